"""The forms of sparse attention, which give the same bits but for one, and the programs that each consists of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import torch

from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram

_FOLDER: Final = Path(__file__).parent / "cuda"
KEYS: Final = 64
"""Keys of a tile."""
FEW_ROWS: Final = 15
"""Up to so many rows a cluster of blocks works on each: more clusters of eight do not find room at once."""
BLOCKS_OF_ROW: Final = 8
_MOST_TILES_OF_FEW: Final = 10
_MOST_PARTS: Final = 220
"""Parts of rows up to which working on parts is faster than a block a row: twice as many as find room at once."""
_MOST_PARTS_OF_ROW: Final = 8
"""A block for each part of a row is a cluster, which has so many at most."""
MARKING_BYTES: Final = 128 << 10
"""Shared memory for a bit per slot of both caches; of larger ones, slots are marked in global memory one by one."""
MANY_ROWS: Final = 1024
"""From so many rows on records are decoded once for all rows, where there is scratch for them."""
_RECORD_BYTES: Final = 1024
RECORDS_PER_ROW: Final = 32
"""Scratch for decoded records, in records for each row of the largest step."""
_QUERY, _TILE = 65536, 65536
_ALIGNMENT: Final = 1024


class Form(enum.Enum):
    """How rows are divided among blocks, and where keys come from."""

    FEW = "a cluster of blocks a row"
    DIRECT = "blocks walk over rows and decode records"
    GATHERED = "blocks walk over rows and copy records decoded before"
    PARTS = "a cluster of blocks a row, each with a part of it; the only form with bits of its own"


@dataclass(frozen=True)
class Pages:
    """What kernels know about the caches at compile time.

    Attributes:
        window_records: records of a page of the window cache.
        kv_records: likewise of the other cache.
        kv_fp4: whether that one has e2m1 records.
    """

    window_records: int
    kv_records: int
    kv_fp4: bool

    def tiles(self, window_columns: int, kv_columns: int) -> int:
        """Tiles of both lists; those of e2m1 records come in pairs."""
        window, kv = -(-window_columns // KEYS), -(-kv_columns // KEYS)
        return window + (2 * -(-kv // 2) if self.kv_fp4 else kv)

    def parts(self, window_columns: int, kv_columns: int) -> int:
        """Parts of a row, of two tiles each, none with tiles of both lists."""
        tiles = self.tiles(window_columns, 0), self.tiles(0, kv_columns)
        return sum(-(-count // 2) for count in tiles)

    def program(self, form: Form, parts: int = 0) -> CudaProgram:
        """The attention kernel in one of its forms; for PARTS, with so many parts of a row."""
        scores, values = partial(wgmma, "mma_scores"), partial(wgmma, "mma_values", transposed=True)
        if form is Form.FEW:
            return self._program("sparse_attn_few", {}, scores(64), values(64, registers=True))
        if form is Form.PARTS:
            return self._program("sparse_attn_parts", {"PARTS": parts}, scores(64), values(128))
        if form is Form.GATHERED:
            own = wgmma("mma_own_values", 256, transposed=True, registers=True)
            return self._program("sparse_attn_gathered", {}, scores(64), values(256), own)
        return self._program("sparse_attn", {}, scores(32), values(128))

    def helper(self, entry: str) -> CudaProgram:
        """A kernel before attention: "mark_slots" or "decode_records"."""
        return self._program(entry, {}, file="gather_records")

    def _program(self, entry: str, macros: dict[str, int], *generated: str, file: str | None = None) -> CudaProgram:
        pages = {"WINDOW_RECORDS": self.window_records, "KV_RECORDS": self.kv_records, "KV_FP4": int(self.kv_fp4)}
        paths = tuple(_FOLDER / name for name in ("hopper.cuh", "attention.cuh", f"{file or entry}.cu"))
        return CudaProgram(paths, entry, {**macros, **pages}, generated)


def block_threads(form: Form) -> int:
    """Threads of a block."""
    return 384 if form is Form.GATHERED else 512


def shared_bytes(form: Form) -> int:
    """Dynamic shared memory of a block."""
    tiles = _ALIGNMENT + _QUERY + 2 * _TILE
    if form is Form.FEW:  # shares of probabilities and their sums, maxima, masks, barriers
        return tiles + 2 * (8192 + 2048) + _MOST_TILES_OF_FEW * 256 + 512 + 16
    if form is Form.PARTS:  # probabilities, maxima, sums, powers, references, masks, a barrier
        return tiles + 2 * 8192 + 2 * _MOST_PARTS_OF_ROW * 256 + 512 + 1024 + 256 + 512 + 8
    if form is Form.GATHERED:  # probabilities and their sums, maxima, masks, barriers
        return tiles + 2 * (8192 + 2048) + 512 + 512 + 96
    return tiles + 8192 + 1024 + 512 + 512 + 96  # probabilities, maxima, sums, masks, barriers


@lru_cache(maxsize=64)
def attention_function(device: int, pages: Pages, form: Form, parts: int = 0) -> CudaFunction:
    """The attention kernel, loaded."""
    with torch.cuda.device(device):
        return CudaFunction(pages.program(form, parts), "sm_90a", shared_bytes(form))


@lru_cache(maxsize=64)
def helper_function(device: int, pages: Pages, entry: str) -> CudaFunction:
    """A kernel before attention, loaded."""
    with torch.cuda.device(device):
        return CudaFunction(pages.helper(entry), "sm_90a", MARKING_BYTES if entry == "mark_slots" else 0)


@dataclass(frozen=True)
class Room:
    """Scratch for decoded records: two counts, a bit per slot of both caches, a place per 32 slots, then records.

    Attributes:
        window_words: words of 32 slots of the window cache.
        words: of both caches.
        records: places for records.
    """

    window_words: int
    words: int
    records: int

    @property
    def cleared_bytes(self) -> int:
        """Bytes from the first on that must be zero before slots are marked: counts and bits."""
        return 16 + 4 * self.words

    @property
    def holds_all_slots(self) -> bool:
        """Whether the records of all slots have room."""
        return self.records >= 32 * self.words

    @property
    def records_start(self) -> int:
        """First byte of the records."""
        return -(-(self.cleared_bytes + 4 * self.words) // 16) * 16


def scratch_bytes(max_rows: int) -> int:
    """Scratch of a plan for steps of up to so many rows; none where no step has many."""
    return max_rows * RECORDS_PER_ROW * _RECORD_BYTES if max_rows >= MANY_ROWS else 0


def works_on_parts(num_rows: int, parts: int) -> bool:
    """Whether blocks should work on parts of rows, of so many parts each, where rows need not have the same bits."""
    return 1 < parts <= _MOST_PARTS_OF_ROW and num_rows * parts <= _MOST_PARTS


def divide_scratch(num_bytes: int, window_slots: int, kv_slots: int) -> Room:
    """Divide scratch for caches of so many slots; without records where bits and places leave no room for one."""
    window_words = -(-window_slots // 32)
    words = window_words + -(-kv_slots // 32)
    start = Room(window_words, words, 0).records_start
    return Room(window_words, words, max((num_bytes - start) // _RECORD_BYTES, 0))


def choose_form(num_rows: int, num_tiles: int, room: Room | None) -> Form:
    """The fastest form; where it is GATHERED, the kernels choose DIRECT if the records turn out to be too many.

    Args:
        num_rows: of the step.
        num_tiles: of a row.
        room: scratch for decoded records, if there is any.
    """
    if num_rows <= FEW_ROWS and num_tiles <= _MOST_TILES_OF_FEW:
        return Form.FEW
    if num_rows >= MANY_ROWS and room is not None and room.records >= num_rows:
        return Form.GATHERED
    return Form.DIRECT
