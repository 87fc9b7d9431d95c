"""The DSpark draft: against its golden values, and bit for bit against itself whatever else runs, or how.

Drafts are taken as the engine's next step would take them: the context is stored and committed, pages behind the window
are freed, and the tables are those of a step that would run the anchor. Pages hold two tokens, so that a context which
is a position too long or too short shows.
"""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.interface import DraftBatch
from deepinfer.testing.puppet import NullModel, PuppetModel

GOLDEN = Path(os.environ.get("DEEPINFER_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden")) / "quant"
SETTINGS = {"backend": "cpu", "block_size": 8, "window_page": 2, "max_model_len": 256}
WAYS = {
    "whole": lambda n: [0, n],
    "chunks of 3": lambda n: [*range(0, n, 3), n],
    "decode": lambda n: [*range(n + 1)],
    "prefill, then decode": lambda n: [0, *range((n + 1) // 2, n + 1)],
}


class Bench:
    """Sequences in an engine's caches, stored up to an anchor, and drafts behind it."""

    def __init__(self, llm) -> None:
        self.llm, self.engine = llm, llm.engine
        self.model, self.executor, self.blocks = self.engine.model, self.engine.executor, self.engine.blocks
        self.draft = self.model.draft

    def store(self, ids, bounds, tap=None):
        """Open a sequence whose last id is the anchor, and run those before it cut at `bounds`; returns its handle."""
        seq = self.blocks.open(np.array(ids, dtype=np.int32))
        for start, end in pairwise(bounds):
            self.blocks.reserve(seq, end)
            step = self.executor.plan(np.array([seq], np.int32), np.array([end - start], np.int32))
            self.executor.forward(self.executor.batch(step, np.array([0], np.int32)), tap)
            self.blocks.commit(np.array([seq], np.int32), np.array([end], np.int32))
        return seq

    def run(self, seqs, choose=None, *, shuffle=False, scratch_seqs=None, tap=None, temperatures=()):
        """Draft behind the anchors of `seqs`, with tables in another order if `shuffle`."""
        for seq in seqs:
            self.blocks.reserve(seq, self.blocks.pool.num_tokens(seq))
        order = list(reversed(range(len(seqs)))) if shuffle else list(range(len(seqs)))
        handles = np.array([seqs[i] for i in order], np.int32)
        step = self.executor.plan(handles, np.ones(len(seqs), np.int32))
        tables, send = self.executor.batch(step, np.array([0], np.int32)), self.executor.send
        batch = DraftBatch(
            anchor_ids=send(step.input_ids[order]),
            anchor_positions=send(step.positions[order]),
            seqs=send(np.array(order, np.int32)),
            window_tables=tables.window_tables,
            window_first_page=tables.window_first_page,
            window_page=tables.window_page,
            scratch=self.draft.new_scratch(scratch_seqs or len(seqs)),
        )
        with torch.inference_mode():
            return self.draft.draft(
                batch, self.executor.caches, choose, temperatures=temperatures, with_logits=True, tap=tap
            )

    def free(self, seqs) -> None:
        for seq in seqs:
            self.blocks.free(seq)

    def draft_for(self, ids, way="whole", **options):
        """A draft behind the last of `ids`."""
        seq = self.store(ids, WAYS[way](len(ids) - 1))
        try:
            return self.run([seq], **options)
        finally:
            self.free([seq])


def assert_equal(got, want, what="") -> None:
    assert torch.equal(got.tokens, want.tokens), what
    assert torch.equal(got.logits, want.logits), what
    assert torch.equal(got.confidences, want.confidences), what


def part(output, index):
    return type(output)(*(t[index : index + 1] for t in (output.tokens, output.confidences, output.logits)))


def text(length, seed=3):
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["quant bfloat16", "quant float32", "quant unrounded", "plain bfloat16"])
def setting(request, tmp_path_factory):
    """A generated checkpoint and how to load it."""
    kind, numbers = request.param.split()
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, seed=5, quant=kind == "quant")
    dtype = "bfloat16" if numbers == "bfloat16" else "float32"
    return str(folder), {**SETTINGS, "dtype": dtype, "kv_rounding": numbers != "unrounded"}


@pytest.fixture(scope="module")
def bench(setting):
    folder, settings = setting
    with LLM(folder, load_draft=True, **settings) as llm:
        yield Bench(llm)


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN}")
    tensors = load_file(str(GOLDEN / "golden.safetensors"))
    with LLM(str(GOLDEN), load_draft=True, dtype="float32", **SETTINGS) as llm:
        yield tensors, Bench(llm)


