"""The native prefix index: what is found again, what is given up, and that nothing shared is ever written."""

import numpy as np
import pytest

from deepinfer.core._native import KVPool

BLOCK, PAGE = 4, 2


def make_pool(*, page_interval=4096, **overrides):
    sizes = dict(num_blocks=12, block_size=BLOCK, num_window_pages=24, window_page=PAGE, window=4)
    pool = KVPool(**(sizes | {"num_slots": 4} | overrides))
    pool.enable_prefix(page_interval)
    return pool


def ids(*values):
    return np.array(values, dtype=np.int32)


def start(pool, tokens, salt=0, steps=(10**6,)):
    """Open a sequence and compute all its tokens, in steps of so many rows."""
    seq = pool.open(ids(*tokens), salt, True)
    for rows in steps * len(tokens):
        end = min(len(tokens), pool.num_computed(seq) + rows)
        assert pool.reserve(seq, end)
        pool.commit(ids(seq), ids(end))
    pool.check()
    return seq


def test_a_prompt_finds_all_full_blocks_before_its_last_token():
    pool = make_pool()
    pool.close(start(pool, range(11)))
    assert pool.match(ids(*range(11))) == (8, 2)
    assert pool.match(ids(*range(8))) == (4, 1)
    assert pool.match(ids(*range(9))) == (8, 2)
    assert pool.match(ids(*range(4))) == (0, 0)
    assert pool.match(ids()) == (0, 0)
    assert pool.match(ids(0, 1, 2, 3, 9, 9, 9, 9, 9)) == (4, 1)
    assert pool.match(ids(9, 1, 2, 3, 4)) == (0, 0)


def test_adopted_memory_is_that_of_the_first_sequence():
    pool = make_pool()
    first = start(pool, range(10))
    blocks, pages = pool.blocks(first).tolist(), pool.pages(first).tolist()
    assert pool.match(ids(*range(10))) == (8, 0)  # nothing of it is idle
    second = pool.open(ids(*range(10)), use_prefix=True)
    assert pool.num_computed(second) == 8
    assert pool.blocks(second).tolist() == blocks[:2]
    # The query at 8 sees 5..8, and page 2 holds 4 and 5; that at 10 sees 7..10, so the first holds pages from 3 on.
    assert (pool.first_page(second), len(pool.pages(second)), pool.first_page(first)) == (2, 2, 3)
    assert pool.pages(second)[1] == pages[0]
    assert pool.reserve(second, 10)
    assert not set(pool.blocks(second)[2:]) & set(blocks)
    assert not set(pool.pages(second)[2:]) & set(pages)
    pool.close(first)
    pool.check()
    pool.commit(ids(second), ids(10))
    pool.close(second)
    assert (pool.num_free_blocks, pool.num_free_pages) == (12, 24)
    pool.check()


def test_generated_tokens_are_found_again():
    pool = make_pool()
    seq = start(pool, range(5))
    for token in range(5, 14):
        pool.append(ids(seq), ids(1), ids(token))
        assert pool.reserve(seq, token + 1)
        pool.commit(ids(seq), ids(token + 1))
    pool.close(seq)
    assert pool.match(ids(*range(20)))[0] == 12


def test_salts_share_nothing():
    pool = make_pool()
    pool.close(start(pool, range(9), salt=7))
    assert pool.match(ids(*range(9)))[0] == 0
    assert pool.match(ids(*range(9)), 2**64 - 1)[0] == 0
    assert pool.match(ids(*range(9)), 7)[0] == 8


def test_a_sequence_without_the_index_reads_and_fills_nothing():
    pool = make_pool()
    pool.close(start(pool, range(9)))
    held = pool.prefix_stats()["held_blocks"]
    seq = pool.open(ids(*range(12)))
    assert pool.num_computed(seq) == 0
    assert pool.reserve(seq, 12)
    pool.commit(ids(seq), ids(12))
    assert pool.prefix_stats()["held_blocks"] == held
    assert pool.prefix_stats()["disabled"] == 1
    pool.check()


def test_equal_blocks_keep_the_first():
    pool = make_pool()
    first, second = pool.open(ids(*range(9)), 0, True), pool.open(ids(*range(9)), 0, True)
    for seq in (first, second):
        assert pool.reserve(seq, 9)
        pool.commit(ids(seq), ids(9))
        pool.check()
    assert pool.prefix_stats()["held_blocks"] == 2
    third = pool.open(ids(*range(9)), 0, True)
    assert pool.blocks(third).tolist() == pool.blocks(first)[:2].tolist()
    pool.close(first)
    pool.close(third)
    pool.check()
    # Memory runs out, so the first one's entries go; the second one enters its own with the next block it fills.
    assert pool.reserve(pool.open(ids(0)), 36)
    assert pool.match(ids(*range(9)))[0] == 0
    pool.append(ids(second), ids(3), ids(9, 10, 11))
    assert pool.reserve(second, 12)
    pool.commit(ids(second), ids(12))
    pool.check()
    assert pool.match(ids(*range(13)))[0] == 12


def test_the_end_of_an_idle_prefix_goes_first():
    pool = make_pool(num_blocks=6)
    pool.close(start(pool, range(17)))
    assert pool.num_free_blocks == 6
    other = pool.open(ids(99))
    for blocks, found in [(2, 16), (3, 12), (4, 8), (5, 4), (6, 0)]:
        assert pool.reserve(other, blocks * BLOCK)
        pool.check()
        assert pool.match(ids(*range(17)))[0] == found
    assert pool.prefix_stats()["evicted_blocks"] == 4
    assert pool.num_free_blocks == 0


