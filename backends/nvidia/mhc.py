"""Hyper-connections: streams read and written by small mixes, and the step that fuses both around a norm.

The mixing product has 24 columns and twenty thousand terms. Its sum is cut in a number of parts that depends on the
model's width alone, so a row has the same bits alone and in any batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import BindContext, Dims

_TILE_ROWS = 64
_TILE_TERMS = 128
_LANE_TERMS = 8
"""Squares that are added before any others: those of a 16-byte load."""
_FEW_ROWS = 512
"""Up to so many rows every tile splits the matrix itself, to the same bits, which costs less than another launch."""
_SPLIT_BLOCK = 1024
"""Matrix elements that one program splits."""
_MAX_PARTS = 32
_PART_TERMS = 512
"""Terms of a part at least, where there are so many."""
_STRETCH = 1024
"""Values of a stream that the fused step holds at a time."""
_SMALL_ROWS = 8
"""Rows that one program of the Sinkhorn kernel takes."""


@kernel
def _three_terms(split: tl.tensor, fn: tl.tensor, COUNT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """float32 as a sum of three bfloat16 [3, COUNT], the largest first; products of those are exact in float32."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < COUNT
    rest = tl.load(fn + place, mask=mask, other=0.0)
    for i in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(split + i * COUNT + place, part, mask=mask)
        rest = rest - part.to(tl.float32)


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
    LANE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Products and squares of one part of the terms: [rows, PARTS, COLUMN_BLOCK], squares in column COLUMNS.

    With SPLIT `fn` is in its three terms, so that tiles of both operands go straight to the tensor cores.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.arange(0, COLUMN_BLOCK)
    product = tl.zeros((ROWS, COLUMN_BLOCK), tl.float32)
    squares = tl.zeros((ROWS, STEP // LANE), tl.float32)
    start = h + row.to(tl.int64)[:, None] * TERMS
    for first in range(part * PART, part * PART + PART, STEP):
        term = first + tl.arange(0, STEP)
        s = tl.load(start + term[None, :], mask=(row < rows)[:, None] & (term < TERMS)[None, :], other=0.0)
        live = (column < COLUMNS)[None, :] & (term < TERMS)[:, None]
        weight = fn + column[None, :] * TERMS + term[:, None]
        if SPLIT:
            product = tl.dot(s, tl.load(weight + 2 * COLUMNS * TERMS, mask=live, other=0.0), product)
            product = tl.dot(s, tl.load(weight + COLUMNS * TERMS, mask=live, other=0.0), product)
            product = tl.dot(s, tl.load(weight, mask=live, other=0.0), product)
        elif h.dtype.element_ty == tl.bfloat16:
            whole = tl.load(weight, mask=live, other=0.0)
            high = whole.to(tl.bfloat16)
            rest = whole - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            product = tl.dot(s, (rest - middle.to(tl.float32)).to(tl.bfloat16), product)
            product = tl.dot(s, middle, product)
            product = tl.dot(s, high, product)
        else:
            product = tl.dot(s, tl.load(weight, mask=live, other=0.0), product, input_precision="tf32x3")
        wide = s.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (ROWS, STEP // LANE, LANE)), 2)
    value = tl.where(column[None, :] == COLUMNS, tl.sum(squares, 1)[:, None], product)
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
    for part in tl.static_range(PARTS):  # loads of all parts are under way before the first is added
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
def _streams(h: tl.tensor, place: tl.tensor, mask: tl.tensor, STREAMS: tl.constexpr, HIDDEN: tl.constexpr) -> tl.tuple:
    """A stretch of every stream of a row, float32: each is loaded once, however many results it goes into."""
    streams = ()
    for i in tl.static_range(STREAMS):
        stream = tl.load(h + i * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
        streams = streams + (stream,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no unpacking
    return streams


@device_function
def _written(
    y: tl.tensor, streams: tl.tuple, post: tl.tensor, comb: tl.tensor, j: tl.constexpr, STREAMS: tl.constexpr
) -> tl.tensor:
    """Stream j of a row after a sublayer's output was written back, float32."""
    kept = tl.zeros(y.shape, tl.float32)
    for i in tl.static_range(STREAMS):
        kept += tl.load(comb + i * STREAMS + j) * streams[i]
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
    streams = _streams(h + row * STREAMS * HIDDEN, place, mask, STREAMS, HIDDEN)
    for j in tl.static_range(STREAMS):
        new = _written(value, streams, post + row * STREAMS, comb + row * STREAMS * STREAMS, j, STREAMS)
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
    """New streams of a row in stretches of BLOCK, then the normed input of the next sublayer.

    A stretch is small, so that a multiprocessor has loads of many rows under way. The input stands in `normed` until
    its mean square is known.
    """
    row = tl.program_id(0).to(tl.int64)
    y += row * HIDDEN
    h += row * STREAMS * HIDDEN
    out += row * STREAMS * HIDDEN
    normed += row * HIDDEN
    post += row * STREAMS
    comb += row * STREAMS * STREAMS
    read += row * STREAMS
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, HIDDEN, BLOCK):
        place = first + tl.arange(0, BLOCK)
        mask = place < HIDDEN
        value = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        streams = _streams(h, place, mask, STREAMS, HIDDEN)
        for j in tl.static_range(STREAMS):
            new = _written(value, streams, post, comb, j, STREAMS)
            stored = new.to(out.dtype.element_ty)
            tl.store(out + j * HIDDEN + place, stored, mask=mask)
            total += tl.load(read + j) * stored.to(tl.float32)
        x = total.to(normed.dtype.element_ty)
        tl.store(normed + place, x, mask=mask)
        squares += tl.where(mask, x.to(tl.float32) * x.to(tl.float32), 0.0)
    mean = tl.div_rn(tl.sum(squares, 0), HIDDEN * 1.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.debug_barrier()  # what is read may have been written by another thread
    for first in tl.static_range(0, HIDDEN, BLOCK):
        place = first + tl.arange(0, BLOCK)
        mask = place < HIDDEN
        x = tl.load(normed + place, mask=mask, other=0.0).to(tl.float32) * inverse
        x = x * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(normed + place, x.to(normed.dtype.element_ty), mask=mask)


def _parts(terms: int) -> tuple[int, int]:
    """How many parts a sum of so many terms has, and terms of a part."""
    parts = max(1, min(_MAX_PARTS, terms // _PART_TERMS))
    steps = -(-terms // (parts * _TILE_TERMS))
    return parts, steps * _TILE_TERMS


def _split_bytes(count: int) -> int:
    """Of a matrix of so many elements in three terms, up to a multiple of 16."""
    return -(-count * 3 * 2 // 16) * 16


def step_scratch_bytes(dims: Dims, ctx: BindContext) -> int:
    """What a mix needs: sums of parts, and the matrix in its terms."""
    streams, terms = int(dims["streams"]), int(dims["streams"]) * int(dims["hidden"])
    columns = streams * (streams + 2)
    floats = _parts(terms)[0] * max(next_pow2(columns + 1), 16) + columns
    return 4 * floats * ctx.max_tokens + _split_bytes(columns * terms)


def _mix(h: Tensor, fn: Tensor, eps: float, mix: Tensor | None, scratch: Tensor | None) -> Tensor:
    """Mixing logits [T, columns] of packed streams; their memory is `mix`, or scratch."""
    rows, terms, columns = h.shape[0], h.shape[1] * h.shape[2], fn.shape[0]
    parts, part = _parts(terms)
    width = max(next_pow2(columns + 1), 16)
    many = h.dtype == torch.bfloat16 and rows > _FEW_ROWS
    split = _split_bytes(columns * terms) if many else 0
    need = split + 4 * rows * (parts * width + columns)
    if scratch is None or scratch.shape[0] < need:
        scratch = torch.empty(need, dtype=torch.uint8, device=h.device)
    room = scratch[split:need].view(torch.float32)
    if mix is None:
        mix = room[rows * parts * width :].view(rows, columns)
    matrix = packed(fn.float())
    if many:
        matrix, whole = scratch[:split].view(torch.bfloat16), matrix  # three terms of each element, one after another
        count = columns * terms
        _three_terms((-(-count // _SPLIT_BLOCK),), matrix, whole, COUNT=count, BLOCK=_SPLIT_BLOCK)
    common = {"TERMS": terms, "PARTS": parts, "COLUMNS": columns, "COLUMN_BLOCK": width}
    _mix_parts(
        (-(-rows // _TILE_ROWS), parts),
        room,
        h,
        matrix,
        rows,
        TERMS=terms,
        PART=part,
        PARTS=parts,
        COLUMNS=columns,
        COLUMN_BLOCK=width,
        ROWS=_TILE_ROWS,
        STEP=_TILE_TERMS,
        LANE=_LANE_TERMS,
        SPLIT=many,
        num_stages=1,  # with copies under way rows came out wrong now and then on an H200, most of them split
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


@KERNELS.implements(mhc_ops.mhc_prenorm_mix, scratch=step_scratch_bytes)
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


@KERNELS.implements(mhc_ops.mhc_step, scratch=step_scratch_bytes, sources=("norm.py",))
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
    block = min(next_pow2(hidden), _STRETCH)
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
