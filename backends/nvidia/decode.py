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
) -> None:
    """Grid (rows, groups of 32 columns by GROUPS). Whole groups, so that loads under a mask stay wide."""
    row = tl.program_id(0).to(tl.int64)
    depth = (depth // 32) * 32
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    factor = ue8m0_value(tl.load(scale + row * scale_pitch + group, mask=group * 32 < depth, other=127))
    code = tl.load(data + row * (data_pitch // VEC) * VEC + column, mask=column < depth, other=0)
    value = (e4m3_value(code) * factor[:, None]).to(tl.bfloat16)
    tl.store(out + row * (out_pitch // VEC) * VEC + column, value, mask=column < depth)


def decode_rows(x: QTensor, out: Tensor) -> Tensor:
    """Decode mxfp8 rows.

    Args:
        x: [R, K] mxfp8 with neighbouring codes side by side, K a multiple of 32.
        out: [R, K] bfloat16.

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
    )
    return out
