"""Memory of results inside captured steps: one region that all graphs of an engine share.

A graph writes its results to the addresses that it was captured with, so they cannot come from the arenas of steps.
Graphs run one after the other on one stream, and what one leaves behind is read before the next one begins; so all of
them use the same region, which is as large as the largest needs.

Within a piece of a step, memory is used again once nobody holds the result that was there: work of one stream is done
in order, so whoever gets it writes behind the last that reads it. That takes a runtime that can tell; without it each
result of a piece has its own.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepinfer.ops.errors import OutOfDeviceMemoryError
from deepinfer.ops.runtime import Runtime

POOL: Final = "graphs"
"""Name of the memory pool that results and inputs of captured steps come from."""
GRAPH_BYTES: Final = 8 << 30
"""The most that results of captured steps take in all, when a step needs it."""
GRAPH_SHARE: Final = 1 / 16
"""The most that it may be of the memory that is free before caches are made; caches leave so much."""
_CHUNK: Final = 16 << 20
_ALIGN: Final = 256


@runtime_checkable
class SplittingRuntime(Protocol):
    """What a runtime has besides, if torch can tell of a part of its memory when nobody uses it any more."""

    def alone(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor whose storage is its own, and lives as long as any view of it."""
        ...


class Place(NamedTuple):
    """A point of the region: which chunk, and how many bytes of it are taken."""

    chunk: int = 0
    offset: int = 0


class GraphMemory:
    """Hands out results from a place of the region that its user sets.

    Args:
        runtime: where chunks come from; they are kept for ever, since graphs know their addresses.
        limit_bytes: the most that is kept. What is beyond comes from the device's allocator, and is marked.

    Attributes:
        place: behind all that was handed out since `begin`.
        has_overflowed: a result since this was last set to False is in memory that is not kept, so that no graph may
            hold it.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int = GRAPH_BYTES) -> None:
        self._runtime = runtime
        self._splitting = runtime if isinstance(runtime, SplittingRuntime) else None
        self._limit = limit_bytes
        self._chunks: list[Tensor] = []
        self._free: list[tuple[Place, int]] = []
        """Places below `place` that nobody uses, and their bytes, in order; no two of them touch."""
        self._returned: deque[tuple[int, Place, int]] = deque()
        """Piece, place and bytes of what nobody holds any more. Whoever lets go last only adds to it: that may be the
        collector of cycles, in any thread and in the middle of a call here."""
        self._piece = 0
        self.place = Place()
        self.has_overflowed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def begin(self, place: Place = Place()) -> None:  # noqa: B008  # a constant
        """Hand out what comes next from there on. Results from before stay where they are, and are not used again."""
        self.place = place
        self._free.clear()
        self._piece += 1

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One result, of undefined contents."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        taken = -(-max(size, 1) // _ALIGN) * _ALIGN
        while self._returned:
            self._take_back(*self._returned.popleft())
        found = self._used_before(taken) or self._fresh(taken)
        if found is None:
            self.has_overflowed = True
            return self._runtime.empty(shape, dtype)
        memory = self._chunks[found.chunk][found.offset : found.offset + taken]
        if self._splitting is not None:
            with torch.inference_mode(False):  # written in any mode later
                memory = self._splitting.alone(memory)
            weakref.finalize(memory.untyped_storage(), self._returned.append, (self._piece, found, taken))
        return memory[:size].view(dtype).view(shape)

    def _used_before(self, taken: int) -> Place | None:
        """The smallest free place of the piece that is large enough."""
        fits = [(size, index) for index, (_, size) in enumerate(self._free) if size >= taken]
        if not fits:
            return None
        size, index = min(fits)
        place, _ = self._free[index]
        rest = [(Place(place.chunk, place.offset + taken), size - taken)] if size > taken else []
        self._free[index : index + 1] = rest
        return place

    def _fresh(self, taken: int) -> Place | None:
        """The next place behind all others; None at the limit."""
        number, offset = self.place
        while number < len(self._chunks) and offset + taken > self._chunks[number].shape[0]:
            number, offset = number + 1, 0
        if number == len(self._chunks) and not self._grow(taken):
            return None
        self.place = Place(number, offset + taken)
        return Place(number, offset)

    def _take_back(self, piece: int, place: Place, size: int) -> None:
        """Add a place that nobody holds any more to the free ones, if it is of this piece."""
        if piece != self._piece:
            return
        at = bisect_left(self._free, (place, 0))
        end = Place(place.chunk, place.offset + size)
        if at < len(self._free) and self._free[at][0] == end:
            size += self._free.pop(at)[1]
        if at:
            before, length = self._free[at - 1]
            if Place(before.chunk, before.offset + length) == place:
                place, size, at = before, length + size, at - 1
                del self._free[at]
        self._free.insert(at, (place, size))

    def _grow(self, num_bytes: int) -> bool:
        size = max(num_bytes, min(_CHUNK, self._limit // 4))
        if self.num_bytes + size > self._limit:
            return False
        try:
            with torch.inference_mode(False):
                self._chunks.append(self._runtime.pool(POOL).empty((size,), torch.uint8))
        except OutOfDeviceMemoryError:
            return False
        return True
