"""What ranks of a group do together: the contract of collectives, and where ranks meet.

A rank is a process (or a thread, for software devices) with one device. All implementations are held to the values of
`deepinfer.ops.exchange`, whose messages `deepinfer.ops.sockets` carries between processes over the host's network.

The contract:

- **Order.** A collective is work on the current stream: it sees what was submitted there before it, and returns before
  it is done where the device is asynchronous. Collectives of one communicator happen in the order of the calls,
  whatever the stream, so all ranks call the same ones in the same order. Two communicators of a rank are not ordered.
- **Buffers.** They follow the rules of ops: the input may be dropped after the call, the result is a new tensor of the
  calling device, or `out` where that is given: contiguous, of the result's shape and dtype, and the input itself only
  where shapes are equal. A communicator that can be captured (`capturable`) allocates nothing when it is given `out`.
- **Shapes.** Every rank passes the same dtype, and the same shape but for the rows of `all_to_all`. Zero rows, and zero
  rows towards some ranks, are ordinary. Splits are known on the host.
- **Dtypes.** Moves (`all_gather`, `all_to_all`, `broadcast`) take every dtype, and quantised data as uint8. Sums take
  float64, float32, bfloat16, float16, int64 and int32; `max` takes these, and uint8 and int8.
- **Sums** have the same bits again (D0), and on every rank, whoever comes last: group, dtype and shape alone decide the
  order of additions. Host memory is added in rank order, ((x0 + x1) + x2) and so on, bfloat16 and float16 in float32
  with one rounding at the end; a device may choose another fixed order. `max` of a NaN is NaN. Integers wrap.
- **Failure.** A rank that is gone or late is named within the timeout by every rank that needs it, as `RankLostError`
  or `CollectiveTimeoutError`; where one failure brings others about, all name the first. Ranks that do not agree get an
  `OpArgumentError` that says which rank asked for what, as far as the device can tell; the host can. Where work is
  asynchronous the error comes when the host next waits. After an error, or `close`, every call raises at once; other
  communicators are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from torch import Tensor

from deepinfer.ops.errors import OpArgumentError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so

Reduction = Literal["sum", "max"]
DEFAULT_TIMEOUT = 60.0
"""Seconds that ranks wait for one another unless told otherwise."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job meet, and which of them this one is.

    Attributes:
        rank: this rank, from 0.
        world_size: how many there are.
        store: a key-value store of `torch.distributed` that all ranks reach; a group of one needs none.
        timeout: seconds that a collective waits unless its call says otherwise; for joining, too.
        name: keeps the keys of several rendezvous in one store apart.
    """

    rank: int = 0
    world_size: int = 1
    store: Store | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT
    name: str = "deepinfer"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OpArgumentError(f"rank {self.rank} of {self.world_size}; ranks run from 0 to {self.world_size - 1}")
        if self.world_size > 1 and self.store is None:
            raise OpArgumentError(f"{self.world_size} ranks need a store to meet in; give one, or use from_environment")
        if not (self.timeout > 0 and isfinite(self.timeout)):
            raise OpArgumentError(f"timeout is {self.timeout} seconds; it must be a finite number above 0")

    @staticmethod
    def from_environment(timeout: float = DEFAULT_TIMEOUT) -> Rendezvous:
        """What torchrun and its like say: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; one rank without them.

        Raises:
            OpArgumentError: some are set and some are not; the missing ones are named.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if "WORLD_SIZE" in missing or os.environ["WORLD_SIZE"] == "1":
            return Rendezvous(timeout=timeout)
        if missing:
            raise OpArgumentError(
                f"WORLD_SIZE is set and {', '.join(missing)} not; a launcher such as torchrun sets all"
            )
        from torch.distributed import rendezvous  # type: ignore[attr-defined]

        store, rank, world_size = next(iter(rendezvous("env://")))
        return Rendezvous(rank, world_size, store, timeout)


@runtime_checkable
class Communicator(Protocol):
    """One rank's end of a group; the contract is the module's docstring.

    Attributes:
        rank: this rank within the group; its place in every concatenation.
        world_size: ranks in the group.
        group: the members as the whole job counts them, in order; errors name ranks so.
        timeout: seconds a collective waits when the call gives none.
        capturable: its collectives may be captured in a graph.
    """

    rank: int
    world_size: int
    group: tuple[int, ...]
    timeout: float
    capturable: bool

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """Elementwise sum or maximum over ranks, on every rank; the shape of `tensor`."""
        ...

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None, timeout: float | None = None) -> Tensor:
        """[n, ...] of every rank, one after the other: [world_size * n, ...]."""
        ...

    def reduce_scatter(
        self, tensor: Tensor, op: Reduction = "sum", *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """Reduce [world_size * n, ...] over ranks and keep this rank's [n, ...].

        Raises:
            OpArgumentError: the rows cannot be divided among the ranks.
        """
        ...

    def all_to_all(
        self,
        tensor: Tensor,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Send each rank its rows and receive from each what it has for this one.

        Args:
            tensor: [sum(send_splits), ...] rows for rank 0, then for rank 1, and so on.
            send_splits: rows for each rank.
            recv_splits: rows from each rank: entry r is entry `rank` of r's `send_splits`.
            out: where to write.
            timeout: seconds.

        Returns:
            [sum(recv_splits), ...] rows of rank 0, then of rank 1, and so on.

        Raises:
            OpArgumentError: splits that do not add up to the rows, or another rank's that do not fit.
        """
        ...

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, out: Tensor | None = None, timeout: float | None = None
    ) -> Tensor:
        """The root's tensor on every rank; that of the others only says shape and dtype. `root` counts in the group."""
        ...

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it; work submitted before on this rank is done then."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of some ranks of this group, called by these alone, in the same order on all.

        Args:
            ranks: places in this group, ascending; this rank is among them.
        """
        ...

    def close(self) -> None:
        """Leave the group once what was called is done; others that need this rank see it gone. Twice is once."""
        ...
