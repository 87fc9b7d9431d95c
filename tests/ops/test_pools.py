"""Memory pools over an allocator that knows nothing of them: what is booked, limited, reserved and given back."""

import threading

import pytest
import torch

from deepinfer.ops.errors import OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.runtime import MemoryPool, PoolStats, Runtime


@pytest.fixture
def runtime():
    return HostRuntime()


def test_a_pool_counts_what_lives_and_views_count(runtime):
    pool = runtime.pool("kv_cache")
    assert isinstance(pool, MemoryPool)
    assert pool.stats() == PoolStats(None)
    whole = pool.zeros((10, 4), torch.float32)
    assert whole.sum() == 0
    other = pool.empty((3,), torch.int64)
    assert pool.stats() == PoolStats(None, 184, 184, 184, 2, 0)
    row = whole[2:].view(torch.int32)[0]
    del whole
    assert pool.stats().allocated_bytes == 184
    del row
    assert pool.stats() == PoolStats(None, 24, 24, 184, 2, 1)
    assert other.shape == (3,)


def test_a_pool_is_found_by_name_and_names_are_told_apart(runtime):
    held = runtime.pool("a").empty((5,), torch.uint8)
    assert runtime.pool("a") is runtime.pool("a")
    runtime.pool("b")
    assert {name: stats.allocated_bytes for name, stats in runtime.pools().items()} == {"a": 5, "b": 0}
    assert HostRuntime().pools() == {}  # runtimes share nothing
    assert held.numel() == 5


def test_a_limit_refuses_and_leaves_the_books_as_they_were(runtime):
    pool = runtime.pool("scratch", limit_bytes=100)
    held = pool.empty((60,), torch.uint8)
    before = pool.stats()
    with pytest.raises(
        OutOfDeviceMemoryError, match="'scratch' has a limit of 100 bytes and 60 of them in use: 44 bytes"
    ):
        pool.zeros((11,), torch.float32)
    assert pool.stats() == before
    runtime.pool("scratch", limit_bytes=104)
    runtime.pool("scratch")  # leaves the limit as it is
    assert pool.zeros((11,), torch.float32).shape == (11,)
    with pytest.raises(OpArgumentError, match="holds 60 bytes; its limit cannot be 59"):
        runtime.pool("scratch", limit_bytes=59)
    assert pool.stats().limit_bytes == 104
    assert held.numel() == 60


def test_an_allocation_that_fails_is_not_booked(runtime):
    pool = runtime.pool("huge")
    with pytest.raises(RuntimeError):
        pool.empty((1 << 60,), torch.uint8)
    assert pool.stats() == PoolStats(None, 0, 0, 1 << 60, 0, 0)


def test_what_is_reserved_counts_as_taken_until_it_is_released(runtime):
    pool = runtime.pool("kv_cache", limit_bytes=1 << 30)
    assert runtime.reserved_and_unused == 0
    pool.reserve(1 << 20)
    pool.reserve(1 << 10)  # less than is held: nothing changes
    held = pool.empty((1 << 18,), torch.uint8)
    assert pool.stats() == PoolStats(1 << 30, 1 << 20, 1 << 18, 1 << 18, 1, 0)
    assert runtime.reserved_and_unused == (1 << 20) - (1 << 18)
    assert pool.release() == (1 << 20) - (1 << 18)
    assert pool.release() == 0
    assert pool.stats().reserved_bytes == 1 << 18
    assert held.numel() == 1 << 18


def test_a_reserve_beyond_limit_or_device_is_refused(runtime):
    with pytest.raises(OutOfDeviceMemoryError, match="limit of 10 bytes"):
        runtime.pool("a", limit_bytes=10).reserve(11)
    with pytest.raises(OutOfDeviceMemoryError, match="in all do not fit, 0 are held"):
        runtime.pool("b").reserve(1 << 60)
    assert runtime.reserved_and_unused == 0


def test_tensors_may_die_in_other_threads(runtime):
    pool = runtime.pool("a")

    def body():
        for _ in range(200):
            pool.empty((8,), torch.uint8)

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.num_allocations, stats.num_releases) == (0, 800, 800)


def test_the_host_has_one_stream(runtime):
    assert isinstance(runtime, Runtime)
    assert not runtime.capabilities.streams
    assert runtime.stream() == runtime.current_stream()
    with runtime.use_stream(runtime.stream()), runtime.use_stream(runtime.current_stream()):
        runtime.event().record()
    runtime.stream().synchronize()
    with (
        pytest.raises(OpArgumentError, match="not a stream of this device"),
        runtime.use_stream(HostRuntime().stream()),
    ):
        pass
