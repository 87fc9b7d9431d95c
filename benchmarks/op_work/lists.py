"""Index lists: windows, dense positions, lengths, and positions to slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepinfer.ops import index
from op_work.work import TOPK, WINDOW, WINDOW_PAGE, Families, Maker, Work, phases

_CONTEXT = 8192
"""Positions behind a decode row."""


def windows(make: Maker) -> Iterator[Work]:
    """Slots of the window of each row."""
    for rows, sequences, what in phases(make):
        each = rows // sequences
        first = (_CONTEXT - WINDOW) // WINDOW_PAGE if each == 1 else 0
        pages = (WINDOW if each == 1 else each) // WINDOW_PAGE + 1
        args = {
            "positions": make.same(_CONTEXT - 1, rows) if each == 1 else make.numbers(0, rows),
            "row_to_seq": make.numbers(0, rows) // each,
            "window_tables": make.numbers(1, 1 + sequences * pages).reshape(sequences, pages),
            "window_first_page": make.same(first, sequences),
            "window_page": WINDOW_PAGE,
            "window": WINDOW,
        }
        yield Work(index.build_swa_index, f"{what}, {WINDOW} columns", [args], 0.0, rows * (4.0 * WINDOW + 8))


def clipped(make: Maker) -> Iterator[Work]:
    """What a replay of the newest rows hides: half of what their windows hold. Hidden once it stays hidden."""
    for rows in (make.sizes.few, make.sizes.many):
        each = min(rows, WINDOW)
        args = {
            "indices": make.integers(0, 1 << 20, rows, WINDOW),
            "positions": _CONTEXT + make.numbers(0, rows) % each,
            "row_to_seq": make.numbers(0, rows) // each,
            "starts": make.same(_CONTEXT, -(-rows // each)),
        }
        hidden = WINDOW - 1 - (each - 1) / 2  # of a row
        yield Work(index.clip_window, f"{rows} x {WINDOW}, {each} rows replayed", [args], 0.0, rows * (8 + 4 * hidden))


def lengths(make: Maker) -> Iterator[Work]:
    """Entries that each row sees, the same for all rows, and a list of them all."""
    for rows in (make.sizes.few, make.sizes.many):
        args = {"positions": make.numbers(0, rows), "ratio": 2}
        yield Work(index.visible_lens, f"{rows} rows, ratio 2", [args], 0.0, 8.0 * rows)
        yield Work(
            index.uniform_lens, f"{rows} rows", [{"like": make.single(rows, TOPK), "value": TOPK}], 0.0, 4.0 * rows
        )
        args = {"visible_lens": make.integers(0, TOPK + 1, rows), "num_columns": TOPK}
        yield Work(index.build_dense_index, f"{rows} x {TOPK}", [args], 0.0, rows * (4.0 * TOPK + 4))


def slots(make: Maker) -> Iterator[Work]:
    """Positions to slots in place. A sequence holds the first blocks in any order: slots are positions once more."""
    records, blocks = 64, 256
    for rows, sequences, what in phases(make):
        args = {
            "indices": make.integers(0, records * blocks, rows, TOPK),
            "block_size": records,
            "block_table": make.shuffled(blocks).expand(sequences, blocks).contiguous(),
            "row_to_seq": make.numbers(0, rows) * sequences // rows,
        }
        num_bytes = rows * (8.0 * TOPK + 4) + 4.0 * sequences * blocks
        yield Work(index.logical_to_slot, f"{what}, {TOPK} columns", [args], 0.0, num_bytes)


FAMILIES: Final[Families] = {
    windows: ("build_swa_index",),
    clipped: ("clip_window",),
    lengths: ("visible_lens", "uniform_lens", "build_dense_index"),
    slots: ("logical_to_slot",),
}
