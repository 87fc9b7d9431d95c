"""Several fake devices, one rank each: collectives are late and ordered like ops, and ranks fail on request."""

import time

import pytest
import torch

from deepinfer.backends.fake.errors import HostAccessError, UnorderedAccessError, UnwrittenReadError
from deepinfer.backends.fake.faults import Fault, FaultPlan
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.ops.backend import BindContext
from deepinfer.ops.collectives import Communicator
from deepinfer.ops.errors import (
    CaptureError,
    CollectiveError,
    CollectiveTimeoutError,
    DeviceError,
    DeviceLostError,
    LaunchError,
    OpArgumentError,
    OutOfDeviceMemoryError,
    RankLostError,
)
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import MemoryPool, Runtime, Stream
from deepinfer.ops.step import shift
from deepinfer.testing.ranks import run_ranks


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def ranks(program, *, world_size=2, seed=0, faults=None, **options):
    """Run on fake devices; `faults` by rank."""
    plans = faults or {}
    runtimes = [FakeRuntime(seed + rank, faults=plans.get(rank)) for rank in range(world_size)]
    return run_ranks(runtimes, program, **options)


def binder(runtime):
    return OpTable(find_backend("fake"), BindContext(runtime.device, runtime), strict=True, overrides={}).bind


# Values and order


def test_it_keeps_the_protocols():
    runtime = FakeRuntime()
    assert isinstance(runtime, Runtime)
    assert isinstance(runtime.stream(), Stream)
    assert isinstance(runtime.pool("a"), MemoryPool)
    assert isinstance(runtime.communicator(), Communicator)
    assert runtime.capabilities.streams and runtime.capabilities.collectives


def test_values_of_every_collective():
    def program(runtime, group):
        rank = group.rank
        mine = runtime.to_device(ids(1, 2, 3) * (rank + 1))
        send, receive = ([1, 2], [1, 1]) if rank == 0 else ([1, 2], [2, 2])
        results = (
            group.all_reduce(mine),
            group.all_reduce(mine, "max"),
            group.all_gather(mine),
            group.reduce_scatter(runtime.to_device(ids(1, 2, 3, 4) * (rank + 1))),
            group.all_to_all(mine, send, receive),
            group.broadcast(mine, 1),
        )
        group.barrier()
        return [runtime.to_host(result).tolist() for result in results]

    common = [3, 6, 9], [2, 4, 6], [1, 2, 3, 2, 4, 6]
    assert ranks(program) == [
        [*common, [3, 6], [1, 2], [2, 4, 6]],
        [*common, [9, 12], [2, 3, 4, 6], [2, 4, 6]],
    ]


@pytest.mark.parametrize("seed", range(6))
def test_collectives_stand_in_order_with_ops_and_across_streams(seed):
    def program(runtime, group):
        bind = binder(runtime)
        side, done = runtime.stream(), runtime.event()
        x = runtime.to_device(ids(group.rank))
        for _ in range(4):
            x = group.all_reduce(bind(shift)(x, 1))
            done.record()
            with runtime.use_stream(side):
                done.wait()
                y = group.all_gather(x)
                back = runtime.event()
                back.record()
            back.wait()
        return runtime.to_host(x).tolist(), runtime.to_host(y).tolist()

    value = (0 + 1) + (1 + 1)
    for _ in range(3):
        value = 2 * (value + 1)
    assert ranks(program, seed=seed) == [([value], [value, value])] * 2


def test_a_call_returns_before_its_work_is_done():
    def program(runtime, group):
        result = group.all_reduce(runtime.to_device(ids(1)))
        ran = [name for _, name in runtime.log]
        return "all_reduce" in ran, runtime.to_host(result).tolist(), runtime.log[-2:]

    log = [(0, "all_reduce"), (0, "to_host")]
    for seed in range(8):
        assert ranks(program, seed=seed) == [(False, [2], log), (False, [2], log)]


def test_the_input_may_be_dropped_after_the_call():
    def program(runtime, group):
        result = group.all_reduce(runtime.to_device(ids(group.rank)))
        runtime.synchronize()
        return runtime.to_host(result).tolist()

    assert ranks(program) == [[1], [1]]


def test_a_collective_on_a_stream_that_does_not_wait_is_found():
    def program(runtime, group):
        x = runtime.to_device(ids(1))
        with runtime.use_stream(runtime.stream()):
            group.all_reduce(x)

    for outcome in ranks(program):
        assert isinstance(outcome, UnorderedAccessError)
        assert "all_reduce on stream 1 reads memory" in str(outcome)


def test_a_result_used_on_a_stream_that_does_not_wait_is_found():
    def program(runtime, group):
        bind, side = binder(runtime), runtime.stream()
        x = group.all_reduce(runtime.to_device(ids(1)))
        with runtime.use_stream(side), pytest.raises(UnorderedAccessError, match="that all_reduce on stream 0 writes"):
            bind(shift)(x, 1)
        return runtime.to_host(x).tolist()

    assert ranks(program) == [[2], [2]]


