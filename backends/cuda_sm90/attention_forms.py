"""The forms of the sparse attention kernel, which give the same bits, and the programs that each consists of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
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
_MOST_PARTS: Final = 264
"""Parts of rows up to which working on parts is faster than a block a row: two for each multiprocessor."""
_PART_BYTES: Final = 64 * 513 * 4
"""Scratch for the results of a part."""
MANY_ROWS: Final = 1024
"""From so many rows on records are decoded once for all rows, where there is scratch for them."""
_RECORD_BYTES: Final = 1024
RECORDS_PER_ROW: Final = 32
"""Scratch for decoded records, in records for each row of the largest step."""
_QUERY, _TILE, _PART = 65536, 65536, 8192
_ALIGNMENT: Final = 1024


class Form(enum.Enum):
    """How rows are divided among blocks, and where keys come from."""

    FEW = "a cluster of blocks a row"
    DIRECT = "blocks walk over rows and decode records"
    GATHERED = "blocks walk over rows and copy records decoded before"
    PARTS = "a block for each part of a row; the only form with bits of its own"


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

    def program(self, form: Form) -> CudaProgram:
        """The attention kernel in one of its forms."""
        if form is Form.FEW:
            parts = wgmma("mma_scores", 64), wgmma("mma_values", 64, transposed=True, registers=True)
            return self._program("sparse_attn_few.cu", "sparse_attn_few", {}, parts)
        parts = wgmma("mma_scores", 32), wgmma("mma_values", 128, transposed=True)
        macros = {"GATHERED": int(form is Form.GATHERED), "PARTS": int(form is Form.PARTS)}
        return self._program("sparse_attn.cu", "sparse_attn", macros, parts)

    def helper(self, entry: str) -> CudaProgram:
        """A kernel before attention ("mark_slots", "decode_records") or behind it ("merge_parts")."""
        file = "merge_parts.cu" if entry == "merge_parts" else "gather_records.cu"
        return self._program(file, entry, {}, ())

    def _program(self, file: str, entry: str, macros: dict[str, int], generated: tuple[str, ...]) -> CudaProgram:
        pages = {"WINDOW_RECORDS": self.window_records, "KV_RECORDS": self.kv_records, "KV_FP4": int(self.kv_fp4)}
        files = tuple(_FOLDER / name for name in ("hopper.cuh", "attention.cuh", file))
        return CudaProgram(files, entry, {**macros, **pages}, generated)


def shared_bytes(form: Form) -> int:
    """Dynamic shared memory of a block."""
    if form is Form.FEW:  # shares of probabilities and their sums, maxima, masks, barriers
        return _ALIGNMENT + _QUERY + 2 * _TILE + 2 * (8192 + 2048) + _MOST_TILES_OF_FEW * 256 + 512 + 16
    return (
        _ALIGNMENT + _QUERY + 2 * _TILE + 8192 + 1024 + 512 + 512 + 48
    )  # probabilities, maxima, sums, masks, barriers


def block_threads(form: Form) -> int:
    """Threads of a block."""
    return 384 if form is Form.GATHERED else 512


@lru_cache(maxsize=64)
def attention_function(device: int, pages: Pages, form: Form) -> CudaFunction:
    """The attention kernel, loaded."""
    with torch.cuda.device(device):
        return CudaFunction(pages.program(form), "sm_90a", shared_bytes(form))


@lru_cache(maxsize=64)
def helper_function(device: int, pages: Pages, entry: str) -> CudaFunction:
    """A kernel before or behind attention, loaded."""
    with torch.cuda.device(device):
        return CudaFunction(pages.helper(entry), "sm_90a")


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
    def records_start(self) -> int:
        """First byte of the records."""
        return -(-(self.cleared_bytes + 4 * self.words) // 16) * 16


def scratch_bytes(max_rows: int) -> int:
    """Scratch of a plan for steps of up to so many rows; none where no step has many."""
    return max_rows * RECORDS_PER_ROW * _RECORD_BYTES if max_rows >= MANY_ROWS else 0


def parts_scratch_bytes() -> int:
    """Scratch for as many parts of rows as are worked on at once."""
    return _MOST_PARTS * _PART_BYTES


def works_on_parts(num_rows: int, parts: int) -> bool:
    """Whether blocks should work on parts of rows, of so many parts each, where rows need not have the same bits."""
    return parts > 1 and num_rows * parts <= _MOST_PARTS


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
