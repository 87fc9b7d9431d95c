"""The compressor: groups pooled per channel, then the newest tokens kept, in two launches: reads before writes."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import compress as compress_ops


@device_function
def _member(
    source: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    back: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    ring: tl.tensor,
    ring_pitch: tl.tensor,
    step: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Gate or value of the token `back` places before a row: from the step's rows, or from what was kept."""
    here = row - back >= first
    now = tl.load(source + tl.maximum(row - back, 0) * DIM + place, mask=mask & here, other=0.0)
    kept = state + (tl.maximum(position - back, 0) % ring) * ring_pitch + place * step
    old = tl.load(kept, mask=mask & (row - back < first), other=0.0)
    return tl.where(here, now, old)


@kernel
def _pool(
    out: tl.tensor,
    gate: tl.tensor,
    value: tl.tensor,
    state: tl.tensor,
    state_slots: tl.tensor,
    positions: tl.tensor,
    row_to_seq: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_pitch: tl.int64,
    ring_pitch: tl.int64,
    kind_pitch: tl.int64,
    step: tl.int64,
    ring: tl.int32,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < DIM
    pooled = tl.zeros((BLOCK,), tl.float32)
    position = tl.load(positions + row).to(tl.int64)
    if (position + 1) % RATIO == 0:
        seq = tl.load(row_to_seq + row)
        first = tl.load(cu_seqlens + seq)
        kept = state + tl.load(state_slots + seq).to(tl.int64) * slot_pitch
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        for back in tl.static_range(RATIO):
            g = _member(gate, kept, row, back, first, position, place, mask, ring, ring_pitch, step, DIM)
            top = tl.where((g > top) | (g != g), g, top)
        total = tl.zeros((BLOCK,), tl.float32)
        for back in tl.static_range(RATIO - 1, -1, -1):
            g = _member(gate, kept, row, back, first, position, place, mask, ring, ring_pitch, step, DIM)
            v = _member(value, kept + kind_pitch, row, back, first, position, place, mask, ring, ring_pitch, step, DIM)
            weight = tl.exp(g - top)
            total += weight
            pooled += weight * v
        pooled = tl.div_rn(pooled, total)
    tl.store(out + row * DIM + place, pooled.to(out.dtype.element_ty), mask=mask)


@kernel
def _keep(
    state: tl.tensor,
    gate: tl.tensor,
    value: tl.tensor,
    state_slots: tl.tensor,
    positions: tl.tensor,
    row_to_seq: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_pitch: tl.int64,
    ring_pitch: tl.int64,
    kind_pitch: tl.int64,
    step: tl.int64,
    ring: tl.int32,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seq = tl.load(row_to_seq + row)
    end = tl.load(cu_seqlens + seq + 1)
    if (row >= end - ring) & (row < end):
        place = tl.arange(0, BLOCK)
        mask = place < DIM
        position = tl.load(positions + row).to(tl.int64)
        slot = tl.load(state_slots + seq).to(tl.int64)
        at = state + slot * slot_pitch + (position % ring) * ring_pitch + place * step
        tl.store(at, tl.load(gate + row * DIM + place, mask=mask), mask=mask)
        tl.store(at + kind_pitch, tl.load(value + row * DIM + place, mask=mask), mask=mask)


@KERNELS.implements(compress_ops.kv_compress)
def kv_compress(
    gate: Tensor,
    value: Tensor,
    state: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    row_to_seq: Tensor,
    cu_seqlens_q: Tensor,
    ratio: int,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A program per row; one that closes no group writes zeros."""
    rows, dim = gate.shape
    out = new_like(out, (rows, dim), out_dtype, gate.device)
    gates, values = packed(gate), packed(value)
    lists = (packed(state_slots), packed(positions), packed(row_to_seq), packed(cu_seqlens_q))
    pitches = (*state.stride(), state.shape[1])
    block = next_pow2(dim)
    _pool(
        (rows,),
        out,
        gates,
        values,
        state,
        *lists,
        *pitches,
        RATIO=ratio,
        DIM=dim,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    _keep((rows,), state, gates, values, *lists, *pitches, DIM=dim, BLOCK=block, num_warps=warps_for(block))
    return out
