"""Index scores `sum_h weights_h * relu(q_h . k_j)`: one program per row and tile of keys, the same for all three ops.

All heads of a row stand in one tile, so a score has one order of additions wherever its key was found. Keys are decoded
where they are used; with bfloat16 weights the dot, the product and the sum are rounded as the model's are.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.records import KIND, load_coded, load_whole
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import FORMAT, new_like, next_pow2, packed, vector_width
from deepinfer.ops import index as index_ops
from deepinfer.ops.formats import PagedCache, QTensor

_KEYS: Final = 64
_SOURCES: Final = ("records.py",)


@device_function
def _vectors(
    data: tl.tensor,
    scale: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FMT: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """[R, BLOCK] vectors number `at` [R, 1], plain or coded, zero where `there` [R, 1] is off and behind DIM."""
    if FMT == 0:
        channel = tl.arange(0, BLOCK)[None, :]
        return tl.load(data + at * DIM + channel, mask=there & (channel < DIM), other=0.0).to(WIDE)
    else:
        packing: tl.constexpr = 1 if FMT == 1 else 2
        groups: tl.constexpr = (DIM + 31) // 32
        return load_coded(data + at * (DIM // packing), scale + at * groups, there, FMT, DIM, BLOCK, WIDE)


@device_function
def _query(
    q: tl.tensor,
    q_scale: tl.tensor,
    row: tl.tensor,
    num_heads: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    Q_FMT: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """[HEADS, BLOCK] index heads of a row, zero outside."""
    head = tl.arange(0, HEADS)[:, None]
    return _vectors(q, q_scale, row * num_heads + head, head < num_heads, DIM, BLOCK, Q_FMT, WIDE)


@device_function
def _score(
    query: tl.tensor,
    keys: tl.tensor,
    weights: tl.tensor,
    row: tl.tensor,
    num_heads: tl.tensor,
    weights_pitch: tl.tensor,
    HEADS: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> tl.tensor:
    """[keys] float32. Keys are the first operand: their number fills the instruction's rows, that of heads may not."""
    head = tl.arange(0, HEADS)
    weight = tl.load(weights + row * weights_pitch + head, mask=head < num_heads, other=0.0).to(tl.float32)
    dots = tl.dot(keys, tl.trans(query), input_precision="ieee")
    if ROUNDED:
        dots = dots.to(tl.bfloat16).to(tl.float32)
    # a comparison with NaN is false either way round, and relu keeps NaN
    gated = tl.where(dots < 0.0, 0.0, dots) * weight[None, :]
    gated = tl.where((head < num_heads)[None, :], gated, 0.0)
    if ROUNDED:
        gated = gated.to(tl.bfloat16).to(tl.float32)
    total = tl.sum(gated, 1)
    return total.to(tl.bfloat16).to(tl.float32) if ROUNDED else total