def test_the_prefix_used_least_recently_goes_first():
    pool = make_pool(num_blocks=5)
    a, b = [1] * 5, [2] * 5
    pool.close(start(pool, a))
    pool.close(start(pool, b))
    pool.close(start(pool, a))
    assert pool.reserve(pool.open(ids(9)), 4 * BLOCK)
    assert [pool.match(ids(*tokens))[0] for tokens in (a, b)] == [4, 0]


def test_sequences_take_the_pages_of_the_index_and_misses_say_so():
    pool = make_pool(num_window_pages=6)
    pool.close(start(pool, range(9)))
    other = pool.open(ids(*range(100, 109)))
    assert pool.reserve(other, 9)
    assert pool.prefix_stats()["evicted_pages"] > 0
    pool.check()
    pool.close(other)
    pool.close(pool.open(ids(*range(9)), 0, True))
    stats = pool.prefix_stats()
    assert (stats["hits"], stats["missed_no_pages"], stats["pageless_tokens"]) == (0, 1, 8)


@pytest.mark.parametrize(("length", "kept"), [(12, [8, 12]), (13, [12]), (33, [16, 32])])
def test_pages_outlast_at_the_end_of_a_prompt_and_at_the_interval(length, kept):
    """Two pages a boundary; sequences that need more take those of other boundaries first."""
    pool = make_pool(num_blocks=40, num_window_pages=30, page_interval=16)
    seq = start(pool, range(length), steps=(BLOCK,))
    pool.close(seq)
    hog = pool.open(ids(99))
    assert pool.reserve(hog, 2 * (30 - 2 * len(kept)))  # all pages but those
    pool.check()
    found = [n for n in range(BLOCK, length + 1, BLOCK) if pool.match(ids(*range(n), 77))[0] == n]
    assert found == kept


def test_pages_where_prompts_part_are_kept_from_the_second_prompt_on():
    pool = make_pool(num_window_pages=16, num_blocks=40)
    shared, hog = list(range(8)), ids(99)

    def take_pages_but(number):
        seq = pool.open(hog)
        assert pool.reserve(seq, PAGE * (16 - number))
        pool.close(seq)

    pool.close(start(pool, [*shared, *[50] * 9]))
    take_pages_but(2)  # those before the end of the prompt
    assert pool.match(ids(*shared, 60, 60))[0] == 0
    pool.close(start(pool, [*shared, *[60] * 9]))
    take_pages_but(6)
    assert pool.match(ids(*shared, 70, 70))[0] == 8


def test_causes_of_misses_are_told_apart():
    pool = make_pool()
    for tokens in ([1] * 4, [1] * 5, [2] * 9, [1] * 4, [1] * 9):
        pool.close(start(pool, tokens))
    stats = pool.prefix_stats()
    assert (stats["queries"], stats["hits"], stats["missed_too_short"], stats["missed_no_block"]) == (5, 2, 2, 1)
    assert (stats["query_tokens"], stats["hit_tokens"]) == (31, 8)


def test_quarantine_takes_back_what_a_sequence_entered():
    pool = make_pool()
    seq = start(pool, range(9))
    pool.quarantine(seq)
    assert pool.match(ids(*range(9)))[0] == 0
    assert pool.prefix_stats()["held_blocks"] == pool.prefix_stats()["held_pages"] == 0
    pool.append(ids(seq), ids(3), ids(9, 10, 11))
    assert pool.reserve(seq, 12)
    pool.commit(ids(seq), ids(12))
    assert pool.prefix_stats()["held_blocks"] == 0
    pool.check()


def test_who_shares_with_a_quarantined_sequence_enters_it_again():
    pool = make_pool()
    bad = start(pool, range(9))
    good = start(pool, range(9))
    pool.quarantine(bad)
    pool.close(bad)
    pool.append(ids(good), ids(3), ids(9, 10, 11))
    assert pool.reserve(good, 12)
    pool.commit(ids(good), ids(12))
    pool.check()
    assert pool.match(ids(*range(13)))[0] == 12


def test_reset_empties_the_index_and_spares_sequences():
    pool = make_pool()
    seq = start(pool, range(9))
    pool.close(start(pool, [5] * 9))
    pool.reset_prefix()
    pool.check()
    assert pool.prefix_stats()["held_blocks"] == 0
    assert pool.num_computed(seq) == 9
    assert (pool.num_free_blocks, pool.match(ids(*range(9)))[0]) == (9, 0)


def test_without_an_index_sequences_start_from_nothing():
    pool = KVPool(num_blocks=4, block_size=4, num_window_pages=9, window_page=2, window=4, num_slots=2)
    seq = start(pool, range(9))
    assert pool.match(ids(*range(9))) == (0, 0)
    pool.quarantine(seq)
    pool.reset_prefix()
    assert pool.prefix_stats()["disabled"] == 1


def test_the_index_is_enabled_once_and_with_a_sound_interval():
    pool = make_pool()
    with pytest.raises(ValueError, match="enabled already"):
        pool.enable_prefix()
    with pytest.raises(ValueError, match="page_interval is 0"):
        make_pool(page_interval=0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 128])
def test_every_token_of_a_block_counts(block_size):
    pool = KVPool(8, block_size, 8 * block_size, 1, 1, 4)
    pool.enable_prefix()
    tokens = np.arange(2 * block_size, dtype=np.int32)
    seq = pool.open(tokens, 0, True)
    assert pool.reserve(seq, len(tokens))
    pool.commit(ids(seq), ids(len(tokens)))
    for place in range(2 * block_size):
        other = np.append(tokens, np.int32(0))
        other[place] += 1
        assert pool.match(other)[0] == place // block_size * block_size
