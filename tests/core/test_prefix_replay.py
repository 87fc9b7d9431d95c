"""The pool's side of bounded replay: how far window pages may be adopted, and prefixes adopted without them."""

import numpy as np
import pytest

from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import StepBuffers

BLOCK, PAGE, WINDOW = 4, 2, 4


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def manager(**options):
    sizes = {"num_blocks": 30, "block_size": BLOCK, "num_window_pages": 40, "window_page": PAGE, "window": WINDOW}
    return KVBlockManager(**sizes | options, num_slots=4, prefix_caching=True)


def store(blocks, tokens):
    """Compute and end a sequence, four tokens a step."""
    seq = blocks.open(ids(*tokens), use_prefix=True)
    for end in range(4, len(tokens) + 1, 4):
        blocks.reserve(seq, end)
        blocks.commit(ids(seq), ids(end))
    blocks.free(seq)


def without_pages(blocks):
    """Take every window page once, so that none is stored."""
    num_tokens = blocks.num_free_pages * PAGE
    seq = blocks.open(ids(*[0] * num_tokens))
    blocks.reserve(seq, num_tokens)
    blocks.free(seq)


def test_window_pages_are_adopted_up_to_a_limit() -> None:
    blocks = manager()
    store(blocks, range(20))
    for limit, found in ((None, 16), (20, 16), (15, 12), (12, 12), (3, 0), (0, 0)):
        assert blocks.match(ids(*range(20)), max_stored=limit).num_tokens == found
        seq = blocks.open(ids(*range(20)), use_prefix=True, max_stored=limit)
        assert blocks.pool.num_computed(seq) == found
        assert blocks.pool.num_replayed(seq) == 0
        blocks.pool.check()
        blocks.free(seq)


def test_pages_where_the_limit_is_outlast_others() -> None:
    blocks = manager(num_window_pages=14)
    seq = blocks.open(ids(*range(40)), use_prefix=True, max_stored=20)
    for end in range(4, 41, 4):
        blocks.reserve(seq, end)
        blocks.commit(ids(seq), ids(end))
    blocks.free(seq)
    taken = blocks.open(ids(*[50] * 16))
    blocks.reserve(taken, 16)
    assert blocks.match(ids(*range(40)), max_stored=20).num_tokens == 20


def test_a_prefix_without_pages_is_adopted_and_its_end_runs_again() -> None:
    blocks = manager(num_blocks=40, num_window_pages=20, max_replay=5)
    store(blocks, range(24))
    without_pages(blocks)
    prompt = ids(*range(22), 90, 91)
    assert blocks.match(prompt).num_tokens == 0
    assert blocks.match(prompt, replay=5).num_tokens == 20
    free = blocks.num_free_blocks
    seq = blocks.open(prompt, use_prefix=True, replay=5)
    pool = blocks.pool
    assert (pool.num_computed(seq), pool.num_replayed(seq), pool.first_page(seq)) == (20, 6, 7)
    assert blocks.num_free_blocks == free - 5
    pool.check()

    buffers = StepBuffers(
        max_rows=8, max_seqs=1, max_blocks=8, max_window_pages=blocks.max_window_pages(8), ratios=(1, 2)
    )
    blocks.reserve(seq, 18)
    step = buffers.write(pool, ids(seq), ids(4))
    assert step.positions.tolist() == [14, 15, 16, 17]
    assert (step.window_slots >= 0).all()
    assert (step.slots[1] == -1).all()
    assert (step.slots[2] == -1).all()
    assert step.window_first_page.tolist() == [7]
    blocks.reserve(seq, 24)
    step = buffers.write(pool, ids(seq), ids(6), starts=ids(18))
    assert (step.slots[1] >= 0).tolist() == [False, False, True, True, True, True]
    assert (step.slots[2] >= 0).tolist() == [False, False, False, True, False, True]
    pool.check()
    with pytest.raises(ValueError, match="before it has run 6 adopted tokens again"):
        blocks.fork(seq)
    with pytest.raises(ValueError, match="cannot commit 18"):
        blocks.commit(ids(seq), ids(18))

    held = pool.prefix_stats()["held_blocks"]
    blocks.commit(ids(seq), ids(24))
    assert pool.num_replayed(seq) == 0
    assert pool.prefix_stats()["held_blocks"] == held == 6
    assert blocks.match(ids(*range(22), 90, 91, 92), replay=5).num_tokens == 20
    pool.check()
    blocks.free(seq)
    pool.check()
    assert blocks.num_free_blocks == 40
    assert blocks.num_free_pages == 20


def test_a_replay_that_saves_no_rows_is_not_made() -> None:
    blocks = manager()
    store(blocks, range(24))
    prompt = ids(*range(24), 90)
    assert blocks.match(prompt, max_stored=16, replay=8).num_tokens == 16
    assert blocks.match(prompt, max_stored=16, replay=6).num_tokens == 24
    assert blocks.match(ids(*range(8), 90), max_stored=0, replay=8).num_tokens == 0


def test_release_in_the_middle_of_a_replay_frees_everything() -> None:
    blocks = manager(max_replay=8)
    store(blocks, range(24))
    seq = blocks.open(ids(*range(24), 90), use_prefix=True, max_stored=0, replay=8)
    assert blocks.pool.num_replayed(seq) == 8
    blocks.reserve(seq, 20)
    blocks.free(seq)
    blocks.pool.check()
    assert blocks.num_free_blocks == 30
