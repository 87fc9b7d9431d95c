"""Index lists: windows, dense positions, lengths, and positions turned into slots. Integers only."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import index as index_ops

_FLAT = 256
"""Elements of a list that one program takes."""


def column_block(columns: int) -> int:
    """Columns that one program takes of a row."""
    return min(next_pow2(columns), 1024)


@kernel
def _window(
    out: tl.tensor,
    positions: tl.tensor,
    row_to_seq: tl.tensor,
    tables: tl.tensor,
    first_pages: tl.tensor,
    table_pitch: tl.int64,
    num_pages: tl.int32,
    page_size: tl.int32,
    window: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq = tl.load(row_to_seq + row).to(tl.int64)
    position = tl.load(positions + row) - (window - 1) + column
    index = tl.maximum(position, 0) // page_size - tl.load(first_pages + seq)
    held = (column < window) & (position >= 0) & (index >= 0) & (index < num_pages)
    page = tl.load(tables + seq * table_pitch + index, mask=held, other=0)
    slot = tl.where(page > 0, page * page_size + tl.maximum(position, 0) % page_size, -1)
    tl.store(out + row * window + column, slot, mask=column < window)


@kernel
def _clip(
    indices: tl.tensor,
    positions: tl.tensor,
    row_to_seq: tl.tensor,
    starts: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    window: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + tl.load(row_to_seq + row))
    position = tl.load(positions + row) - (window - 1) + column
    gone = (column < window) & (position < start)
    tl.store(indices + row * pitch + column.to(tl.int64) * step, tl.full((BLOCK,), -1, tl.int32), mask=gone)


@kernel
def _dense(out: tl.tensor, lens: tl.tensor, columns: tl.int32, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    visible = tl.load(lens + row)
    tl.store(out + row * columns + column, tl.where(column < visible, column, -1), mask=column < columns)


@kernel
def _groups(out: tl.tensor, positions: tl.tensor, count: tl.int32, ratio: tl.int32, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(out + place, (tl.load(positions + place, mask=mask, other=0) + 1) // ratio, mask=mask)


@kernel
def _fill(out: tl.tensor, count: tl.int32, value: tl.int32, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.zeros((BLOCK,), tl.int32) + value, mask=place < count)


@kernel
def _slots(
    indices: tl.tensor,
    tables: tl.tensor,
    row_to_seq: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    table_pitch: tl.int64,
    num_blocks: tl.int32,
    block_size: tl.int32,
    columns: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = indices + row * pitch + column.to(tl.int64) * step
    position = tl.load(at, mask=column < columns, other=-1)
    valid = position >= 0
    seq = tl.load(row_to_seq + row).to(tl.int64)
    index = tl.minimum(position // block_size, num_blocks - 1)
    block = tl.load(tables + seq * table_pitch + index, mask=valid, other=0)
    tl.store(at, block * block_size + position % block_size, mask=valid)


@kernel
def _positions(
    out: tl.tensor,
    indices: tl.tensor,
    blocks: tl.tensor,
    columns: tl.int32,
    num_blocks: tl.int32,
    block: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    index = tl.load(indices + row * columns + column, mask=mask, other=-1)
    chosen = tl.load(blocks + row * num_blocks + tl.maximum(index, 0) // block, mask=mask & (index >= 0), other=0)
    tl.store(out + row * columns + column, tl.where(index >= 0, chosen * block + index % block, -1), mask=mask)


@kernel
def _block_max(
    scores: tl.tensor,
    counts: tl.tensor,
    logits: tl.tensor,
    lens: tl.tensor,
    pitch: tl.int64,
    columns: tl.int32,
    num_blocks: tl.int32,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens + row)
    valid = (length + SIZE - 1) // SIZE
    within = tl.arange(0, SIZE_BLOCK)
    column = number[:, None] * SIZE + within[None, :]
    seen = (within[None, :] < SIZE) & (column < columns) & (column < length)
    value = tl.load(logits + row * pitch + column, mask=seen, other=float("-inf"))
    best = tl.max(tl.where(value == value, value, float("-inf")), 1)
    best = tl.maximum(best, -3.4028234663852886e38)
    best = tl.where(number == valid - 1, float("inf"), best)
    best = tl.where(number < valid, best, float("-inf"))
    tl.store(scores + row * num_blocks + number, best, mask=number < num_blocks)
    if tl.program_id(1) == 0:
        tl.store(counts + row, valid)


@KERNELS.implements(index_ops.build_swa_index)
def build_swa_index(
    positions: Tensor,
    row_to_seq: Tensor,
    window_tables: Tensor,
    window_first_page: Tensor,
    window_page: int,
    window: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A program per row."""
    rows, table = positions.shape[0], packed(window_tables)
    out = new_like(out, (rows, window), torch.int32, positions.device)
    block = column_block(window)
    _window(
        (rows, -(-window // block)),
        out,
        packed(positions),
        packed(row_to_seq),
        table,
        packed(window_first_page),
        table.stride(0),
        table.shape[1],
        window_page,
        window,
        BLOCK=block,
    )
    return out


@KERNELS.implements(index_ops.clip_window)
def clip_window(indices: Tensor, positions: Tensor, row_to_seq: Tensor, starts: Tensor, *, out: None = None) -> None:
    """Stores of -1 alone; what stays is not touched."""
    rows, window = indices.shape
    block = column_block(window)
    _clip(
        (rows, -(-window // block)),
        indices,
        packed(positions),
        packed(row_to_seq),
        packed(starts),
        indices.stride(0),
        indices.stride(1),
        window,
        BLOCK=block,
    )


@KERNELS.implements(index_ops.build_dense_index)
def build_dense_index(visible_lens: Tensor, num_columns: int, *, out: Tensor | None = None) -> Tensor:
    """A program per stretch of a row."""
    rows = visible_lens.shape[0]
    out = new_like(out, (rows, num_columns), torch.int32, visible_lens.device)
    block = column_block(num_columns)
    _dense((rows, -(-num_columns // block)), out, packed(visible_lens), num_columns, BLOCK=block)
    return out


@KERNELS.implements(index_ops.visible_lens)
def visible_lens(positions: Tensor, ratio: int, *, out: Tensor | None = None) -> Tensor:
    """One division."""
    count = positions.shape[0]
    out = new_like(out, (count,), torch.int32, positions.device)
    _groups((-(-count // _FLAT),), out, packed(positions), count, ratio, BLOCK=_FLAT)
    return out


@KERNELS.implements(index_ops.uniform_lens)
def uniform_lens(like: Tensor, value: int, *, out: Tensor | None = None) -> Tensor:
    """One store."""
    count = like.shape[0]
    out = new_like(out, (count,), torch.int32, like.device)
    _fill((-(-count // _FLAT),), out, count, value, BLOCK=_FLAT)
    return out


@KERNELS.implements(index_ops.logical_to_slot)
def logical_to_slot(
    indices: Tensor, block_size: int, block_table: Tensor, row_to_seq: Tensor, *, out: None = None
) -> None:
    """In place; -1 is not touched."""
    rows, columns = indices.shape
    table, block = packed(block_table), column_block(columns)
    _slots(
        (rows, -(-columns // block)),
        indices,
        table,
        packed(row_to_seq),
        indices.stride(0),
        indices.stride(1),
        table.stride(0),
        table.shape[1],
        block_size,
        columns,
        BLOCK=block,
    )


@KERNELS.implements(index_ops.blocks_to_positions)
def blocks_to_positions(indices: Tensor, blocks: Tensor, block: int, *, out: Tensor | None = None) -> Tensor:
    """A gather and a product."""
    rows, columns = indices.shape
    out = new_like(out, (rows, columns), torch.int32, indices.device)
    tile = column_block(columns)
    _positions(
        (rows, -(-columns // tile)), out, packed(indices), packed(blocks), columns, blocks.shape[1], block, BLOCK=tile
    )
    return out


@KERNELS.implements(index_ops.block_max)
def block_max(
    logits: Tensor, lens: Tensor, block: int, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """A program per row and stretch of candidate blocks."""
    rows, columns = logits.shape
    num_blocks = -(-columns // block)
    given = out if out is not None else (None, None)
    scores = new_like(given[0], (rows, num_blocks), torch.float32, logits.device)
    counts = new_like(given[1], (rows,), torch.int32, logits.device)
    values = logits if logits.stride(1) == 1 else logits.contiguous()
    tile = min(next_pow2(num_blocks), 256)
    _block_max(
        (rows, max(-(-num_blocks // tile), 1)),
        scores,
        counts,
        values,
        packed(lens),
        values.stride(0),
        columns,
        num_blocks,
        SIZE=block,
        SIZE_BLOCK=next_pow2(block),
        BLOCK=tile,
    )
    return scores, counts
