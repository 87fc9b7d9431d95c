"""Quantised rows as bfloat16, which holds every finite value of them exactly but those below its smallest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import e4m3_value, ue8m0_value
from deepinfer.backends.nvidia.launch import kernel
from deepinfer.ops.formats import QTensor


@kernel
def _decode_rows(
    out: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    depth: tl.int32,
    out_pitch: tl.int64,
    data_pitch: tl.int64,
    scale_pitch: tl.int64,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
    EVENS_FIRST: tl.constexpr,
) -> None:
    """Grid (rows, groups of 32 columns by GROUPS). Whole groups, so that loads under a mask stay wide."""
    row = tl.program_id(0).to(tl.int64)
    depth = (depth // 32) * 32
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    factor = ue8m0_value(tl.load(scale + row * scale_pitch + group, mask=group * 32 < depth, other=127))
    code = tl.load(data + row * (data_pitch // VEC) * VEC + column, mask=column < depth, other=0)
    value = (e4m3_value(code) * factor[:, None]).to(tl.bfloat16)
    if EVENS_FIRST:
        value = tl.reshape(tl.permute(tl.reshape(value, (GROUPS, 2, 8, 2)), (0, 1, 3, 2)), (GROUPS, 32))
    tl.store(out + row * (out_pitch // VEC) * VEC + column, value, mask=column < depth)


@kernel
def _spread_scales(
    out: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.int32,
    groups: tl.int32,
    out_rows: tl.int64,
    scale_pitch: tl.int64,
    ROWS: tl.constexpr,
) -> None:
    """Grid (rows by ROWS, groups by 4)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * 4 + tl.arange(0, 4)
    ok = (row < num_rows)[:, None] & (group < groups)[None, :]
    value = ue8m0_value(tl.load(scale + row[:, None] * scale_pitch + group[None, :], mask=ok, other=127))
    place = (tl.program_id(1) * out_rows + row)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + place, value, mask=ok)


def spread_scales(scale: Tensor, out: Tensor) -> Tensor:
    """ue8m0 scales as powers of two, four groups of a row side by side.

    Args:
        scale: [R, G] uint8, neighbours side by side, G a multiple of 4.
        out: [G / 4, at least R, 4] float32, packed; what is behind R rows is left as it is.

    Returns:
        `out`.
    """
    num_rows, groups = scale.shape
    grid = triton.cdiv(num_rows, 128), groups // 4
    _spread_scales(grid, out, scale, num_rows, groups, out.shape[1], scale.stride(0), ROWS=128)
    return out


def decode_rows(x: QTensor, out: Tensor, *, evens_first: bool = False) -> Tensor:
    """Decode mxfp8 rows.

    Args:
        x: [R, K] mxfp8 with neighbouring codes side by side, K a multiple of 32.
        out: [R, K] bfloat16.
        evens_first: write every 16 columns as 0, 2, .., 14, 1, 3, .., 15.

    Returns:
        `out`.
    """
    num_rows, depth = x.shape
    vec = 16 if all(p % 16 == 0 for p in (x.data.stride(0), out.stride(0), depth)) else 1
    _decode_rows(
        (num_rows, triton.cdiv(depth, 2048)),
        out,
        x.data,
        x.scale,
        depth,
        out.stride(0),
        x.data.stride(0),
        x.scale.stride(0),
        GROUPS=64,
        VEC=vec,
        EVENS_FIRST=evens_first,
    )
    return out
