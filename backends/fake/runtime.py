"""The runtime of the fake device: memory, copies, streams, events and graphs, each as strict as hardware allows.

Calls return before their work is done. What the host may know at any moment is what it has waited for; reading more,
or writing what a queued copy still reads, is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.fake.collectives import FakeCommunicator
from deepinfer.backends.fake.copies import PinnedBuffers, copy_in, copy_out
from deepinfer.backends.fake.errors import BrokenPromiseError, HostAccessError
from deepinfer.backends.fake.faults import Fault, FaultKind, FaultPlan
from deepinfer.backends.fake.handles import FakeEvent, FakeStream, HostCopy
from deepinfer.backends.fake.memory import Allocation, DeviceMemory, Ref
from deepinfer.backends.fake.pools import FakePool
from deepinfer.backends.fake.promises import WatchedPlan
from deepinfer.backends.fake.streams import Device, Work
from deepinfer.backends.fake.tensor import DEVICE, FakeTensor
from deepinfer.ops.backend import Plan
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.defaults import NewMemory
from deepinfer.ops.errors import CaptureError, OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.pools import PoolAccount
from deepinfer.ops.runtime import Capabilities, MemoryInfo, PoolStats, Stream
from deepinfer.ops.sockets import has_store, join
from deepinfer.ops.spec import OpSpec
from deepinfer.ops.sync_guard import SyncGuard


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
        self.capabilities = Capabilities(
            asynchronous=True, graphs=True, pinned_memory=True, streams=True, collectives=has_store()
        )
        self.faults = faults or FaultPlan()
        self._detect = detect
        self._memory = DeviceMemory(memory_bytes)
        self._pools: dict[str, FakePool] = {}
        self._device = Device(seed, self.faults, self._memory, detect=detect, patience=patience)
        self._pinned = PinnedBuffers()
        self._here = threading.local()
        self._known: dict[int, int] = {}  # per stream, how many pieces of work the host has waited for
        self._graph: list[Work] | None = None
        self._lock = threading.RLock()
        self.sync_guard = SyncGuard()

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
            return MemoryInfo(self._memory.limit - self._memory.used, self._memory.limit)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory full of poison.

        Raises:
            OutOfDeviceMemoryError: the limit does not allow it, also after everything queued has run.
            CaptureError: a graph is being captured.
        """
        return self.allocate(shape, dtype, None)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, account: PoolAccount | None) -> Tensor:
        """As `empty`, on the account of a pool."""
        with self._lock:
            if self._graph is not None:
                raise CaptureError(f"allocation of {list(shape)} while a graph is captured; allocate before")
            self._refuse_in_run(f"allocated {list(shape)}")
            self._device.raise_failure()
            self._bury()
            shadow = torch.empty(shape, dtype=dtype, device="meta")
            num_bytes = prod(shape) * dtype.itemsize
            try:
                allocation = self._allocation(num_bytes, account)
            except OutOfDeviceMemoryError as error:
                held = ", ".join(f"{name} {stats.reserved_bytes}" for name, stats in self.pools().items())
                what = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
                raise OutOfDeviceMemoryError(f"{what}: {error}; pools hold: {held or 'nothing'}") from error
            return FakeTensor(allocation, shadow)

    def _allocation(self, num_bytes: int, account: PoolAccount | None) -> Allocation:
        try:
            return self._memory.allocate(num_bytes, self.stream_number, account)
        except OutOfDeviceMemoryError:
            self._device.wait(None)  # what is queued to be freed is free then
            return self._memory.allocate(num_bytes, self.stream_number, account)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory that a queued fill sets to zero."""
        return self.filled(self.empty(shape, dtype))

    def filled(self, made: Tensor) -> Tensor:
        """Queue a fill with zeros of a tensor, and return it."""
        ref = self.ref(made)

        def fill() -> None:
            if not ref.block.pristine:
                ref.view().zero_()

        self.submit(Work("zeros", fill, writes=(ref,)))
        return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies read late: writing it before the copy is done is an error."""
        return self._pinned.new(shape, dtype)

    def to_device(self, host: Tensor) -> Tensor:
        """Queue a copy to the device. Pageable memory is read now, pinned memory when the copy runs.

        Raises:
            OpArgumentError: the tensor is on the device already.
            HostBufferReuseError: later, if a pinned source changed before the copy ran.
        """
        if isinstance(host, FakeTensor):
            raise OpArgumentError("to_device was given a tensor of the device; it takes one of the host")
        made = self.empty(tuple(host.shape), host.dtype)
        self.submit(copy_in(self.ref(made), host, late=host in self._pinned, detect=self._detect))
        return made

    def write(self, target: Tensor, host: Tensor) -> None:
        """Queue a copy into memory that exists; the host tensor is read now.

        Raises:
            OpArgumentError: shape or dtype differ.
            CaptureError: a graph is being captured, which would repeat the copy of a moment.
        """
        self._write(target, host, late=False)

    def write_later(self, target: Tensor, host: Tensor) -> None:
        """As `write`; pinned memory is read when the copy runs.

        Raises:
            HostBufferReuseError: later, if a pinned source changed before the copy ran.
        """
        self._write(target, host, late=host in self._pinned)

    def _write(self, target: Tensor, host: Tensor, *, late: bool) -> None:
        self.refuse_in_graph("a copy from the host")
        ref = self.ref(target)
        if isinstance(host, FakeTensor) or (tuple(host.shape), host.dtype) != (ref.shape, ref.dtype):
            raise OpArgumentError(
                f"write was given a {type(host).__name__} of {list(host.shape)} {host.dtype} for a target of "
                f"{list(ref.shape)} {ref.dtype}; it takes a host tensor of the same shape and dtype"
            )
        self.submit(copy_in(ref, host, late=late, detect=self._detect))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host and wait for it, and for what comes before it on this stream."""
        self.sync_guard.check("to_host")
        return self.to_host_later(tensor).wait()

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """Queue a copy to the host; the result can be read once the host has waited for it."""
        with self._lock:
            self.refuse_in_graph("a copy to the host")
            work, target = copy_out(self.ref(tensor))
            return HostCopy(self, self.submit(work), target)

    def landing(self, shape: tuple[int, ...], dtype: torch.dtype) -> NewMemory:
        """Every copy has memory of its own, which nobody finds overwritten."""
        return NewMemory(self)

    def event(self) -> FakeEvent:
        """A new event; until it is recorded it counts as reached."""
        return FakeEvent(self)

    def pool(self, name: str, limit_bytes: int | None = None) -> FakePool:
        """The memory pool of that name, made on first use; it reserves memory in earnest."""
        with self._lock:
            found = self._pools.setdefault(name, FakePool(name, self, self._memory, self._lock))
            if limit_bytes is not None:
                found.account.set_limit(limit_bytes)
            return found

    def pools(self) -> dict[str, PoolStats]:
        """What every pool holds; memory that waits in a queue to be freed is not free."""
        with self._lock:
            return {name: pool.account.stats() for name, pool in self._pools.items()}

    def stream(self) -> FakeStream:
        """A new stream."""
        with self._lock:
            return FakeStream(self, self._device.new_stream())

    def current_stream(self) -> FakeStream:
        """The stream that work of this thread goes to; at first the device's own."""
        return FakeStream(self, self.stream_number)

    @property
    def stream_number(self) -> int:
        """Number of the current stream."""
        number: int = getattr(self._here, "stream", 0)
        return number

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Work that this thread submits inside goes to that stream; memory allocated inside is freed in its order.

        Raises:
            OpArgumentError: it is a stream of another device.
            CaptureError: a graph is being captured.
        """
        self.refuse_in_graph("a change of stream")
        if not isinstance(stream, FakeStream) or stream.runtime is not self:
            raise OpArgumentError(f"{stream} is not a stream of this device")
        before, self._here.stream = self.stream_number, stream.number
        try:
            yield
        finally:
            self._here.stream = before

    def communicator(self, rendezvous: Rendezvous | None = None) -> FakeCommunicator:
        """Ranks are processes, or threads with a fake device each; messages pass through the hosts."""
        return FakeCommunicator(self, join(rendezvous or Rendezvous()))

    def synchronize(self) -> None:
        """Run everything and wait for it.

        Raises:
            CaptureError: a graph is being captured.
            DeviceError: what went wrong since the host last looked.
        """
        with self._lock:
            self.refuse_in_graph("synchronize")
            self.sync_guard.check("synchronize")
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

    def lose(self, why: str) -> None:
        """Lose the device for good; for work that finds out, in the device's thread."""
        self._device.lose(why)

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
            return self._device.submit(work, self.stream_number, self._known)

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
            self.sync_guard.check(what)
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

    def recycle(self, tensor: Tensor) -> Tensor:
        """The same memory as a new tensor of poison; a use of tensors made of it before is found, as after a free."""
        with self._lock:
            self.refuse_in_graph("recycling memory")
            if not isinstance(tensor, FakeTensor):
                raise HostAccessError("recycle", f"it was given a tensor on {tensor.device}")
            old = tensor.allocation
            made = FakeTensor(old.renewed(), tensor.shadow)
            renew = partial(self._memory.renew, old.block)
            self._device.submit(Work("recycle", renew, always=True), old.stream, self._known)
            return made

    def watch(self, op: OpSpec[..., Any], plan: Plan) -> Plan:
        """The plan, with its promises held against what it does."""
        return WatchedPlan(op, plan, self)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A capturable plan runs inside, in this thread: allocations and waits are errors that name it."""
        before: str | None = getattr(self._here, "running", None)
        self._here.running = name
        try:
            yield
        finally:
            self._here.running = before

    def _refuse_in_run(self, what: str) -> None:
        running: str | None = getattr(self._here, "running", None)
        if running is not None:
            raise BrokenPromiseError(
                f"the plan of {running} {what} while it ran, though it is capturable: results go to `out`, what it "
                "needs besides is scratch_bytes and persistent_bytes"
            )

    def refuse_in_graph(self, what: str) -> None:
        """Raise a `CaptureError` while a graph is captured; `what` says what was tried."""
        self._refuse_in_run(f"did what a graph cannot hold ({what})")
        if self._graph is not None:
            raise CaptureError(f"{what} while a graph is captured: a graph holds device work of one stream alone")

    def _learn(self, work: Work) -> None:
        for stream, count in work.clock.items():
            self._known[stream] = max(self._known.get(stream, 0), count)

    def _bury(self) -> None:
        """Queue the freeing of blocks whose last tensor has died."""
        while self._memory.deaths:
            death = self._memory.deaths.popleft()
            free = partial(self._memory.free, death.block, death.account)
            self._device.submit(Work("free", free, always=True), death.stream, self._known)
