"""The fake device is late: order of work, events, copies, graphs and faults."""

import time
from types import SimpleNamespace

import pytest
import torch

from deepinfer.backends.fake.errors import (
    HostAccessError,
    HostBufferReuseError,
    HostReadError,
    UnorderedAccessError,
    UseAfterFreeError,
)
from deepinfer.backends.fake.faults import Fault, FaultPlan
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.ops.backend import BindContext
from deepinfer.ops.errors import CaptureError, DeviceLostError, LaunchError, OpArgumentError, RankLostError
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.step import shift


def fake(seed=0, **options):
    """A runtime and a function that binds ops to it."""
    runtime = FakeRuntime(seed, **options)
    table = OpTable(find_backend("fake"), BindContext(runtime.device, runtime), strict=True, overrides={})
    return runtime, table.bind


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def device():
    return fake()


# Order


def order(seed, streams=3, each=4):
    runtime, bind = fake(seed)
    queues = [runtime.current_stream()] + [runtime.stream() for _ in range(streams - 1)]
    values = []
    for queue in queues:
        with runtime.use_stream(queue):
            values.append(runtime.zeros((1,), torch.int32))
    runtime.synchronize()
    before = len(runtime.log)
    for _ in range(each):
        for queue, value in zip(queues, values, strict=True):
            with runtime.use_stream(queue):
                bind(shift)(value, 1)
    runtime.synchronize()
    return tuple(stream for stream, _ in runtime.log[before:])


def test_order_between_streams_differs_by_seed_and_repeats():
    orders = [order(seed) for seed in range(8)]
    assert len(set(orders)) > 4
    assert orders == [order(seed) for seed in range(8)]


def test_work_is_late_and_in_order_within_a_stream(device):
    runtime, bind = device
    x = runtime.to_device(ids(0))
    for _ in range(5):
        x = bind(shift)(x, 1)
    assert len(runtime.log) < 6
    assert runtime.to_host(x).tolist() == [5]


def cross_stream(seed, waits, **options):
    runtime, bind = fake(seed, **options)
    side = runtime.stream()
    x = bind(shift)(runtime.to_device(ids(1)), 1)
    event = runtime.event()
    event.record()
    with runtime.use_stream(side):
        if waits:
            event.wait()
        y = bind(shift)(x, 1)
        return runtime.to_host(y).tolist()


def test_an_event_orders_streams_and_its_absence_is_found():
    assert [cross_stream(seed, True) for seed in range(16)] == [[3]] * 16
    for seed in range(16):
        with pytest.raises(
            UnorderedAccessError, match=r"shift on stream 1 reads memory .* that shift on stream 0 writes"
        ):
            cross_stream(seed, False)


def test_without_detection_a_missing_event_lets_garbage_through():
    outcomes = {tuple(cross_stream(seed, False, detect=False)) for seed in range(24)}
    assert (3,) in outcomes
    assert len(outcomes) > 1


def test_events_tell_how_far_the_device_is(device):
    runtime, bind = device
    event = runtime.event()
    assert event.query()  # not recorded yet
    x = runtime.to_device(ids(1))
    for _ in range(40):
        x = bind(shift)(x, 1)
    event.record()
    polls = 1
    while not event.query():
        polls += 1
    assert polls > 3
    late = bind(shift)(x, 1)
    event.record()
    event.synchronize()
    assert event.query()
    assert runtime.to_host(late).tolist() == [42]


# Copies


def test_pageable_buffers_may_be_reused_at_once_and_pinned_ones_not(device):
    runtime, _ = device
    host = ids(1, 2)
    there = runtime.to_device(host)
    host.fill_(9)
    assert runtime.to_host(there).tolist() == [1, 2]

    pinned = runtime.pinned((2,), torch.int32)
    array = pinned.numpy()  # as the engine holds it
    del pinned
    array[:] = (1, 2)
    there = runtime.to_device(torch.from_numpy(array))
    event = runtime.event()
    event.record()
    event.synchronize()
    array[:] = 9
    assert runtime.to_host(there).tolist() == [1, 2]
    late = runtime.to_device(torch.from_numpy(array[1:]))
    array[:] = 3
    with pytest.raises(HostBufferReuseError, match=r"pinned host buffer of \[1\]"):
        runtime.to_host(late)


def test_without_detection_a_pinned_buffer_is_read_late():
    runtime, _ = fake(detect=False)
    pinned = runtime.pinned((2,), torch.int32)
    there = runtime.to_device(pinned)
    pinned.fill_(5)
    assert runtime.to_host(there).tolist() == [5, 5]


def test_a_copy_to_the_host_is_read_only_after_a_wait(device):
    runtime, _ = device
    x = runtime.to_device(ids(4))
    copy = runtime.to_host_later(x)
    with pytest.raises(HostReadError, match="before the host waited"):
        _ = copy.tensor
    while not copy.ready():
        pass
    assert copy.tensor.tolist() == [4]
    second, event = runtime.to_host_later(x), runtime.event()
    event.record()
    event.synchronize()
    assert second.tensor.tolist() == [4]  # the event is behind it
    assert runtime.to_host_later(x).wait().tolist() == [4]


