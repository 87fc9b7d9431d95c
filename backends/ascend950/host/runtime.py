"""An Ascend device as the engine sees it: memory, pinned copies, streams, events, pools, graphs and ranks.

Memory, copies and the current stream are torch_npu's (`torch_device.py`), the rest is AscendCL's (`acl.py`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.ascend950.host.acl import Acl
from deepinfer.backends.ascend950.host.cann import cann_home, cann_version
from deepinfer.backends.ascend950.host.launcher import driver_of
from deepinfer.backends.ascend950.host.prototypes import CONSTANTS
from deepinfer.backends.ascend950.host.streams import AscendCopy, AscendEvent, AscendGraph, AscendStream
from deepinfer.backends.ascend950.host.torch_device import TorchDevice, import_torch_npu
from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.defaults import RuntimeDefaults
from deepinfer.ops.errors import CaptureError, OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.runtime import Capabilities, Event, HostCopy, MemoryInfo, Stream
from deepinfer.ops.sync_guard import SyncGuard

_RELAXED = CONSTANTS["ACL_MODEL_RI_CAPTURE_MODE_RELAXED"]


class AscendRuntime(RuntimeDefaults):
    """The `Runtime` protocol over one Ascend device.

    Args:
        tensors: torch's side of the device.
        acl: the driver, with the device current.

    Attributes:
        acl: the driver.
    """

    def __init__(self, tensors: TorchDevice, acl: Acl) -> None:
        self.acl = acl
        self._tensors = tensors
        self.device = tensors.device
        self.device_name = acl.soc_name() or "Ascend"
        home = cann_home()
        self.driver_version = f"CANN {cann_version(home)}" if home is not None else "no CANN"
        self.capabilities = Capabilities(
            asynchronous=True,
            graphs=True,
            pinned_memory=True,
            torch_compute=True,
            streams=True,
            collectives=True,
            num_devices=acl.num_devices(),
        )
        self.sync_guard = SyncGuard()

    def current_handle(self) -> int:
        """The driver's name for the current stream."""
        return self._tensors.current_queue().handle

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes; what the allocator holds and does not use is free, what pools set aside is not."""
        free, total = self.acl.memory_info()
        return MemoryInfo(max(free + self._tensors.unused_bytes() - self.reserved_and_unused, 0), total)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory.

        Raises:
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        try:
            return self._tensors.empty(shape, dtype)
        except torch.OutOfMemoryError as error:
            info = self.memory_info()
            raise OutOfDeviceMemoryError(
                f"{self.device_name}: {list(shape)} {dtype} does not fit; "
                f"{info.free_bytes} of {info.total_bytes} bytes are free"
            ) from error

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed device memory.

        Raises:
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        made = self.empty(shape, dtype)
        self._tensors.fill_zero(made)
        return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed page-locked host memory."""
        return self._tensors.pinned(shape, dtype).zero_()

    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device on the current stream; the host goes on, and pinned memory is read later.

        Raises:
            OpArgumentError: the tensor is on a device already.
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        if host.device.type != "cpu":
            raise OpArgumentError(f"to_device takes a tensor of the host, got one on {host.device}")
        made = self.empty(tuple(host.shape), host.dtype)
        self._send(made, host)
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host and wait for it, and for what comes before it on this stream."""
        self.sync_guard.check("to_host")
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._tensors.copy(host, tensor, later=False)
        return host

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """Begin a copy into pinned memory on the current stream."""
        host = self._tensors.pinned(tuple(tensor.shape), tensor.dtype)
        self._tensors.copy(host, tensor, later=True)
        done = AscendEvent(self)
        done.record()
        return AscendCopy(self, host, tensor, done)

    def write(self, target: Tensor, host: Tensor) -> None:
        """Copy a host tensor into device memory that exists, on the current stream; it is free on return.

        Raises:
            OpArgumentError: shape or dtype differ.
        """
        _check_like(target, host)
        self._tensors.copy(target, self._staged(host), later=True)

    def write_later(self, target: Tensor, host: Tensor) -> None:
        """As `write`, but the host goes on at once and pinned memory is read later.

        Raises:
            OpArgumentError: shape or dtype differ.
        """
        _check_like(target, host)
        self._send(target, host)

    def event(self) -> Event:
        """A new event that can tell the time."""
        return AscendEvent(self)

    def synchronize(self) -> None:
        """Block the host until all submitted work is done.

        Raises:
            DeviceError: work failed on the device.
        """
        self.sync_guard.check("synchronize")
        self.acl.call("aclrtSynchronizeDevice", what=self.device_name)

    def stream(self) -> Stream:
        """A new stream."""
        return AscendStream(self, self._tensors.new_queue())

    def current_stream(self) -> Stream:
        """The stream that work of this thread goes to."""
        return AscendStream(self, self._tensors.current_queue())

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream current for this thread.

        Raises:
            OpArgumentError: it is a stream of another device.
        """
        if not isinstance(stream, AscendStream) or stream.runtime is not self:
            raise OpArgumentError(f"{stream} is not a stream of {self.device}")
        with self._tensors.use_queue(stream.queue):
            yield

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Capture a step as a graph and return the graph's replay.

        The step is not run: run it before in the same form, so that its kernels are compiled and loaded. The graph
        keeps the memory that it allocated; its inputs and results are the tensors that the step named.

        Raises:
            CaptureError: the step did something that a graph cannot hold.
        """
        self.sync_guard.check("capture")
        queue = self._tensors.new_queue()
        with self._tensors.use_queue(queue), self._tensors.kept_allocations() as memory:
            # relaxed: a kernel that is loaded late is no work of the graph
            self.acl.call("aclmdlRICaptureBegin", queue.handle, _RELAXED, error=CaptureError)
            try:
                step()
            except BaseException as error:
                self._abandon(queue.handle)
                if isinstance(error, RuntimeError):
                    raise CaptureError(f"{self.device_name}: {error}") from error
                raise
            handle = self.acl.found("aclmdlRICaptureEnd", queue.handle, error=CaptureError, what=self.device_name)
        return AscendGraph(self, handle, memory).replay

    def communicator(self, rendezvous: Rendezvous | None = None) -> Communicator:
        """This rank's end of an HCCL group.

        Raises:
            CollectiveTimeoutError: a rank did not come in time; it is named.
        """
        if rendezvous is None or rendezvous.world_size == 1:
            return super().communicator(rendezvous)
        from deepinfer.backends.ascend950.host.hccl import join

        return join(self.device, rendezvous, lambda: self.acl.call("aclrtSynchronizeStream", self.current_handle()))

    def _send(self, target: Tensor, host: Tensor) -> None:
        """Copy to the device without waiting: from where it is if that is pinned, else by way of pinned memory."""
        self._tensors.copy(target, host if self._tensors.is_pinned(host) else self._staged(host), later=True)

    def _staged(self, host: Tensor) -> Tensor:
        """A pinned copy; torch's allocator gives its memory to nobody else until the device has read it."""
        return self._tensors.pinned(tuple(host.shape), host.dtype).copy_(host)

    def _abandon(self, stream: int) -> None:
        """End a capture whose step failed; the failure is what the caller hears of."""
        handle = ctypes.c_void_p()
        self.acl.library.aclmdlRICaptureEnd(stream, ctypes.byref(handle))
        if handle.value:
            self.acl.library.aclmdlRIDestroy(handle)


def open_runtime(index: int | None = None) -> AscendRuntime:
    """The runtime of a device of this host.

    Args:
        index: which; None for the one of `LOCAL_RANK`, which launchers set, else the first.

    Raises:
        BackendUnavailableError: the driver's library is not there.
        DeviceError: the device does not answer.
    """
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(import_torch_npu().npu.device_count(), 1)
    return AscendRuntime(*driver_of(index))


def _check_like(target: Tensor, host: Tensor) -> None:
    if host.device.type != "cpu" or host.shape != target.shape or host.dtype != target.dtype:
        raise OpArgumentError(
            f"write takes a host tensor like its target, {list(target.shape)} {target.dtype}; got "
            f"{list(host.shape)} {host.dtype} on {host.device}"
        )
