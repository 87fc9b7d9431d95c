"""The CUDA runtime on a device: memory, copies, streams, events, pools and graphs. Skipped where there is none."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.distributed import HashStore

from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import CaptureError, HostSyncError, OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.process_groups import GroupCommunicator
from deepinfer.ops.runtime import Runtime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def runtime() -> Runtime:
    from deepinfer.backends.nvidia.runtime import CudaRuntime

    return CudaRuntime()


def test_it_is_a_runtime(runtime: Runtime) -> None:
    assert isinstance(runtime, Runtime)
    assert runtime.capabilities.graphs and runtime.capabilities.streams and runtime.capabilities.torch_compute


def test_free_memory_counts_what_the_allocator_keeps_as_free(runtime: Runtime) -> None:
    before = runtime.memory_info()
    held = runtime.empty((1 << 28,), torch.uint8)
    during = runtime.memory_info()
    del held
    gc.collect()
    after = runtime.memory_info()
    assert before.free_bytes - during.free_bytes == 1 << 28
    assert after.free_bytes == before.free_bytes
    assert 0 < after.free_bytes <= after.total_bytes


def test_too_much_memory_is_refused_with_what_is_there(runtime: Runtime) -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="bytes are free"):
        runtime.empty((1 << 50,), torch.uint8)


def test_copies_both_ways_and_into_memory_that_exists(runtime: Runtime) -> None:
    host = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    there = runtime.to_device(host)
    assert torch.equal(runtime.to_host(there.T), host.T)
    pinned = runtime.pinned((4,), torch.int32)
    assert pinned.is_pinned() and not pinned.any()
    pinned += 7
    runtime.write(there[1], pinned)
    pinned.zero_()  # free on return
    assert runtime.to_host_later(there).wait().tolist() == [[0, 1, 2, 3], [7, 7, 7, 7], [8, 9, 10, 11]]
    with pytest.raises(OpArgumentError, match="write takes a host tensor like its target"):
        runtime.write(there, host.long())
    with pytest.raises(OpArgumentError, match="to_device takes a tensor of the host"):
        runtime.to_device(there)


def test_events_order_streams_and_tell_the_time(runtime: Runtime) -> None:
    x = runtime.zeros((1 << 24,), torch.float32)
    begin, written, end = runtime.event(), runtime.event(), runtime.event()
    assert written.query()  # not recorded: counts as reached
    side = runtime.stream()
    begin.record()
    for _ in range(50):
        x += 1
    written.record()
    with runtime.use_stream(side):
        written.wait()
        y = x * 2
        end.record()
        side.synchronize()
    assert end.query() and float(runtime.to_host(y[:1])) == 100.0
    assert 0 < written.elapsed_ms(begin) <= end.elapsed_ms(begin)


def test_a_landing_is_the_same_memory_for_every_copy(runtime: Runtime) -> None:
    x = runtime.to_device(torch.arange(8, dtype=torch.int32))
    landing = runtime.landing((8,), torch.int32)
    first = landing.begin(x)
    place = first.wait().data_ptr()
    assert first.wait().is_pinned() and first.wait().tolist() == list(range(8))
    second = landing.begin((x + 1)[:5])
    assert second.wait().tolist() == [1, 2, 3, 4, 5] and second.wait().data_ptr() == place
    with runtime.sync_guard.forbid("a step"):
        third = landing.begin(x)
    assert third.wait().tolist() == list(range(8))


def test_waits_are_refused_where_they_are_forbidden(runtime: Runtime) -> None:
    x = runtime.zeros((4,), torch.float32)
    with runtime.sync_guard.forbid("a step"):
        copy = runtime.to_host_later(x)
        for wait in (runtime.synchronize, lambda: runtime.to_host(x), runtime.current_stream().synchronize):
            with pytest.raises(HostSyncError, match="a step"):
                wait()
    assert copy.wait().tolist() == [0.0] * 4


def test_waits_inside_of_torch_are_errors_while_they_are_watched_for(runtime: Runtime) -> None:
    x = runtime.zeros((4,), torch.float32)
    guard = runtime.sync_guard
    with guard.forbid("a step"):
        assert x.sum().item() == 0.0  # nobody looks
    with guard.watched():
        assert x.sum().item() == 0.0  # nothing is forbidden
        with guard.forbid("a step"):
            small = runtime.to_device(torch.ones(4))
            runtime.write(small, torch.full((4,), 3.0).pin_memory())
            for wait in (x.sum().item, x.nonzero, x.tolist, lambda: x.copy_(torch.ones(4))):
                with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                    wait()
            with guard.permit("a test"):
                assert x.sum().item() == 0.0
            copy = runtime.to_host_later(x + 1)
    assert small.tolist() == [3.0] * 4
    assert copy.wait().tolist() == [1.0] * 4 and x.sum().item() == 0.0


def test_a_pool_is_limited_and_accounted_for(runtime: Runtime) -> None:
    pool = runtime.pool("kv_cache", limit_bytes=1 << 20)
    held = pool.zeros((1 << 19,), torch.uint8)
    with pytest.raises(OutOfDeviceMemoryError):
        pool.empty((1 << 20,), torch.uint8)
    assert runtime.pools()["kv_cache"].allocated_bytes == 1 << 19
    del held
    gc.collect()
    assert runtime.pools()["kv_cache"].allocated_bytes == 0


def test_a_graph_replays_what_was_captured_and_runs_nothing_before(runtime: Runtime) -> None:
    x, y = runtime.zeros((8,), torch.float32), runtime.zeros((8,), torch.float32)

    def step() -> None:
        y.add_(x)

    replay = runtime.capture(step)
    assert not runtime.to_host(y).any()
    runtime.write(x, torch.full((8,), 3.0))
    replay()
    replay()
    assert runtime.to_host(y).tolist() == [6.0] * 8


def test_a_step_that_waits_cannot_be_captured(runtime: Runtime) -> None:
    x = runtime.zeros((8,), torch.float32)
    with pytest.raises(CaptureError):
        runtime.capture(lambda: x.sum().item())
    runtime.synchronize()
    assert runtime.to_host(x + 1).tolist() == [1.0] * 8


def test_a_group_of_one_needs_no_network(runtime: Runtime) -> None:
    comm = runtime.communicator()
    assert comm.world_size == 1


def test_a_group_of_one_in_a_store_goes_through_nccl_and_into_a_graph(runtime: Runtime) -> None:
    if not runtime.capabilities.collectives:
        pytest.skip("this torch is built without NCCL")
    comm = runtime.communicator(Rendezvous(0, 1, HashStore()))
    assert isinstance(comm, GroupCommunicator) and comm.capturable
    x = runtime.to_device(torch.arange(6, dtype=torch.bfloat16).reshape(3, 2))
    out = runtime.zeros((3, 2), torch.bfloat16)
    comm.all_to_all(x, [3], [3], out=out)  # the first call makes the library's own streams
    out.zero_()
    replay = runtime.capture(lambda: comm.all_to_all(x, [3], [3], out=out))
    assert not runtime.to_host(out).any()
    replay()
    assert torch.equal(runtime.to_host(out), runtime.to_host(x))
    del replay  # the library waits for graphs that hold it
    comm.close()


def test_parts_of_memory_live_as_long_as_anybody_uses_them(runtime: Runtime) -> None:
    whole = runtime.zeros((64,), torch.uint8)
    gone: list[int] = []
    part = runtime.alone(whole[16:32])  # type: ignore[attr-defined]
    weakref.finalize(part.untyped_storage(), gone.append, 1)
    view = part.view(torch.float32)[1:]
    del part
    view.fill_(1.0)
    assert not gone and runtime.to_host(whole.view(torch.float32)).tolist() == [0.0] * 5 + [1.0] * 3 + [0.0] * 8
    del view
    assert gone == [1]
