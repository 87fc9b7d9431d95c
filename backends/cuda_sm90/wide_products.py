"""Products with packed weights for activations that the WGMMA form does not take: float32, which nothing rounds.

These read the packed codes where they are, so a run needs no second copy of a weight and may be captured in a graph.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda_sm90.packing import LAYOUT
from deepinfer.backends.cuda_sm90.packing_narrow import NARROW
from deepinfer.backends.nvidia.codes import e2m1_value, e4m3_value, ue8m0_value
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.linear import columns_together, load_width, operand_of
from deepinfer.backends.nvidia.products import expert_tile, load_operand
from deepinfer.backends.nvidia.tensors import next_pow2, packed
from deepinfer.ops.formats import QTensor

_BYTES, _PAIRS, _NARROW_PAIRS = 0, 1, 2
_ORDER: Final = {("mxfp8", LAYOUT): _BYTES, ("mxfp4", LAYOUT): _PAIRS, ("mxfp4", NARROW): _NARROW_PAIRS}
_ROWS, _OUTPUTS, _DEPTH = 16, 64, 32


@device_function
def load_packed(
    codes: tl.tensor,
    scales: tl.tensor,
    first_block: tl.tensor,
    rows: tl.tensor,
    rows_ok: tl.tensor,
    first: tl.tensor,
    depth: tl.tensor,
    ORDER: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """[R, BK] float32 values of a packed matrix from column `first` on, by the places that `packing.py` tells.

    Args:
        codes: packed codes of all matrices.
        scales: their packed scales.
        first_block: of the matrix.
        rows: [R] row numbers within it.
        rows_ok: [R] which of them exist.
        first: first column, a multiple of BK.
        depth: columns in all, a multiple of 128.
        ORDER: which packing.
        BK: columns, 32: those of one scale.
    """
    row, column = rows[:, None], first + tl.arange(0, BK)[None, :]
    block = first_block + (row // 128) * (depth // 128) + first // 128
    half, warp, high, pair, low = (row // 64) % 2, (row // 16) % 4, (row // 4) % 4, (row // 2) % 2, row % 2
    part, group = (first // 64) % 2, (first // 32) % 4
    if ORDER == 2:
        quarter, byte = (column // 4) % 4, column % 4
        word = (column // 16) % 4
    else:
        step, upper, quarter, odd = (column // 16) % 4, (column // 8) % 2, (column // 2) % 4, column % 2
        word = step
    thread = 32 * warp + 8 * high + 4 * low + quarter
    ok = rows_ok[:, None]
    if ORDER == 0:
        unit = (2 * part + step // 2) * 2048 + 16 * thread + 4 * (2 * (step % 2) + upper) + 2 * odd
        at = codes + block * 16384 + 8192 * half + unit
        under, over = tl.load(at, mask=ok, other=0), tl.load(at + 1, mask=ok, other=0)
        even = (over & 128) | ((over & 7) << 4) | (under >> 4)
        value = e4m3_value(tl.where(pair == 0, even, ((over & 8) << 4) | (over & 112) | (under & 15)))
        left_out = 120
    else:
        at = codes + block * 8192 + 4096 * half + 2048 * part + 16 * thread + 4 * word
        if ORDER == 2:
            both = tl.load(at + byte, mask=ok, other=0)
            value = e2m1_value(tl.where(pair == 0, both, both >> 4))
        else:
            under, over = tl.load(at + 2 * odd, mask=ok, other=0), tl.load(at + 2 * odd + 1, mask=ok, other=0)
            lane = under.to(tl.int32) | (over.to(tl.int32) << 8)
            place = 2 * upper + pair
            shift = tl.where(place == 3, 0, 3 * place)
            shifted = lane << shift  # magnitude to bits 8..6, sign to bit 15
            code = ((shifted >> 6) & 7) | ((shifted >> 12) & 8)
            last = ((lane >> 13) & 3) | ((lane >> 8) & 4) | ((lane >> 8) & 8)
            value = e2m1_value(tl.where(place == 3, last, code).to(tl.uint8))
        left_out = 126
    at_scale = scales + block * 512 + 256 * half + 64 * warp + 8 * (2 * high + low) + 2 * group + pair
    byte_of_scale = tl.load(at_scale, mask=ok, other=127).to(tl.int32) - left_out
    return value * ue8m0_value(byte_of_scale.to(tl.uint8))


@kernel
def _product(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    acc: tl.tensor,
    psum: tl.tensor,
    num_rows: tl.int32,
    num_experts: tl.int32,
    num_out: tl.int32,
    depth: tl.int32,
    out_pitch: tl.int64,
    out_group: tl.int64,
    x_pitch: tl.int64,
    x_group: tl.int64,
    x_scale_pitch: tl.int64,
    acc_pitch: tl.int64,
    X_FMT: tl.constexpr,
    ORDER: tl.constexpr,
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (row tiles, output tiles, groups), K in steps of one size into one accumulator."""
    group = tl.program_id(2).to(tl.int64)
    matrix = group
    first_row = tl.program_id(0).to(tl.int64) * BM
    end = num_rows.to(tl.int64)
    there = first_row < end
    if EXPERTS > 0:
        there, matrix, first_row, end = expert_tile(psum, num_experts, EXPERTS, BM)
    if there:
        rows = first_row + tl.arange(0, BM)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        rows_ok, columns_ok = rows < end, columns < num_out
        block = matrix * (num_out // 128).to(tl.int64) * (depth // 128)
        total = tl.zeros((BN, BM), tl.float32)
        for first in range(0, depth, BK):
            left = load_packed(codes, scales, block, columns, columns_ok, first, depth, ORDER, BK).to(WIDE)
            own = x + group * ((x_group // VEC) * VEC)
            right = load_operand(
                own, x_scale, rows, rows_ok, first, depth, x_pitch, x_scale_pitch, X_FMT, BK, WIDE, VEC
            )
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        ok = columns_ok[:, None] & rows_ok[None, :]
        if acc is not None:
            total += tl.load(acc + rows[None, :] * acc_pitch + columns[:, None], mask=ok, other=0.0).to(tl.float32)
        place = group * out_group + rows[None, :] * out_pitch + columns[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=ok)


def product(
    x: Tensor | QTensor,
    weight: QTensor,
    out: Tensor,
    *,
    acc: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor:
    """`x W^T + acc` with a packed weight of one matrix, of groups that `x` has an axis of, or of experts.

    Args:
        x: [T, K]; [T, G, K] plain with groups.
        weight: packed [N, K], [G, N, K] or [E, N, K].
        out: [T, N], or [T, G, N] with groups, neighbouring columns side by side.
        acc: [T, N], added in float32 before the rounding.
        row_ends: [E] int32 running ends of the experts' rows; None without experts.

    Returns:
        `out`.
    """
    left, wide = operand_of(x), not isinstance(x, QTensor) and x.dtype != torch.bfloat16
    num_rows, depth, num_out = x.shape[0], x.shape[-1], weight.shape[-2]
    experts = 0 if row_ends is None else weight.shape[0]
    groups = x.shape[1] if len(x.shape) == 3 else 1
    added = None if acc is None else columns_together(acc)
    most = triton.cdiv(num_rows, _ROWS) + min(experts, num_rows)
    _product(
        (most, triton.cdiv(num_out, _OUTPUTS), groups),
        out,
        left.data,
        left.scale,
        weight.data,
        weight.scale,
        added,
        None if row_ends is None else packed(row_ends),
        num_rows,
        experts,
        num_out,
        depth,
        out.stride(0),
        out.stride(1) if groups > 1 else 0,
        left.data.stride(0),
        left.data.stride(1) if groups > 1 else 0,
        left.scale_pitch,
        0 if added is None else added.stride(0),
        X_FMT=left.fmt,
        ORDER=_ORDER[weight.fmt, weight.layout],
        WIDE=tl.float32 if wide else tl.bfloat16,
        EXPERTS=next_pow2(experts) if experts else 0,
        BM=_ROWS,
        BN=_OUTPUTS,
        BK=_DEPTH,
        VEC=load_width(depth, *left.data.stride()[:-1]),
        num_warps=4,
        num_stages=2,
    )
    return out
