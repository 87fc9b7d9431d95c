"""Step metadata against a slow model that computes every entry on its own, from the definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core._native import KVPool, StepArrays
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import StepBuffers

BLOCK, PAGE, WINDOW = 8, 4, 8
RATIOS = (1, 2, 4)
NGRAM = 4


def ids(*values):
    return np.array(values, dtype=np.int32)


def make_pool(**overrides):
    sizes = dict(
        num_blocks=64,
        block_size=BLOCK,
        num_window_pages=128,
        window_page=PAGE,
        window=WINDOW,
        num_slots=8,
    )
    return KVPool(**(sizes | overrides))


def make_buffers(**overrides):
    sizes = dict(max_rows=64, max_seqs=8, max_blocks=16, max_window_pages=20, ratios=RATIOS, ngram=NGRAM)
    return StepBuffers(**(sizes | overrides))


def model_step(pool, seqs, query_lens, rows, padded, max_blocks=16, max_pages=20):
    """What a step must hold, one entry at a time; padding first, then what is used."""
    out = {name: [0] * rows for name in ("input_ids", "positions", "row_to_seq")}
    out["window_slots"] = [-1] * rows
    slots = {ratio: [-1] * rows for ratio in RATIOS}
    for name in ("seq_lens", "query_lens", "state_slots", "window_first_page"):
        out[name] = [0] * padded
    out["history"] = [[-1] * (NGRAM - 1) for _ in range(padded)]
    out["block_tables"] = [[0] * max_blocks for _ in range(padded)]
    out["window_tables"] = [[0] * max_pages for _ in range(padded)]
    out["cu_seqlens_q"] = [0] + [sum(query_lens[: i + 1]) for i in range(padded)]
    row = 0
    for i, (seq, query_len) in enumerate(zip(seqs, query_lens, strict=True)):
        tokens, table, pages = pool.tokens(seq).tolist(), pool.blocks(seq).tolist(), pool.pages(seq).tolist()
        begin, first_page = pool.num_computed(seq), pool.first_page(seq)
        end = begin + query_len
        out["seq_lens"][i], out["query_lens"][i] = end, query_len
        out["state_slots"][i], out["window_first_page"][i] = seq, first_page
        for k in range(NGRAM - 1):
            if begin - 1 - k >= 0:
                out["history"][i][k] = tokens[begin - 1 - k]
        for position in range(end):
            out["block_tables"][i][position // BLOCK] = table[position // BLOCK]
            if position // PAGE >= first_page:
                out["window_tables"][i][position // PAGE - first_page] = pages[position // PAGE - first_page]
        for t in range(begin, end):
            out["input_ids"][row], out["positions"][row], out["row_to_seq"][row] = tokens[t], t, i
            out["window_slots"][row] = pages[t // PAGE - first_page] * PAGE + t % PAGE
            for ratio in RATIOS:
                records, entry = BLOCK // ratio, t // ratio
                if (t + 1) % ratio == 0:
                    slots[ratio][row] = table[entry // records] * records + entry % records
            row += 1
    return out, slots


def assert_step_equals_model(step, pool, seqs, query_lens, pad_rows=0, pad_seqs=0):
    rows, padded = max(sum(query_lens), pad_rows), max(len(seqs), pad_seqs)
    expected, slots = model_step(pool, seqs, query_lens, rows, padded)
    for name, value in expected.items():
        actual = getattr(step, name)
        assert actual.dtype == np.int32 and actual.flags.c_contiguous
        assert actual.tolist() == value, name
    assert {ratio: array.tolist() for ratio, array in step.slots.items()} == slots
    assert step.block_table_lens.tolist() == [-(-length // BLOCK) for length in expected["seq_lens"]]
    assert (step.num_rows, step.num_seqs) == (sum(query_lens), len(seqs))


def opened(pool, num_tokens, num_computed=0):
    seq = pool.open(np.arange(100, 100 + num_tokens, dtype=np.int32))
    assert pool.reserve(seq, num_tokens)
    pool.commit(ids(seq), ids(num_computed))
    return seq


def test_a_mixed_step_by_hand():
    pool, buffers = make_pool(), make_buffers()
    decode, prefill = opened(pool, 12, 11), opened(pool, 3)
    step = buffers.write(pool, ids(prefill, decode), ids(3, 1), pad_rows=5, pad_seqs=3)
    assert step.input_ids.tolist() == [100, 101, 102, 111, 0]
    assert step.positions.tolist() == [0, 1, 2, 11, 0]
    assert step.row_to_seq.tolist() == [0, 0, 0, 1, 0]
    assert step.cu_seqlens_q.tolist() == [0, 3, 4, 4]
    assert step.seq_lens.tolist() == [3, 12, 0]
    assert step.state_slots.tolist() == [prefill, decode, 0]
    assert step.history.tolist() == [[-1, -1, -1], [110, 109, 108], [-1, -1, -1]]
    assert step.block_tables[:, :3].tolist() == [[3, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert step.window_first_page.tolist() == [0, 1, 0]  # 11 computed: positions from 4 on stay
    assert step.window_tables[:, :3].tolist() == [[1, 0, 0], [2, 3, 0], [0, 0, 0]]  # page 1 was freed first
    assert step.window_slots.tolist() == [4, 5, 6, 15, -1]
    assert step.slots[1].tolist() == [24, 25, 26, 19, -1]
    assert step.slots[2].tolist() == [-1, 12, -1, 9, -1]
    assert step.slots[4].tolist() == [-1, -1, -1, 4, -1]
    assert_step_equals_model(step, pool, [prefill, decode], [3, 1], 5, 3)


def test_an_empty_step_is_all_padding():
    pool, buffers = make_pool(), make_buffers()
    assert_step_equals_model(buffers.write(pool, ids(), ids(), pad_rows=4, pad_seqs=2), pool, [], [], 4, 2)
    assert buffers.write(pool, ids(), ids()).cu_seqlens_q.tolist() == [0]


def test_a_sequence_may_have_no_rows():
    pool, buffers = make_pool(), make_buffers()
    seqs = [opened(pool, 9, 9), opened(pool, 2)]
    assert_step_equals_model(buffers.write(pool, ids(*seqs), ids(0, 2)), pool, seqs, [0, 2])


def test_views_of_the_largest_step_fit_exactly():
    pool = make_pool()
    buffers = make_buffers(max_rows=16, max_seqs=1, max_blocks=2, max_window_pages=4)
    seq = opened(pool, 17)
    step = buffers.write(pool, ids(seq), ids(16))
    assert step.block_tables.tolist() == [[1, 2]]
    assert step.window_tables.tolist() == [[1, 2, 3, 4]]


@st.composite
def workloads(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    steps = draw(
        st.lists(
            st.tuples(
                st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=8),
                st.integers(0, 64),
                st.integers(0, 8),
            ),
            min_size=1,
            max_size=6,
        )
    )
    return lengths, steps


@settings(max_examples=200, deadline=None, derandomize=True)
@given(workloads())
def test_random_steps_in_the_same_buffers_equal_the_model(workload):
    lengths, steps = workload
    pool, buffers = make_pool(), make_buffers()
    seqs = [opened(pool, length) for length in lengths]
    for choice, pad_rows, pad_seqs in steps:
        left = {seq: pool.num_tokens(seq) - pool.num_computed(seq) for seq in seqs}
        rows = {seqs[i]: min(q, left[seqs[i]]) for i, q in choice if i < len(seqs)}
        while sum(rows.values()) > 64:
            rows.popitem()
        chosen, query_lens = list(rows), list(rows.values())
        step = buffers.write(pool, ids(*chosen), ids(*query_lens), pad_rows=pad_rows, pad_seqs=pad_seqs)
        assert_step_equals_model(step, pool, chosen, query_lens, pad_rows, pad_seqs)
        pool.commit(ids(*chosen), step.seq_lens[: len(chosen)])
        pool.check()


def native_arrays(guard, **shapes):
    """Arrays cut out of one guarded area each: [guard | array | guard], all guards 77."""
    areas, arrays = {}, {}
    sizes = {name: (6,) for name in ("input_ids", "positions", "row_to_seq", "window_slots")}
    sizes |= {name: (3,) for name in ("seq_lens", "query_lens", "state_slots", "window_first_page")}
    sizes |= {"cu_seqlens_q": (4,), "history": (3, 2), "block_tables": (3, 2), "window_tables": (3, 4)}
    sizes |= {"block_table_lens": (3,), "window_table_lens": (3,), "slots": (6,)} | shapes
    for name, shape in sizes.items():
        size = int(np.prod(shape))
        areas[name] = np.full(size + 2 * guard, 77, dtype=np.int32)
        arrays[name] = areas[name][guard : guard + size].reshape(shape)
        arrays[name][...] = 0
    return areas, arrays


def bind(arrays, ratio=2):
    return StepArrays(**(arrays | {"slots": [(ratio, arrays["slots"])]}))


def test_arrays_are_padded_to_their_end_by_default_and_nothing_else_is_written():
    pool = make_pool()
    areas, arrays = native_arrays(guard=16)
    assert pool.write_step(ids(opened(pool, 4)), ids(4), bind(arrays)) == 4
    assert arrays["positions"].tolist() == [0, 1, 2, 3, 0, 0]
    assert arrays["window_slots"].tolist() == [4, 5, 6, 7, -1, -1]
    assert arrays["cu_seqlens_q"].tolist() == [0, 4, 4, 4]
    assert arrays["history"].tolist() == [[-1, -1]] * 3
    for name, area in areas.items():
        assert (area[:16] == 77).all() and (area[-16:] == 77).all(), name


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input_ids", (4,), r"input_ids has shape \(4,\); this step needs at least \(5,\)"),
        ("window_slots", (4,), r"window_slots has shape \(4,\)"),
        ("slots", (4,), r"slots has shape \(4,\)"),
        ("cu_seqlens_q", (2,), r"cu_seqlens_q has shape \(2,\); this step needs at least \(3,\)"),
        ("state_slots", (1,), r"state_slots has shape \(1,\); this step needs at least \(2,\)"),
        ("history", (1, 3), r"history has shape \(1, 3\)"),
        ("block_tables", (3, 1), r"block_tables has shape \(3, 1\); this step needs at least \(2, 2\)"),
        ("window_tables", (1, 9), r"window_tables has shape \(1, 9\); this step needs at least \(2, 3\)"),
        ("block_table_lens", (2,), r"block_table_lens has shape \(2,\); this step needs at least \(3,\)"),
    ],
)
def test_an_array_that_is_too_small_is_named_before_anything_is_written(name, shape, message):
    pool = make_pool()
    areas, arrays = native_arrays(guard=4, **{name: shape})
    before = {key: area.copy() for key, area in areas.items()}
    bound = bind(arrays)
    with pytest.raises(ValueError, match=message):
        pool.write_step(ids(opened(pool, 4), opened(pool, 9, 8)), ids(4, 1), bound)
    assert all((areas[key] == area).all() for key, area in before.items())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda a: a.astype(np.int64), "positions has shape .* and dtype int64"),
        (lambda a: np.zeros(12, np.int32)[::2], "positions has shape .* need a C-contiguous int32 array"),
        (lambda a: a.reshape(2, 3), r"positions has shape \(2, 3\)"),
        (lambda a: np.frombuffer(bytes(24), np.int32), "positions is read-only"),
    ],
)
def test_arrays_of_another_kind_are_refused_when_bound(kind, message):
    arrays = native_arrays(guard=0)[1]
    arrays["positions"] = kind(arrays["positions"])
    with pytest.raises(ValueError, match=message):
        bind(arrays)


@pytest.mark.parametrize(
    ("seqs", "query_lens", "message"),
    [
        ((1, 1), (1, 1), "sequence 1 is named twice"),
        ((1, 3), (1, 1), "sequence 3 is not open"),
        ((1,), (5,), "sequence 1: 5 rows from 0; it has 4 tokens, 0 computed"),
        ((1,), (-1,), "sequence 1: -1 rows from 0"),
        ((2,), (1,), "sequence 2: rows up to 1 tokens are not reserved"),
        ((1, 2), (1,), "seqs has 2 entries, query_lens has 1"),
    ],
)
def test_a_sequence_that_cannot_run_is_named(seqs, query_lens, message):
    pool, buffers = make_pool(), make_buffers()
    opened(pool, 4)
    pool.open(ids(1))
    with pytest.raises(ValueError, match=message):
        buffers.write(pool, ids(*seqs), ids(*query_lens))


def test_table_lengths_that_somebody_changed_are_refused():
    pool = make_pool()
    arrays = native_arrays(guard=0)[1]
    arrays["window_table_lens"][1] = 5
    with pytest.raises(ValueError, match=r"window_table_lens\[1\] is 5; window_tables has 4 columns"):
        pool.write_step(ids(), ids(), bind(arrays))


def test_padding_beyond_the_capacity_is_refused():
    pool, buffers = make_pool(), make_buffers()
    with pytest.raises(ValueError, match="input_ids has shape"):
        buffers.write(pool, ids(), ids(), pad_rows=65)
    with pytest.raises(ValueError, match="cu_seqlens_q has shape"):
        buffers.write(pool, ids(), ids(), pad_seqs=9)


def test_a_ratio_must_divide_the_block():
    pool = make_pool()
    with pytest.raises(ValueError, match="ratio 3 does not divide block_size 8"):
        make_buffers(ratios=(3,)).write(pool, ids(), ids())
    with pytest.raises(ValueError, match="ratio is 0"):
        make_buffers(ratios=(0,))


def test_slots_beyond_int32_are_refused():
    pool = make_pool(num_blocks=2, block_size=2**30)
    assert make_buffers(ratios=(2,)).write(pool, ids(), ids()).num_rows == 0
    with pytest.raises(OverflowError, match="slots of ratio 1: 2 blocks of 1073741824 records exceed int32"):
        make_buffers(ratios=(1,)).write(pool, ids(), ids())


def test_the_caller_chooses_the_memory():
    made = []

    def zeros(shape):
        made.append(np.zeros(shape, np.int32))
        return made[-1]

    pool = make_pool()
    step = make_buffers(zeros=zeros).write(pool, ids(opened(pool, 2)), ids(2))
    assert any(np.shares_memory(step.input_ids, array) for array in made)


def test_rows_of_steps_in_flight_start_behind_what_is_known() -> None:
    """Unknown tokens are 0, and -1 in the history; positions and slots are those of the planned rows."""
    manager = KVBlockManager(8, 8, window_page=4, window=8, num_slots=2)
    seq = manager.open(np.array([11, 12, 13, 14, 15], dtype=np.int32))
    manager.reserve(seq, 9)
    manager.commit(np.array([seq], dtype=np.int32), np.array([4], dtype=np.int32))
    buffers = StepBuffers(max_rows=8, max_seqs=2, max_blocks=4, max_window_pages=4, ratios=(1, 2), ngram=4)
    step = buffers.write(
        manager.pool,
        np.array([seq], dtype=np.int32),
        np.array([3], dtype=np.int32),
        starts=np.array([6], dtype=np.int32),
    )
    assert step.positions.tolist() == [6, 7, 8]
    assert step.input_ids.tolist() == [0, 0, 0]
    assert step.history[0].tolist() == [-1, 15, 14]
    assert step.seq_lens.tolist() == [9]
    pages, blocks = manager.pool.pages(seq), manager.pool.blocks(seq)
    assert step.window_slots.tolist() == [pages[1] * 4 + 2, pages[1] * 4 + 3, pages[2] * 4]
    assert step.slots[2].tolist() == [-1, blocks[0] * 4 + 3, -1]
    with pytest.raises(ValueError, match="sequence 1: 1 rows from 3; it has 5 tokens, 4 computed"):
        buffers.write(
            manager.pool,
            np.array([seq], dtype=np.int32),
            np.array([1], dtype=np.int32),
            starts=np.array([3], dtype=np.int32),
        )
