"""KV bookkeeping: sizing rules, defaults and errors over the native pool."""

import pickle

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, DeepInferError, OutOfBlocksError, RequestError
from deepinfer.core.kv_blocks import KVBlockManager, KVCopy


def ids(*values):
    return np.array(values, dtype=np.int32)


def opened(manager, num_tokens):
    """A sequence that holds memory for all its tokens."""
    seq = manager.open(np.zeros(num_tokens, dtype=np.int32))
    manager.reserve(seq, num_tokens)
    return seq


def test_a_failed_reserve_takes_nothing():
    manager = KVBlockManager(num_blocks=2, block_size=4)  # block 0 is not counted
    seq = manager.open(np.zeros(9, dtype=np.int32))
    with pytest.raises(OutOfBlocksError, match="need 3 blocks for 9 tokens, 2 free"):
        manager.reserve(seq, 9)
    assert (manager.num_free_blocks, manager.num_free_slots) == (2, 255)
    manager.free(seq)
    assert manager.num_free_slots == 256
    assert manager.pool.num_tokens(opened(manager, 8)) == 8


def test_a_failed_reserve_says_what_is_short():
    manager = KVBlockManager(num_blocks=4, block_size=4, num_window_pages=3, window_page=2)
    seq = opened(manager, 5)
    with pytest.raises(OutOfBlocksError, match="need 1 window page for 7 tokens, 0 free"):
        manager.reserve(seq, 7)
    with pytest.raises(OutOfBlocksError, match="need 3 blocks for 17 tokens, 2 free"):
        manager.reserve(seq, 17)
    assert (manager.num_free_blocks, manager.num_free_pages) == (2, 0)


def test_every_shortage_is_an_out_of_blocks_error():
    manager = KVBlockManager(num_blocks=1, block_size=4, num_slots=2)
    seq = opened(manager, 3)
    manager.commit(ids(seq), ids(3))
    with pytest.raises(OutOfBlocksError, match="need 1 block"):
        manager.fork(seq)
    manager.open(ids(1))
    with pytest.raises(OutOfBlocksError, match="need 1 sequence slot, 0 free"):
        manager.open(ids(1))


def test_fork_names_the_copies():
    manager = KVBlockManager(num_blocks=4, block_size=4)
    seq = opened(manager, 4)
    manager.commit(ids(seq), ids(4))
    child, copies = manager.fork(seq)
    assert copies == [KVCopy("state", seq, child)]
    seq = opened(manager, 3)
    manager.commit(ids(seq), ids(3))
    child, copies = manager.fork(seq)
    assert copies == [KVCopy("block", 2, 3), KVCopy("page", 2, 3), KVCopy("state", seq, child)]


def test_free_keeps_nothing():
    manager = KVBlockManager(num_blocks=2, block_size=4)
    seq = manager.open(ids(5, 6, 7))
    manager.reserve(seq, 3)
    assert manager.reserve_many(ids(seq), ids(9)) == 0
    manager.free(seq)
    assert (manager.num_free_blocks, manager.num_free_slots) == (2, 256)


@pytest.mark.parametrize(
    ("block_size", "window_page", "num_window_pages"), [(128, 32, 40), (4, 4, 10), (48, 16, 30), (1, 1, 10)]
)
def test_default_pages_divide_the_block_and_cover_as_many_tokens(block_size, window_page, num_window_pages):
    pool = KVBlockManager(10, block_size).pool
    assert (pool.window_page, pool.num_window_pages) == (window_page, num_window_pages)
    assert pool.window == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"window_page": 0}, "window_page is 0"),
        ({"window_page": 48}, "window_page 48 does not divide block_size 128"),
        ({"num_window_pages": 2**30, "window_page": 128}, "slots beyond int32"),
    ],
)
def test_bad_settings_are_config_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        KVBlockManager(**({"num_blocks": 4} | settings))


def test_blocks_for_rounds_up():
    manager = KVBlockManager(num_blocks=2, block_size=4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def most_pages_held(manager, num_rows, num_tokens):
    """The most pages held by a sequence that runs in steps of num_rows, wherever its first step ends."""
    most = 0
    for first in range(1, num_rows + 1):
        seq = manager.open(np.zeros(num_tokens, np.int32))
        end = first
        while end <= num_tokens:
            manager.reserve(seq, end)
            most = max(most, len(manager.pool.pages(seq)))
            manager.commit(ids(seq), ids(end))
            end += num_rows
        manager.free(seq)
    return most


@pytest.mark.parametrize("window_page", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_max_window_pages_is_what_long_sequences_reach(window_page, window, num_rows):
    manager = KVBlockManager(64, 4, window_page=window_page, window=window)
    assert most_pages_held(manager, num_rows, 60) == manager.max_window_pages(num_rows)


def test_errors_have_one_base_and_survive_pickling():
    assert all(issubclass(error, DeepInferError) for error in (ConfigError, OutOfBlocksError, RequestError))
    error = pickle.loads(pickle.dumps(RequestError("prompt_too_long", "9 tokens, at most 8")))
    assert (error.code, error.message, str(error)) == (
        "prompt_too_long",
        "9 tokens, at most 8",
        "prompt_too_long: 9 tokens, at most 8",
    )
