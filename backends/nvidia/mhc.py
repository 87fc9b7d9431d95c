"""Hyper-connections: streams read and written by small mixes, and the step that fuses both around a norm."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.mixing import mix_scratch_bytes, mixing_logits
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import mhc as mhc_ops

_STRETCH = 1024
"""Values of a stream that the fused step holds at a time."""
_SMALL_ROWS = 8
"""Rows that one program of the Sinkhorn kernel takes."""


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


@KERNELS.implements(mhc_ops.mhc_step, scratch=mix_scratch_bytes, sources=("norm.py", "mixing.py"))
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
    mix = mixing_logits(new, fn, norm_eps, None, scratch)
    pre, next_post, next_comb = _split(mix, scale, base, iters, hc_eps, given[2:])
    return new, normed, pre, next_post, next_comb