def test_unwritten_input_is_found_but_for_broadcast():
    def program(runtime, group):
        blank = runtime.empty((2,), torch.int32)
        given = runtime.to_device(ids(5, 6)) if group.rank == 0 else blank
        assert runtime.to_host(group.broadcast(given)).tolist() == [5, 6]
        group.all_reduce(blank)
        with pytest.raises((UnwrittenReadError, CollectiveError)):  # its own, or that the other has failed before
            runtime.synchronize()

    assert ranks(program) == [None, None]


def test_wrong_arguments_are_refused_at_the_call():
    def program(runtime, group):
        x = runtime.to_device(ids(1, 2, 3))
        calls = [
            lambda: group.all_to_all(x, [1, 1], [1, 1]),
            lambda: group.reduce_scatter(x),
            lambda: group.all_reduce(x, "mean"),
            lambda: group.all_gather(x, out=x),
            lambda: group.broadcast(x, 2),
        ]
        for call in calls:
            with pytest.raises(OpArgumentError):
                call()
        with pytest.raises(HostAccessError, match="tensor on cpu"):
            group.all_reduce(ids(1))
        with pytest.raises(CaptureError, match="a collective while a graph is captured"):
            runtime.capture(lambda: group.all_reduce(x, out=x))
        return runtime.to_host(group.all_reduce(x, out=x)).tolist()

    assert ranks(program) == [[2, 4, 6]] * 2


def test_ranks_that_disagree_are_told_when_they_wait():
    def program(runtime, group):
        x = runtime.to_device(ids(1, 2, 3, 4))
        split = [2, 2] if group.rank else [3, 1]
        group.all_to_all(x, split, [2, 2] if group.rank else [3, 2])
        runtime.synchronize()

    outcomes = ranks(program)
    assert outcomes[0] is None  # it got the rows that it expects
    assert isinstance(outcomes[1], OpArgumentError)
    assert "rank 0 sends 'call 1: all_to_all, int32 [1]', where rank 1 expects" in str(outcomes[1])


def test_a_closed_communicator_refuses():
    group = FakeRuntime().communicator()
    group.close()
    group.close()
    with pytest.raises(DeviceError, match="was closed"):
        group.barrier()


def test_a_subgroup_of_fake_ranks():
    def program(runtime, group):
        if group.rank == 1:
            return None
        pair = group.subgroup([0, 2])
        total = runtime.to_host(pair.all_reduce(runtime.to_device(ids(group.rank)))).tolist()
        pair.close()
        return pair.group, total

    assert ranks(program, world_size=3) == [((0, 2), [2]), None, ((0, 2), [2])]


# Faults


def steps(runtime, group):
    x = runtime.to_device(ids(1))
    for _ in range(5):
        x = group.all_reduce(x)
    return runtime.to_host(x).tolist()


def test_the_death_of_a_rank_is_named_by_the_others_and_its_device_is_lost():
    began = time.monotonic()
    outcomes = ranks(steps, world_size=3, faults={1: FaultPlan([Fault("death", at=3, name="all_reduce")])}, timeout=30)
    assert time.monotonic() - began < 15
    assert isinstance(outcomes[1], DeviceLostError)
    assert "rank 1 died as it came to all_reduce" in str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, RankLostError)
        assert (outcome.rank, outcome.op) == (1, "all_reduce sum")


def test_a_slow_rank_is_waited_for_within_the_timeout():
    plan = FaultPlan([Fault("slow_rank", at=2, seconds=0.3)])
    assert ranks(steps, faults={0: plan}, timeout=20) == [[32], [32]]
    assert [fault.kind for fault in plan.struck] == ["slow_rank"]


def test_a_slow_rank_is_named_when_the_time_is_over():
    outcomes = ranks(steps, faults={0: FaultPlan([Fault("slow_rank", at=2, seconds=4.0)])}, timeout=1.5)
    assert isinstance(outcomes[1], CollectiveTimeoutError)
    assert (outcomes[1].rank, outcomes[1].op) == (0, "all_reduce sum")
    assert outcomes[1].seconds >= 1.5
    assert isinstance(outcomes[0], CollectiveTimeoutError)  # it is told that it was the late one
    assert outcomes[0].rank == 0


def test_a_failed_collective_is_named_by_all():
    outcomes = ranks(steps, world_size=3, faults={2: FaultPlan([Fault("failed_collective", at=4)])})
    for outcome in outcomes:
        assert type(outcome) is CollectiveError
        assert outcome.rank == 2
        assert "rank 2 failed: a fault that its plan asked for" in str(outcome)