def test_an_event_on_another_stream_vouches_for_what_it_waited_for(device):
    runtime, _ = device
    copy, done = runtime.to_host_later(runtime.to_device(ids(4))), runtime.event()
    done.record()
    side, end = runtime.stream(), runtime.event()
    with runtime.use_stream(side):
        end.record()
        end.synchronize()
        with pytest.raises(HostReadError):
            _ = copy.tensor
        done.wait()
        end.record()
        end.synchronize()
    assert copy.tensor.tolist() == [4]


def test_copies_go_one_way(device):
    runtime, _ = device
    with pytest.raises(OpArgumentError, match="takes one of the host"):
        runtime.to_device(runtime.zeros((1,), torch.int32))
    with pytest.raises(HostAccessError, match="tensor on cpu"):
        runtime.to_host(ids(1))


# Graphs


def test_a_captured_step_runs_on_replay_only(device):
    runtime, bind = device
    x, out = runtime.to_device(ids(1)), runtime.zeros((1,), torch.int32)
    replay = runtime.capture(lambda: bind(shift).plan.run(x, 10, out=out))
    assert runtime.to_host(out).tolist() == [0]
    replay()
    assert runtime.to_host(out).tolist() == [11]
    bind(copy_blocks)(x[:, None], runtime.to_device(ids()), runtime.to_device(ids()))
    replay()
    replay()
    assert runtime.to_host(out).tolist() == [11]


FORBIDDEN = {
    "allocation": lambda s: s.runtime.empty((1,), torch.int32),
    "zeros": lambda s: s.runtime.zeros((1,), torch.int32),
    "an op that allocates": lambda s: s.bind(shift)(s.x, 1),
    "copy to the device": lambda s: s.runtime.to_device(ids(1)),
    "copy to the host": lambda s: s.runtime.to_host(s.x),
    "later copy": lambda s: s.runtime.to_host_later(s.x),
    "synchronize": lambda s: s.runtime.synchronize(),
    "event.synchronize": lambda s: s.event.synchronize(),
    "event.query": lambda s: s.event.query(),
    "event.record": lambda s: s.event.record(),
    "event.wait": lambda s: s.event.wait(),
    "another stream": lambda s: s.runtime.use_stream(s.runtime.current_stream()).__enter__(),
    "capture": lambda s: s.runtime.capture(lambda: None),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_capture_rejects(device, what):
    runtime, bind = device
    x, out = runtime.to_device(ids(1)), runtime.zeros((1,), torch.int32)
    event = runtime.event()
    event.record()
    state = SimpleNamespace(runtime=runtime, bind=bind, x=x, event=event)

    def step():
        bind(shift).plan.run(x, 1, out=out)
        FORBIDDEN[what](state)

    with pytest.raises(CaptureError, match="while a graph is captured"):
        runtime.capture(step)
    assert runtime.to_host(out).tolist() == [0]  # nothing of it ran, and the device goes on


def test_a_graph_does_not_keep_its_inputs(device):
    runtime, bind = device
    x, out = runtime.to_device(ids(1)), runtime.zeros((1,), torch.int32)
    held = [x]
    del x
    replay = runtime.capture(lambda: bind(shift).plan.run(held[0], 1, out=out))
    held.clear()
    replay()
    with pytest.raises(UseAfterFreeError, match="shift used"):
        runtime.synchronize()


# Faults


def test_a_failed_launch_loses_that_op_alone():
    plan = FaultPlan([Fault("failed_launch", at=2, name="shift")])
    runtime, bind = fake(faults=plan)
    x = bind(shift)(runtime.to_device(ids(1)), 1)
    with pytest.raises(LaunchError, match="shift"):
        bind(shift)(x, 1)
    assert runtime.to_host(bind(shift)(x, 1)).tolist() == [3]
    assert [f.kind for f in plan.struck] == ["failed_launch"]


def test_a_lost_device_stays_lost():
    runtime, bind = fake(faults=FaultPlan([Fault("lost_device", at=2, name="shift")]))
    x = runtime.to_device(ids(1))
    for _ in range(3):
        x = bind(shift)(x, 1)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="while it ran shift"):
            runtime.synchronize()
    with pytest.raises(DeviceLostError):
        bind(shift)(x, 1)


def test_a_slow_copy_holds_up_its_stream():
    runtime, _ = fake(faults=FaultPlan([Fault("slow_copy", at=2, name="to_device", seconds=0.05)]))
    began = time.perf_counter()
    values = [runtime.to_device(ids(i)) for i in range(3)]
    assert [int(runtime.to_host(v)) for v in values] == [0, 1, 2]
    assert time.perf_counter() - began > 0.05


def test_a_dead_rank_is_named_within_a_bounded_time():
    runtime, bind = fake(faults=FaultPlan([Fault("dead_rank", name="shift", rank=3)]), patience=0.05)
    x = bind(shift)(runtime.to_device(ids(1)), 1)
    event = runtime.event()
    event.record()
    assert not any(event.query() for _ in range(50))
    for wait in (runtime.synchronize, event.synchronize, lambda: runtime.to_host(x)):
        with pytest.raises(RankLostError, match="rank 3 does not answer") as caught:
            wait()
        assert caught.value.rank == 3
