"""Mixture of experts around its products: router, dispatch and combine on one device, activation."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import store_tile
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import (
    FORMAT,
    new_codes,
    new_like,
    next_pow2,
    packed,
    pitch,
    rows_of,
    vector_width,
    warps_for,
)
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat
from deepinfer.ops.moe import DispatchHandle

_SWIGLU_BLOCK = 256
"""Values of a row that one program of the activation takes: a divisor of the model's widths."""
_SWIGLU_TILE = 1024
"""Values that it takes in all."""
_SCAN = 1024
"""Choices that a program looks at in one step."""
_SCANNED_WHOLE = 2048
"""Up to so many choices each token looks at all of them; of more, stretches are counted first."""
_WARP = 32
"""Bins that a histogram has at least."""
_SPREAD_BLOCK = 8192
"""Elements of a row that are held at once."""


@device_function
def _constant(like: tl.tensor, value: tl.constexpr) -> tl.tensor:
    """A float64 in every place; a bare number would become a float32 first."""
    return tl.full(like.shape, value, tl.float64)


@device_function
def _next(sum_: tl.tensor, x: tl.tensor, coefficient: tl.constexpr) -> tl.tensor:
    """A step of Horner's scheme in float64."""
    return tl.fma(sum_, x, _constant(x, coefficient))


@device_function
def _log1p_exp(size: tl.tensor) -> tl.tensor:
    """log(1 + exp(-size)) of float32 that are not negative: in float64 to 2^-47, then rounded once.

    With the library's functions 8192 rows took 35 us on an H200 where they take 22. Both polynomials are Chebyshev fits
    (mpmath's `chebyfit`): of exp on +-log(2) / 2, and of log1p(t) / t on [0, 1].
    """
    x = tl.minimum(size, 128.0).to(tl.float64)  # where the result is 0 already
    # 1.5 * 2^52 leaves the nearest integer in the low bits
    shifted = tl.fma(x, _constant(x, -1.4426950408889634), _constant(x, 6755399441055744.0))
    power = shifted - 6755399441055744.0
    r = tl.fma(power, _constant(x, -0.6931471805599453), -x)
    p = _next(_constant(r, 2.7626357241447223e-07), r, 2.764018079620985e-06)
    p = _next(p, r, 2.4801504346997686e-05)
    p = _next(p, r, 0.00019841170270440067)
    p = _next(p, r, 0.0013888888932488599)
    p = _next(p, r, 0.008333333385667782)
    p = _next(p, r, 0.04166666666657314)
    p = _next(p, r, 0.16666666666554406)
    p = _next(p, r, 0.5000000000000006)
    p = _next(p, r, 1.0000000000000067)
    p = _next(p, r, 1.0)
    t = (p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)
    q = _next(_constant(t, 5.7257071651592704e-05), t, -0.0006056331381238628)
    q = _next(q, t, 0.003032665275883164)
    q = _next(q, t, -0.009629407360351236)
    q = _next(q, t, 0.0219941389705604)
    q = _next(q, t, -0.03907726951573114)
    q = _next(q, t, 0.05742104178532733)
    q = _next(q, t, -0.07375189663045013)
    q = _next(q, t, 0.08713666158405099)
    q = _next(q, t, -0.0988285620764629)
    q = _next(q, t, 0.11082925631397271)
    q = _next(q, t, -0.12494859138938634)
    q = _next(q, t, 0.14285023617558082)
    q = _next(q, t, -0.16666600961412256)
    q = _next(q, t, 0.19999995817342595)
    q = _next(q, t, -0.24999999836556086)
    q = _next(q, t, 0.33333333329940107)
    q = _next(q, t, -0.49999999999971906)
    q = _next(q, t, 0.9999999999999996)
    return (t * q).to(tl.float32)


