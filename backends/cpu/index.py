"""Choosing positions: window slots, index scores, candidate blocks, exact top-k, and positions to slots."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.norm import rotate
from deepinfer.backends.cpu.tensors import (
    KIND,
    address,
    cache_args,
    dense,
    empty_codes,
    floats,
    ids,
    num_threads,
    operand,
)
from deepinfer.ops import index as index_ops
from deepinfer.ops.formats import PagedCache, QTensor, QuantFormat


@BACKEND.implements(index_ops.build_swa_index)
def build_swa_index(
    positions: Tensor,
    row_to_seq: Tensor,
    window_tables: Tensor,
    window_first_page: Tensor,
    window_page: int,
    window: int,
) -> Tensor:
    """One pass over the slots, oldest first."""
    positions, row_to_seq, tables, first = ids(positions), ids(row_to_seq), ids(window_tables), ids(window_first_page)
    rows = positions.shape[0]
    out = torch.empty((rows, window), dtype=torch.int32)
    _kernels.window_slots(
        out.data_ptr(),
        positions.data_ptr(),
        row_to_seq.data_ptr(),
        rows,
        tables.data_ptr(),
        tables.shape[0],
        tables.shape[1],
        first.data_ptr(),
        window_page,
        window,
    )
    return out


@BACKEND.implements(index_ops.clip_window)
def clip_window(indices: Tensor, positions: Tensor, row_to_seq: Tensor, starts: Tensor) -> None:
    """The columns to hide are the first of each row, so one comparison of column numbers decides."""
    rows, window = indices.shape
    if rows == 0:
        return
    hidden = starts.index_select(0, row_to_seq) - positions + (window - 1)
    indices.masked_fill_(torch.arange(window, dtype=torch.int32) < hidden[:, None], -1)


@BACKEND.implements(index_ops.build_dense_index)
def build_dense_index(visible_lens: Tensor, num_columns: int) -> Tensor:
    """0, 1, ... then -1."""
    lens = ids(visible_lens)
    rows = lens.shape[0]
    out = torch.empty((rows, num_columns), dtype=torch.int32)
    _kernels.dense_index(out.data_ptr(), lens.data_ptr(), rows, num_columns)
    return out


@BACKEND.implements(index_ops.concat_index)
def concat_index(first: Tensor, second: Tensor) -> Tensor:
    """Copies, which torch does as well as anyone."""
    return torch.cat((first, second), dim=1)


@BACKEND.implements(index_ops.visible_lens)
def visible_lens(positions: Tensor, ratio: int) -> Tensor:
    """A division that rounds down."""
    positions = ids(positions)
    out = torch.empty(positions.shape, dtype=torch.int32)
    _kernels.visible_lens(out.data_ptr(), positions.data_ptr(), positions.numel(), ratio)
    return out


@BACKEND.implements(index_ops.logical_to_slot)
def logical_to_slot(indices: Tensor, block_size: int, block_table: Tensor, row_to_seq: Tensor) -> None:
    """In place; an index that is not contiguous int32 is left to the reference."""
    if indices.dtype is not torch.int32 or not indices.is_contiguous():
        index_ops.logical_to_slot(indices, block_size, block_table, row_to_seq)
        return
    table, row_to_seq = ids(block_table), ids(row_to_seq)
    rows, width = indices.shape
    _kernels.positions_to_slots(
        indices.data_ptr(),
        rows,
        width,
        block_size,
        table.data_ptr(),
        table.shape[0],
        table.shape[1],
        row_to_seq.data_ptr(),
    )


@BACKEND.implements(index_ops.index_q_quant)
def index_q_quant(q: Tensor, positions: Tensor, cos_sin: Tensor, fmt: QuantFormat | None) -> Tensor | QTensor:
    """Rotation and codes of a head in one pass."""
    if fmt is None:
        return rotate(q, positions, cos_sin)
    codes = empty_codes(tuple(q.shape), fmt)
    rotate(q, positions, cos_sin, codes=codes)
    return codes


@BACKEND.implements(index_ops.index_logits_ragged)
def index_logits_ragged(
    q: Tensor | QTensor, k: Tensor | QTensor, weights: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """Scores against dense keys; only a row's own range is computed."""
    heads_of, q_scale, q_kind = operand(q)
    keys, k_scale, k_kind = operand(k)
    weights, starts, ends = dense(weights), ids(starts), ids(ends)
    rows, heads, dim = q.shape
    columns = max(int((ends - starts).max()), 0) if rows else 0
    out = torch.empty((rows, columns), dtype=torch.float32)
    _kernels.scores_ragged(
        out.data_ptr(),
        rows,
        columns,
        heads_of.data_ptr(),
        address(q_scale),
        q_kind,
        heads,
        dim,
        keys.data_ptr(),
        address(k_scale),
        k_kind,
        k.shape[0],
        weights.data_ptr(),
        KIND[weights.dtype],
        starts.data_ptr(),
        ends.data_ptr(),
        num_threads(),
    )
    return out


