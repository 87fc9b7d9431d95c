"""Device memory: blocks with a limit, poison and generations.

A block is bytes that only the device thread touches. An `Allocation` is the host's handle: tensors and their views hold
it, queued work does not, so the program's own lifetimes decide when memory is free. It is free once the queue passes
the point where the last tensor died; then it is poisoned, its generation moves on, and its address is used again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.backends.fake.errors import UnwrittenReadError, UseAfterFreeError
from deepinfer.ops.errors import OutOfDeviceMemoryError
from deepinfer.ops.pools import PoolAccount

POISON: Final = 0xFF
"""Every byte of memory that holds nothing: NaN in every float format, -1 in integers."""
_GRAIN: Final = 256
_LARGE: Final = 16 << 20
"""Blocks from here on are given back to the system instead of poisoned, and start as zeros that cost nothing."""


class Block:
    """Bytes of device memory at a fixed address.

    Attributes:
        generation: how often the block has been freed; a tensor of an older generation is dead.
        written: something wrote it since it was handed out.
        pristine: it holds zeros and has never been written.
        accesses: queued work that touches it, as far as later work may have to be ordered behind it.
    """

    __slots__ = ("accesses", "buffer", "generation", "pristine", "size", "written")

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.written = False
        self.accesses: list[Access] = []
        self.pristine = size >= _LARGE
        self.buffer = torch.zeros(size, dtype=torch.uint8) if self.pristine else _poisoned(size)

    def end_life(self) -> None:
        """Whatever was made of the block so far is dead."""
        self.generation += 1
        self.written = self.pristine = False
        self.accesses.clear()

    @property
    def address(self) -> int:
        """First byte; equal for allocations that use the same block one after the other."""
        return self.buffer.data_ptr()


class Ref(NamedTuple):
    """A tensor as queued work holds it: where it is, without keeping it alive."""

    block: Block
    generation: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        """The hidden memory as a host tensor; for the device thread only."""
        return self.block.buffer.view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    @property
    def empty(self) -> bool:
        """It names no element."""
        return 0 in self.shape

    @property
    def extent(self) -> tuple[int, int]:
        """First byte of the block that it touches, and the one behind the last."""
        if self.empty:
            return 0, 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize

    def check(self, work: str, *, reads: bool) -> None:
        """Refuse memory that is not this tensor's any more, or (`reads`) that nothing has written.

        Raises:
            UseAfterFreeError: the block was freed.
            UnwrittenReadError: the block holds poison.
        """
        what = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        if self.block.generation != self.generation:
            raise UseAfterFreeError(
                f"{work} used {what} at {self.block.address:#x} after it was freed: its last tensor died, or it is the "
                "result of a step whose memory a later one has, and nothing on that stream waits for this work"
            )
        if reads and not self.block.written and not self.empty:
            raise UnwrittenReadError(
                f"{work} read {what} at {self.block.address:#x}, which nothing has written yet: the work that writes "
                "it was skipped, or no event makes this stream wait for it"
            )


class Access(NamedTuple):
    """Queued work that touches a part of a block.

    Attributes:
        stream: where it is queued.
        place: how many pieces of work its stream had before it.
        first: byte of the block.
        end: byte behind the last one.
        writes: whether it writes.
        work: name, for messages.
    """

    stream: int
    place: int
    first: int
    end: int
    writes: bool
    work: str


class Death(NamedTuple):
    """A block whose last tensor died, the stream that owns it, and the pool that it is booked in."""

    block: Block
    stream: int
    account: PoolAccount | None


class Allocation:
    """The host's handle on a block; when it dies the block is queued to be freed on its stream."""

    __slots__ = ("_deaths", "_is_over", "account", "block", "generation", "stream")

    def __init__(self, block: Block, stream: int, account: PoolAccount | None, deaths: deque[Death]) -> None:
        self.block = block
        self.generation = block.generation
        self.stream = stream
        self.account = account
        self._deaths = deaths
        self._is_over = False

    def renewed(self) -> Allocation:
        """The block's next life; this one is over once the queue passes here, though tensors still hold it."""
        made = Allocation(self.block, self.stream, self.account, self._deaths)
        made.generation = self.generation + 1
        self._is_over = True
        return made

    def ref(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Ref:
        """A tensor in this block."""
        return Ref(self.block, self.generation, dtype, tuple(shape), tuple(stride), offset)

    def __del__(self) -> None:
        if not self._is_over:  # any thread, any time: nothing else is safe here
            self._deaths.append(Death(self.block, self.stream, self.account))


class DeviceMemory:
    """Hands out blocks within a limit, on the account of a named pool or on nobody's.

    Args:
        limit: bytes in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.deaths: deque[Death] = deque()
        self._free: defaultdict[int, list[Block]] = defaultdict(list)

    def allocate(self, num_bytes: int, stream: int, account: PoolAccount | None = None) -> Allocation:
        """A block of at least that many bytes.

        Raises:
            OutOfDeviceMemoryError: the device's limit or the pool's does not allow it.
        """
        size = -(-max(num_bytes, 1) // _GRAIN) * _GRAIN
        self._take(size if account is None else account.growth(size), f"{num_bytes} bytes")
        if account is not None:
            account.take(size)
        free = self._free[size]
        return Allocation(free.pop() if free else Block(size), stream, account, self.deaths)

    def reserve(self, num_bytes: int, account: PoolAccount) -> None:
        """Set bytes aside for a pool.

        Raises:
            OutOfDeviceMemoryError: as `allocate`.
        """
        self._take(max(num_bytes - account.reserved_bytes, 0), f"{num_bytes} bytes for pool {account.name!r}")
        account.reserve(num_bytes)

    def release(self, account: PoolAccount) -> int:
        """Take back what a pool has set aside and does not use; returns how many bytes."""
        num_bytes = account.release()
        self.used -= num_bytes
        return num_bytes

    def free(self, block: Block, account: PoolAccount | None) -> None:
        """Poison a block and make it available; called when the queue passes the point of its death."""
        self.used -= block.size if account is None else account.give_back(block.size)
        block.end_life()
        if block.size < _LARGE:
            block.buffer.fill_(POISON)
            self._free[block.size].append(block)

    def renew(self, block: Block) -> None:
        """Poison a block that has a new use; called when the queue passes that point."""
        block.end_life()
        block.buffer.fill_(POISON)

    def _take(self, num_bytes: int, what: str) -> None:
        if self.used + num_bytes > self.limit:
            raise OutOfDeviceMemoryError(f"{what} do not fit: {self.used} of {self.limit} bytes are in use")
        self.used += num_bytes


def _poisoned(size: int) -> Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8)
