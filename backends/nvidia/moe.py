"""Mixture of experts around its products: router, dispatch and combine on one device, activation."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import store_tile
from deepinfer.backends.nvidia.launch import kernel
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
    soft = tl.log(1.0 + tl.exp(-tl.abs(z.to(tl.float64)))).to(tl.float32)
    affinity = tl.sqrt_rn(tl.where(z < 0.0, 0.0, z) + soft)
    added = tl.load(bias + expert, mask=mask, other=0.0)
    if image_mask is not None:
        image = tl.load(image_mask + row) != 0
        added = tl.where(image, tl.load(image_bias + expert, mask=mask, other=0.0), added)
    score = affinity + added
    left = tl.where(mask, tl.where(score == score, score, float("inf")), float("-inf"))
    place = tl.arange(0, TOPK_BLOCK)
    chosen = tl.zeros((TOPK_BLOCK,), tl.int32)
    weight = tl.zeros((TOPK_BLOCK,), tl.float32)
    total = 0.0
    taken = ~mask
    for k in tl.static_range(TOPK):
        best = tl.max(tl.where(taken, float("-inf"), left), 0)
        index = tl.min(tl.where((left == best) & (taken == 0), expert, BLOCK), 0)
        own = tl.sum(tl.where(expert == index, affinity, 0.0), 0)
        taken = taken | (expert == index)
        chosen = tl.where(place == k, index, chosen)
        weight = tl.where(place == k, own, weight)
        total = total + own
    weight = tl.div_rn(weight, total + 1e-20) * factor
    tl.store(expert_ids + row * TOPK + place, chosen.to(tl.int64), mask=place < TOPK)
    tl.store(weights + row * TOPK + place, weight, mask=place < TOPK)


@kernel
def _place(
    slot_to_row: tl.tensor,
    row_weights: tl.tensor,
    psum: tl.tensor,
    expert_ids: tl.tensor,
    weights: tl.tensor,
    choices: tl.int32,
    experts: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Rows of one expert: where they begin, and the row of each of its choices in ascending order."""
    expert = tl.program_id(0)
    before = 0
    own = 0
    for first in range(0, choices, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + at, mask=at < choices, other=-1).to(tl.int32)
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(psum + expert, before + own)
    row = before
    for first in range(0, choices, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + at, mask=at < choices, other=-1).to(tl.int32)
        mine = chosen == expert
        count = mine.to(tl.int32)
        rows = row + tl.cumsum(count, 0) - 1
        tl.store(slot_to_row + at, rows, mask=mine)
        tl.store(row_weights + rows, tl.load(weights + at, mask=mine, other=0.0), mask=mine)
        row += tl.sum(count, 0)
        if expert == 0:
            tl.store(slot_to_row + at, tl.full((BLOCK,), -1, tl.int32), mask=(at < choices) & (chosen < 0))


@kernel
def _spread(
    target: tl.tensor,
    source: tl.tensor,
    slot_to_row: tl.tensor,
    source_pitch: tl.int64,
    choices_per_row: tl.int32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    choice = tl.program_id(0)
    row = tl.load(slot_to_row + choice).to(tl.int64)
    if row >= 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = place < WIDTH
        token = (choice // choices_per_row).to(tl.int64)
        value = tl.load(source + token * (source_pitch // VEC) * VEC + place, mask=mask)
        tl.store(target + row * WIDTH + place, value, mask=mask)


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
    """A row of affinities in registers, k times its best."""
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
        num_warps=max(1, min(4, block // 64)),
    )
    return expert_ids, weights


def _spread_rows(target: Tensor, source: Tensor, slots: Tensor) -> None:
    flat, width = rows_of(source), source.shape[-1]
    block = min(next_pow2(width), 2048)
    _spread(
        (slots.numel(), -(-width // block)),
        target,
        flat,
        slots,
        pitch(flat),
        slots.shape[1],
        WIDTH=width,
        BLOCK=block,
        VEC=vector_width(pitch(flat), width),
        num_warps=warps_for(block),
    )


@KERNELS.implements(moe_ops.ep_dispatch)
def ep_dispatch(
    x: Tensor | QTensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    out: tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle] | None = None,
) -> tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]:
    """A program per expert finds its rows; a program per choice copies one."""
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
    _place(
        (num_experts,), slots, row_weights, psum, packed(expert_ids), packed(weights), count, num_experts, BLOCK=_SCAN
    )
    if isinstance(x, QTensor) and isinstance(rows, QTensor):
        _spread_rows(rows.data, x.data, slots)
        _spread_rows(rows.scale, x.scale, slots)
    elif isinstance(x, Tensor) and isinstance(rows, Tensor):
        _spread_rows(rows, x, slots)
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
