"""Collectives over host memory by direct exchange: every rank sends to every rank that needs it, and adds by itself.

No trees and no rings. A rank hears from each other rank directly, so the one that it does not hear from is the one at
fault, and sums are made in rank order by each. It is the reference that device collectives are held to, and what
processes without a better network use; `deepinfer.ops.sockets` carries its messages.

Before its data a rank sends what it is about to do, in words. Where two ranks' words differ both say so, instead of
waiting for bytes that never come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from deepinfer.ops.collectives import DEFAULT_TIMEOUT, Reduction
from deepinfer.ops.errors import CollectiveError, CollectiveTimeoutError, DeviceError, OpArgumentError, RankLostError
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

_WORDS: Final = 256
"""Bytes of the message that says what a rank is about to do."""


class PeerError(Exception):
    """A message to or from a peer did not pass; `late` when time ran out, else the peer is gone."""

    def __init__(self, peer: int, *, late: bool) -> None:
        super().__init__(peer, late)
        self.peer = peer
        self.late = late


class Peers(Protocol):
    """The way from one rank to the others of its group, which are numbered by their places in it."""

    def send(self, peer: int, data: Tensor) -> None:
        """Start to send bytes; they stay as they are until `flush`.

        Args:
            peer: to whom; messages to one peer arrive in order.
            data: [n] uint8, n > 0.

        Raises:
            PeerError: it is gone.
        """
        ...

    def receive(self, peer: int, data: Tensor, deadline: float) -> None:
        """Fill [n] uint8 with the next message of a peer; it has that length.

        Raises:
            PeerError: it is gone, or the deadline (`time.monotonic`) has passed.
        """
        ...

    def flush(self, deadline: float) -> None:
        """Return when everything sent has left.

        Raises:
            PeerError: somebody did not take it.
        """
        ...

    def agree(self, verdict: Verdict) -> Verdict:
        """Say why this group ends, and return what was said first."""
        ...

    def subgroup(self, ranks: Sequence[int], timeout: float) -> Peers:
        """The way to some of them.

        Raises:
            CollectiveError: a rank did not come.
        """
        ...

    def close(self) -> None:
        """Leave; peers that need this rank see it gone."""
        ...


@dataclass(frozen=True)
class Verdict:
    """Why a group ended: the first failure, which those that follow from it are told by.

    Attributes:
        kind: "lost" and "late" name a rank that did not answer, "failed" one that said so itself; "mismatch" is ranks
            that do not agree on what to do.
        rank: whose fault it is, as the whole job counts.
        what: in words, after "rank n".
    """

    kind: Literal["lost", "late", "failed", "mismatch"]
    rank: int
    what: str

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Verdict:
        """From text."""
        return Verdict(**json.loads(text))

    def error(self, op: str, seconds: float) -> Exception:
        """As this rank raises it."""
        if self.kind == "mismatch":
            return OpArgumentError(f"{op}: rank {self.rank} {self.what}")
        kinds = {"lost": RankLostError, "late": CollectiveTimeoutError, "failed": CollectiveError}
        return kinds[self.kind](self.rank, op, seconds, self.what)


class HostCommunicator:
    """Implements `Communicator` for host tensors; synchronous, so results and errors are there on return.

    Args:
        group: the members as the whole job counts them.
        rank: this one's place among them.
        peers: the way to the others; a group of one needs none.
        timeout: seconds.
    """

    def __init__(
        self, group: Sequence[int] = (0,), rank: int = 0, peers: Peers | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.group = tuple(group)
        self.rank = rank
        self.world_size = len(self.group)
        self.timeout = timeout
        self.capturable = False
        self._peers = peers
        self._others = [place for place in range(self.world_size) if place != rank]
        self._calls = 0
        self._error: Exception | None = None
        self._closed = False

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.all_reduce`."""
        check_reduction(tensor, op)
        out = self._out("all_reduce", tensor, tensor.shape, out)
        own = tensor.contiguous()
        parts = [own if place == self.rank else torch.empty_like(own) for place in range(self.world_size)]
        self._exchange(f"all_reduce {op}", [own] * self.world_size, parts, timeout)
        return out.copy_(reduce_in_rank_order(parts, op))

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None, timeout: float | None = None) -> Tensor:
        """As `Communicator.all_gather`."""
        out = self._out("all_gather", tensor, gathered_shape(tensor, self.world_size), out)
        own = tensor.contiguous()
        parts = list(out.split([tensor.shape[0]] * self.world_size))
        self._exchange("all_gather", [own] * self.world_size, parts, timeout)
        parts[self.rank].copy_(own)
        return out

    def reduce_scatter(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.reduce_scatter`."""
        check_reduction(tensor, op)
        shape = scattered_shape(tensor, self.world_size)
        out = self._out("reduce_scatter", tensor, shape, out)
        pieces = list(tensor.contiguous().split([shape[0]] * self.world_size))
        own = pieces[self.rank]
        parts = [own if place == self.rank else torch.empty_like(own) for place in range(self.world_size)]
        self._exchange(f"reduce_scatter {op}", pieces, parts, timeout)
        return out.copy_(reduce_in_rank_order(parts, op))

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
        pieces = list(sent_apart(tensor, out).split(list(send_splits)))
        parts = list(out.split(list(recv_splits)))
        self._exchange("all_to_all", pieces, parts, timeout)
        parts[self.rank].copy_(pieces[self.rank])
        return out

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.broadcast`."""
        check_root(root, self.world_size)
        out = self._out("broadcast", tensor, tensor.shape, out)
        nothing = out.new_empty(0)  # what comes back to the root, so that it notices who is gone or does something else
        sent: list[Tensor | None] = [None] * self.world_size
        parts: list[Tensor | None] = [None] * self.world_size
        if self.rank == root:
            out.copy_(tensor)
            sent, parts = [out] * self.world_size, [nothing] * self.world_size
        else:
            sent[root], parts[root] = nothing, out
        self._exchange(f"broadcast of {self.group[root]}", sent, parts, timeout)
        return out

    def barrier(self, *, timeout: float | None = None) -> None:
        """As `Communicator.barrier`."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._exchange("barrier", [nothing] * self.world_size, [nothing] * self.world_size, timeout)

    def subgroup(self, ranks: Sequence[int]) -> HostCommunicator:
        """As `Communicator.subgroup`."""
        self._check_open()
        check_members(ranks, self.rank, self.world_size)
        group = [self.group[place] for place in ranks]
        peers = self._peers.subgroup(ranks, self.timeout) if self._peers is not None and len(ranks) > 1 else None
        return HostCommunicator(group, list(ranks).index(self.rank), peers, self.timeout)

    def abort(self, verdict: Verdict) -> None:
        """Leave the group for a reason that the others are to be told; called by the thread that makes its calls."""
        if not self._closed and self._error is None:
            self._error = verdict.error("abort", 0.0)
            if self._peers is not None:
                self._peers.agree(verdict)
                self._peers.close()

    def close(self) -> None:
        """As `Communicator.close`."""
        self._closed = True
        if self._peers is not None:
            self._peers.close()

    def _out(self, op: str, tensor: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
        for given in (tensor, out):
            if given is not None and given.device.type != "cpu":
                raise OpArgumentError(f"{op}: this communicator takes tensors of the host, got one on {given.device}")
        if out is None:
            return torch.empty(tuple(shape), dtype=tensor.dtype)
        check_out(op, out, shape, tensor)
        return out

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("this communicator was closed; make another with runtime.communicator")
        if self._error is not None:
            raise self._error

    def _exchange(
        self, op: str, sent: Sequence[Tensor | None], parts: Sequence[Tensor | None], timeout: float | None
    ) -> None:
        """Send one contiguous tensor to each peer and receive one from each; None is no message that way."""
        self._check_open()
        self._calls += 1
        began = time.monotonic()
        deadline = began + (self.timeout if timeout is None else timeout)
        try:
            self._send(op, sent)
            for peer in self._others:
                part = parts[peer]
                if part is not None:
                    self._receive(peer, self._words(op, part), part, deadline)
            if self._peers is not None:
                self._peers.flush(deadline)
        except PeerError as error:
            what = "did not take part in time" if error.late else "is gone"
            self._fail(Verdict("late" if error.late else "lost", self.group[error.peer], what), op, began)
        except _WordsDifferError as error:
            self._fail(Verdict("mismatch", self.group[error.peer], error.what), op, began)

    def _send(self, op: str, sent: Sequence[Tensor | None]) -> None:
        for peer in self._others:
            piece = sent[peer]
            if piece is not None and self._peers is not None:
                words = self._words(op, piece).encode().ljust(_WORDS)
                self._peers.send(peer, torch.frombuffer(bytearray(words), dtype=torch.uint8))
                if piece.numel():
                    self._peers.send(peer, _bytes(piece))

    def _receive(self, peer: int, expected: str, part: Tensor, deadline: float) -> None:
        assert self._peers is not None  # there is a peer to hear from
        words = torch.empty(_WORDS, dtype=torch.uint8)
        self._peers.receive(peer, words, deadline)
        theirs = words.numpy().tobytes().decode().rstrip()
        if theirs != expected:
            raise _WordsDifferError(peer, f"sends {theirs!r}, where rank {self.group[self.rank]} expects {expected!r}")
        if part.numel():
            self._peers.receive(peer, _bytes(part), deadline)

    def _words(self, op: str, tensor: Tensor) -> str:
        words = f"call {self._calls}: {op}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return words[:_WORDS]  # ASCII; what is cut off is the end of a shape of some thirty sizes

    def _fail(self, verdict: Verdict, op: str, began: float) -> None:
        seconds = time.monotonic() - began
        assert self._peers is not None  # nobody else can fail
        if self._error is None:
            self._error = self._peers.agree(verdict).error(op, seconds)
        self._peers.close()
        raise self._error


class _WordsDifferError(Exception):
    """A peer is about to do something else."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(peer, what)
        self.peer = peer
        self.what = what


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