def test_golden_features(golden) -> None:
    """Equal but for cache codes: a value next to a rounding edge may take the neighbouring code and move its row."""
    tensors, bench = golden
    ids = tensors[f"prompt{int(tensors['dspark.prompt_index'])}.input_ids"].tolist()
    for way, bounds in WAYS.items():
        rows = []

        def tap(name, value, rows=rows):
            if name == "draft.features":
                rows.append(value.clone())

        bench.free([bench.store(ids, bounds(len(ids)), tap)])
        diff = (torch.cat(rows) - tensors["dspark.target_features"]).abs().amax(-1)
        assert diff.median() < 2e-5, way
        assert diff.max() < 2e-3, way


def test_golden_drafts(golden) -> None:
    """At every anchor, with every position before it as context."""
    tensors, bench = golden
    ids = tensors[f"prompt{int(tensors['dspark.prompt_index'])}.input_ids"].tolist()
    worst = []
    for i, anchor in enumerate(tensors["dspark.anchors"].tolist()):
        seen = {}
        got = bench.draft_for(ids[: anchor + 1], tap=lambda name, value, seen=seen: seen.update({name: value.clone()}))
        want = tensors["dspark.confidence_logit_raw_hidden"][i]
        assert got.tokens[0].tolist() == tensors["dspark.greedy_tokens"][i].tolist(), anchor
        diffs = [
            (seen["draft.base_logits"][0] - tensors["dspark.base_logits"][i]).abs().max(),
            (got.logits[0] - tensors["dspark.greedy_logits"][i]).abs().max(),
            (got.confidences[0].logit() - want).abs().max(),
        ]
        assert max(diffs) < 2e-3, (anchor, diffs)
        worst.append(max(diffs))
    assert torch.stack(worst).median() < 2e-5


def test_golden_batch_of_all_anchors(golden) -> None:
    tensors, bench = golden
    ids = tensors[f"prompt{int(tensors['dspark.prompt_index'])}.input_ids"].tolist()
    anchors = tensors["dspark.anchors"].tolist()
    seqs = [bench.store(ids[: anchor + 1], [0, anchor]) for anchor in anchors]
    got = bench.run(seqs)
    bench.free(seqs)
    assert torch.equal(got.tokens, tensors["dspark.greedy_tokens"])


@pytest.mark.parametrize("anchor", [1, 2, 8, 16, 17, 40])
def test_ways_of_storing_the_context_give_equal_bits(bench, anchor) -> None:
    ids = text(anchor + 1)
    want = bench.draft_for(ids)
    for way in WAYS:
        assert_equal(bench.draft_for(ids, way), want, way)


def test_batch_gives_the_bits_of_each_alone(bench) -> None:
    texts = [text(length, seed=length) for length in (2, 30, 17, 9, 41)]
    alone = [bench.draft_for(ids) for ids in texts]
    seqs = [bench.store(ids, [0, len(ids) - 1]) for ids in texts]
    for options in ({}, {"shuffle": True}, {"scratch_seqs": 9}):
        together = bench.run(seqs, **options)
        for i, want in enumerate(alone):
            assert_equal(part(together, i), want, (i, options))
    some = bench.run(seqs[1:3])
    bench.free(seqs)
    for i, want in enumerate(alone[1:3]):
        assert_equal(part(some, i), want, i)


def test_no_sequence_gives_an_empty_draft(bench) -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    batch = DraftBatch(empty, empty, empty, tables, tables[0], 2, bench.draft.new_scratch(1))
    with torch.inference_mode():
        got = bench.draft.draft(batch, bench.executor.caches)
    assert got.tokens.shape == got.confidences.shape == (0, bench.draft.num_tokens)
    assert got.logits is None


def test_the_context_is_the_window_before_the_anchor(bench) -> None:
    """Context records are wiped one position at a time; those of the window move the draft, and no others."""
    window = bench.model.cache_spec.window - 1
    anchor = window + 5
    ids = text(anchor + 1)
    seq = bench.store(ids, [0, anchor])
    want = bench.run([seq])
    step = bench.executor.plan(np.array([seq], np.int32), np.ones(1, np.int32))
    first, table = int(step.window_first_page[0]), step.window_tables[0].tolist()
    held = range(first * SETTINGS["window_page"], anchor)
    matters = []
    for position in held:
        column, offset = divmod(position, SETTINGS["window_page"])
        page = table[column - first]
        before = bench.executor.caches.pages[page].clone()
        for i in range(len(bench.draft.layers)):
            cache = bench.executor.caches.records(f"mtp.{i}.window")
            size = cache.format.record_bytes
            cache.data[page, offset * size : (offset + 1) * size].zero_()
        changed = bench.run([seq])
        bench.executor.caches.pages[page].copy_(before)
        if not torch.equal(changed.logits, want.logits):
            matters.append(position)
    bench.free([seq])
    assert matters == list(range(anchor - window, anchor))
    assert min(held) <= anchor - window


