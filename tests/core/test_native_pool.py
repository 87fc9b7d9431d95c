"""The native pool: who holds what after any sequence of calls, and whether stored records stay readable."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from deepinfer.core._native import KVPool, PoolExhaustedError


def make_pool(**overrides):
    sizes = dict(num_blocks=8, block_size=4, num_window_pages=12, window_page=2, window=6, num_slots=4)
    return KVPool(**(sizes | overrides))


def ids(*values):
    return np.array(values, dtype=np.int32)


def computed(pool, num_tokens):
    """A sequence of tokens 0, 1, 2.. that are all computed."""
    seq = pool.open(np.arange(num_tokens, dtype=np.int32))
    assert pool.reserve(seq, num_tokens)
    pool.commit(ids(seq), ids(num_tokens))
    pool.check()
    return seq


def free_counts(pool):
    return pool.num_free_blocks, pool.num_free_pages, pool.num_free_slots


def test_a_pool_starts_with_everything_free_but_the_holes():
    pool = make_pool()
    assert free_counts(pool) == (8, 12, 4)
    pool.check()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_slots": 2**31 - 1}, "num_slots is 2147483647"),
        ({"window_page": 3}, "window_page 3 does not divide block_size 4"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_bad_sizes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**overrides)


def test_window_slots_beyond_int32_are_refused_at_once():
    with pytest.raises(OverflowError, match="2 window pages of 1073741824 tokens"):
        make_pool(block_size=2**30, window_page=2**30, num_window_pages=2)


def test_ids_come_in_order_and_come_back_in_order():
    pool = make_pool()
    first = computed(pool, 9)
    assert pool.blocks(first).tolist() == [1, 2, 3]
    pool.close(first)
    assert pool.blocks(computed(pool, 9)).tolist() == [1, 2, 3]


def test_open_without_a_free_slot_raises():
    pool = make_pool(num_slots=1)
    seq = pool.open(ids(1))
    with pytest.raises(PoolExhaustedError, match="need 1 sequence slot, 0 free"):
        pool.open(ids(2))
    pool.close(seq)
    assert pool.open(ids(2)) == seq
    assert pool.tokens(seq).tolist() == [2]


@pytest.mark.parametrize("seq", [-1, 0, 2, 5, 2**40])
def test_a_handle_that_is_not_open_is_named(seq):
    pool = make_pool()
    pool.open(ids(1))
    assert not pool.is_open(seq)
    with pytest.raises(ValueError, match=f"sequence {seq} is not open"):
        pool.num_tokens(seq)


def test_tokens_is_a_copy():
    pool = make_pool()
    seq = pool.open(ids(1, 2))
    pool.tokens(seq)[0] = 9
    assert pool.tokens(seq).tolist() == [1, 2]


def test_append_gives_each_sequence_its_tokens_or_none():
    pool = make_pool()
    a, b = pool.open(ids(1)), pool.open(ids())
    pool.append(ids(b, a), ids(3, 1), ids(7, 5, 6, 8))
    with pytest.raises(ValueError, match="sequence 4 is not open"):
        pool.append(ids(a, 4), ids(1, 1), ids(1, 1))
    with pytest.raises(ValueError, match="seqs has 2 entries, counts has 1"):
        pool.append(ids(a, b), ids(1), ids(1))
    with pytest.raises(ValueError, match="counts add up to 3, tokens has 2 entries"):
        pool.append(ids(a, b), ids(1, 2), ids(1, 1))
    with pytest.raises(ValueError, match="count is -1"):
        pool.append(ids(a, b), ids(-1, 2), ids(1))
    with pytest.raises(ValueError, match=f"sequence {a} is named twice"):
        pool.append(ids(a, a), ids(1, 1), ids(1, 1))
    assert pool.tokens(a).tolist() == [1, 8]
    assert pool.tokens(b).tolist() == [7, 5, 6]


@pytest.mark.parametrize(
    "tokens", [np.zeros(2, np.int64), np.zeros((2, 1), np.int32), np.zeros(4, np.int32)[::2]], ids=str
)
def test_arrays_of_another_kind_are_refused_by_name(tokens):
    with pytest.raises(ValueError, match=r"token_ids has shape .* need a C-contiguous int32 array of 1 dimension"):
        make_pool().open(tokens)


@pytest.mark.parametrize("short", [{"num_blocks": 2}, {"num_window_pages": 4}])
def test_a_failed_reserve_takes_nothing(short):
    pool = make_pool(**short)
    seq = pool.open(ids(*range(9)))
    before = free_counts(pool)
    assert (pool.blocks_needed(seq, 9), pool.pages_needed(seq, 9)) == (3, 5)
    assert not pool.reserve(seq, 9)
    assert free_counts(pool) == before
    assert pool.reserve(seq, 8)
    assert (pool.blocks_needed(seq, 9), pool.pages_needed(seq, 9)) == (1, 1)
    pool.check()


def test_reserve_many_stops_at_the_first_that_does_not_fit():
    pool = make_pool(num_blocks=3)
    a, b, c = (pool.open(ids(0)) for _ in range(3))
    assert pool.reserve_many(ids(a, b, c), ids(8, 8, 4)) == 1
    assert [len(pool.blocks(seq)) for seq in (a, b, c)] == [2, 0, 0]
    assert pool.reserve_many(ids(a, c), ids(8, 4)) == 2
    pool.check()


def test_commit_keeps_the_window_and_frees_pages_before_it():
    pool = make_pool()  # pages of 2, window 6
    seq = pool.open(ids(*range(16)))
    assert pool.reserve(seq, 16)
    for n, first_page in [(6, 0), (7, 1), (8, 1), (9, 2), (16, 5)]:
        pool.commit(ids(seq), ids(n))
        assert pool.first_page(seq) == first_page == max(0, n - 6 + 1) // 2
        assert len(pool.pages(seq)) == 8 - first_page
        pool.check()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ([4, 4], "named twice"),
        ([3], "cannot commit 3 tokens; it has 4 computed of 9"),
        ([10], "cannot commit 10"),
        ([9], "reserve them first"),
    ],
)
def test_commit_refuses_what_cannot_be_stored(new, message):
    pool = make_pool()
    seq = computed(pool, 4)
    pool.append(ids(seq), ids(5), ids(*range(5)))
    with pytest.raises(ValueError, match=message):
        pool.commit(ids(*[seq] * len(new)), ids(*new))
    assert pool.num_computed(seq) == 4


def test_fork_shares_what_is_full_and_copies_the_tail():
    pool = make_pool()
    seq = computed(pool, 7)
    child, copies = pool.fork(seq)
    assert pool.blocks(seq).tolist() == [1, 2]
    assert pool.blocks(child).tolist() == [1, 3]
    assert pool.first_page(child) == pool.first_page(seq) == 1
    assert pool.pages(seq).tolist() == [2, 3, 4]
    assert pool.pages(child).tolist()[:2] == [2, 3]
    assert copies == [("block", 2, 3), ("page", 4, pool.pages(child)[-1]), ("state", seq, child)]
    pool.check()
    pool.close(seq)
    pool.check()
    assert pool.blocks(child).tolist() == [1, 3]


def test_fork_at_a_boundary_copies_only_the_state():
    pool = make_pool()
    seq = computed(pool, 8)
    pool.reserve(seq, 12)  # room for what comes next is not shared
    child, copies = pool.fork(seq)
    assert copies == [("state", seq, child)]
    assert len(pool.blocks(child)) == 2
    assert pool.fork(pool.open(ids(5)))[1] == []


@pytest.mark.parametrize(
    ("short", "message"),
    [({"num_slots": 1}, "sequence slot"), ({"num_blocks": 2}, "block"), ({"num_window_pages": 4}, "window page")],
)
def test_a_failed_fork_takes_nothing(short, message):
    pool = make_pool(window=64, **short)
    seq = computed(pool, 7)
    before = free_counts(pool)
    with pytest.raises(PoolExhaustedError, match=f"need 1 {message}"):
        pool.fork(seq)
    assert free_counts(pool) == before
    pool.check()


NUM_BLOCKS, NUM_PAGES, BLOCK, PAGE = 10, 16, 4, 2


class PoolMachine(RuleBasedStateMachine):
    """Random calls against a memory that really stores records.

    A record is the tuple of tokens up to its position, so a stale, shared or freed place shows as a wrong record.
    """

    seqs = Bundle("seqs")

    def __init__(self):
        super().__init__()
        self.window = 3
        self.pool = make_pool(
            num_blocks=NUM_BLOCKS,
            num_window_pages=NUM_PAGES,
            window=self.window,
            num_slots=3,
        )
        self.memory = {"block": {}, "page": {}}  # kind -> (id, offset) -> record
        self.tokens = {}
        self.computed = {}

    def place(self, kind, seq, position):
        if kind == "block":
            return int(self.pool.blocks(seq)[position // BLOCK]), position % BLOCK
        return int(self.pool.pages(seq)[position // PAGE - self.pool.first_page(seq)]), position % PAGE

    def copy(self, copies):
        for kind, src, dst in copies:
            for (place_id, offset), record in list(self.memory.get(kind, {}).items()):
                if place_id == src:
                    self.memory[kind][dst, offset] = record

    @rule(target=seqs, tokens=st.lists(st.integers(0, 2), max_size=14))
    def open(self, tokens):
        if self.pool.num_free_slots == 0:
            with pytest.raises(PoolExhaustedError):
                self.pool.open(ids(*tokens))
            return multiple()
        seq = self.pool.open(ids(*tokens))
        self.tokens[seq], self.computed[seq] = list(tokens), 0
        return seq

    @rule(seq=seqs, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def append(self, seq, tokens):
        self.pool.append(ids(seq), ids(len(tokens)), ids(*tokens))
        self.tokens[seq] += tokens

    @rule(seq=seqs, rows=st.integers(0, 9), ahead=st.integers(0, 3))
    def step(self, seq, rows, ahead):
        begin = self.computed[seq]
        end = min(len(self.tokens[seq]), begin + rows)
        before = free_counts(self.pool)
        need = self.pool.blocks_needed(seq, end + ahead), self.pool.pages_needed(seq, end + ahead)
        if not self.pool.reserve(seq, end + ahead):
            assert need[0] > before[0] or need[1] > before[1]
            assert free_counts(self.pool) == before
            return
        assert free_counts(self.pool)[:2] == (before[0] - need[0], before[1] - need[1])
        for kind in self.memory:
            for position in range(begin, end):
                self.memory[kind][self.place(kind, seq, position)] = tuple(self.tokens[seq][: position + 1])
        self.pool.commit(ids(seq), ids(end))
        self.computed[seq] = end

    @rule(target=seqs, seq=seqs)
    def fork(self, seq):
        try:
            child, copies = self.pool.fork(seq)
        except PoolExhaustedError:
            return multiple()
        self.copy(copies)
        self.tokens[child], self.computed[child] = list(self.tokens[seq]), self.computed[seq]
        return child

    @rule(seq=consumes(seqs))
    def close(self, seq):
        self.pool.close(seq)
        del self.tokens[seq]

    @invariant()
    def books_balance_and_records_are_readable(self):
        self.pool.check()
        for seq, tokens in self.tokens.items():
            n = self.computed[seq]
            assert self.pool.tokens(seq).tolist() == tokens
            assert self.pool.num_computed(seq) == n
            for position in range(n):
                assert self.memory["block"][self.place("block", seq, position)] == tuple(tokens[: position + 1])
            for position in range(max(0, n - self.window + 1), n):
                assert self.memory["page"][self.place("page", seq, position)] == tuple(tokens[: position + 1])

    def teardown(self):
        for seq in self.tokens:
            self.pool.close(seq)
        self.pool.check()
        assert free_counts(self.pool) == (NUM_BLOCKS, NUM_PAGES, 3)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
