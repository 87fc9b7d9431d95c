"""Hyper-connections: streams read and written by small mixes, and the step that fuses both around a norm.

The mixing product has 24 columns and twenty thousand terms. Its sum is cut in a number of parts that depends on the
model's width alone, so a row has the same bits alone and in any batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.norm import normed_row
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import BindContext, Dims

_TILE_ROWS = 64
_TILE_TERMS = 128
_MAX_PARTS = 16
_PART_TERMS = 1024
"""Terms of a part at least, where there are so many."""
_SMALL_ROWS = 8
"""Rows that one program of the Sinkhorn kernel takes."""


@kernel
def _mix_parts(
    parts: tl.tensor,
    h: tl.tensor,
    fn: tl.tensor,
    rows: tl.int32,
    TERMS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Products and squares of one part of the terms: [rows, PARTS, COLUMN_BLOCK], squares in column COLUMNS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.arange(0, COLUMN_BLOCK)
    product = tl.zeros((ROWS, COLUMN_BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    start = h + row.to(tl.int64)[:, None] * TERMS
    for first in range(part * PART, part * PART + PART, STEP):
        term = first + tl.arange(0, STEP)
        s = tl.load(start + term[None, :], mask=(row < rows)[:, None] & (term < TERMS)[None, :], other=0.0)
        weight = tl.load(
            fn + column[None, :] * TERMS + term[:, None],
            mask=(column < COLUMNS)[None, :] & (term < TERMS)[:, None],
            other=0.0,
        ).to(tl.float32)
        if h.dtype.element_ty == tl.bfloat16:
            # float32 is the sum of three bfloat16, and products of those are exact in float32
            high = weight.to(tl.bfloat16)
            rest = weight - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            product = tl.dot(s, low, product)
            product = tl.dot(s, middle, product)
            product = tl.dot(s, high, product)
        else:
            product = tl.dot(s, weight, product, input_precision="tf32x3")
        wide = s.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    value = tl.where(column[None, :] == COLUMNS, squares[:, None], product)
    at = parts + (row.to(tl.int64)[:, None] * PARTS + part) * COLUMN_BLOCK + column[None, :]
    tl.store(at, value, mask=(row < rows)[:, None] & (column <= COLUMNS)[None, :])


@kernel
def _mix_sum(
    mix: tl.tensor,
    parts: tl.tensor,
    eps: tl.float32,
    TERMS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
) -> None:
    """The parts in ascending order, and the statistic of the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMN_BLOCK)
    total = tl.zeros((COLUMN_BLOCK,), tl.float32)
    for part in range(PARTS):
        at = parts + (row * PARTS + part) * COLUMN_BLOCK + column
        total += tl.load(at, mask=column <= COLUMNS, other=0.0)
    mean = tl.div_rn(tl.sum(tl.where(column == COLUMNS, total, 0.0), 0), TERMS * 1.0)
    value = total * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(mix + row * COLUMNS + column, value, mask=column < COLUMNS)