@kernel
def _stored(
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    cache: tl.tensor,
    weights: tl.tensor,
    visible: tl.tensor,
    blocks: tl.tensor,
    block_table: tl.tensor,
    row_to_seq: tl.tensor,
    num_heads: tl.int32,
    num_columns: tl.int32,
    num_blocks: tl.int32,
    table_columns: tl.int32,
    weights_pitch: tl.int64,
    table_pitch: tl.int64,
    page_bytes: tl.int64,
    CANDIDATE: tl.constexpr,
    RECORDS: tl.constexpr,
    CACHE_KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_FMT: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDED: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (rows, tiles of columns). With CANDIDATE 0 column j is position j, else columns are of candidate blocks."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    inside = column < num_columns
    if CANDIDATE == 0:
        position = column
        ok = inside
    else:
        number = tl.load(blocks + row * num_blocks + column // CANDIDATE, mask=inside, other=-1)
        position = tl.where(number >= 0, number, 0) * CANDIDATE + column % CANDIDATE
        ok = inside & (number >= 0)
    ok = ok & (position < tl.load(visible + row))
    place = tl.minimum(position // RECORDS, table_columns - 1)
    sequence = tl.load(row_to_seq + row).to(tl.int64)
    page = tl.load(block_table + sequence * table_pitch + place, mask=ok, other=0).to(tl.int64)
    slot = page * RECORDS + position % RECORDS
    keys = load_whole(cache, slot, ok, page_bytes, RECORDS, CACHE_KIND, DIM, BLOCK, VEC, WIDE)
    query = _query(q, q_scale, row, num_heads, DIM, BLOCK, HEADS, Q_FMT, WIDE)
    score = _score(query, keys, weights, row, num_heads, weights_pitch, HEADS, ROUNDED)
    tl.store(out + row * num_columns + column, tl.where(ok, score, -float("inf")), mask=inside)


@kernel
def _ragged(
    out: tl.tensor,
    q: tl.tensor,
    q_scale: tl.tensor,
    k: tl.tensor,
    k_scale: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    num_heads: tl.int32,
    num_columns: tl.int32,
    weights_pitch: tl.int64,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_FMT: tl.constexpr,
    K_FMT: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> None:
    """Grid (rows, tiles of columns): column c is key `starts + c`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = tl.load(starts + row).to(tl.int64) + column
    ok = key < tl.load(ends + row)
    keys = _vectors(k, k_scale, key[:, None], ok[:, None], DIM, BLOCK, K_FMT, WIDE)
    query = _query(q, q_scale, row, num_heads, DIM, BLOCK, HEADS, Q_FMT, WIDE)
    score = _score(query, keys, weights, row, num_heads, weights_pitch, HEADS, ROUNDED)
    tl.store(out + row * num_columns + column, tl.where(ok, score, -float("inf")), mask=column < num_columns)


def _parts(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None, int]:
    if isinstance(x, QTensor):
        return packed(x.data), packed(x.scale), FORMAT[x.fmt]
    return packed(x), None, 0


def _single(*operands: Tensor | QTensor) -> bool:
    """Whether some operand holds float32 values, which bfloat16 would round."""
    return any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in operands)


def _stored_scores(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    candidate_block: int,
    num_columns: int,
    block_table: Tensor,
    row_to_seq: Tensor,
    out: Tensor | None,
) -> Tensor:
    num_rows, num_heads, dim = q.shape
    y = new_like(out, (num_rows, num_columns), torch.float32, weights.device)
    data, scale, fmt = _parts(q)
    single = _single(q) or cache.format.kind == "f32"
    weights, block_table = packed(weights), packed(block_table)
    _stored(
        (num_rows, triton.cdiv(num_columns, _KEYS)),
        y,
        data,
        scale,
        cache.data,
        weights,
        packed(visible),
        None if blocks is None else packed(blocks),
        block_table,
        packed(row_to_seq),
        num_heads,
        num_columns,
        0 if blocks is None else blocks.shape[1],
        block_table.shape[1],
        weights.stride(0),
        block_table.stride(0),
        cache.data.stride(0),
        CANDIDATE=0 if blocks is None else candidate_block,
        RECORDS=cache.records,
        CACHE_KIND=KIND[cache.format.kind],
        DIM=dim,
        BLOCK=max(next_pow2(dim), 32),
        HEADS=max(next_pow2(num_heads), 16),
        KEYS=_KEYS,
        Q_FMT=fmt,
        WIDE=tl.float32 if single else tl.bfloat16,
        ROUNDED=weights.dtype == torch.bfloat16,
        VEC=vector_width(cache.data.stride(0)),
    )
    return y


@KERNELS.implements(index_ops.index_logits_paged, sources=_SOURCES)
def index_logits_paged(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
    num_columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Every column of the result is written, those past `visible` with -inf."""
    return _stored_scores(q, cache, weights, visible, None, 0, num_columns, block_table, row_to_seq, out)


@KERNELS.implements(index_ops.index_logits_blocks, sources=_SOURCES)
def index_logits_blocks(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor,
    candidate_block: int,
    block_table: Tensor,
    row_to_seq: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same kernel over the columns of candidate blocks, so the bits are those of the paged scores."""
    num_columns = blocks.shape[1] * candidate_block
    return _stored_scores(
        q, cache, weights, visible, blocks, candidate_block, num_columns, block_table, row_to_seq, out
    )


@KERNELS.implements(index_ops.index_logits_ragged, capturable=False, sources=_SOURCES)
def index_logits_ragged(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The width of the result depends on the lengths, which the host reads."""
    num_rows, num_heads, dim = q.shape
    num_columns = max(int((ends - starts).max()), 0) if num_rows else 0
    y = new_like(out, (num_rows, num_columns), torch.float32, weights.device)
    q_data, q_scale, q_fmt = _parts(q)
    k_data, k_scale, k_fmt = _parts(k)
    weights = packed(weights)
    _ragged(
        (num_rows, triton.cdiv(num_columns, _KEYS)),
        y,
        q_data,
        q_scale,
        k_data,
        k_scale,
        weights,
        packed(starts),
        packed(ends),
        num_heads,
        num_columns,
        weights.stride(0),
        DIM=dim,
        BLOCK=max(next_pow2(dim), 32),
        HEADS=max(next_pow2(num_heads), 16),
        KEYS=_KEYS,
        Q_FMT=q_fmt,
        K_FMT=k_fmt,
        WIDE=tl.float32 if _single(q, k) else tl.bfloat16,
        ROUNDED=weights.dtype == torch.bfloat16,
    )
    return y
