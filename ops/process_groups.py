"""Collectives between devices by a process group of torch, whichever library the group is made of.

The group moves bytes only. Sums are made here from what was gathered, in rank order, because a ring adds in another
order on every rank and for every size: results have the bits that the contract asks for, at the price of moving
world_size times the data of a small tensor. Everything is queued on the current stream; nothing waits for the host.

When something fails, every rank that noticed says so in the store. The rank that said nothing is the one to name, or
one that began when another's time was over already; clocks of hosts have to agree better than timeouts last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from deepinfer.ops.collectives import Communicator, Reduction
from deepinfer.ops.errors import CollectiveError, CollectiveTimeoutError, DeviceError, RankLostError
from deepinfer.ops.reductions import (
    check_members,
    check_out,
    check_reduction,
    check_root,
    exchanged_shape,
    gathered_shape,
    reduce_in_rank_order,
    scattered_shape,
    sent_apart,
)

MakeGroup = Callable[[Store, int, int, timedelta], ProcessGroup]
"""(store, rank, world size, timeout) to a process group."""
_LATE: Final = "did not take part in time"
_REPORT_SECONDS: Final = 5.0
"""How long ranks that noticed a failure are waited for, so that the silent one can be named."""


class GroupCommunicator:
    """Implements `Communicator` over a process group.

    Args:
        device: of the tensors it takes.
        store: which all members reach.
        group: the members as the whole job counts them.
        rank: this one's place among them.
        timeout: seconds.
        make_group: makes the process group.
        settle: blocks the host until the device's current stream is done; None where collectives are done on return.
        capturable: its collectives may be captured in a graph.
    """

    def __init__(
        self,
        device: torch.device,
        store: Store,
        group: Sequence[int],
        rank: int,
        timeout: float,
        make_group: MakeGroup,
        settle: Callable[[], object] | None = None,
        *,
        capturable: bool = False,
    ) -> None:
        self.device = device
        self.group = tuple(group)
        self.rank = rank
        self.world_size = len(self.group)
        self.timeout = timeout
        self.capturable = capturable
        self._store = store
        self._make_group = make_group
        self._settle = settle
        self._subgroups = 0
        self._closed = False
        self._error: Exception | None = None
        self._meet()
        self._process_group = make_group(PrefixStore("group", store), rank, self.world_size, timedelta(seconds=timeout))

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.all_reduce`."""
        check_reduction(tensor, op)
        out = self._out("all_reduce", tensor, tuple(tensor.shape), out)
        parts = tensor.new_empty((self.world_size, *tensor.shape))
        self._gather("all_reduce", parts, tensor, timeout)
        return out.copy_(reduce_in_rank_order(parts.unbind(0), op))

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None, timeout: float | None = None) -> Tensor:
        """As `Communicator.all_gather`."""
        out = self._out("all_gather", tensor, gathered_shape(tensor, self.world_size), out)
        self._gather("all_gather", out, tensor, timeout)
        return out

    def reduce_scatter(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.reduce_scatter`."""
        check_reduction(tensor, op)
        shape = scattered_shape(tensor, self.world_size)
        out = self._out("reduce_scatter", tensor, shape, out)
        parts = tensor.new_empty((self.world_size, *shape))
        counts = [parts[0].nbytes] * self.world_size
        self._exchange("reduce_scatter", parts, tensor, counts, counts, timeout)
        return out.copy_(reduce_in_rank_order(parts.unbind(0), op))

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
        shape = exchanged_shape(tensor, send_splits, recv_splits, self.rank, self.world_size)
        out = self._out("all_to_all", tensor, shape, out)
        row = tensor.element_size()
        for size in tensor.shape[1:]:
            row *= size
        sent = sent_apart(tensor, out)
        received, given = [n * row for n in recv_splits], [n * row for n in send_splits]
        self._exchange("all_to_all", out, sent, received, given, timeout)
        return out

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.broadcast`."""
        check_root(root, self.world_size)
        out = self._out("broadcast", tensor, tuple(tensor.shape), out)
        if self.rank == root:
            out.copy_(tensor)
        if out.numel():
            self._run("broadcast", lambda: self._process_group.broadcast(_bytes(out), root), timeout)
        return out

    def barrier(self, *, timeout: float | None = None) -> None:
        """As `Communicator.barrier`."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device), timeout=timeout)
        if self._settle is not None:
            with self._failures_named("barrier", timeout):
                self._settle()

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """As `Communicator.subgroup`."""
        self._check_open()
        check_members(ranks, self.rank, self.world_size)
        self._subgroups += 1
        name = f"subgroup {','.join(map(str, ranks))} {self._subgroups}"
        return GroupCommunicator(
            self.device,
            PrefixStore(name, self._store),
            [self.group[place] for place in ranks],
            list(ranks).index(self.rank),
            self.timeout,
            self._make_group,
            self._settle,
            capturable=self.capturable,
        )

    def close(self) -> None:
        """As `Communicator.close`."""
        if not self._closed:
            self._closed = True
            if self._error is None:
                self._process_group.shutdown()

    def _meet(self) -> None:
        """Wait for every member, so that one that does not come is named before the group is made."""
        began = time.monotonic()
        self._store.set(f"here {self.rank}", "1")
        for place in range(self.world_size):
            left = max(self.timeout - (time.monotonic() - began), 0.001)
            try:
                self._store.wait([f"here {place}"], timedelta(seconds=left))
            except RuntimeError as error:
                seconds = time.monotonic() - began
                raise CollectiveTimeoutError(self.group[place], "join", seconds, "did not come") from error

    def _gather(self, op: str, into: Tensor, tensor: Tensor, timeout: float | None) -> None:
        own = _bytes(tensor.contiguous())
        if own.numel():
            self._run(op, lambda: self._process_group._allgather_base(_bytes(into), own), timeout)

    def _exchange(
        self,
        op: str,
        into: Tensor,
        tensor: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        timeout: float | None,
    ) -> None:
        own, result = _bytes(tensor.contiguous()), _bytes(into)
        self._run(op, lambda: self._process_group.alltoall_base(result, own, list(receive), list(send)), timeout)

    def _out(self, op: str, tensor: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
        if out is None:
            return tensor.new_empty(shape)
        check_out(op, out, shape, tensor)
        return out

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("this communicator was closed; make another with runtime.communicator")
        if self._error is not None:
            raise self._error

    def _run(self, op: str, start: Callable[[], Work], timeout: float | None) -> None:
        """Queue a collective. With a timeout of its own the host waits for it: no queue can be told of the time."""
        with self._failures_named(op, timeout):
            work = start()
            if timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout))

    @contextmanager
    def _failures_named(self, op: str, timeout: float | None) -> Iterator[None]:
        """Turn what the library or the device raises inside into an error that names a rank; it is kept."""
        self._check_open()
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_late = time.monotonic() - began >= (self.timeout if timeout is None else timeout)
            self._error = self._who_failed(op, began, is_late=is_late)
            raise self._error from error

    def _who_failed(self, op: str, began: float, *, is_late: bool) -> CollectiveError:
        """The rank that does not report the failure that the others saw, or that came when it was too late."""
        seconds, gave_up = time.monotonic() - began, time.time()
        self._store.set(f"failed {self.rank}", str(gave_up - seconds))
        deadline = time.monotonic() + min(_REPORT_SECONDS, self.timeout)
        late = None
        for place in range(self.world_size):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait([f"failed {place}"], timedelta(seconds=left))
            except RuntimeError:
                if is_late:
                    return CollectiveTimeoutError(self.group[place], op, seconds, _LATE)
                seconds = time.monotonic() - began
                return RankLostError(self.group[place], op, seconds, "is gone or does not answer")
            if is_late and late is None and float(self._store.get(f"failed {place}")) > gave_up:
                late = place
        if late is not None:
            return CollectiveTimeoutError(self.group[late], op, seconds, _LATE)
        return CollectiveError(self.group[self.rank], op, time.monotonic() - began, "and all others report a failure")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
