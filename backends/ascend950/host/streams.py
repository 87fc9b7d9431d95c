"""Streams, events, copies on their way and captured graphs of an Ascend device."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from deepinfer.backends.ascend950.host.prototypes import CONSTANTS
from deepinfer.ops.errors import OpArgumentError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.host.acl import Acl
    from deepinfer.backends.ascend950.host.runtime import AscendRuntime
    from deepinfer.backends.ascend950.host.torch_device import Queue
    from deepinfer.ops.runtime import Event

_EVENT_FLAGS: Final = (
    CONSTANTS["ACL_EVENT_SYNC"] | CONSTANTS["ACL_EVENT_CAPTURE_STREAM_PROGRESS"] | CONSTANTS["ACL_EVENT_TIME_LINE"]
)
"""An event that streams can wait for, the host can ask for, and that knows its time."""
_REACHED: Final = CONSTANTS["ACL_EVENT_RECORDED_STATUS_COMPLETE"]


@dataclass(frozen=True)
class AscendStream:
    """A queue of work of one device.

    Attributes:
        runtime: whose.
        queue: the driver's and torch's names for it.
    """

    runtime: AscendRuntime
    queue: Queue

    def synchronize(self) -> None:
        """Block the host until its work is done.

        Raises:
            DeviceError: work failed on the device.
        """
        self.runtime.sync_guard.check("stream.synchronize")
        self.runtime.acl.call("aclrtSynchronizeStream", self.queue.handle, what=self.runtime.device_name)


class AscendEvent:
    """A mark in a stream.

    Args:
        runtime: whose.
    """

    def __init__(self, runtime: AscendRuntime) -> None:
        self._runtime = runtime
        self._acl = runtime.acl
        self._handle: int = self._acl.made("aclrtCreateEventExWithFlag", _EVENT_FLAGS)
        self._recorded = False
        _destroy_with(self, self._acl, "aclrtDestroyEvent", self._handle)

    def record(self) -> None:
        """Mark the end of the current stream."""
        self._acl.call("aclrtRecordEvent", self._handle, self._runtime.current_handle())
        self._recorded = True

    def wait(self) -> None:
        """Make the current stream wait for the mark."""
        if self._recorded:
            self._acl.call("aclrtStreamWaitEvent", self._runtime.current_handle(), self._handle)

    def synchronize(self) -> None:
        """Block the host until the mark is reached.

        Raises:
            DeviceError: work before it failed.
        """
        self._runtime.sync_guard.check("event.synchronize")
        self.block()

    def block(self) -> None:
        """As `synchronize`, for callers that have asked the guard."""
        if self._recorded:
            self._acl.call("aclrtSynchronizeEvent", self._handle, what=self._runtime.device_name)

    def query(self) -> bool:
        """True when the mark has been reached."""
        if not self._recorded:
            return True
        status = ctypes.c_int()
        self._acl.call("aclrtQueryEventStatus", self._handle, ctypes.byref(status))
        return status.value == _REACHED

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of the device's clock between two marks.

        Raises:
            OpArgumentError: one of them was not recorded, or `since` is of another kind of device.
        """
        if not isinstance(since, AscendEvent) or not (since._recorded and self._recorded):
            raise OpArgumentError("elapsed_ms takes two recorded events of this device")
        milliseconds = ctypes.c_float()
        self._acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), since._handle, self._handle)
        return milliseconds.value


@dataclass(frozen=True)
class AscendCopy:
    """A copy to pinned memory on its way.

    Attributes:
        runtime: whose.
        host: where it goes.
        source: what is read; it stays until the copy is there.
        done: reached then.
    """

    runtime: AscendRuntime
    host: Tensor
    source: Tensor
    done: AscendEvent

    def wait(self) -> Tensor:
        """Block the host until the copy is there, and give it."""
        if not self.done.query():
            self.runtime.sync_guard.check("waiting for a copy to the host")
            self.done.block()
        return self.host


class AscendGraph:
    """A captured step.

    Args:
        runtime: whose.
        handle: the driver's name for it.
        memory: keeps what the step allocated.
    """

    def __init__(self, runtime: AscendRuntime, handle: int, memory: object) -> None:
        self._runtime = runtime
        self._handle = handle
        self._memory = memory
        _destroy_with(self, runtime.acl, "aclmdlRIDestroy", handle)

    def replay(self) -> None:
        """Queue the step on the current stream.

        Raises:
            DeviceError: the driver refused.
        """
        self._runtime.acl.call("aclmdlRIExecuteAsync", self._handle, self._runtime.current_handle())


def _destroy_with(owner: object, acl: Acl, name: str, handle: int) -> None:
    """Give a handle back when its owner dies; at the end of the process torch_npu closes the driver first."""
    weakref.finalize(owner, getattr(acl.library, name), handle).atexit = False
