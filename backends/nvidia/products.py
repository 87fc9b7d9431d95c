"""One tile of `y = x W^T` for every kind of operand, laid over a matrix, over groups, or over the rows of experts.

The weight is the first operand of the MMA: its rows fill the instruction's 64 rows however few tokens there are. K is
walked in steps of one size with one accumulator, so a row's additions do not depend on how many rows come with it.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer.backends.nvidia.codes import MXFP8, e2m1_value, e4m3_value, ue8m0_value
from deepinfer.backends.nvidia.launch import device_function, kernel


@device_function
def load_operand(
    data: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    rows_ok: tl.tensor,
    first: tl.tensor,
    depth: tl.tensor,
    data_pitch: tl.tensor,
    scale_pitch: tl.tensor,
    FMT: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """[R, BK] values of an operand from column `first` on, zero outside.

    Args:
        data: codes or values.
        scale: ue8m0 codes; not read for plain operands.
        rows: [R] int64 row numbers.
        rows_ok: [R] which of them exist.
        first: first column, a multiple of BK.
        depth: columns in all.
        data_pitch: elements of `data` from row to row.
        scale_pitch: likewise of `scale`.
        FMT: 0 for plain values, else their format.
        BK: columns, a multiple of 32.
        WIDE: dtype of the products.
        VEC: 16 where `depth` is a multiple of 32 and pitches are of 16, so that loads are wide; else 1.
    """
    data_pitch = (data_pitch // VEC) * VEC
    half = (depth // (2 * VEC)) * VEC  # of a packed row; its depth is even
    if VEC > 1:
        depth = (depth // (2 * VEC)) * (2 * VEC)
    column = first + tl.arange(0, BK)
    if FMT == 0:
        place = rows[:, None] * data_pitch + column[None, :]
        return tl.load(data + place, mask=rows_ok[:, None] & (column < depth)[None, :], other=0.0).to(WIDE)
    else:
        group = first // 32 + tl.arange(0, BK // 32)
        group_ok = rows_ok[:, None] & (group * 32 < depth)[None, :]
        byte = tl.load(scale + rows[:, None] * scale_pitch + group[None, :], mask=group_ok, other=127)
        factor = ue8m0_value(byte)[:, :, None]
        if FMT == MXFP8:
            place = rows[:, None] * data_pitch + column[None, :]
            code = tl.load(data + place, mask=rows_ok[:, None] & (column < depth)[None, :], other=0)
            value = e4m3_value(code)
        else:
            pair = first // 2 + tl.arange(0, BK // 2)
            place = rows[:, None] * data_pitch + pair[None, :]
            both = tl.load(data + place, mask=rows_ok[:, None] & (pair < half)[None, :], other=0)
            value = tl.reshape(tl.join(e2m1_value(both), e2m1_value(both >> 4)), (rows.shape[0], BK))
        grouped = tl.reshape(value, (rows.shape[0], BK // 32, 32)) * factor
        return tl.reshape(grouped, (rows.shape[0], BK)).to(WIDE)


@device_function
def tile_product(
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
    X_FMT: tl.constexpr,
    W_FMT: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """[BN, BM] float32: products of BN weight rows with BM activation rows."""
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, depth, BK):
        left = load_operand(w, w_scale, w_rows, w_ok, first, depth, w_pitch, w_scale_pitch, W_FMT, BK, WIDE, VEC)
        right = load_operand(x, x_scale, x_rows, x_ok, first, depth, x_pitch, x_scale_pitch, X_FMT, BK, WIDE, VEC)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@kernel
def dense(
    out: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    acc: tl.tensor,
    num_rows: tl.int32,
    num_out: tl.int32,
    depth: tl.int32,
    factor: tl.float32,
    out_pitch: tl.int64,
    out_group: tl.int64,
    x_pitch: tl.int64,
    x_group: tl.int64,
    x_scale_pitch: tl.int64,
    w_pitch: tl.int64,
    w_group: tl.int64,
    w_scale_pitch: tl.int64,
    w_scale_group: tl.int64,
    acc_pitch: tl.int64,
    X_FMT: tl.constexpr,
    W_FMT: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (row tiles, output tiles, groups): `(x W^T) * factor + acc`, one rounding at the end."""
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    rows_ok, columns_ok = rows < num_rows, columns < num_out
    y = tile_product(
        x + group * ((x_group // VEC) * VEC),
        x_scale,
        w + group * ((w_group // VEC) * VEC),
        w_scale + group * w_scale_group if W_FMT != 0 else w_scale,
        rows,
        rows_ok,
        columns,
        columns_ok,
        depth,
        x_pitch,
        x_scale_pitch,
        w_pitch,
        w_scale_pitch,
        X_FMT,
        W_FMT,
        WIDE,
        BM,
        BN,
        BK,
        VEC,
    )
    y = y * factor
    ok = columns_ok[:, None] & rows_ok[None, :]
    if acc is not None:
        y += tl.load(acc + rows[None, :] * acc_pitch + columns[:, None], mask=ok, other=0.0).to(tl.float32)
    place = group * out_group + rows[None, :] * out_pitch + columns[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=ok)


@device_function
def expert_tile(
    psum: tl.tensor, num_experts: tl.tensor, EXPERTS: tl.constexpr, BM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Which rows of which expert the program's tile holds: tiles do not straddle experts.

    Args:
        psum: [num_experts] running ends of the experts' rows.
        num_experts: how many.
        EXPERTS: a power of two that covers them.
        BM: rows of a tile.

    Returns:
        whether there is such a tile; the expert, its first row of the tile and its end, int64.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    ends = tl.load(psum + expert, mask=known, other=0)
    starts = tl.load(psum + expert - 1, mask=known & (expert > 0), other=0)
    tiles = tl.where(known, (ends - starts + BM - 1) // BM, 0)
    behind = tl.cumsum(tiles, 0)
    mine = known & (tile >= behind - tiles) & (tile < behind)
    there = tl.sum(mine.to(tl.int32), 0) > 0
    which = tl.sum(tl.where(mine, expert, 0), 0).to(tl.int64)
    end = tl.sum(tl.where(mine, ends, 0), 0).to(tl.int64)
    first = tl.sum(tl.where(mine, starts + (tile - (behind - tiles)) * BM, 0), 0).to(tl.int64)
    return there, which, first, end


@kernel
def grouped(
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
    X_FMT: tl.constexpr,
    W_FMT: tl.constexpr,
    WIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (row tiles of all experts, output tiles). Tiles do not straddle experts; those past the end do nothing."""
    there, which, first, end = expert_tile(psum, num_experts, EXPERTS, BM)
    if there:
        rows = first + tl.arange(0, BM)
        columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
        rows_ok, columns_ok = rows < end, columns < num_out
        y = tile_product(
            x,
            x_scale,
            w + which * ((w_expert // VEC) * VEC),
            w_scale + which * w_scale_expert if W_FMT != 0 else w_scale,
            rows,
            rows_ok,
            columns,
            columns_ok,
            depth,
            x_pitch,
            x_scale_pitch,
            w_pitch,
            w_scale_pitch,
            X_FMT,
            W_FMT,
            WIDE,
            BM,
            BN,
            BK,
            VEC,
        )
        place = rows[None, :] * out_pitch + columns[:, None]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=columns_ok[:, None] & rows_ok[None, :])
