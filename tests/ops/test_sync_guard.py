"""The guard against waits of the host: what it forbids, for whom, and what it lets through; runtimes ask it."""

import threading

import pytest
import torch

from deepinfer.backends.fake.errors import HostReadError
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.ops.errors import HostSyncError, OpArgumentError
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.sync_guard import SyncGuard


def test_a_wait_is_an_error_inside_and_only_there() -> None:
    guard = SyncGuard()
    guard.check("to_host")
    with guard.forbid("the launch of a step"):
        assert guard.is_forbidden
        with pytest.raises(HostSyncError, match="to_host would make the host wait during the launch") as caught:
            guard.check("to_host")
        assert caught.value.call == "to_host"
    guard.check("to_host")
    assert not guard.is_forbidden


def test_an_exception_inside_opens_the_guard_again() -> None:
    guard = SyncGuard()
    with pytest.raises(KeyError), guard.forbid("a test"):
        raise KeyError
    guard.check("to_host")


def test_a_permitted_wait_is_counted_by_its_reason_and_only_where_it_was_forbidden() -> None:
    guard = SyncGuard()
    with guard.permit("a table on the host"):
        guard.check("to_host")
    assert guard.permitted == {}
    with guard.forbid("a test"):
        for _ in range(2):
            with guard.permit("a table on the host"):
                guard.check("to_host")
        with pytest.raises(HostSyncError):
            guard.check("to_host")
    assert guard.permitted == {"a table on the host": 2}


def test_forbidding_inside_of_a_permission_counts_again() -> None:
    guard = SyncGuard()
    outer, inner = guard.forbid("outer"), guard.forbid("inner")
    with outer, guard.permit("why"), inner, pytest.raises(HostSyncError, match="during inner"):
        guard.check("x")


def test_a_subclass_hears_of_every_change_and_watching_changes_nothing_by_itself() -> None:
    heard = []

    class Listening(SyncGuard):
        def _changed(self):
            heard.append(self.is_forbidden)

    guard = Listening()
    with guard.watched(), guard.forbid("a test"), guard.permit("why"), guard.forbid("inner"):
        pass
    assert heard == [True, False, True, False, True, False]


def test_other_threads_may_wait() -> None:
    guard = SyncGuard()
    seen = []
    with guard.forbid("a test"):
        thread = threading.Thread(target=lambda: seen.append(guard.is_forbidden))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.fixture(params=[HostRuntime, FakeRuntime])
def runtime(request):
    return request.param()


WAITS = {
    "to_host": lambda runtime, there, event: runtime.to_host(there),
    "a copy to the host": lambda runtime, there, event: runtime.to_host_later(there).wait(),
    "event.synchronize": lambda runtime, there, event: event.synchronize(),
    "synchronize": lambda runtime, there, event: runtime.synchronize(),
}


@pytest.mark.parametrize("call", WAITS)
def test_every_blocking_call_of_a_runtime_asks_the_guard(runtime, call) -> None:
    there = runtime.to_device(torch.arange(3))
    event = runtime.event()
    event.record()
    with runtime.sync_guard.forbid("a test"), pytest.raises(HostSyncError, match=call):
        WAITS[call](runtime, there, event)
    WAITS[call](runtime, there, event)


def test_what_does_not_wait_is_allowed(runtime) -> None:
    with runtime.sync_guard.forbid("a test"):
        there = runtime.to_device(torch.arange(3))
        event = runtime.event()
        event.record()
        event.wait()
        event.query()
        copy = runtime.to_host_later(there)
    assert copy.wait().tolist() == [0, 1, 2]


def test_time_between_events_is_known_once_the_host_has_waited(runtime) -> None:
    first, second = runtime.event(), runtime.event()
    first.record()
    runtime.zeros((1000,), torch.float32)
    second.record()
    second.synchronize()
    assert second.elapsed_ms(first) >= 0
    assert first.elapsed_ms(second) <= 0


def test_time_of_events_that_the_host_knows_nothing_of_is_refused(runtime) -> None:
    first, second = runtime.event(), runtime.event()
    first.record()
    with pytest.raises((OpArgumentError, HostReadError), match=r"two events|waited for both"):
        second.elapsed_ms(first)


def test_time_between_events_of_two_devices_is_refused(runtime) -> None:
    ours, theirs = runtime.event(), (HostRuntime() if isinstance(runtime, FakeRuntime) else FakeRuntime()).event()
    for event in (ours, theirs):
        event.record()
        event.synchronize()
    with pytest.raises(OpArgumentError, match=r"of this device|of the same device"):
        ours.elapsed_ms(theirs)


def test_fake_devices_do_not_share_a_clock() -> None:
    ours, theirs = FakeRuntime().event(), FakeRuntime().event()
    for event in (ours, theirs):
        event.record()
        event.synchronize()
    with pytest.raises(OpArgumentError, match="of the same device"):
        ours.elapsed_ms(theirs)
