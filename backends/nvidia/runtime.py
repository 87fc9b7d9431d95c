"""A CUDA device as the engine sees it: memory, pinned copies, streams, events, pools, graphs and ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.defaults import RuntimeDefaults
from deepinfer.ops.errors import CaptureError, DeviceError, OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.runtime import Capabilities, Event, HostCopy, MemoryInfo, Stream
from deepinfer.ops.sync_guard import SyncGuard

_STAGED_BYTES: Final = 1 << 20


class CudaSyncGuard(SyncGuard):
    """A guard that lets torch raise where one of its own calls would wait: an item, a copy of pageable memory."""

    _watches = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """As `SyncGuard.watched`; for the whole process, so no other thread may use a device meanwhile."""
        self._watches = True
        self._changed()
        try:
            yield
        finally:
            self._watches = False
            torch.cuda.set_sync_debug_mode("default")

    def _changed(self) -> None:
        if self._watches:
            torch.cuda.set_sync_debug_mode("error" if self.is_forbidden else "default")


class CudaRuntime(RuntimeDefaults):
    """The `Runtime` protocol over one CUDA device; torch's caching allocator owns its memory.

    Args:
        index: which device; None for the one of `LOCAL_RANK`, which launchers set, else the current one.
    """

    def __init__(self, index: int | None = None) -> None:
        if index is None:
            local = os.environ.get("LOCAL_RANK")
            index = torch.cuda.current_device() if local is None else int(local) % torch.cuda.device_count()
        self.device = torch.device("cuda", index)
        self.device_name = torch.cuda.get_device_name(index)
        self.driver_version = f"CUDA {torch.version.cuda}"
        self.capabilities = Capabilities(
            asynchronous=True,
            graphs=True,
            pinned_memory=True,
            torch_compute=True,
            streams=True,
            collectives=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
            num_devices=torch.cuda.device_count(),
        )
        self.sync_guard: SyncGuard = CudaSyncGuard()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def stream_now(self) -> torch.cuda.Stream:
        """The current stream as torch names it; asking torch makes a new object every time, several calls a step."""
        raw: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._streams.get(raw)
        if found is None:
            found = self._streams[raw] = torch.cuda.current_stream(self.device)
        return found

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes; what the allocator holds and does not use is free, what pools set aside is not."""
        with torch.cuda.device(self.device):
            free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(max(free + cached - self.reserved_and_unused, 0), total)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory.

        Raises:
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(shape, dtype) from error

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed device memory.

        Raises:
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        return self.empty(shape, dtype).zero_()

    def alone(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor whose storage is its own, and lives as long as any view of it."""
        made: Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
        return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed page-locked host memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device on the current stream; the host goes on, and pinned memory is read later.

        Raises:
            OpArgumentError: the tensor is on a device already.
            OutOfDeviceMemoryError: it does not fit; nothing was allocated.
        """
        if host.device.type != "cpu":
            raise OpArgumentError(f"to_device takes a tensor of the host, got one on {host.device}")
        made = self.empty(tuple(host.shape), host.dtype)
        if host.is_pinned():
            made.copy_(host, non_blocking=True)
        else:
            _copy_staged(made, host)
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host and wait for it, and for what comes before it on this stream."""
        self.sync_guard.check("to_host")
        return tensor.to("cpu")

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """Begin a copy into pinned memory on the current stream."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self.stream_now())
        return CudaCopy(host, done, self.sync_guard)

    def landing(self, shape: tuple[int, ...], dtype: torch.dtype) -> CudaLanding:
        """Pinned memory and an event, used again by every copy."""
        return CudaLanding(self, self.pinned(shape, dtype).view(-1))

    def write(self, target: Tensor, host: Tensor) -> None:
        """Copy a host tensor into device memory that exists, on the current stream; it is free on return.

        Raises:
            OpArgumentError: shape or dtype differ.
        """
        _check_like(target, host)
        _copy_staged(target, host)

    def write_later(self, target: Tensor, host: Tensor) -> None:
        """As `write`, but the host goes on at once and pinned memory is read later.

        Raises:
            OpArgumentError: shape or dtype differ.
        """
        _check_like(target, host)
        target.copy_(host, non_blocking=True)

    def event(self) -> Event:
        """A new event that can tell the time."""
        return CudaEvent(self, torch.cuda.Event(enable_timing=True))

    def synchronize(self) -> None:
        """Block the host until all submitted work is done.

        Raises:
            DeviceError: work failed on the device.
        """
        self.sync_guard.check("synchronize")
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceError(f"{self.device_name}: {error}") from error

    def stream(self) -> Stream:
        """A new stream."""
        return CudaStream(self, torch.cuda.Stream(self.device))

    def current_stream(self) -> Stream:
        """The stream that work of this thread goes to."""
        return CudaStream(self, self.stream_now())

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream current for this thread.

        Raises:
            OpArgumentError: it is a stream of another device.
        """
        if not isinstance(stream, CudaStream) or stream.stream.device != self.device:
            raise OpArgumentError(f"{stream} is not a stream of {self.device}")
        with torch.cuda.stream(stream.stream):
            yield

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Capture a step as a graph and return the graph's replay.

        The step is not run: run it before in the same form, so that its kernels are compiled and loaded. The graph
        keeps the memory that it allocated; its inputs and results are the tensors that the step named.

        Raises:
            CaptureError: the step did something that a graph cannot hold.
        """
        self.sync_guard.check("capture")
        graph = torch.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a step without rows launches nothing
                # relaxed: a kernel that is loaded late is no work of the graph
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device), capture_error_mode="relaxed"):
                    step()
        except RuntimeError as error:
            raise CaptureError(f"{self.device_name}: {error}") from error
        replay: Callable[[], None] = graph.replay
        return replay

    def communicator(self, rendezvous: Rendezvous | None = None) -> Communicator:
        """This rank's end of an NCCL group; one rank that has no store needs none.

        Graphs that hold its collectives are to be dropped before it is closed: NCCL waits for them.

        Raises:
            NotImplementedError: this torch has no NCCL and there is more than one rank.
        """
        if rendezvous is None or rendezvous.store is None:
            return super().communicator(rendezvous)
        if not self.capabilities.collectives:
            raise NotImplementedError("this torch is built without NCCL, so its devices join no ranks")
        from deepinfer.backends.nvidia.communicator import join

        return join(self.device, rendezvous)

    def _out_of_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> OutOfDeviceMemoryError:
        info = self.memory_info()
        return OutOfDeviceMemoryError(
            f"{self.device_name}: {list(shape)} {dtype} does not fit; "
            f"{info.free_bytes} of {info.total_bytes} bytes are free"
        )


