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
    """

    __slots__ = ("buffer", "generation", "pristine", "size", "written")

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.written = False
        self.pristine = size >= _LARGE
        self.buffer = torch.zeros(size, dtype=torch.uint8) if self.pristine else _poisoned(size)

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

    def check(self, work: str, *, reads: bool) -> None:
        """Refuse memory that is not this tensor's any more, or (`reads`) that nothing has written.

        Raises:
            UseAfterFreeError: the block was freed.
            UnwrittenReadError: the block holds poison.
        """
        what = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        if self.block.generation != self.generation:
            raise UseAfterFreeError(
                f"{work} used {what} at {self.block.address:#x} after it was freed: its last tensor died, and nothing "
                "on the stream that frees it waits for this work"
            )
        if reads and not self.block.written and not self.empty:
            raise UnwrittenReadError(
                f"{work} read {what} at {self.block.address:#x}, which nothing has written yet: the work that writes "
                "it was skipped, or no event makes this stream wait for it"
            )


class Death(NamedTuple):
    """A block whose last tensor died, and the stream that owns it."""

    block: Block
    stream: int


class Allocation:
    """The host's handle on a block; when it dies the block is queued to be freed on its stream."""

    __slots__ = ("_deaths", "block", "generation", "stream")

    def __init__(self, block: Block, stream: int, deaths: deque[Death]) -> None:
        self.block = block
        self.generation = block.generation
        self.stream = stream
        self._deaths = deaths

    def ref(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Ref:
        """A tensor in this block."""
        return Ref(self.block, self.generation, dtype, tuple(shape), tuple(stride), offset)

    def __del__(self) -> None:
        self._deaths.append(Death(self.block, self.stream))  # any thread, any time: nothing else is safe here


class MemoryPool:
    """Hands out blocks within a limit.

    Args:
        limit: bytes in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.deaths: deque[Death] = deque()
        self._free: defaultdict[int, list[Block]] = defaultdict(list)

    def allocate(self, num_bytes: int, stream: int) -> Allocation | None:
        """A block of at least that many bytes; None when the limit does not allow it."""
        size = -(-max(num_bytes, 1) // _GRAIN) * _GRAIN
        if self.used + size > self.limit:
            return None
        self.used += size
        free = self._free[size]
        return Allocation(free.pop() if free else Block(size), stream, self.deaths)

    def free(self, block: Block) -> None:
        """Poison a block and make it available; called when the queue passes the point of its death."""
        self.used -= block.size
        block.generation += 1
        block.written = False
        if block.size < _LARGE:
            block.buffer.fill_(POISON)
            self._free[block.size].append(block)


def _poisoned(size: int) -> Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8)