@kernel
def _gate(
    expert_ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    bias: tl.tensor,
    image_bias: tl.tensor,
    image_mask: tl.tensor,
    pitch: tl.int64,
    factor: tl.float32,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < EXPERTS
    z = tl.load(logits + row * pitch + expert, mask=mask, other=0.0)
    # float64 inside and one rounding, so that equal logits give the reference's choice
    affinity = tl.sqrt_rn(tl.where(z < 0.0, 0.0, z) + _log1p_exp(tl.abs(z)))
    added = tl.load(bias + expert, mask=mask, other=0.0)
    if image_mask is not None:
        image = tl.load(image_mask + row) != 0
        added = tl.where(image, tl.load(image_bias + expert, mask=mask, other=0.0), added)
    score = affinity + added
    # integers in the order of scores, NaN as infinity; the least one is of no score
    left = tl.where(score == score, score, float("inf")).to(tl.int32, bitcast=True)
    left = left ^ ((left >> 31) & 0x7FFFFFFF)
    left = tl.where(mask, left, -0x80000000)
    bits = affinity.to(tl.int32, bitcast=True)
    place = tl.arange(0, TOPK_BLOCK)
    chosen = tl.zeros((TOPK_BLOCK,), tl.int32)
    weight = tl.zeros((TOPK_BLOCK,), tl.float32)
    total = 0.0
    for k in tl.static_range(TOPK):
        index = tl.min(tl.where(left == tl.max(left, 0), expert, BLOCK), 0)
        own = tl.sum(tl.where(expert == index, bits, 0), 0).to(tl.float32, bitcast=True)
        left = tl.where(expert == index, -0x80000000, left)
        chosen = tl.where(place == k, index, chosen)
        weight = tl.where(place == k, own, weight)
        total = total + own
    weight = tl.div_rn(weight, total + 1e-20) * factor
    tl.store(expert_ids + row * TOPK + place, chosen.to(tl.int64), mask=place < TOPK)
    tl.store(weights + row * TOPK + place, weight, mask=place < TOPK)


@kernel
def _count(
    counts: tl.tensor,
    expert_ids: tl.tensor,
    choices: tl.int32,
    experts: tl.int32,
    span: tl.int32,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """How often each expert is chosen in a stretch of `span` choices, at most BLOCK."""
    stretch = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    at = stretch * span + place
    chosen = tl.load(expert_ids + at, mask=(place < span) & (at < choices), other=-1).to(tl.int32)
    expert = tl.arange(0, BINS)
    found = tl.histogram(tl.maximum(chosen, 0), BINS, mask=chosen >= 0)
    tl.store(counts + stretch * experts + expert, found, mask=expert < experts)


@kernel
def _starts(
    starts: tl.tensor,
    psum: tl.tensor,
    counts: tl.tensor,
    stretches: tl.int32,
    experts: tl.int32,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Where a stretch's rows of each expert begin, and the ends of experts."""
    stretch = tl.program_id(0)
    expert = tl.arange(0, BINS)
    inside = expert < experts
    before = tl.zeros((BINS,), tl.int32)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, stretches, STEP):
        other = first + tl.arange(0, STEP)
        mask = (other < stretches)[:, None] & inside[None, :]
        found = tl.load(counts + other[:, None] * experts + expert[None, :], mask=mask, other=0)
        before += tl.sum(tl.where((other < stretch)[:, None], found, 0), 0)
        total += tl.sum(found, 0)
    ends = tl.cumsum(total, 0)
    tl.store(starts + stretch * experts + expert, ends - total + before, mask=inside)
    if stretch == 0:
        tl.store(psum + expert, ends, mask=inside)


@device_function
def _copy(
    target: tl.tensor,
    line: tl.tensor,
    row: tl.tensor,
    choice: tl.tensor,
    first: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of a line, from `first` on, to the rows of its choices; -1 is no row."""
    place = first + tl.arange(0, BLOCK)
    value = tl.load(line + place, mask=place < WIDTH)
    for number in tl.static_range(CHOICES):
        to = tl.sum(tl.where(choice == number, row, 0), 0).to(tl.int64)
        tl.store(target + to * WIDTH + place, value, mask=(place < WIDTH) & (to >= 0))


@kernel
def _spread(
    target: tl.tensor,
    target_scale: tl.tensor,
    slot_to_row: tl.tensor,
    row_weights: tl.tensor,
    psum: tl.tensor,
    source: tl.tensor,
    source_scale: tl.tensor,
    expert_ids: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor,
    source_pitch: tl.int64,
    scale_pitch: tl.int64,
    tokens: tl.int32,
    experts: tl.int32,
    span: tl.int32,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_VEC: tl.constexpr,
) -> None:
    """A token's row to the rows of its choices: how many choices come before each of them.

    With `starts` those in its stretch of `span` choices are counted here. Without, all are, and programs behind those
    of tokens find the ends of CHOICE_BLOCK experts each.
    """
    token = tl.program_id(0)
    choice = tl.arange(0, CHOICE_BLOCK)
    own = token * CHOICES + choice
    live = (choice < CHOICES) & (token < tokens)
    expert = tl.load(expert_ids + own, mask=live, other=-1).to(tl.int32)
    if starts is not None:
        stretch = token * CHOICES // span
        first = stretch * span
        last = token * CHOICES + CHOICES
        row = tl.load(starts + stretch * experts + expert, mask=expert >= 0, other=0)
    else:
        first = 0
        last = tokens * CHOICES
        # every choice of an expert comes before its end
        expert = tl.where(token < tokens, expert, (token - tokens) * CHOICE_BLOCK + choice)
        row = tl.zeros((CHOICE_BLOCK,), tl.int32)
    for begin in range(first, last, SCAN):
        at = begin + tl.arange(0, SCAN)[None, :]
        chosen = tl.load(expert_ids + at, mask=at < last, other=-1).to(tl.int32)
        before = (chosen == expert[:, None]) & (at < own[:, None])
        if starts is None:
            before = before | (chosen < expert[:, None])
        row += tl.sum((before & (chosen >= 0)).to(tl.int32), 1)
    if token >= tokens:
        tl.store(psum + expert, row, mask=expert < experts)
    else:
        row = tl.where(expert >= 0, row, -1)
        tl.store(slot_to_row + own, row, mask=live)
        tl.store(row_weights + row, tl.load(weights + own, mask=live, other=0.0), mask=live & (row >= 0))
        place = token.to(tl.int64)
        line = source + place * (source_pitch // VEC) * VEC
        for part in tl.static_range(0, WIDTH, BLOCK):
            _copy(target, line, row, choice, part, CHOICES, WIDTH, BLOCK)
        if source_scale is not None:
            line = source_scale + place * (scale_pitch // SCALE_VEC) * SCALE_VEC
            _copy(target_scale, line, row, choice, 0, CHOICES, SCALES, SCALE_BLOCK)


@kernel
def _swiglu(
    out: tl.tensor,
    scale: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    row_weight: tl.tensor,
    rows: tl.int32,
    gate_pitch: tl.int64,
    up_pitch: tl.int64,
    limit: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FMT: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (tiles of ROWS rows, stretches of BLOCK values): no stretch of the model's widths is partly empty."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = live & (place < WIDTH)
    g = tl.load(gate + at * (gate_pitch // VEC) * VEC + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at * (up_pitch // VEC) * VEC + place, mask=mask, other=0.0).to(tl.float32)
    g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.clamp(u, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    y = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if row_weight is not None:
        y = y * tl.load(row_weight + row, mask=row < rows, other=0.0)[:, None]
    if FMT == 0:
        tl.store(out + at * WIDTH + place, y.to(out.dtype.element_ty), mask=mask)
    else:
        value = tl.where(mask, y, 0.0)
        store_tile(out, scale, value, row, rows, tl.program_id(1), WIDTH, ROWS, BLOCK, GROUP_SIZE, FMT)


@kernel
def _combine(
    out: tl.tensor,
    y: tl.tensor,
    slot_to_row: tl.tensor,
    bias: tl.tensor,
    y_pitch: tl.int64,
    bias_pitch: tl.int64,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(slot_to_row + token * CHOICES + choice).to(tl.int64)
        total += tl.load(y + row * (y_pitch // VEC) * VEC + place, mask=mask & (row >= 0), other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + token * (bias_pitch // VEC) * VEC + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + place, total.to(out.dtype.element_ty), mask=mask)


@KERNELS.implements(moe_ops.moe_gate)
def moe_gate(
    logits: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    image_mask: Tensor | None,
    k: int,
    scale: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A warp per row: affinities in registers, k times the best."""
    rows, experts = logits.shape
    given = out if out is not None else (None, None)
    expert_ids = new_like(given[0], (rows, k), torch.int64, logits.device)
    weights = new_like(given[1], (rows, k), torch.float32, logits.device)
    flat, block = rows_of(logits), next_pow2(experts)
    images = image_bias is not None and image_mask is not None
    _gate(
        (rows,),
        expert_ids,
        weights,
        flat,
        packed(bias),
        packed(image_bias) if images and image_bias is not None else None,
        packed(image_mask) if images and image_mask is not None else None,
        pitch(flat),
        scale,
        EXPERTS=experts,
        TOPK=k,
        BLOCK=block,
        TOPK_BLOCK=next_pow2(k),
        num_warps=1,
    )
    return expert_ids, weights


@KERNELS.implements(moe_ops.ep_dispatch)
def ep_dispatch(
    x: Tensor | QTensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    out: tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle] | None = None,
) -> tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]:
    """A program per token counts the choices before its own, and copies its row to where they belong."""
    tokens, k = expert_ids.shape
    count, device = tokens * k, expert_ids.device
    rows: Tensor | QTensor
    if out is not None:
        rows, row_weights, psum, slots = out[0], out[1], out[2], out[3].slot_to_row
    else:
        row_weights = torch.empty(count, dtype=torch.float32, device=device)
        psum = torch.empty(num_experts, dtype=torch.int32, device=device)
        slots = torch.empty((tokens, k), dtype=torch.int32, device=device)
        if isinstance(x, QTensor):
            data = torch.empty((count, x.data.shape[1]), dtype=torch.uint8, device=device)
            rows = QTensor(data, torch.empty((count, x.scale.shape[1]), dtype=torch.uint8, device=device), x.fmt)
        else:
            rows = torch.empty((count, x.shape[1]), dtype=x.dtype, device=device)
    ids, block, span, starts = packed(expert_ids), next_pow2(k), 0, None
    if count <= _SCANNED_WHOLE:
        programs = tokens + -(-num_experts // block)
    else:
        programs, span, bins = tokens, max(_SCAN // k, 1) * k, max(next_pow2(num_experts), _WARP)
        stretches = -(-count // span)
        counts, starts = torch.empty((2, stretches, num_experts), dtype=torch.int32, device=device)
        _count((stretches,), counts, ids, count, num_experts, span, BLOCK=next_pow2(span), BINS=bins)
        _starts((stretches,), starts, psum, counts, stretches, num_experts, STEP=16, BINS=bins)
    source = rows_of(x.data if isinstance(x, QTensor) else x)
    scale = rows_of(x.scale) if isinstance(x, QTensor) else None
    width, scales = source.shape[1], 0 if scale is None else scale.shape[1]
    _spread(
        (programs,),
        rows.data if isinstance(rows, QTensor) else rows,
        rows.scale if isinstance(rows, QTensor) else None,
        slots,
        row_weights,
        psum,
        source,
        scale,
        ids,
        packed(weights),
        starts,
        pitch(source),
        0 if scale is None else pitch(scale),
        tokens,
        num_experts,
        span,
        CHOICES=k,
        CHOICE_BLOCK=block,
        SCAN=_SCAN,
        WIDTH=width,
        BLOCK=min(next_pow2(width), _SPREAD_BLOCK),
        VEC=vector_width(pitch(source), width),
        SCALES=scales,
        SCALE_BLOCK=next_pow2(scales),
        SCALE_VEC=1 if scale is None else vector_width(pitch(scale), scales),
    )
    return rows, row_weights, psum, DispatchHandle(slots)


@KERNELS.implements(moe_ops.swiglu_quant)
def swiglu_quant(
    gate: Tensor,
    up: Tensor,
    limit: float,
    row_weight: Tensor | None,
    fmt: QuantFormat | None,
    *,
    out: Tensor | QTensor | None = None,
) -> Tensor | QTensor:
    """The activation in float32, and codes of it without a rounding in between."""
    rows, width = gate.shape
    group = 32 if fmt is None else GROUP[fmt]
    result: Tensor | QTensor
    if fmt is None:
        result = new_like(out if isinstance(out, Tensor) else None, (rows, width), gate.dtype, gate.device)
    else:
        result = new_codes(out if isinstance(out, QTensor) else None, (rows, width), fmt, gate.device)
    gates, ups = rows_of(gate), rows_of(up)
    block = min(max(next_pow2(width), group), _SWIGLU_BLOCK)
    tile = _SWIGLU_TILE // block
    _swiglu(
        (-(-rows // tile), -(-width // block)),
        result.data if isinstance(result, QTensor) else result,
        result.scale if isinstance(result, QTensor) else None,
        gates,
        ups,
        None if row_weight is None else packed(row_weight),
        rows,
        pitch(gates),
        pitch(ups),
        limit,
        WIDTH=width,
        BLOCK=block,
        ROWS=tile,
        GROUP_SIZE=group,
        FMT=FORMAT[fmt or "plain"],
        VEC=vector_width(pitch(gates), pitch(ups)),
        num_warps=warps_for(tile * block, 32),
    )
    return result


@KERNELS.implements(moe_ops.ep_combine)
def ep_combine(
    y: Tensor, handle: DispatchHandle, bias: Tensor | None, out_dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """Choices in their order, then the bias; rows that no choice names are not read."""
    slots, width = packed(handle.slot_to_row), y.shape[1]
    tokens, k = slots.shape
    out = new_like(out, (tokens, width), out_dtype, y.device)
    flat = rows_of(y)
    added = None if bias is None else rows_of(bias)
    block = min(next_pow2(width), 2048)
    pitches = (pitch(flat), 0 if added is None else pitch(added))
    _combine(
        (tokens, -(-width // block)),
        out,
        flat,
        slots,
        added,
        *pitches,
        CHOICES=k,
        WIDTH=width,
        BLOCK=block,
        VEC=vector_width(*pitches, width),
        num_warps=warps_for(block),
    )
    return out
