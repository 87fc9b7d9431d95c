"""The runtime of the fake device: memory, copies, streams, events and graphs, each as strict as hardware allows.

Calls return before their work is done. What the host may know at any moment is what it has waited for; reading more,
or writing what a queued copy still reads, is found out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.fake.errors import HostAccessError, HostBufferReuseError, HostReadError
from deepinfer.backends.fake.faults import Fault, FaultKind, FaultPlan
from deepinfer.backends.fake.memory import POISON, Block, MemoryPool, Ref
from deepinfer.backends.fake.streams import Device, Stream, Work
from deepinfer.backends.fake.tensor import DEVICE, FakeTensor
from deepinfer.ops.errors import CaptureError, OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.runtime import Capabilities, MemoryInfo


class FakeRuntime:
    """One fake device; implements `deepinfer.ops.runtime.Runtime`.

    Args:
        seed: decides the order in which queued work happens.
        memory_bytes: size of the device's memory.
        faults: what is to fail.
        detect: raise where memory is used after free, read before it is written, or a pinned buffer is overwritten too
            early. Off, garbage flows instead, as on a hard device.
        patience: seconds before a wait for a dead rank gives up.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        memory_bytes: int = 2 << 30,
        faults: FaultPlan | None = None,
        detect: bool = True,
        patience: float = 0.2,
    ) -> None:
        self.device = DEVICE
        self.capabilities = Capabilities(asynchronous=True, graphs=True, pinned_memory=True)
        self.faults = faults or FaultPlan()
        self._detect = detect
        self._pool = MemoryPool(memory_bytes)
        self._device = Device(seed, self.faults, self._pool, detect=detect, patience=patience)
        self._pinned: dict[int, int] = {}
        self._current = 0
        self._known: dict[int, int] = {}  # per stream, how many pieces of work the host has waited for
        self._graph: list[Work] | None = None
        self._lock = threading.RLock()

    @property
    def log(self) -> list[tuple[int, str]]:
        """The newest pieces of work that ran, as (stream, name), in order."""
        return list(self._device.log)

    def inject_fault(self, kind: FaultKind, *, name: str = "*", at: int = 1) -> None:
        """Let the `at`-th piece of work from now whose name matches fail (`Fault`)."""
        with self._lock:
            self._device.wait(None)  # what is queued has been submitted, and is not meant
            self.faults.add(Fault(kind, at, name))

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes; memory that waits in a queue to be freed is not free."""
        with self._lock:
            self._bury()
            return MemoryInfo(self._pool.limit - self._pool.used, self._pool.limit)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory full of poison.

        Raises:
            OutOfDeviceMemoryError: the limit does not allow it, also after everything queued has run.
            CaptureError: a graph is being captured.
        """
        with self._lock:
            if self._graph is not None:
                raise CaptureError(f"allocation of {list(shape)} while a graph is captured; allocate before")
            self._device.raise_failure()
            self._bury()
            shadow = torch.empty(shape, dtype=dtype, device="meta")
            num_bytes = prod(shape) * dtype.itemsize
            allocation = self._pool.allocate(num_bytes, self._current)
            if allocation is None:
                self._device.wait(None)
                allocation = self._pool.allocate(num_bytes, self._current)
            if allocation is None:
                raise OutOfDeviceMemoryError(
                    f"{num_bytes} bytes for {str(dtype).removeprefix('torch.')}{list(shape)} do not fit: "
                    f"{self._pool.used} of {self._pool.limit} bytes are in use"
                )
            return FakeTensor(allocation, shadow)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory that a queued fill sets to zero."""
        made = self.empty(shape, dtype)
        ref = self.ref(made)

        def fill() -> None:
            if not ref.block.pristine:
                ref.view().zero_()

        self.submit(Work("zeros", fill, writes=(ref,)))
        return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies read late: writing it before the copy is done is an error."""
        owner = np.zeros(max(prod(shape) * dtype.itemsize, 1), dtype=np.uint8)
        address = owner.ctypes.data
        self._pinned[address] = address + owner.nbytes
        weakref.finalize(owner, self._pinned.pop, address)
        return torch.from_numpy(owner)[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def to_device(self, host: Tensor) -> Tensor:
        """Queue a copy to the device. Pageable memory is read now, pinned memory when the copy runs.

        Raises:
            OpArgumentError: the tensor is on the device already.
            HostBufferReuseError: later, if a pinned source changed before the copy ran.
        """
        if isinstance(host, FakeTensor):
            raise OpArgumentError("to_device was given a tensor of the device; it takes one of the host")
        made = self.empty(tuple(host.shape), host.dtype)
        ref, pinned = self.ref(made), self._is_pinned(host)
        staged = host.detach().contiguous() if pinned and not self._detect else host.detach().clone()

        def copy() -> None:
            if pinned and self._detect and not _same_bytes(staged, host):
                raise HostBufferReuseError(
                    f"a pinned host buffer of {list(host.shape)} {host.dtype} was overwritten before its copy to the "
                    "device was done; wait on an event recorded behind the copy"
                )
            ref.view().copy_(staged)

        self.submit(Work("to_device", copy, writes=(ref,)))
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host and wait for it, and for what comes before it on this stream."""
        return self.to_host_later(tensor).wait()

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """Queue a copy to the host; the result can be read once the host has waited for it."""
        with self._lock:
            self.refuse_in_graph("a copy to the host")
            ref = self.ref(tensor)
            target = torch.full((prod(ref.shape) * ref.dtype.itemsize,), POISON, dtype=torch.uint8)
            target = target.view(ref.dtype).view(ref.shape)

            def copy() -> None:
                target.copy_(ref.view())

            return HostCopy(self, self.submit(Work("to_host", copy, reads=(ref,))), target)

    def event(self) -> FakeEvent:
        """A new event; until it is recorded it counts as reached."""
        return FakeEvent(self)

    def new_stream(self) -> int:
        """Number of a new stream; `use_stream` makes it current."""
        with self._lock:
            self._device.streams.append(Stream(len(self._device.streams)))
            return len(self._device.streams) - 1

    @contextmanager
    def use_stream(self, stream: int) -> Iterator[None]:
        """Work submitted inside goes to that stream; memory allocated inside is freed in its order."""
        self.refuse_in_graph("a change of stream")
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        """Run everything and wait for it.

        Raises:
            CaptureError: a graph is being captured.
            DeviceError: what went wrong since the host last looked.
        """
        with self._lock:
            self.refuse_in_graph("synchronize")
            self._bury()
            self._device.wait(None)
            self._device.raise_failure()
            self._known = {s.number: s.submitted for s in self._device.streams}

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Record what `step` submits instead of running it, and return its replay.

        The caller keeps every tensor that the step uses alive for as long as it replays.

        Raises:
            CaptureError: the step allocates, reads on the host, waits, or uses another stream; nothing is left behind.
        """
        with self._lock:
            self.refuse_in_graph("another capture")
            self._graph = []
            try:
                step()
                graph = tuple(self._graph)
            finally:
                self._graph = None

        def replay() -> None:
            with self._lock:
                self.refuse_in_graph("a replay")
                for work in graph:
                    self.submit(work.again())

        return replay

    def submit(self, work: Work, *, launch: bool = False) -> Work:
        """Queue work on the current stream; for the runtime and op implementations.

        Args:
            work: not submitted before.
            launch: it is an op, which may fail to launch.
        """
        with self._lock:
            self._device.raise_failure()
            if launch:
                self.faults.at_submit(work.name)
            if self._graph is not None:
                self._graph.append(work)
                return work
            self._bury()
            return self._device.submit(work, self._current)

    def ref(self, tensor: Tensor) -> Ref:
        """Where a tensor is, for queued work.

        Raises:
            HostAccessError: it is a tensor of the host.
        """
        if not isinstance(tensor, FakeTensor):
            raise HostAccessError("an op or a copy", f"it was given a tensor on {tensor.device}; use runtime.to_device")
        return tensor.ref()

    def wait_for(self, work: Work, what: str) -> None:
        """Make the host wait for queued work, and know what was ordered before it."""
        with self._lock:
            self.refuse_in_graph(what)
            self._device.wait(work)
            self._device.raise_failure()
            self._learn(work)

    def poll(self, work: Work) -> bool:
        """Whether work is done; every question lets the device go on a little."""
        with self._lock:
            self.refuse_in_graph("a query")
            self._device.nudge()
            self._device.raise_failure()
            if work.done:
                self._learn(work)
            return work.done

    def knows(self, work: Work) -> bool:
        """Whether the host has waited for work, directly or by what came after it."""
        return self._known.get(work.stream, 0) > work.place

    def refuse_in_graph(self, what: str) -> None:
        """Raise a `CaptureError` while a graph is captured; `what` says what was tried."""
        if self._graph is not None:
            raise CaptureError(f"{what} while a graph is captured: a graph holds device work of one stream alone")

    def _learn(self, work: Work) -> None:
        for stream, count in work.clock.items():
            self._known[stream] = max(self._known.get(stream, 0), count)

    def _bury(self) -> None:
        """Queue the freeing of blocks whose last tensor has died."""
        while self._pool.deaths:
            death = self._pool.deaths.popleft()
            self._device.submit(Work("free", _freeing(self._pool, death.block), always=True), death.stream)

    def _is_pinned(self, host: Tensor) -> bool:
        address = host.data_ptr()
        return any(start <= address < end for start, end in list(self._pinned.items()))


@dataclass
class FakeEvent:
    """A mark in a stream of the fake device."""

    runtime: FakeRuntime
    _mark: Work | None = field(default=None, repr=False)

    def record(self) -> None:
        """Mark the current end of the current stream; an older mark is forgotten."""
        self.runtime.refuse_in_graph("event.record")
        self._mark = self.runtime.submit(Work("event", always=True))

    def wait(self) -> None:
        """Make later work of the current stream wait for the mark."""
        self.runtime.refuse_in_graph("event.wait")
        if self._mark is not None:
            self.runtime.submit(Work("wait", after=self._mark, always=True))

    def synchronize(self) -> None:
        """Block the host until the mark is reached."""
        self.runtime.refuse_in_graph("event.synchronize")
        if self._mark is not None:
            self.runtime.wait_for(self._mark, "event.synchronize")

    def query(self) -> bool:
        """True when the mark has been reached; asking lets time pass."""
        self.runtime.refuse_in_graph("event.query")
        return self._mark is None or self.runtime.poll(self._mark)


@dataclass
class HostCopy:
    """A copy to the host on its way."""

    runtime: FakeRuntime
    work: Work
    _target: Tensor = field(repr=False)

    def wait(self) -> Tensor:
        """Wait for the copy."""
        self.runtime.wait_for(self.work, "a copy to the host")
        return self._target

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self.runtime.poll(self.work)

    @property
    def tensor(self) -> Tensor:
        """The values.

        Raises:
            HostReadError: the host has waited neither for the copy nor for anything behind it.
        """
        if not self.runtime.knows(self.work):
            raise HostReadError(
                "the target of a copy was read before the host waited for the copy, or an event after it"
            )
        return self._target


def _freeing(pool: MemoryPool, block: Block) -> Callable[[], None]:
    return lambda: pool.free(block)


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    return left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
