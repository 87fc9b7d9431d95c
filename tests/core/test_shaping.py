"""Row shapes: how they add up, that they touch no other row, and what happens when they leave nothing or fail."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.core import logits_processors
from deepinfer.core.row_shaping import RowShaping
from deepinfer.core.shapers import SeenTokens, ShapingContext, ThinkingBudget, make_shaper
from deepinfer.core.shaping import PLAIN, Penalties, RowShape, RowShaper, Shapers, merge, pack_mask, unpack_mask
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.ops.shaping import adjust_logits, apply_penalties
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft
from deepinfer.testing.workloads import cpu_ops

VOCAB = 70

pytestmark = pytest.mark.usefixtures("one_thread")


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


class HandMask:
    """Allows `ids[k]` at output index k, as a grammar would."""

    def __init__(self, *ids):
        self.masks = [pack_mask(allowed, VOCAB) for allowed in ids]
        self.accepted = 0
        self.shaped = []

    def shape(self, drafts):
        self.shaped.append((self.accepted, list(drafts)))
        places = range(self.accepted, self.accepted + len(drafts) + 1)
        return [RowShape(mask=self.masks[p % len(self.masks)]) for p in places]

    def accept(self, tokens):
        self.accepted += len(tokens)


@pytest.fixture
def installed(monkeypatch):
    """Install processors by name."""
    made = {}

    class Point:
        def __init__(self, factory):
            self.factory = factory

        def load(self):
            if isinstance(self.factory, Exception):
                raise self.factory
            return self.factory

    monkeypatch.setattr(logits_processors, "_installed", lambda: {name: Point(f) for name, f in made.items()})
    return made


def llm_of(model, **settings):
    settings = {"block_size": 4, "window_page": 2, "max_model_len": 64, "num_kv_blocks": 64, **settings}
    return LLM(model, backend="cpu", **settings)


def test_masks_pack_and_unpack() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 31, 32, 33, 70, 384):
        ids = np.flatnonzero(rng.random(size) < 0.4)
        mask = pack_mask(ids, size)
        assert mask.dtype == np.int32 and mask.shape == (-(-size // 32),)
        assert np.flatnonzero(unpack_mask(mask, size)).tolist() == ids.tolist()


def test_shapes_merge_field_by_field() -> None:
    first = RowShape(pack_mask([1, 2, 3], VOCAB), ints(5), ints(1, 2), floats(1, 2), functions=(abs,))
    penalties = Penalties(ints(1), ints(1), 1.0, 0.5, 0.0)
    second = RowShape(pack_mask([2, 3, 4], VOCAB), ints(5, 6), ints(2, 9), floats(0.5, 4), penalties, (np.sqrt,), 7)
    both = merge([first, PLAIN, second])
    assert np.flatnonzero(unpack_mask(both.mask, VOCAB)).tolist() == [2, 3]
    assert both.forbidden.tolist() == [5, 6]
    assert dict(zip(both.bias_ids.tolist(), both.bias.tolist(), strict=True)) == {1: 1.0, 2: 2.5, 9: 4.0}
    assert both.penalties is penalties and both.functions == (abs, np.sqrt) and both.forced == 7
    assert merge([PLAIN, PLAIN]).is_plain and merge([PLAIN, first]) is first
    with pytest.raises(ValueError, match="two shapers of one request have penalties"):
        merge([second, second])


def test_a_shape_knows_when_nothing_is_left() -> None:
    assert RowShape(mask=pack_mask([], VOCAB)).allows_nothing(VOCAB)
    assert RowShape(mask=pack_mask([3, 4], VOCAB), forbidden=ints(3, 4)).allows_nothing(VOCAB)
    assert not RowShape(mask=pack_mask([3, 4], VOCAB), forbidden=ints(3)).allows_nothing(VOCAB)
    assert not RowShape(mask=pack_mask([], VOCAB), forced=5).allows_nothing(VOCAB)
    assert RowShape(mask=pack_mask([3, 4], VOCAB), forced=5).forbids_what_it_forces
    assert RowShape(forbidden=ints(4, 5), forced=5).forbids_what_it_forces
    for shape in (
        RowShape(mask=pack_mask([3, 5], VOCAB), forbidden=ints(3), forced=5),
        RowShape(mask=pack_mask([], 9)),
    ):
        assert not shape.forbids_what_it_forces


def test_drafts_are_counted_as_if_they_had_been_emitted() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    one, other = SeenTokens(params, [5, 6, 5]), SeenTokens(params, [5, 6, 5])
    one.accept([6, 9])
    ahead = one.shape([9, 9, 11, 5])
    for place, draft in enumerate([None, 9, 9, 11, 5]):
        if draft is not None:
            one.accept([draft])
        want, got = one.shape([])[0].penalties, ahead[place].penalties
        assert dict(zip(want.ids.tolist(), want.counts.tolist(), strict=True)) == dict(
            zip(got.ids.tolist(), got.counts.tolist(), strict=True)
        )
    assert dict(
        zip(*map(list, (other.shape([])[0].penalties.ids, other.shape([])[0].penalties.counts)), strict=True)
    ) == {
        5: 0,
        6: 0,
    }


def test_penalties_in_fp32_in_the_stated_order() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.3, 5.0]])
    args = [torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 0], [0, 1, 2], [3, 0, 1])]
    apply_penalties(logits, *args, torch.tensor([1.3]), torch.tensor([0.7]), torch.tensor([0.2]))
    x = np.float32(2.0) / np.float32(1.3) - np.float32(0.7) * np.float32(3) - np.float32(0.2)
    y = np.float32(-2.0) * np.float32(1.3)
    z = np.float32(0.3) / np.float32(1.3) - np.float32(0.7) - np.float32(0.2)
    assert logits[0].tolist() == [float(x), float(y), float(z), 5.0]
    adjust_logits(logits, args[0][:1], args[1][:1], torch.tensor([-np.inf]))
    assert logits[0, 0] == -np.inf and logits[0, 3] == 5.0


def test_rows_without_a_shape_keep_their_bits() -> None:
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(6, VOCAB, generator=gen)
    logits[5, 3], logits[0, 1] = torch.nan, -0.0
    before = logits.clone()
    shaping = RowShaping(cpu_ops(), VOCAB)
    rows = [
        (1, RowShape(mask=pack_mask([1, 2], VOCAB))),
        (2, RowShape(forbidden=ints(4), bias_ids=ints(4, 5), bias=floats(9, 1))),
        (4, RowShape(penalties=Penalties(ints(7), ints(2), 2.0, 1.0, 1.0), functions=(np.negative,), forced=9)),
    ]
    assert shaping.apply(logits, rows) == {}
    shaping.force(logits, rows)
    for row in (0, 3, 5):
        assert torch.equal(logits[row].view(torch.int32), before[row].view(torch.int32))
    assert logits[1].isfinite().nonzero()[:, 0].tolist() == [1, 2]
    assert logits[2, 4] == -np.inf and logits[2, 5] == before[2, 5] + 1
    assert logits[4].isfinite().nonzero()[:, 0].tolist() == [9] and logits[4, 9] == -before[4, 9]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_unconstrained_request_beside_a_masked_one_is_as_alone(installed, asynchronous) -> None:  # SX-3
    installed["mask"] = lambda ids, prompt, vocab: HandMask(*ids)
    plain = SamplingParams(max_tokens=12, seed=3, logprobs=2)
    masked = SamplingParams(max_tokens=12, seed=4, logits_processors={"mask": [[5, 6], [7], [8, 9, 10]]}, logprobs=1)
    with llm_of(HashModel(VOCAB), async_scheduling=asynchronous) as llm:
        alone = [llm.generate([1, 2, 3], p)[0] for p in (plain, masked)]
        together = llm.generate([[1, 2, 3]] * 2, [plain, masked])
        for one, other in zip(alone, together, strict=True):
            assert one.outputs == other.outputs
        ids = together[1].outputs[0].token_ids
    assert all(t in ([5, 6], [7], [8, 9, 10])[k % 3] for k, t in enumerate(ids))
    assert len(set(together[0].outputs[0].token_ids)) > 5


def test_each_verify_row_is_masked_behind_its_drafts(installed) -> None:
    """Illegal drafts are rejected, legal ones kept, and the answer is the one without drafts."""
    shapers = []
    installed["mask"] = lambda ids, prompt, vocab: shapers.append(HandMask(*ids)) or shapers[-1]
    params = SamplingParams(max_tokens=20, seed=4, logits_processors={"mask": [[5, 6], [7], [8, 9]]}, logprobs=1)
    with llm_of(HashModel(VOCAB)) as llm:
        (want,) = llm.generate([1, 2, 3], params)

    def guess(ids):
        ahead = want.outputs[0].token_ids[len(ids) - 3 :][:4]
        return [*ahead[:2], 11, *ahead[3:]], [0.9] * len([*ahead[:2], 11, *ahead[3:]])

    for asynchronous in (False, True):
        shapers.clear()
        draft = ScriptedDraft(guess, 4)
        with llm_of(HashModel(VOCAB), draft=draft, draft_schedule="fixed", async_scheduling=asynchronous) as llm:
            (got,) = llm.generate([1, 2, 3], params)
            assert got.outputs == want.outputs
            assert llm.stats.num_host_waits >= 5
        assert shapers[0].accepted == 20 and max(len(drafts) for _, drafts in shapers[0].shaped) == 4
        assert len(shapers[0].shaped) < 10


def test_masks_that_leave_nothing_are_named_and_distrust_no_kv(installed) -> None:
    params = SamplingParams(max_tokens=8, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3)
    with llm_of(HashModel(VOCAB)) as llm:
        bad, good = llm.generate([[1, 2], [3, 4]], [params, SamplingParams(max_tokens=8)])
    assert bad.error.code == "no_token_allowed" and "position 2" in bad.error.message
    assert bad.outputs[0].finish_reason == "error" and good.error is None


def test_nan_under_a_shape_is_still_a_numerical_error() -> None:
    def logits(ids):
        return np.full(VOCAB, np.nan) if len(ids) == 4 else np.arange(VOCAB)

    params = [SamplingParams(max_tokens=6, temperature=0, **o) for o in ({"presence_penalty": 1.0}, {"min_tokens": 2})]
    with llm_of(PuppetModel(VOCAB, logits)) as llm:
        for result in llm.generate([[1, 2]] * 2, params):
            assert result.error.code == "numerical_error" and len(result.outputs[0].token_ids) == 2


def test_a_function_sees_ids_and_logits_and_changes_them(installed) -> None:
    seen = []

    def make(argument, prompt, vocab):
        assert argument == {"shift": 3} and prompt == [1, 2, 3] and vocab == VOCAB

        def process(output_ids, logits):
            seen.append((list(output_ids), logits.copy()))
            return np.roll(logits, 3)

        return process

    installed["roll"] = make
    model = HashModel(VOCAB)
    params = SamplingParams(max_tokens=9, temperature=0, logits_processors={"roll": {"shift": 3}}, logprobs=0)
    with llm_of(model) as llm:
        (got,) = llm.generate([1, 2, 3], params)
        assert llm.stats.num_host_waits == 9
    ids = [1, 2, 3]
    for place, token in enumerate(got.outputs[0].token_ids):
        raw = model.expected_logits(ids)[-1]
        assert token == int(np.roll(raw, 3).argmax())
        assert seen[place][0] == ids[3:] and np.array_equal(seen[place][1], raw)
        ids.append(token)
    draft = ScriptedDraft(lambda known: (got.outputs[0].token_ids[len(known) - 3 :][:3], [0.5] * 3), 3)
    draft._draft_fn = lambda known: ((got.outputs[0].token_ids + [0] * 9)[len(known) - 3 :][:3], [0.5] * 3)
    with llm_of(model, draft=draft, draft_schedule="fixed") as llm:
        assert llm.generate([1, 2, 3], params)[0].outputs == got.outputs
        assert llm.stats.num_steps < 6


def test_what_a_processor_raises_is_its_requests_own_fault(installed) -> None:
    def raising(output_ids, logits):
        if len(output_ids) == 2:
            raise KeyError("oh")
        return logits

    class BadShaper(HandMask):
        def shape(self, drafts):
            if self.accepted == 3:
                raise RuntimeError("no shape")
            return super().shape(drafts)

    class BadAccept(HandMask):
        def accept(self, tokens):
            raise RequestError("grammar_failed", "a token that is not allowed")

    installed["raises"] = lambda *_: raising
    installed["bad shape"] = lambda *_: BadShaper(range(VOCAB))
    installed["bad accept"] = lambda *_: BadAccept(range(VOCAB))
    names = [None, "raises", "bad shape", "bad accept"]
    params = [
        SamplingParams(max_tokens=6, seed=1, logits_processors={name: 0} if name else None, logprobs=0)
        for name in names
    ]
    with llm_of(HashModel(VOCAB)) as llm:
        results = llm.generate([[1, 2, 3]] * 4, params)
        assert llm.engine.blocks.num_free_slots == llm.engine.blocks.pool.num_slots
    assert [r.error and r.error.code for r in results] == [
        None,
        "logits_processor_failed",
        "shaping_failed",
        "grammar_failed",
    ]
    whole = results[0].outputs[0].token_ids
    assert [r.outputs[0].token_ids for r in results] == [whole, whole[:2], whole[:3], whole[:1]]
    assert all(len(r.outputs[0].logprobs) == len(r.outputs[0].token_ids) for r in results)
    assert "KeyError: 'oh'" in results[1].error.message


def test_processors_that_cannot_be_had_are_refused(installed) -> None:
    installed["broken"] = ImportError("no module")

    def refusing(argument, prompt, vocab):
        raise RequestError("bad_argument", "wants a number")

    installed["refusing"] = refusing
    with llm_of(HashModel(VOCAB)) as llm:
        for name, code, text in (
            ("nope", "unknown_logits_processor", "'nope' is not installed .*broken, refusing"),
            ("broken", "logits_processor_failed", "'broken' cannot be imported"),
            ("refusing", "bad_argument", "wants a number"),
        ):
            (result,) = llm.generate([1], SamplingParams(logits_processors={name: None}))
            assert result.error.code == code
            with pytest.raises(RequestError, match=text):
                raise result.error


def test_entry_points_are_looked_up_by_group(monkeypatch) -> None:
    point = EntryPoint("mine", "numpy:negative", "deepinfer.logits_processors")
    monkeypatch.setattr(
        logits_processors, "entry_points", lambda group: [point] if group == "deepinfer.logits_processors" else []
    )
    assert logits_processors.find_processor("mine") is np.negative


@pytest.mark.parametrize("speculation", ["coupled", "rejection"])
def test_penalties_with_drafts_equal_those_without(speculation) -> None:  # SA-6
    """Under rejection such a request verifies no drafts, so it too gets what it gets alone."""
    params = [SamplingParams(max_tokens=30, seed=1, frequency_penalty=f, temperature=0.7) for f in (2.0, -2.0)]
    with llm_of(HashModel(16)) as llm:
        want = [r.outputs[0].token_ids for r in llm.generate([[1, 2]] * 2, params)]
    assert len(set(want[0])) > len(set(want[1])) + 3  # and they do something

    def guess(ids):
        return [3, 3, ids[-1]], [0.5] * 3

    with llm_of(HashModel(16), draft=ScriptedDraft(guess, 3), speculation=speculation, draft_schedule="fixed") as llm:
        assert [r.outputs[0].token_ids for r in llm.generate([[1, 2]] * 2, params)] == want


def test_features_about_text_need_a_tokenizer() -> None:
    with llm_of(HashModel(VOCAB)) as llm:
        for options in ({"stop": "a"}, {"bad_words": ["a"]}, {"thinking_budget": 3}):
            (result,) = llm.generate([1], SamplingParams(**options))
            assert result.error.code == "unsupported_parameter" and "no tokenizer" in result.error.message


def test_contradictions_are_refused(pytestconfig) -> None:
    tokenizer = Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")
    end = tokenizer.token_to_id("</think>")
    with llm_of(HashModel(384, eos_token_ids=(1,)), tokenizer=tokenizer) as llm:
        for options, text in (
            ({"golden_token_ids": [5, 6], "allowed_token_ids": [5]}, r"\[1\] forces id 6, which allowed_token_ids"),
            ({"golden_token_ids": [5, 1], "min_tokens": 2}, r"\[1\] forces id 1, which ends the answer before min_tok"),
            ({"golden_token_ids": [90, 83], "bad_words": ["xq"]}, r"\[1\] forces id 83, which completes one of bad"),
            ({"thinking_budget": 2, "allowed_token_ids": [5]}, f"forces </think> .id {end}., which allowed_token_ids"),
            ({"stop": "a", "detokenize": False}, "stop cannot be combined with detokenize=False"),
        ):
            (result,) = llm.generate([1], SamplingParams(**options))
            with pytest.raises(RequestError, match=text):
                raise result.error


def test_no_shaper_is_made_for_nothing(pytestconfig) -> None:
    tokenizer = Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")
    context = ShapingContext(384, (1,), tokenizer)
    neutral = SamplingParams(stop="a", stop_token_ids=[5], logprobs=3, n=2, logit_bias={}, golden_token_ids=[])
    assert make_shaper(neutral, [1, 2], context) is None
    assert isinstance(make_shaper(SamplingParams(thinking_budget=3), [1], context), ThinkingBudget)
    both = make_shaper(SamplingParams(thinking_budget=3, min_tokens=1), [1], context, HandMask([1]))
    assert isinstance(both, Shapers) and len(both.parts) == 3 and isinstance(both, RowShaper)


@pytest.mark.parametrize("speculation", ["off", "coupled"])
def test_a_bias_alone_waits_for_nothing(speculation) -> None:
    params = SamplingParams(max_tokens=12, seed=1, logit_bias={5: 4.0}, allowed_token_ids=range(40))
    with llm_of(HashModel(VOCAB), async_scheduling=False) as llm:
        (want,) = llm.generate([1, 2], params)
    draft = None
    if speculation != "off":
        draft = ScriptedDraft(lambda ids: ([*want.outputs[0].token_ids, 0, 0, 0][len(ids) - 2 :][:3], [0.5] * 3), 3)
    with llm_of(HashModel(VOCAB), async_scheduling=True, draft=draft, draft_schedule="fixed") as llm:
        (got,) = llm.generate([1, 2], params)
        assert got.outputs == want.outputs and llm.stats.num_host_waits == 0
        assert llm.stats.num_steps <= (14 if draft is None else 7)


def test_who_waits_holds_up_nobody_else() -> None:
    """Ahead of the host: the plain request runs in every step, the one with penalties in every other."""
    with llm_of(HashModel(VOCAB), async_scheduling=True) as llm:
        engine = llm.engine
        engine.add_request("plain", [1, 2], SamplingParams(max_tokens=10, seed=1))
        engine.add_request("waits", [1, 2], SamplingParams(max_tokens=10, seed=1, presence_penalty=0.5))
        ended = {}
        for step in range(60):
            ended |= {output.request_id: step for output in engine.step() if output.finished}
        assert ended["plain"] <= 11 and 18 <= ended["waits"] <= 22
