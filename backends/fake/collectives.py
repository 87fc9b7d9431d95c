"""Collectives of the fake device: queued like ops, late, and able to fail.

The device's thread carries the bytes of hidden memory through the host's communicator, so values and the order of sums
are the reference's. What the host sees is what a hard device shows: the call returns at once, an error comes when it
next waits, and a rank that dies takes its device along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.backends.fake.memory import Ref
from deepinfer.backends.fake.streams import Work
from deepinfer.ops.collectives import Reduction
from deepinfer.ops.errors import CollectiveError, DeviceError, DeviceLostError
from deepinfer.ops.exchange import HostCommunicator, Verdict
from deepinfer.ops.reductions import (
    check_out,
    check_reduction,
    check_root,
    exchanged_shape,
    gathered_shape,
    scattered_shape,
)

if TYPE_CHECKING:
    from deepinfer.backends.fake.runtime import FakeRuntime


class FakeCommunicator:
    """Implements `deepinfer.ops.collectives.Communicator`.

    Args:
        runtime: this rank's device.
        host: the way to the other ranks; used by the device's thread alone.
    """

    def __init__(self, runtime: FakeRuntime, host: HostCommunicator) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self.group = host.group
        self.timeout = host.timeout
        self.capturable = False
        self._runtime = runtime
        self._host = host
        self._last: Work | None = None
        self._closed = False

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.all_reduce`."""
        check_reduction(tensor, op)
        return self._queue("all_reduce", tensor, tuple(tensor.shape), out, op, timeout=timeout)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None, timeout: float | None = None) -> Tensor:
        """As `Communicator.all_gather`."""
        return self._queue("all_gather", tensor, gathered_shape(tensor, self.world_size), out, timeout=timeout)

    def reduce_scatter(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.reduce_scatter`."""
        check_reduction(tensor, op)
        return self._queue("reduce_scatter", tensor, scattered_shape(tensor, self.world_size), out, op, timeout=timeout)

    def all_to_all(
        self,
        tensor: Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """As `Communicator.all_to_all`."""
        send, receive = tuple(send_splits), tuple(recv_splits)
        shape = exchanged_shape(tensor, send, receive, self.rank, self.world_size)
        return self._queue("all_to_all", tensor, shape, out, send, receive, timeout=timeout)

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.broadcast`; a tensor of another rank than the root's need not have been written."""
        check_root(root, self.world_size)
        result, source, target = self._ends("broadcast", tensor, tuple(tensor.shape), out)

        def run() -> None:
            # What others pass says shape and dtype alone, and may never have been written.
            target.view().copy_(self._host.broadcast(source.view(), root, timeout=timeout))

        self._submit("broadcast", run, (source,) if root == self.rank else (), (target,))
        return result

    def barrier(self, *, timeout: float | None = None) -> None:
        """As `Communicator.barrier`; the host waits for its current stream."""
        work = self._submit("barrier", lambda: self._host.barrier(timeout=timeout), (), ())
        self._runtime.wait_for(work, "a barrier")

    def subgroup(self, ranks: Sequence[int]) -> FakeCommunicator:
        """As `Communicator.subgroup`; the host waits for what was called here before."""
        self._drain()
        return FakeCommunicator(self._runtime, self._host.subgroup(ranks))

    def close(self) -> None:
        """As `Communicator.close`."""
        if not self._closed:
            self._closed = True
            try:
                self._drain()
            finally:
                self._host.close()

    def _drain(self) -> None:
        if self._last is not None and not self._last.done:
            self._runtime.wait_for(self._last, "the end of a communicator's work")

    def _ends(self, name: str, tensor: Tensor, shape: tuple[int, ...], out: Tensor | None) -> tuple[Tensor, Ref, Ref]:
        source = self._runtime.ref(tensor)
        if out is not None:
            check_out(name, out, shape, tensor)
        result = self._runtime.empty(shape, tensor.dtype) if out is None else out
        return result, source, self._runtime.ref(result)

    def _queue(
        self,
        name: str,
        tensor: Tensor,
        shape: tuple[int, ...],
        out: Tensor | None,
        *options: Any,
        timeout: float | None,
    ) -> Tensor:
        """Queue the host's collective of that name on hidden memory."""
        result, source, target = self._ends(name, tensor, shape, out)

        def run() -> None:
            target.view().copy_(getattr(self._host, name)(source.view(), *options, timeout=timeout))

        self._submit(name, run, (source,), (target,))
        return result

    def _submit(self, name: str, run: Callable[[], None], reads: tuple[Ref, ...], writes: tuple[Ref, ...]) -> Work:
        if self._closed:
            raise DeviceError("this communicator was closed; make another with runtime.communicator")
        runtime = self._runtime
        runtime.refuse_in_graph("a collective")
        if self._last is not None and self._last.stream != runtime.stream_number:
            runtime.submit(Work("wait", after=self._last, always=True))  # calls happen in their order, on any streams
        work = Work(name, lambda: self._take_part(name, run), reads, writes, collective=True, dropped=self._drop)
        self._last = runtime.submit(work, launch=True)
        return self._last

    def _take_part(self, name: str, run: Callable[[], None]) -> None:
        """Run in the device's thread, with the faults that were asked for."""
        fault = self._runtime.faults.at_collective(name)
        me = self.group[self.rank]
        if fault is not None and fault.kind == "slow_rank":
            time.sleep(fault.seconds)
        elif fault is not None and fault.kind == "death":
            why = f"rank {me} died as it came to {name}: a fault that its plan asked for"
            self._runtime.lose(why)
            self._host.abort(Verdict("lost", me, "is gone"))
            raise DeviceLostError(why)
        elif fault is not None:
            verdict = Verdict("failed", me, "failed: a fault that its plan asked for")
            self._host.abort(verdict)
            raise CollectiveError(me, name, 0.0, verdict.what)
        run()

    def _drop(self) -> None:
        self._host.abort(Verdict("failed", self.group[self.rank], "failed before it came to the collective"))
