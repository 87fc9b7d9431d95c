"""The fake device is hard: each thing that breaks on real hardware is an error here, and it names the culprit."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.backends.fake.errors import (
    HostAccessError,
    HostBufferReuseError,
    HostReadError,
    UnwrittenReadError,
    UseAfterFreeError,
)
from deepinfer.backends.fake.faults import Fault, FaultPlan
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.backends.fake.shapes import RESULTS
from deepinfer.ops.backend import BindContext
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import (
    CaptureError,
    DeviceLostError,
    LaunchError,
    OpArgumentError,
    OutOfDeviceMemoryError,
    RankDeadError,
)
from deepinfer.ops.formats import QTensor
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.index import index_logits_ragged, visible_lens
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import Event, Runtime
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


def test_it_is_a_runtime_and_never_chosen_unasked(device):
    runtime, _ = device
    assert isinstance(runtime, Runtime) and isinstance(runtime.event(), Event)
    assert runtime.capabilities.asynchronous and not runtime.capabilities.unified_memory
    assert find_backend("auto").name != "fake"
    assert {i.op.name for i in find_backend("fake").implementations} == set(defined_ops())


# Host access


HOST_ACCESS = {
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "__int__": lambda x: int(x[0, 0]),
    "__float__": lambda x: float(x[0, 0]),
    "__bool__": lambda x: bool(x[0, 0]),
    "__index__": lambda x: [1, 2][x[0, 0]],
    "print": lambda x: print(x),
    "__format__": lambda x: f"{x}",
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: x.__dlpack__(),
    "data_ptr": lambda x: x.data_ptr(),
    "cpu": lambda x: x.cpu(),
    "add": lambda x: x + 1,
    "__eq__": lambda x: x == x,
    "mul": lambda x: torch.ones(3) * x,
    "cat": lambda x: torch.cat((x, x)),
    "float": lambda x: x.float(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "new_zeros": lambda x: x.new_zeros(3),
    "empty_like": lambda x: torch.empty_like(x),
    "copy_": lambda x: torch.zeros(4, 6).copy_(x),
    "__getitem__": lambda x: x[[1, 2]],
    "a mask __getitem__": lambda x: x[torch.tensor([True, False, True, False])],
    "__setitem__": lambda x: x.__setitem__(0, 1),
    "deepcopy": lambda x: __import__("copy").deepcopy(x),
    "__reduce_ex__": lambda x: __import__("pickle").dumps(x),
    "reshape": lambda x: x.T.reshape(24),
}


@pytest.mark.parametrize("what", HOST_ACCESS)
@pytest.mark.parametrize("inference", [False, True])
def test_host_access_raises_and_names_the_call(device, what, inference):
    x = device[0].to_device(torch.ones(4, 6, dtype=torch.float64))
    with torch.inference_mode(inference), pytest.raises(HostAccessError) as caught:
        HOST_ACCESS[what](x)
    assert what.split()[-1] in str(caught.value)


def test_torch_cannot_make_tensors_there(device):
    with pytest.raises(Exception, match="privateuseone"):
        torch.zeros(2, device=device[0].device)


def test_an_op_refuses_host_tensors(device):
    runtime, bind = device
    with pytest.raises(HostAccessError, match=r"op rms_norm.*argument weight is a tensor on cpu"):
        bind(rms_norm)(runtime.to_device(torch.ones(1, 4)), torch.ones(4), 1e-6)


VIEWS = {
    "select": lambda x: x[1],
    "negative": lambda x: x[-1, 2:],
    "slice": lambda x: x[1:3, ::2],
    "numpy int": lambda x: x[np.int64(1)],
    "new axis": lambda x: x[:, None, ..., 0],
    "split": lambda x: x.split((1, 3))[1],
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "iterate": lambda x: list(x)[3],
    "view": lambda x: x.view(2, 12),
    "bits": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T[1:],
    "expand": lambda x: x[:1].expand(5, 6),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 3),
    "unsqueeze": lambda x: torch.unsqueeze(x, 0),
}


@pytest.mark.parametrize("what", VIEWS)
def test_views_share_memory_and_show_the_same_values(device, what):
    runtime, _ = device
    host = torch.arange(24.0).view(4, 6)
    x = runtime.to_device(host)
    free = runtime.memory_info().free_bytes
    got, want = VIEWS[what](x), VIEWS[what](host)
    assert runtime.memory_info().free_bytes == free
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    del x  # a view keeps the memory
    assert torch.equal(runtime.to_host(got), want)


def test_writes_show_through_views(device):
    runtime, bind = device
    pool = runtime.zeros((4, 8), torch.uint8)
    head = pool[:, :3]
    source = runtime.to_device(torch.full((4, 8), 7, dtype=torch.uint8))
    assert source.is_contiguous() and len(source) == 4 and "FakeTensor(shape=(4, 8)" in repr(source)
    bind(copy_blocks)(head, runtime.to_device(ids(0)), runtime.to_device(ids(2)))
    bind(copy_blocks)(source, runtime.to_device(ids(0)), runtime.to_device(ids(2)))
    assert runtime.to_host(pool).eq(0).all() and runtime.to_host(source).eq(7).all()


# Ops


def test_results_have_the_bits_of_the_cpu(device):
    runtime, bind = device
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    host = OpTable(find_backend("cpu"), BindContext(torch.device("cpu"), find_backend("cpu").runtime()), overrides={})
    want = host.bind(quantize)(x, "mxfp8")
    got = bind(quantize)(runtime.to_device(x), "mxfp8")
    assert isinstance(got, QTensor) and got.fmt == "mxfp8"
    assert torch.equal(runtime.to_host(got.data), want.data) and torch.equal(runtime.to_host(got.scale), want.scale)


def test_a_size_that_depends_on_values_makes_the_host_wait(device):
    runtime, bind = device
    bound = bind(index_logits_ragged)
    assert not bound.plan.capturable and bind(rms_norm).plan.capturable
    send = runtime.to_device
    q, k, w = torch.ones(2, 1, 32), torch.ones(4, 32), torch.ones(2, 1)
    got = bound(send(q), send(k), send(w), send(ids(0, 1)), send(ids(2, 4)))
    assert got.shape == (2, 3)
    assert torch.equal(runtime.to_host(got), index_logits_ragged(q, k, w, ids(0, 1), ids(2, 4)))


def test_an_op_without_declared_shapes_asks_its_reference(device, monkeypatch):
    runtime, bind = device
    monkeypatch.delitem(RESULTS, "visible_lens")
    got = bind(visible_lens)(runtime.to_device(ids(0, 1, 2, 3)), 2)
    assert runtime.to_host(got).tolist() == [0, 1, 1, 2]


def test_a_plan_writes_where_it_is_told(device):
    runtime, bind = device
    out = runtime.empty((2,), torch.int32)
    got = bind(shift).plan.run(runtime.to_device(ids(1, 2)), 5, out=out, scratch=runtime.empty((0,), torch.uint8))
    assert got is out and runtime.to_host(out).tolist() == [6, 7]
    bind(shift).plan.run(runtime.to_device(ids(1, 2, 3)), 5, out=out)
    with pytest.raises(OpArgumentError, match="shift returned"):
        runtime.synchronize()


def test_an_error_of_an_op_comes_with_the_next_wait_and_once(device):
    runtime, bind = device
    bad = runtime.to_device(torch.ones(2, 3)), runtime.to_device(ids(0, 9))
    bind(gather_rows)(*bad)
    with pytest.raises(Exception, match="out of range") as caught:
        runtime.synchronize()
    assert "gather_rows" in caught.value.__notes__[0]
    runtime.synchronize()
    assert runtime.to_host(runtime.zeros((1,), torch.int32)).tolist() == [0]


# Memory


def test_new_memory_is_poison_and_reading_it_is_found():
    runtime, _ = fake()
    with pytest.raises(UnwrittenReadError, match=r"to_host read float32\[3\]"):
        runtime.to_host(runtime.empty((3,), torch.float32))
    loose, _ = fake(detect=False)
    assert loose.to_host(loose.empty((3,), torch.bfloat16)).isnan().all()
    assert loose.to_host(loose.empty((3,), torch.int32)).tolist() == [-1] * 3
    assert loose.to_host(loose.zeros((3,), torch.int32)).tolist() == [0] * 3


def test_freed_memory_is_poisoned_and_its_address_used_again():
    runtime, _ = fake(detect=False)
    first = runtime.to_device(torch.ones(8))
    address = repr(first).split("at=")[1]
    del first
    runtime.synchronize()
    second = runtime.empty((8,), torch.float32)
    assert repr(second).split("at=")[1] == address
    assert runtime.to_host(second).isnan().all()


def planted_use_after_free(runtime, bind):
    """A tensor is used on a second stream and dropped; nothing makes its own stream wait for that use."""
    x = runtime.to_device(ids(1, 2, 3))
    runtime.synchronize()
    side = runtime.new_stream()
    with runtime.use_stream(side):
        made = bind(shift)(x, 1)
    del x
    return side, made


def outcome_of_use_after_free(seed, **options):
    runtime, bind = fake(seed, **options)
    side, made = planted_use_after_free(runtime, bind)
    runtime.memory_info()  # the free is queued
    with runtime.use_stream(side):
        return runtime.to_host(made).tolist()


def test_use_after_free_on_another_stream_is_found_in_some_order():
    found = 0
    for seed in range(24):
        try:
            assert outcome_of_use_after_free(seed) == [2, 3, 4]
        except UseAfterFreeError as error:
            assert "shift used int32[3]" in str(error)
            found += 1
    assert 0 < found < 24


def test_without_detection_use_after_free_reads_poison():
    outcomes = {tuple(outcome_of_use_after_free(seed, detect=False)) for seed in range(24)}
    assert outcomes == {(2, 3, 4), (0, 0, 0)}  # -1 + 1


def test_memory_is_free_only_when_the_queue_has_passed(device):
    runtime, bind = device
    whole = runtime.memory_info().free_bytes
    x = runtime.zeros((1 << 16,), torch.uint8)
    y = bind(gather_rows)(x, runtime.to_device(ids(0)))
    used = runtime.memory_info().free_bytes
    del x
    assert runtime.memory_info().free_bytes == used < whole - (1 << 16) + 1
    runtime.synchronize()
    assert runtime.memory_info().free_bytes >= whole - 512
    del y


def test_memory_has_a_limit_and_waits_for_frees_before_it_refuses():
    runtime, _ = fake(memory_bytes=1 << 20)
    assert runtime.memory_info().total_bytes == 1 << 20
    held = runtime.zeros((3 << 18,), torch.uint8)
    with pytest.raises(OutOfDeviceMemoryError, match="524288 bytes for uint8"):
        runtime.zeros((1 << 19,), torch.uint8)
    del held
    assert runtime.to_host(runtime.zeros((1 << 19,), torch.uint8)).sum() == 0


# Order


def order(seed, streams=3, each=4):
    runtime, bind = fake(seed)
    numbers = [0] + [runtime.new_stream() for _ in range(streams - 1)]
    values = []
    for number in numbers:
        with runtime.use_stream(number):
            values.append(runtime.zeros((1,), torch.int32))
    runtime.synchronize()
    before = len(runtime.log)
    for _ in range(each):
        for number, value in zip(numbers, values, strict=True):
            with runtime.use_stream(number):
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


def cross_stream(seed, waits):
    runtime, bind = fake(seed)
    side = runtime.new_stream()
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
    found = 0
    for seed in range(24):
        try:
            cross_stream(seed, False)
        except UnwrittenReadError:
            found += 1
    assert found > 8


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
    side, end = runtime.new_stream(), runtime.event()
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
    "another stream": lambda s: s.runtime.use_stream(0).__enter__(),
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
    replay = runtime.capture(lambda: bind(shift).plan.run(x, 1, out=out))
    del x
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
        with pytest.raises(RankDeadError, match="rank 3 does not answer") as caught:
            wait()
        assert caught.value.rank == 3