def test_a_collective_that_does_not_launch_fails_on_its_rank_and_the_others_see_it_gone():
    outcomes = ranks(steps, faults={0: FaultPlan([Fault("failed_launch", at=2, name="all_reduce")])})
    assert isinstance(outcomes[0], LaunchError)
    assert isinstance(outcomes[1], RankLostError)
    assert outcomes[1].rank == 0


def test_work_that_fails_before_a_collective_does_not_let_the_others_wait():
    def program(runtime, group):
        bind = binder(runtime)
        blank = runtime.empty((1,), torch.int32)
        x = bind(shift)(blank if group.rank == 0 else runtime.to_device(ids(1)), 1)
        return runtime.to_host(group.all_reduce(x)).tolist()

    began = time.monotonic()
    outcomes = ranks(program, timeout=30)
    assert time.monotonic() - began < 15
    assert isinstance(outcomes[0], UnwrittenReadError)
    assert type(outcomes[1]) is CollectiveError
    assert "rank 0 failed before it came to the collective" in str(outcomes[1])


# Pools


def test_a_reserve_is_taken_from_the_device_and_from_everybody_else():
    runtime = FakeRuntime(memory_bytes=1 << 20)
    pool = runtime.pool("kv_cache")
    pool.reserve(3 << 18)
    assert runtime.memory_info().free_bytes == 1 << 18
    with pytest.raises(OutOfDeviceMemoryError, match="pools hold: kv_cache 786432"):
        runtime.empty((1 << 19,), torch.uint8)
    held = pool.zeros((1 << 19,), torch.uint8)
    assert runtime.memory_info().free_bytes == 1 << 18
    with pytest.raises(OutOfDeviceMemoryError, match="do not fit"):
        pool.empty((3 << 18,), torch.uint8)
    assert pool.release() == 1 << 18
    assert runtime.memory_info().free_bytes == 1 << 19
    assert runtime.to_host(held).sum() == 0


def test_a_pool_has_its_memory_back_when_the_queue_has_passed_and_it_is_poisoned():
    runtime = FakeRuntime(memory_bytes=1 << 20)
    pool = runtime.pool("kv_cache", limit_bytes=1 << 10)
    x = pool.zeros((1 << 10,), torch.uint8)
    del x
    assert pool.stats().allocated_bytes == 1 << 10  # its fill may not have run
    y = pool.empty((1 << 10,), torch.uint8)  # waits for that, as the limit makes it
    assert pool.stats().num_releases == 1
    with pytest.raises(UnwrittenReadError):
        runtime.to_host(y)
    with pytest.raises(OutOfDeviceMemoryError, match="'kv_cache' has a limit of 1024 bytes"):
        pool.empty((1,), torch.uint8)


# Streams


def test_a_stream_is_waited_for_alone():
    runtime = FakeRuntime(3)
    bind, side = binder(runtime), runtime.stream()
    here = runtime.to_device(ids(1))
    for _ in range(30):
        here = bind(shift)(here, 1)
    with runtime.use_stream(side):
        assert runtime.current_stream() == side
        there = bind(shift)(runtime.to_device(ids(5)), 1)
    side.synchronize()
    assert (1, "shift") in runtime.log
    assert runtime.to_host(here).tolist() == [31]
    assert there.shape == (1,)


def test_writing_what_another_stream_reads_is_found_and_disjoint_parts_are_not():
    runtime = FakeRuntime()
    bind, side = binder(runtime), runtime.stream()
    x = runtime.to_device(ids(1, 2, 3, 4))
    runtime.synchronize()
    y = bind(shift)(x[:2], 1)
    with runtime.use_stream(side):
        runtime.write(x[2:], ids(7, 8))
        with pytest.raises(
            UnorderedAccessError, match=r"to_device on stream 1 writes memory .* shift on stream 0 reads"
        ):
            runtime.write(x[1:], ids(7, 8, 9))
    runtime.synchronize()
    with runtime.use_stream(side):
        runtime.write(x[1:], ids(7, 8, 9))  # the host has waited for what reads it
    runtime.synchronize()
    assert runtime.to_host(x).tolist() == [1, 7, 8, 9]
    assert runtime.to_host(y).tolist() == [2, 3]


def test_threads_have_their_own_current_stream():
    import threading

    runtime = FakeRuntime()
    seen = []
    with runtime.use_stream(runtime.stream()):
        thread = threading.Thread(target=lambda: seen.append(runtime.current_stream().number))
        thread.start()
        thread.join()
        seen.append(runtime.current_stream().number)
    assert seen == [0, 1]


def test_a_stream_of_another_device_is_refused():
    with (
        pytest.raises(OpArgumentError, match="not a stream of this device"),
        FakeRuntime().use_stream(FakeRuntime().stream()),
    ):
        pass
