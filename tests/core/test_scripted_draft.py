"""`ScriptedDraft`: what the function says reaches the engine, about the sequences as the engine sees them."""

import numpy as np
import pytest
import torch

from deepinfer.core.caches import CacheStore
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import StepBuffers
from deepinfer.models.interface import DraftBatch, StepBatch
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft
from deepinfer.testing.workloads import cpu_ops

VOCAB = 16
TABLES = torch.zeros(2, 1, dtype=torch.int32)


def ints(*values):
    return np.array(values, dtype=np.int32)


class Bench:
    """Sequences run by hand, with a block manager and caches but no engine."""

    def __init__(self, model):
        self.model = model
        spec = model.cache_spec
        sizes = {"num_blocks": 32, "block_size": 4, "num_window_pages": 64, "window_page": 2}
        self.blocks = KVBlockManager(
            sizes["num_blocks"],
            sizes["block_size"],
            num_window_pages=sizes["num_window_pages"],
            window_page=sizes["window_page"],
            window=spec.window,
            num_slots=4,
        )
        self.caches = CacheStore(spec, cpu_ops().context.runtime, num_slots=4, max_rollback=4, **sizes)
        self.buffers = StepBuffers(
            max_rows=64, max_seqs=4, max_blocks=16, max_window_pages=32, ratios=spec.ratios, ngram=spec.ngram
        )

    def step(self, *seqs, drafts=()):
        """Run all known tokens of sequences that are not computed yet, and drafts of the last one behind them."""
        pool = self.blocks.pool
        handles, known = ints(*seqs), ints(*(pool.num_tokens(s) for s in seqs))
        ends = known.copy()
        ends[-1] += len(drafts)
        assert self.blocks.reserve_many(handles, ends) == len(seqs)
        starts = ints(*(pool.num_computed(s) for s in seqs))
        meta = self.buffers.write(pool, handles, ends - starts, starts=starts)
        if drafts:
            meta.input_ids[-len(drafts) :] = drafts
        send = torch.from_numpy
        names = ("input_ids", "positions", "row_to_seq", "cu_seqlens_q", "seq_lens", "block_tables", "window_tables")
        names += ("window_first_page", "window_slots", "state_slots", "history")
        fields = {name: send(getattr(meta, name)) for name in names}
        slots = torch.stack([send(meta.slots[r]) for r in sorted(meta.slots)])
        optional = {"packed_ratio_slots": slots} if "packed_ratio_slots" in StepBatch.__dataclass_fields__ else {}
        batch = StepBatch(
            **fields,
            **optional,
            ratio_slots=dict(zip(sorted(meta.slots), slots, strict=True)),
            window_page=pool.window_page,
            logits_rows=send(meta.cu_seqlens_q[1:] - 1),
            max_seq_len=int(ends.max()),
        )
        logits = self.model.forward(batch, self.caches)
        self.blocks.commit(handles, known)
        return logits


def draft(model, anchors, positions, seqs, **options):
    scratch = model.draft.new_scratch(len(anchors))
    batch = DraftBatch(
        torch.tensor(anchors, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(seqs, dtype=torch.int32),
        TABLES,
        TABLES[:, 0],
        2,
        scratch,
    )
    return model.draft.draft(batch, None, **options)


@pytest.fixture
def heard():
    """Every sequence that the function was asked about."""
    return []


def puppet():
    return PuppetModel(VOCAB, lambda ids: np.zeros(VOCAB))


def test_the_function_hears_the_whole_sequence_and_its_answer_comes_back(heard) -> None:
    def guess(token_ids):
        heard.append(token_ids)
        return [len(token_ids), 9], [0.75, 0.25]

    model = ScriptedDraft(guess, 2).bind(puppet())
    bench = Bench(model)
    first, second = bench.blocks.open(ints(1, 2, 3)), bench.blocks.open(ints(*range(9)))
    bench.step(first, second)
    out = draft(model, [7, 8], [9, 3], [1, 0])
    assert heard == [[*range(9), 7], [1, 2, 3, 8]]
    assert out.tokens.tolist() == [[10, 9], [4, 9]] and out.tokens.dtype == torch.int32
    assert out.confidences.tolist() == [[0.75, 0.25]] * 2 and out.confidences.dtype == torch.float32
    assert out.logits is None
    assert model.draft.num_tokens == 2


def test_rows_of_a_rejected_draft_are_not_heard_of(heard) -> None:
    model = ScriptedDraft(lambda ids: heard.append(ids) or ([0], [0.5]), 1).bind(puppet())
    bench = Bench(model)
    seq = bench.blocks.open(ints(1, 2, 3))
    bench.step(seq)
    bench.blocks.pool.append(ints(seq), ints(1), ints(4))
    bench.step(seq, drafts=[5, 6])
    draft(model, [9], [4], [0])  # the first draft was wrong
    bench.blocks.pool.append(ints(seq), ints(2), ints(9, 8))
    bench.step(seq)
    draft(model, [7], [6], [0])
    assert heard == [[1, 2, 3, 4, 9], [1, 2, 3, 4, 9, 8, 7]]


def test_a_forked_sequence_is_heard_from_its_first_token_on(heard) -> None:
    """Its prefix was never a row of its own: it is read back from shared blocks."""
    model = ScriptedDraft(lambda ids: heard.append(ids) or ([0], [0.5]), 1).bind(puppet())
    bench = Bench(model)
    parent = bench.blocks.open(ints(*range(8)))
    bench.step(parent)
    child, copies = bench.blocks.fork(parent)
    for copy in copies:
        bench.caches.copy(cpu_ops(), copy.kind, [copy.src], [copy.dst])
    bench.blocks.pool.append(ints(child), ints(1), ints(11))
    bench.step(child)
    draft(model, [12], [9], [0])
    assert heard == [[*range(8), 11, 12]]


def test_the_model_underneath_is_not_changed() -> None:
    ids = ints(*range(10))
    plain, drafted = HashModel(VOCAB), ScriptedDraft(lambda ids: ([], [])).bind(HashModel(VOCAB))
    benches = [Bench(plain), Bench(drafted)]
    logits = [bench.step(bench.blocks.open(ids)) for bench in benches]
    assert torch.equal(*logits)
    assert drafted.info == plain.info
    assert set(plain.cache_spec.block_records) < set(drafted.cache_spec.block_records)


@pytest.mark.parametrize(
    ("answer", "tokens", "confidences"),
    [
        (([], []), [0, 0, 0], [0, 0, 0]),
        (([5], [0.5]), [5, 0, 0], [0.5, 0, 0]),
        (([5, 6, 7, 8], [0.5] * 4), [5, 6, 7], [0.5] * 3),
    ],
)
def test_answers_of_any_length_fill_the_block(answer, tokens, confidences) -> None:
    model = ScriptedDraft(lambda ids: answer, 3).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)))
    out = draft(model, [2], [1], [0], with_logits=True)
    assert (out.tokens[0].tolist(), out.confidences[0].tolist()) == (tokens, confidences)
    assert out.logits.argmax(-1)[0].tolist() == tokens
    assert out.logits.isfinite().sum(-1).tolist() == [[1, 1, 1]]


