"""The runtime over a driver that runs work as late as it may: order, waits, graphs, memory, failures."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from deepinfer.backends.ascend950.host import runtime as runtime_module
from deepinfer.backends.ascend950.host.acl import Acl
from deepinfer.ops.errors import (
    BackendUnavailableError,
    CaptureError,
    DeviceError,
    HostSyncError,
    OpArgumentError,
    OutOfDeviceMemoryError,
)
from deepinfer.ops.runtime import Runtime


def test_it_is_a_runtime_and_says_what_it_can(runtime) -> None:
    assert isinstance(runtime, Runtime)
    assert runtime.device_name == "Ascend950DT_9572"
    can = runtime.capabilities
    assert can.asynchronous and can.graphs and can.streams and can.pinned_memory and can.torch_compute
    assert can.num_devices == 2


def test_a_pageable_source_may_be_written_as_soon_as_the_copy_is_queued(runtime) -> None:
    host = torch.arange(8)
    on_device = runtime.to_device(host)
    host.zero_()
    assert runtime.to_host(on_device).tolist() == list(range(8))


def test_pinned_memory_is_read_when_the_copy_runs(runtime) -> None:
    host = runtime.pinned((4,), torch.int32)
    assert host.tolist() == [0] * 4
    on_device = runtime.to_device(host[1:3])
    host.fill_(7)
    assert runtime.to_host(on_device).tolist() == [7, 7]


def test_write_leaves_its_source_free_and_write_later_reads_pinned_memory_later(runtime) -> None:
    target = runtime.zeros((2,), torch.float32)
    pinned = runtime.pinned((2,), torch.float32)
    runtime.write(target, pinned.fill_(1))
    pinned.fill_(2)
    assert runtime.to_host(target).tolist() == [1, 1]
    runtime.write_later(target, pinned)
    pinned.fill_(3)
    assert runtime.to_host(target).tolist() == [3, 3]
    pageable = torch.full((2,), 4.0)
    runtime.write_later(target, pageable)
    pageable.fill_(5)
    assert runtime.to_host(target).tolist() == [4, 4]


def test_what_does_not_fit_the_target_is_refused(runtime) -> None:
    target = runtime.zeros((2,), torch.float32)
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(OpArgumentError, match=r"write takes a host tensor like its target, \[2\] torch.float32"):
            runtime.write(target, wrong)


def test_a_copy_to_the_host_is_there_after_its_wait_alone(runtime) -> None:
    on_device = runtime.to_device(torch.arange(3))
    copy = runtime.to_host_later(on_device)
    with runtime.sync_guard.forbid("a step"), pytest.raises(HostSyncError, match="a copy to the host"):
        copy.wait()
    assert copy.wait().tolist() == [0, 1, 2]
    with runtime.sync_guard.forbid("a step"):
        assert copy.wait().tolist() == [0, 1, 2]  # it is there: nothing to wait for


@pytest.mark.parametrize("call", ["to_host", "synchronize", "stream", "event", "capture"])
def test_every_wait_asks_the_guard(runtime, call: str) -> None:
    tensor, event = runtime.zeros((1,), torch.float32), runtime.event()
    calls = {
        "to_host": lambda: runtime.to_host(tensor),
        "synchronize": runtime.synchronize,
        "stream": runtime.current_stream().synchronize,
        "event": event.synchronize,
        "capture": lambda: runtime.capture(lambda: None),
    }
    with runtime.sync_guard.forbid("a step"), pytest.raises(HostSyncError):
        calls[call]()


def test_planning_and_launching_never_wait(runtime, fake_acl) -> None:
    other = runtime.stream()
    target = runtime.zeros((4,), torch.int32)
    fake_acl.log()
    with runtime.sync_guard.forbid("a step"):
        event = runtime.event()
        runtime.write(target, torch.ones(4, dtype=torch.int32))
        event.record()
        with runtime.use_stream(other):
            event.wait()
            runtime.to_host_later(runtime.to_device(torch.zeros(4)))
    assert not [line for line in fake_acl.log() if "Synchronize" in line]


def test_an_event_orders_streams(runtime) -> None:
    written, target = runtime.event(), runtime.zeros((2,), torch.int32)
    other = runtime.stream()
    runtime.synchronize()
    runtime.write(target, torch.tensor([1, 2], dtype=torch.int32))
    with runtime.use_stream(other):  # nothing orders this one
        assert runtime.to_host(target).tolist() == [0, 0]
    written.record()
    with runtime.use_stream(other):
        written.wait()
        assert runtime.to_host(target).tolist() == [1, 2]
    assert runtime.current_stream() != other


def test_an_event_that_was_not_recorded_counts_as_reached(runtime, fake_acl) -> None:
    event = runtime.event()
    fake_acl.log()
    assert event.query()
    event.wait()
    event.synchronize()
    assert not fake_acl.log()
    with pytest.raises(OpArgumentError, match="two recorded events"):
        event.elapsed_ms(event)


def test_an_event_is_reached_when_its_stream_has_come_to_it(runtime) -> None:
    first, last = runtime.event(), runtime.event()
    first.record()
    last.record()
    assert not first.query()
    first.synchronize()
    assert first.query() and not last.query()
    runtime.current_stream().synchronize()
    assert last.query()
    assert last.elapsed_ms(first) == 0.5


def test_a_stream_of_another_device_is_refused(runtime, fake_acl) -> None:
    with pytest.raises(OpArgumentError, match="not a stream of"), runtime.use_stream(object()):
        pass


def test_a_captured_step_runs_when_it_is_replayed_and_not_before(runtime, fake_acl) -> None:
    source, target = runtime.pinned((2,), torch.int32), runtime.zeros((2,), torch.int32)
    runtime.synchronize()
    replay = runtime.capture(lambda: runtime.write_later(target, source.fill_(1)))
    assert runtime.to_host(target).tolist() == [0, 0]
    for value in (5, 6):
        source.fill_(value)
        replay()
        assert runtime.to_host(target).tolist() == [value, value]
    names = [line.split()[0] for line in fake_acl.log() if "RI" in line]
    assert names == ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd", *["aclmdlRIExecuteAsync"] * 2]


def test_a_graph_is_destroyed_with_its_replay(runtime, fake_acl) -> None:
    replay = runtime.capture(lambda: None)
    fake_acl.log()
    del replay
    assert "aclmdlRIDestroy" in fake_acl.log()


def test_a_step_that_cannot_be_captured_is_a_capture_error_and_leaves_no_capture(runtime, fake_acl) -> None:
    with pytest.raises(CaptureError, match="aclrtSynchronizeStream failed with 107027"):
        runtime.capture(lambda: runtime.to_host(runtime.zeros((1,), torch.int32)))
    names = [line.split()[0] for line in fake_acl.log() if "RI" in line]
    assert names == ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd", "aclmdlRIDestroy"]
    assert runtime.capture(lambda: None) is not None


def test_an_error_of_the_step_itself_is_passed_on(runtime, fake_acl) -> None:
    def step() -> None:
        raise KeyError("not the device's fault")

    with pytest.raises(KeyError):
        runtime.capture(step)
    assert "aclmdlRICaptureEnd" in fake_acl.log()


@pytest.mark.parametrize("name", ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd"])
def test_a_driver_that_refuses_a_capture_says_why(runtime, fake_acl, name: str) -> None:
    fake_acl.fail_next(name)
    with pytest.raises(CaptureError, match=f"{name} failed with 507899: injected into {name}"):
        runtime.capture(lambda: None)


def test_what_does_not_fit_is_refused_with_what_is_free(runtime) -> None:
    free = runtime.memory_info().free_bytes
    with pytest.raises(OutOfDeviceMemoryError, match=f"does not fit; {free} of {1 << 24} bytes are free"):
        runtime.empty((1 << 25,), torch.uint8)
    assert runtime.memory_info().free_bytes == free


def test_a_pool_sets_memory_aside(runtime) -> None:
    before = runtime.memory_info().free_bytes
    runtime.pool("kv").reserve(1 << 20)
    assert runtime.memory_info().free_bytes == before - (1 << 20)


def test_a_failure_on_the_device_is_reported_where_the_host_waits(runtime, fake_acl) -> None:
    for name, wait in (
        ("aclrtSynchronizeDevice", runtime.synchronize),
        ("aclrtSynchronizeStream", runtime.current_stream().synchronize),
    ):
        fake_acl.fail_next(name, 507015)
        with pytest.raises(DeviceError, match=f"Ascend950DT_9572: {name} failed with 507015: injected"):
            wait()


def test_another_thread_works_on_the_same_device(runtime, fake_acl) -> None:
    results: list[list[int]] = []
    fake_acl.log()
    thread = threading.Thread(target=lambda: results.append(runtime.to_host(runtime.to_device(torch.ones(2))).tolist()))
    thread.start()
    thread.join(30)
    assert results == [[1.0, 1.0]]
    assert fake_acl.log().count("aclrtSetCurrentContext") == 1


def test_a_device_that_is_not_there_is_named_by_the_driver(fake_acl) -> None:
    with pytest.raises(DeviceError, match="aclrtSetDevice failed with 107001: there is no such device"):
        fake_acl.start(2)


def test_a_driver_that_is_initialised_already_is_taken_as_it_is(fake_acl) -> None:
    fake_acl.start(0)
    fake_acl.start(0)
    assert fake_acl.log().count("aclInit") == 2


@pytest.mark.parametrize(("rank", "devices", "want"), [(None, 2, 0), ("1", 2, 1), ("5", 2, 1), ("3", 1, 0)])
def test_a_rank_takes_the_device_that_launchers_give_it(
    runtime, fake_acl, rank: str | None, devices: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def driver_of(index: int) -> tuple[object, object]:
        opened.append(index)
        return runtime._tensors, fake_acl

    count = SimpleNamespace(device_count=lambda: devices)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=count))
    monkeypatch.setattr(runtime_module, "driver_of", driver_of)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert runtime_module.open_runtime().device == runtime.device
    assert opened == [want]
    assert os.environ["TASK_QUEUE_ENABLE"] == "0"


def test_a_library_that_is_missing_or_too_old_is_named(tmp_path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"libnone.so cannot be loaded .* install CANN 9.2"):
        Acl("libnone.so")
    with pytest.raises(BackendUnavailableError, match=r"libm.so.6 has no aclInit, .* older CANN"):
        Acl("libm.so.6")
