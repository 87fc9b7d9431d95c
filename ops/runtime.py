"""What the engine asks of a device beyond ops: memory and pools, copies, streams, events, graphs, a way to other ranks.

The engine is written against this protocol. A backend without a feature says so in `capabilities` and the engine takes
the slower road; it never guesses from a name. `deepinfer.ops.defaults.RuntimeDefaults` answers for streams, pools and
ranks where a device has nothing better; collectives are in `deepinfer.ops.collectives`.

Streams. Work of one stream happens in order; between streams nothing is ordered but by events. Every host thread has a
current stream, the device's own at first, and what is submitted goes there: ops, copies, fills, events, replays and
collectives. Memory belongs to the stream that was current when it was allocated: once its last tensor dies it is used
again in that stream's order. Who uses a tensor on another stream therefore orders both ways: an event so that the
other stream sees the values, and, before the last reference goes, one that makes the owning stream wait for the use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.sync_guard import SyncGuard


@dataclass(frozen=True)
class Capabilities:
    """What a device can do; everything defaults to no.

    Attributes:
        asynchronous: work submitted to a stream may run after the call returns.
        graphs: capture and replay of a step.
        pinned_memory: host buffers that copies read without blocking the host.
        unified_memory: host code may read device tensors without a copy.
        torch_compute: PyTorch computes on its tensors, so a reference can run there; elsewhere references run on the
            host, on copies of what they touch (`deepinfer.ops.fallback`).
        streams: `Runtime.stream` makes streams whose work may overlap; without it there is one stream only.
        collectives: `Runtime.communicator` joins more than one rank.
        num_devices: how many devices this process sees.
    """

    asynchronous: bool = False
    graphs: bool = False
    pinned_memory: bool = False
    unified_memory: bool = False
    torch_compute: bool = False
    streams: bool = False
    collectives: bool = False
    num_devices: int = 1


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of device memory: free now, and in all."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class PoolStats:
    """What a memory pool holds, in bytes, and what went through it.

    Attributes:
        limit_bytes: the most it may hold; None without a limit of its own.
        reserved_bytes: taken from the device for this pool: what is in use, and what `reserve` keeps ready.
        allocated_bytes: in use by tensors that live.
        peak_bytes: the most that was in use at once.
        num_allocations: tensors handed out so far.
        num_releases: those of them whose memory came back.
    """

    limit_bytes: int | None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    num_allocations: int = 0
    num_releases: int = 0


@runtime_checkable
class MemoryPool(Protocol):
    """Device memory under a name, so that it can be told who holds what, limited, and set aside.

    Memory comes back when the last tensor that uses it dies; views count.
    """

    name: str

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Runtime.empty`, from this pool.

        Raises:
            OutOfDeviceMemoryError: the pool's limit or the device does not allow it; nothing was allocated.
        """
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Runtime.zeros`, from this pool.

        Raises:
            OutOfDeviceMemoryError: as `empty`.
        """
        ...

    def reserve(self, num_bytes: int) -> None:
        """Keep at least this many bytes in all for this pool, used or not: nobody else is given them.

        Rounding of single allocations counts, so leave room for it (`PoolStats.allocated_bytes` includes it).

        Raises:
            OutOfDeviceMemoryError: the pool's limit or the device does not allow it; nothing changed.
        """
        ...

    def release(self) -> int:
        """Give back what is reserved and not in use; returns how many bytes that were."""
        ...

    def stats(self) -> PoolStats:
        """What it holds now."""
        ...


@runtime_checkable
class Stream(Protocol):
    """A queue of device work; `Runtime.use_stream` makes it current."""

    def synchronize(self) -> None:
        """Block the host until all work submitted to this stream is done.

        Raises:
            DeviceError: what went wrong since the host last looked.
        """
        ...


@runtime_checkable
class Event(Protocol):
    """A mark in a stream, of the device that made it. Until it is recorded it counts as reached."""

    def record(self) -> None:
        """Mark the current end of the current stream; an older mark is forgotten."""
        ...

    def wait(self) -> None:
        """Make the current stream wait for the mark, whichever stream it is in; the host goes on."""
        ...

    def synchronize(self) -> None:
        """Block the host until the mark is reached."""
        ...

    def query(self) -> bool:
        """True when the mark has been reached."""
        ...

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from another mark to this one, by the device's clock; the host knows that both are reached."""
        ...


@runtime_checkable
class HostCopy(Protocol):
    """A copy to the host on its way."""

    def wait(self) -> torch.Tensor:
        """Block the host until the copy is there, and give it."""
        ...


@runtime_checkable
class Landing(Protocol):
    """Memory on the host that copies come to, one after the other."""

    def begin(self, tensor: torch.Tensor) -> HostCopy:
        """As `Runtime.to_host_later`; the tensor that the copy gives is valid until the next call.

        Args:
            tensor: of the landing's dtype, with any number of entries up to its size, contiguous.
        """
        ...


@runtime_checkable
class Runtime(Protocol):
    """One device as the engine sees it; among several of a host the one that LOCAL_RANK names, as launchers set it.

    Attributes:
        device: where tensors live.
        capabilities: what it can do.
        sync_guard: asked by every call that blocks the host: `to_host`, `synchronize`, waiting for an event or a copy.
    """

    device: torch.device
    capabilities: Capabilities
    sync_guard: SyncGuard

    def memory_info(self) -> MemoryInfo:
        """Free and total device memory in bytes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that copies read without blocking the host; ordinary memory where there is no other.

        `to_device` of it, or of a view, may read it after the call returns: whoever writes it again first waits on an
        event recorded behind the copy. Any other host tensor may be written as soon as `to_device` returns, unless
        memory is unified.
        """
        ...

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device on the current stream.

        With `capabilities.unified_memory` the result may be the host tensor itself. Whoever lets an op write the
        result, or writes the host tensor again while the result is in use, passes a copy.
        """
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the host, after the work that makes it, and wait for it."""
        ...

    def to_host_later(self, tensor: torch.Tensor) -> HostCopy:
        """Begin to copy a device tensor to the host, behind the work submitted so far; the host goes on."""
        ...

    def landing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Landing:
        """Memory on the host for copies that come in every step; what is kept for it need not be found each time."""
        ...

    def write(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a host tensor into device memory that exists, on the current stream; the host tensor is free on return.

        Args:
            target: device tensor, or any view of one.
            host: of the same shape and dtype.
        """
        ...

    def write_later(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """As `write`, but pinned memory is read when the copy runs: the host writes it again behind an event after it.

        Args:
            target: device tensor, or any view of one.
            host: of the same shape and dtype.
        """
        ...

    def pool(self, name: str, limit_bytes: int | None = None) -> MemoryPool:
        """The memory pool of that name, made on first use.

        Args:
            name: who the memory is for, such as "kv_cache".
            limit_bytes: the most it may hold from now on; None leaves the limit as it is, at first none.

        Raises:
            OpArgumentError: it holds more than that already.
        """
        ...

    def pools(self) -> Mapping[str, PoolStats]:
        """What every named pool holds, by name; memory outside pools shows in `memory_info` alone."""
        ...

    def stream(self) -> Stream:
        """A new stream; the only one there is without `capabilities.streams`."""
        ...

    def current_stream(self) -> Stream:
        """The stream that work of this host thread goes to."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream current for this host thread, for the length of a `with` block; blocks nest.

        Entering and leaving order nothing between streams: that is what events are for.
        """
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def synchronize(self) -> None:
        """Block the host until all submitted work is done."""
        ...

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Capture a step as a graph and return its replay.

        Raises:
            NotImplementedError: `capabilities.graphs` is False.
        """
        ...

    def communicator(self, rendezvous: Rendezvous | None = None) -> Communicator:
        """This rank's end of a group of ranks; a group of one without a rendezvous.

        Every rank of the rendezvous calls it once, and it returns when all have. The caller closes what it gets.

        Raises:
            NotImplementedError: `capabilities.collectives` is False and there is more than one rank.
            CollectiveTimeoutError: a rank did not come within the rendezvous' timeout; it is named.
        """
        ...