def test_a_sequence_without_an_anchor_is_not_asked_about(heard) -> None:
    model = ScriptedDraft(lambda ids: heard.append(ids) or ([3], [0.5]), 1).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)), bench.blocks.open(ints(2)))
    out = draft(model, [-1, 4], [1, 1], [0, 1])
    assert out.tokens.tolist() == [[0], [3]]
    assert heard == [[2, 4]]


def test_with_logits_the_engine_chooses_and_the_function_follows(heard) -> None:
    def guess(token_ids):
        heard.append(token_ids)
        logits = np.zeros((2, VOCAB))
        logits[:, token_ids[-1]] = 1  # likes to repeat
        return [token_ids[-1]] * 2, [0.9 if token_ids[-1] == 4 else 0.1] * 2, logits

    def choose(place, logits):
        assert logits.shape == (1, VOCAB) and logits.dtype == torch.float32
        return torch.tensor([4 if place == 0 else int(logits[0].argmax())], dtype=torch.int32)

    model = ScriptedDraft(guess, 2).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)))
    out = draft(model, [2], [1], [0], choose=choose, with_logits=True)
    assert heard == [[1, 2], [1, 2, 4]]
    assert out.tokens.tolist() == [[4, 4]]
    assert out.confidences[0].tolist() == pytest.approx([0.1, 0.9])
    assert out.logits.argmax(-1).tolist() == [[2, 4]]


def test_without_a_choice_the_tokens_are_the_functions_own() -> None:
    model = ScriptedDraft(lambda ids: ([3], [0.5], np.eye(VOCAB)[7:8]), 1).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)))
    assert draft(model, [2], [1], [0]).tokens.tolist() == [[3]]
    nothing = draft(model, [2], [1], [0], choose=lambda place, logits: torch.tensor([-1], dtype=torch.int32))
    assert nothing.tokens.tolist() == [[3]]


def test_temperatures_divide_the_logits_of_the_confidences() -> None:
    model = ScriptedDraft(lambda ids: ([1, 1, 1], [0.8, 0.8, 1.0]), 3).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)))
    out = draft(model, [2], [1], [0], temperatures=(1.0, 2.0, 3.0))
    assert out.confidences[0].tolist() == pytest.approx([0.8, 2 / 3, 1.0], abs=1e-6)
    with pytest.raises(ValueError, match="temperatures has 2 entries for 3 drafted tokens"):
        draft(model, [2], [1], [0], temperatures=(1.0, 2.0))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (([1, 2], [0.5]), "2 tokens and 1 confidences"),
        (([VOCAB], [0.5]), r"tokens \[16\]; ids run from 0 to 15"),
        (([1],), r"\(tokens, confidences\) or"),
        (([1], [0.5], np.zeros((1, 3))), r"shape \(1, 3\) for 1 tokens of 16 ids"),
    ],
)
def test_an_answer_that_is_no_draft_is_refused(answer, message) -> None:
    model = ScriptedDraft(lambda ids: answer, 2).bind(puppet())
    bench = Bench(model)
    bench.step(bench.blocks.open(ints(1)))
    with pytest.raises(ValueError, match=message):
        draft(model, [2], [1], [0])


def test_one_draft_serves_one_model() -> None:
    scripted = ScriptedDraft(lambda ids: ([], []))
    with pytest.raises(RuntimeError, match="bind"):
        scripted.draft(None, None)
    scripted.bind(puppet())
    with pytest.raises(ValueError, match="bound to a model already"):
        scripted.bind(puppet())
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        ScriptedDraft(lambda ids: ([], []), 0)