@BACKEND.implements(index_ops.index_logits_paged)
def index_logits_paged(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
    num_columns: int,
) -> Tensor:
    """Scores of visible keys only; neighbouring rows of a sequence share the decoded keys."""
    heads_of, q_scale, q_kind = operand(q)
    weights, visible, table, row_to_seq = dense(weights), ids(visible), ids(block_table), ids(row_to_seq)
    rows, heads, dim = q.shape
    out = torch.empty((rows, num_columns), dtype=torch.float32)
    _kernels.scores_paged(
        out.data_ptr(),
        rows,
        num_columns,
        heads_of.data_ptr(),
        address(q_scale),
        q_kind,
        heads,
        dim,
        cache_args(cache),
        weights.data_ptr(),
        KIND[weights.dtype],
        visible.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        table.shape[1],
        row_to_seq.data_ptr(),
        num_threads(),
    )
    return out


@BACKEND.implements(index_ops.index_logits_blocks)
def index_logits_blocks(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor,
    candidate_block: int,
    block_table: Tensor,
    row_to_seq: Tensor,
) -> Tensor:
    """The same sums as `index_logits_paged`, for keys of the named blocks alone."""
    heads_of, q_scale, q_kind = operand(q)
    weights, visible, blocks = dense(weights), ids(visible), ids(blocks)
    table, row_to_seq = ids(block_table), ids(row_to_seq)
    rows, heads, dim = q.shape
    num_blocks = blocks.shape[1]
    out = torch.empty((rows, num_blocks * candidate_block), dtype=torch.float32)
    _kernels.scores_blocks(
        out.data_ptr(),
        rows,
        num_blocks,
        candidate_block,
        heads_of.data_ptr(),
        address(q_scale),
        q_kind,
        heads,
        dim,
        cache_args(cache),
        weights.data_ptr(),
        KIND[weights.dtype],
        visible.data_ptr(),
        blocks.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        table.shape[1],
        row_to_seq.data_ptr(),
        num_threads(),
    )
    return out


@BACKEND.implements(index_ops.block_max)
def block_max(logits: Tensor, lens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Columns past a row's end are not read."""
    logits, lens = floats(logits), ids(lens)
    rows, columns = logits.shape
    scores = torch.empty((rows, -(-columns // block)), dtype=torch.float32)
    counts = torch.empty((rows,), dtype=torch.int32)
    _kernels.block_max(
        scores.data_ptr(), counts.data_ptr(), logits.data_ptr(), rows, columns, lens.data_ptr(), block, num_threads()
    )
    return scores, counts


@BACKEND.implements(index_ops.topk_select)
def topk_select(x: Tensor, k: int, lens: Tensor) -> Tensor:
    """Find the k-th value by selection, then take what passes it from left to right."""
    x, lens = dense(x), ids(lens)
    rows, columns = x.shape
    out = torch.empty((rows, k), dtype=torch.int32)
    _kernels.topk(out.data_ptr(), k, x.data_ptr(), KIND[x.dtype], rows, columns, lens.data_ptr(), num_threads())
    return out


@BACKEND.implements(index_ops.blocks_to_positions)
def blocks_to_positions(indices: Tensor, blocks: Tensor, block: int) -> Tensor:
    """One lookup per column."""
    indices, blocks = ids(indices), ids(blocks)
    rows, width = indices.shape
    out = torch.empty((rows, width), dtype=torch.int32)
    _kernels.blocks_to_positions(
        out.data_ptr(), indices.data_ptr(), rows, width, blocks.data_ptr(), blocks.shape[1], block
    )
    return out


@BACKEND.implements(index_ops.uniform_lens)
def uniform_lens(like: Tensor, value: int) -> Tensor:
    """One fill."""
    return torch.full((like.shape[0],), value, dtype=torch.int32)


@BACKEND.implements(index_ops.concat_rows)
def concat_rows(parts: tuple[Tensor, ...]) -> Tensor:
    """Copies, which torch does as well as anyone."""
    return torch.cat(parts)
