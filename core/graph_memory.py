"""Memory of results inside captured steps: one region that all graphs of an engine share.

A graph writes its results to the addresses that it was captured with, so they cannot come from the arenas of steps.
Graphs run one after the other on one stream, and what one leaves behind is read before the next one begins; so all of
them start at the beginning of the same region, which is as large as the largest needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.ops.errors import OutOfDeviceMemoryError
from deepinfer.ops.runtime import Runtime

POOL: Final = "graphs"
"""Name of the memory pool that results and inputs of captured steps come from."""
GRAPH_BYTES: Final = 8 << 30
"""The most that results of captured steps take in all, when a step needs it. Nothing is used twice in a step, so the
largest steps of a model of 40 layers come to several GiB."""
_CHUNK: Final = 16 << 20
_ALIGN: Final = 256


class Place(NamedTuple):
    """A point of the region: which chunk, and how many bytes of it are taken."""

    chunk: int = 0
    offset: int = 0


class GraphMemory:
    """Hands out results one behind the other, from a place that its user sets; the same calls give the same memory.

    Args:
        runtime: where chunks come from; they are kept for ever, since graphs know their addresses.
        limit_bytes: the most that is kept. What is beyond comes from the device's allocator, and is marked.

    Attributes:
        place: where the next result goes.
        has_overflowed: a result since this was last set to False is in memory that is not kept, so that no graph may
            hold it.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int = GRAPH_BYTES) -> None:
        self._runtime = runtime
        self._limit = limit_bytes
        self._chunks: list[Tensor] = []
        self.place = Place()
        self.has_overflowed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One result, of undefined contents."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        taken = -(-max(size, 1) // _ALIGN) * _ALIGN
        number, offset = self.place
        while number < len(self._chunks) and offset + taken > self._chunks[number].shape[0]:
            number, offset = number + 1, 0
        if number == len(self._chunks) and not self._grow(taken):
            self.has_overflowed = True
            return self._runtime.empty(shape, dtype)
        self.place = Place(number, offset + taken)
        return self._chunks[number][offset : offset + size].view(dtype).view(shape)

    def _grow(self, num_bytes: int) -> bool:
        size = max(num_bytes, _CHUNK)
        if self.num_bytes + size > self._limit:
            return False
        try:
            with torch.inference_mode(False):  # written in any mode later
                self._chunks.append(self._runtime.pool(POOL).empty((size,), torch.uint8))
        except OutOfDeviceMemoryError:
            return False
        return True