@device_function
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@kernel
def _sinkhorn(
    pre: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    mix: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    rows: tl.int32,
    iters: tl.int32,
    eps: tl.float32,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Read and write weights, and the stream matrix after its normalisations, of ROWS rows."""
    columns: tl.constexpr = STREAMS * (STREAMS + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = row.to(tl.int64)[:, None]
    stream = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (stream < STREAMS)
    start = mix + wide * columns
    first = tl.load(start + stream, mask=mask, other=0.0) * tl.load(scale)
    first += tl.load(base + stream, mask=stream < STREAMS, other=0.0)
    tl.store(pre + wide * STREAMS + stream, _sigmoid(first) + eps, mask=mask)
    second = tl.load(start + STREAMS + stream, mask=mask, other=0.0) * tl.load(scale + 1)
    second += tl.load(base + STREAMS + stream, mask=stream < STREAMS, other=0.0)
    tl.store(post + wide * STREAMS + stream, 2.0 * _sigmoid(second), mask=mask)
    i = tl.arange(0, BLOCK)[None, :, None]
    j = tl.arange(0, BLOCK)[None, None, :]
    inside = (i < STREAMS) & (j < STREAMS)
    place = i * STREAMS + j
    live = (row < rows)[:, None, None] & inside
    third = tl.load(start[:, :, None] + 2 * STREAMS + place, mask=live, other=0.0) * tl.load(scale + 2)
    third += tl.load(base + 2 * STREAMS + place, mask=inside, other=0.0)
    third = tl.where(inside, third, float("-inf"))
    top = tl.max(third, 2)[:, :, None]
    weight = tl.where(inside, tl.exp(third - top), 0.0)
    matrix = tl.where(
        inside, tl.div_rn(weight, tl.sum(weight, 2)[:, :, None] + tl.where(i < STREAMS, 0.0, 1.0)) + eps, 0.0
    )
    matrix = tl.div_rn(matrix, tl.sum(matrix, 1)[:, None, :] + eps)
    for _ in range(iters - 1):
        matrix = tl.div_rn(matrix, tl.sum(matrix, 2)[:, :, None] + eps)
        matrix = tl.div_rn(matrix, tl.sum(matrix, 1)[:, None, :] + eps)
    tl.store(comb + wide[:, :, None] * STREAMS * STREAMS + place, matrix, mask=live)


@device_function
def _written(
    y: tl.tensor,
    h: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    j: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
) -> tl.tensor:
    """Stream j of a row after a sublayer's output was written back, float32."""
    kept = tl.zeros(place.shape, tl.float32)
    for i in tl.static_range(STREAMS):
        stream = tl.load(h + i * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
        kept += tl.load(comb + i * STREAMS + j) * stream
    return tl.load(post + j) * y + kept


@kernel
def _post(
    out: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < HIDDEN
    value = tl.load(y + row * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
    h += row * STREAMS * HIDDEN
    for j in tl.static_range(STREAMS):
        new = _written(value, h, post + row * STREAMS, comb + row * STREAMS * STREAMS, j, place, mask, STREAMS, HIDDEN)
        tl.store(out + (row * STREAMS + j) * HIDDEN + place, new.to(out.dtype.element_ty), mask=mask)


@kernel
def _apply(
    out: tl.tensor,
    h: tl.tensor,
    pre: tl.tensor,
    divisor: tl.float32,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(STREAMS):
        stream = tl.load(h + (row * STREAMS + i) * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
        if pre is not None:
            stream = stream * tl.load(pre + row * STREAMS + i)
        total += stream
    total = tl.div_rn(total, divisor)
    tl.store(out + row * HIDDEN + place, total.to(out.dtype.element_ty), mask=mask)


@kernel
def _expand(
    h: tl.tensor,
    pre: tl.tensor,
    x: tl.tensor,
    STREAMS: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < HIDDEN
    value = tl.load(x + row * HIDDEN + place, mask=mask)
    for i in tl.static_range(STREAMS):
        tl.store(h + (row * STREAMS + i) * HIDDEN + place, value, mask=mask)
    if tl.program_id(1) == 0:
        stream = tl.arange(0, STREAM_BLOCK)
        tl.store(pre + row * STREAMS + stream, tl.where(stream == 0, 1.0, 0.0), mask=stream < STREAMS)


@kernel
def _write_and_read(
    out: tl.tensor,
    normed: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    read: tl.tensor,
    weight: tl.tensor,
    eps: tl.float32,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """New streams of a row, and the normed input of the next sublayer while they are in registers."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < HIDDEN
    value = tl.load(y + row * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
    h += row * STREAMS * HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(STREAMS):
        new = _written(value, h, post + row * STREAMS, comb + row * STREAMS * STREAMS, j, place, mask, STREAMS, HIDDEN)
        stored = new.to(out.dtype.element_ty)
        tl.store(out + (row * STREAMS + j) * HIDDEN + place, stored, mask=mask)
        total += tl.load(read + row * STREAMS + j) * stored.to(tl.float32)
    x = total.to(out.dtype.element_ty).to(tl.float32)
    x = normed_row(tl.where(mask, x, 0.0), weight, eps, mask, place, HIDDEN)
    tl.store(normed + row * HIDDEN + place, x.to(normed.dtype.element_ty), mask=mask)


def _parts(terms: int) -> tuple[int, int]:
    """How many parts a sum of so many terms has, and terms of a part."""
    parts = max(1, min(_MAX_PARTS, terms // _PART_TERMS))
    steps = -(-terms // (parts * _TILE_TERMS))
    return parts, steps * _TILE_TERMS


def _scratch_bytes(dims: Dims, ctx: BindContext) -> int:
    streams, terms = int(dims["streams"]), int(dims["streams"]) * int(dims["hidden"])
    columns = streams * (streams + 2)
    floats = _parts(terms)[0] * next_pow2(columns + 1) + columns
    return 4 * floats * ctx.max_tokens


def _mix(h: Tensor, fn: Tensor, eps: float, mix: Tensor | None, scratch: Tensor | None) -> Tensor:
    """Mixing logits [T, columns] of packed streams; their memory is `mix`, or scratch."""
    rows, terms, columns = h.shape[0], h.shape[1] * h.shape[2], fn.shape[0]
    parts, part = _parts(terms)
    width = max(next_pow2(columns + 1), 16)
    need = rows * (parts * width + columns)
    room = scratch.view(torch.float32) if scratch is not None and scratch.shape[0] >= 4 * need else None
    if room is None:
        room = torch.empty(need, dtype=torch.float32, device=h.device)
    if mix is None:
        mix = room[rows * parts * width : need].view(rows, columns)
    common = {"TERMS": terms, "PARTS": parts, "COLUMNS": columns, "COLUMN_BLOCK": width}
    _mix_parts(
        (-(-rows // _TILE_ROWS), parts),
        room,
        h,
        packed(fn),
        rows,
        TERMS=terms,
        PART=part,
        PARTS=parts,
        COLUMNS=columns,
        COLUMN_BLOCK=width,
        ROWS=_TILE_ROWS,
        STEP=_TILE_TERMS,
        num_stages=3,
    )
    _mix_sum((rows,), mix, room, eps, **common, num_warps=1)
    return mix


def _split(
    mix: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float, out: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = mix.shape
    streams = int((columns + 1) ** 0.5) - 1
    pre = new_like(out[0], (rows, streams), torch.float32, mix.device)
    post = new_like(out[1], (rows, streams), torch.float32, mix.device)
    comb = new_like(out[2], (rows, streams, streams), torch.float32, mix.device)
    _sinkhorn(
        (-(-rows // _SMALL_ROWS),),
        pre,
        post,
        comb,
        packed(mix),
        packed(scale),
        packed(base),
        rows,
        iters,
        eps,
        STREAMS=streams,
        BLOCK=next_pow2(streams),
        ROWS=_SMALL_ROWS,
        num_warps=1,
    )
    return pre, post, comb


@KERNELS.implements(mhc_ops.mhc_prenorm_mix, scratch=_scratch_bytes)
def mhc_prenorm_mix(
    h: Tensor, fn: Tensor, eps: float, *, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """Tensor cores, the matrix as a sum of three, in a fixed number of parts."""
    out = new_like(out, (h.shape[0], fn.shape[0]), torch.float32, h.device)
    return _mix(packed(h), fn, eps, out, scratch)


@KERNELS.implements(mhc_ops.mhc_split_sinkhorn)
def mhc_split_sinkhorn(
    mix: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    eps: float,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All normalisations of eight rows in registers."""
    return _split(mix, scale, base, iters, eps, out if out is not None else (None, None, None))


def _read(h: Tensor, pre: Tensor | None, divisor: float, out: Tensor | None) -> Tensor:
    rows, streams, hidden = h.shape
    out = new_like(out, (rows, hidden), h.dtype, h.device)
    block = min(next_pow2(hidden), 1024)
    _apply(
        (rows, -(-hidden // block)),
        out,
        packed(h),
        None if pre is None else packed(pre),
        divisor,
        STREAMS=streams,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


@KERNELS.implements(mhc_ops.mhc_apply)
def mhc_apply(h: Tensor, pre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A weighted sum of streams."""
    return _read(h, pre, 1.0, out)


@KERNELS.implements(heads_ops.stream_mean)
def stream_mean(h: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A sum of streams and a division."""
    return _read(h, None, float(h.shape[1]), out)


@KERNELS.implements(mhc_ops.mhc_post)
def mhc_post(y: Tensor, h: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Every stream from all streams and the output."""
    rows, streams, hidden = h.shape
    out = new_like(out, (rows, streams, hidden), h.dtype, h.device)
    block = min(next_pow2(hidden), 1024)
    _post(
        (rows, -(-hidden // block)),
        out,
        packed(y),
        packed(h),
        packed(post),
        packed(comb),
        STREAMS=streams,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


@KERNELS.implements(mhc_ops.mhc_expand)
def mhc_expand(x: Tensor, streams: int, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """One read, a write per stream."""
    rows, hidden = x.shape
    given = out if out is not None else (None, None)
    h = new_like(given[0], (rows, streams, hidden), x.dtype, x.device)
    pre = new_like(given[1], (rows, streams), torch.float32, x.device)
    block = min(next_pow2(hidden), 1024)
    _expand(
        (rows, -(-hidden // block)),
        h,
        pre,
        packed(x),
        STREAMS=streams,
        STREAM_BLOCK=next_pow2(streams),
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return h, pre


@KERNELS.implements(mhc_ops.mhc_step, scratch=_scratch_bytes, sources=("norm.py",))
def mhc_step(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    read: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write, read and norm in one pass over the streams; then the mix of what was written."""
    rows, streams, hidden = h.shape
    given = out if out is not None else (None,) * 5
    new = new_like(given[0], (rows, streams, hidden), h.dtype, h.device)
    normed = new_like(given[1], (rows, hidden), h.dtype, h.device)
    block = next_pow2(hidden)
    _write_and_read(
        (rows,),
        new,
        normed,
        packed(y),
        packed(h),
        packed(post),
        packed(comb),
        packed(read),
        packed(norm_weight),
        norm_eps,
        STREAMS=streams,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    mix = _mix(new, fn, norm_eps, None, scratch)
    pre, next_post, next_comb = _split(mix, scale, base, iters, hc_eps, given[2:])
    return new, normed, pre, next_post, next_comb