def _copy_staged(target: Tensor, host: Tensor) -> None:
    """Copy from host memory that is free on return.

    What a step sends is small and goes through pinned memory, which torch keeps until the copy has run: torch's own
    copy from other memory waits for all work of the stream.
    """
    if host.nbytes <= _STAGED_BYTES:
        staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        target.copy_(staged.copy_(host), non_blocking=True)
    else:
        target.copy_(host.clone() if host.is_pinned() else host)  # the wait that reads all of it


def _check_like(target: Tensor, host: Tensor) -> None:
    if not host.is_cpu or host.shape != target.shape or host.dtype != target.dtype:
        raise OpArgumentError(
            f"write takes a host tensor like its target, {list(target.shape)} {target.dtype}; got "
            f"{list(host.shape)} {host.dtype} on {host.device}"
        )


@dataclass(frozen=True)
class CudaCopy:
    """A copy to pinned memory on its way.

    Attributes:
        host: where it goes.
        done: reached when it is there.
        guard: of the runtime.
    """

    host: Tensor
    done: torch.cuda.Event
    guard: SyncGuard

    def wait(self) -> Tensor:
        """Block the host until the copy is there, and give it."""
        if not self.done.query():
            self.guard.check("waiting for a copy to the host")
            self.done.synchronize()
        return self.host


class CudaLanding:
    """Pinned memory that copies come to.

    Args:
        runtime: whose.
        host: all of it, with one axis.
    """

    def __init__(self, runtime: CudaRuntime, host: Tensor) -> None:
        self._runtime, self._host = runtime, host
        self._done = torch.cuda.Event()
        self._newest = CudaCopy(host, self._done, runtime.sync_guard)

    def begin(self, tensor: Tensor) -> CudaCopy:
        """As `Landing.begin`."""
        copy = self._newest
        if copy.host.shape != tensor.shape:
            part = self._host[: tensor.numel()].view(tensor.shape)
            copy = self._newest = CudaCopy(part, self._done, self._runtime.sync_guard)
        copy.host.copy_(tensor, non_blocking=True)
        self._done.record(self._runtime.stream_now())
        return copy


@dataclass(frozen=True)
class CudaStream:
    """A queue of work of one device.

    Attributes:
        runtime: whose.
        stream: torch's name for it.
    """

    runtime: CudaRuntime
    stream: torch.cuda.Stream

    def synchronize(self) -> None:
        """Block the host until its work is done.

        Raises:
            DeviceError: work failed on the device.
        """
        self.runtime.sync_guard.check("stream.synchronize")
        try:
            self.stream.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"{self.runtime.device_name}: {error}") from error


@dataclass(frozen=True)
class CudaEvent:
    """A mark in a stream.

    Attributes:
        runtime: whose.
        mark: torch's name for it.
    """

    runtime: CudaRuntime
    mark: torch.cuda.Event

    def record(self) -> None:
        """Mark the end of the current stream."""
        self.mark.record(self.runtime.stream_now())

    def wait(self) -> None:
        """Make the current stream wait for the mark."""
        self.mark.wait(self.runtime.stream_now())

    def synchronize(self) -> None:
        """Block the host until the mark is reached."""
        self.runtime.sync_guard.check("event.synchronize")
        self.mark.synchronize()

    def query(self) -> bool:
        """True when the mark has been reached."""
        return bool(self.mark.query())

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of the device's clock between two marks.

        Raises:
            OpArgumentError: `since` is an event of another kind of device.
        """
        if not isinstance(since, CudaEvent):
            raise OpArgumentError("elapsed_ms takes two events of this device")
        return float(since.mark.elapsed_time(self.mark))
