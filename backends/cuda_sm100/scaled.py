"""Products of block-scaled operands: the tensor cores take codes and ue8m0 scales as they are, nothing is decoded.

The weight is the first operand, so its rows fill the instruction's 128 rows however few tokens there are. K is walked
in steps of one size with one accumulator in float32, so a row's additions do not depend on how many rows come with it.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer.backends.nvidia.codes import MXFP8
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.products import expert_tile

_ONE = tl.constexpr(127)
"""The ue8m0 code of 1: what stands for scales outside an operand, since 0 times a NaN scale is no zero."""


@device_function
def _codes(
    data: tl.tensor,
    rows: tl.tensor,
    rows_ok: tl.tensor,
    first: tl.tensor,
    depth: tl.tensor,
    pitch: tl.tensor,
    FMT: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """[R, BK] bytes of e4m3, or [R, BK / 2] of e2m1 pairs, from column `first` on; zero outside.

    Args:
        data: the codes.
        rows: [R] int64 row numbers.
        rows_ok: [R] which of them exist.
        first: first column, a multiple of BK.
        depth: columns in all, a multiple of VEC codes.
        pitch: bytes from row to row.
        FMT: MXFP8 or MXFP4.
        BK: columns.
        VEC: bytes that rows start at a multiple of.
    """
    packing: tl.constexpr = 1 if FMT == MXFP8 else 2
    byte = first // packing + tl.arange(0, BK // packing)
    width = (depth // (packing * VEC)) * VEC
    place = rows[:, None] * ((pitch // VEC) * VEC) + byte[None, :]
    return tl.load(data + place, mask=rows_ok[:, None] & (byte < width)[None, :], other=0)


@device_function
def _scales(
    scale: tl.tensor,
    rows: tl.tensor,
    rows_ok: tl.tensor,
    first: tl.tensor,
    depth: tl.tensor,
    pitch: tl.tensor,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """[R, BK / 32] ue8m0 codes; with VEC, which divides their number in a row, a row of the tile is one load."""
    group = first // 32 + tl.arange(0, BK // 32)
    groups = ((depth + 31) // (32 * VEC)) * VEC
    ok = rows_ok[:, None] & (group < groups)[None, :]
    return tl.load(scale + rows[:, None] * ((pitch // VEC) * VEC) + group[None, :], mask=ok, other=_ONE)


@device_function
def _scaled_product(
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    x_rows: tl.tensor,
    x_ok: tl.tensor,
    w_rows: tl.tensor,
    w_ok: tl.tensor,
    depth: tl.tensor,
    x_pitch: tl.tensor,
    x_scale_pitch: tl.tensor,
    w_pitch: tl.tensor,
    w_scale_pitch: tl.tensor,
    W_FMT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    SCALE_VEC: tl.constexpr,
) -> tl.tensor:
    """[BN, BM] float32: products of BN weight rows with BM rows of e4m3 activations."""
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, depth, BK):
        left = _codes(w, w_rows, w_ok, first, depth, w_pitch, W_FMT, BK, VEC)
        right = _codes(x, x_rows, x_ok, first, depth, x_pitch, MXFP8, BK, VEC)
        total = tl.dot_scaled(
            left,
            _scales(w_scale, w_rows, w_ok, first, depth, w_scale_pitch, BK, SCALE_VEC),
            "e4m3" if W_FMT == MXFP8 else "e2m1",
            tl.trans(right),
            _scales(x_scale, x_rows, x_ok, first, depth, x_scale_pitch, BK, SCALE_VEC),
            "e4m3",
            total,
        )
    return total


@kernel
def dense_scaled(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    acc: tl.tensor,
    num_rows: tl.int32,
    num_out: tl.int32,
    depth: tl.int32,
    out_pitch: tl.int64,
    x_pitch: tl.int64,
    x_scale_pitch: tl.int64,
    w_pitch: tl.int64,
    w_scale_pitch: tl.int64,
    acc_pitch: tl.int64,
    W_FMT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    SCALE_VEC: tl.constexpr,
) -> None:
    """Grid (row tiles, output tiles): `x W^T + acc`, one rounding at the end."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    rows_ok, columns_ok = rows < num_rows, columns < num_out
    y = _scaled_product(
        x,
        x_scale,
        w,
        w_scale,
        rows,
        rows_ok,
        columns,
        columns_ok,
        depth,
        x_pitch,
        x_scale_pitch,
        w_pitch,
        w_scale_pitch,
        W_FMT,
        BM,
        BN,
        BK,
        VEC,
        SCALE_VEC,
    )
    ok = columns_ok[:, None] & rows_ok[None, :]
    if acc is not None:
        y += tl.load(acc + rows[None, :] * acc_pitch + columns[:, None], mask=ok, other=0.0).to(tl.float32)
    place = rows[None, :] * out_pitch + columns[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=ok)


@kernel
def grouped_scaled(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    psum: tl.tensor,
    num_experts: tl.int32,
    num_out: tl.int32,
    depth: tl.int32,
    out_pitch: tl.int64,
    x_pitch: tl.int64,
    x_scale_pitch: tl.int64,
    w_pitch: tl.int64,
    w_expert: tl.int64,
    w_scale_pitch: tl.int64,
    w_scale_expert: tl.int64,
    W_FMT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    SCALE_VEC: tl.constexpr,
) -> None:
    """Grid (row tiles of all experts, output tiles); tiles past the end do nothing."""
    there, which, first, end = expert_tile(psum, num_experts, EXPERTS, BM)
    if there:
        rows = first + tl.arange(0, BM)
        columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
        rows_ok, columns_ok = rows < end, columns < num_out
        y = _scaled_product(
            x,
            x_scale,
            w + which * ((w_expert // VEC) * VEC),
            w_scale + which * ((w_scale_expert // SCALE_VEC) * SCALE_VEC),
            rows,
            rows_ok,
            columns,
            columns_ok,
            depth,
            x_pitch,
            x_scale_pitch,
            w_pitch,
            w_scale_pitch,
            W_FMT,
            BM,
            BN,
            BK,
            VEC,
            SCALE_VEC,
        )
        place = rows[None, :] * out_pitch + columns[:, None]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=columns_ok[:, None] & rows_ok[None, :])