def test_loading_the_draft_leaves_the_model_alone(setting, bench) -> None:
    folder, settings = setting
    with LLM(folder, **settings) as llm:
        assert llm.engine.model.draft is None
        assert not any(r.name.startswith("mtp.") for r in llm.engine.model.cache_spec.window_records)
        for length in (1, 20, 60):
            for options in ({}, {"chunk_size": 7}, {"decode_from": 3}):
                want = llm.logits(text(length), **options)
                assert torch.equal(bench.llm.logits(text(length), **options), want), (length, options)
    names = {r.name for r in bench.model.cache_spec.window_records}
    assert {f"mtp.{i}.window" for i in range(len(bench.draft.layers))} < names


def test_the_chooser_decides_and_later_places_follow(bench) -> None:
    ids = text(23)
    greedy = bench.draft_for(ids)
    assert torch.equal(greedy.tokens, greedy.logits.argmax(-1).int())
    places = []

    def choose(place, logits):
        assert torch.equal(logits, greedy.logits[:, place]) or place > 2
        places.append(place)
        return greedy.tokens[:, place] if place != 2 else torch.full((1,), 5, dtype=torch.int32)

    got = bench.draft_for(ids, choose=choose)
    assert places == list(range(bench.draft.num_tokens))
    assert got.tokens[0].tolist() == [5 if i == 2 else t for i, t in enumerate(greedy.tokens[0].tolist())]
    same_logits = [torch.equal(got.logits[:, i], greedy.logits[:, i]) for i in range(bench.draft.num_tokens)]
    assert same_logits == [i != 3 for i in range(bench.draft.num_tokens)]
    same = (got.confidences == greedy.confidences)[0].tolist()
    assert same == [i != 3 for i in range(bench.draft.num_tokens)]


def test_what_cannot_be_chosen_stays_in_its_row(bench) -> None:
    """A chooser gives -1 for a row of NaN: that row drafts something, the others are as ever."""
    texts = [text(12, seed=1), text(12, seed=2), text(12, seed=3)]
    seqs = [bench.store(ids, [0, len(ids) - 1]) for ids in texts]
    want = bench.run(seqs)

    def choose(place, logits):
        tokens = logits.argmax(-1).int()
        tokens[1] = -1
        return tokens

    got = bench.run(seqs, choose)
    bench.free(seqs)
    assert ((got.tokens >= 0) & (got.tokens < bench.model.info.vocab_size)).all()
    for i in (0, 2):
        assert_equal(part(got, i), part(want, i))


def test_temperatures_divide_the_confidence_logits(bench) -> None:
    ids = text(20)
    want = bench.draft_for(ids)
    count = bench.draft.num_tokens
    temperatures = [0.5 + i for i in range(count)]
    got = bench.draft_for(ids, temperatures=temperatures)
    assert torch.equal(got.logits, want.logits)
    assert ((want.confidences > 0) & (want.confidences < 1)).all()
    expected = (want.confidences.logit() / torch.tensor(temperatures)).sigmoid()
    assert torch.allclose(got.confidences, expected, atol=1e-5)
    with pytest.raises(ValueError, match=f"2 confidence temperatures for drafts of {count} tokens"):
        bench.draft_for(ids, temperatures=(1.0, 1.0))


def test_drafting_goes_on_to_the_last_position(setting) -> None:
    """Drafted rows stand at positions that the model itself never runs."""
    folder, settings = setting
    with LLM(folder, load_draft=True, **{**settings, "max_model_len": 24}) as llm:
        last = Bench(llm).draft_for(text(24))
    with LLM(folder, load_draft=True, **settings) as llm:
        assert_equal(Bench(llm).draft_for(text(24)), last)


def test_puppets_have_no_draft() -> None:
    assert PuppetModel(4, lambda ids: [0.0] * 4).draft is None
    assert NullModel(4).draft is None
