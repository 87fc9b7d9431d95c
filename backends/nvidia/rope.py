"""Rotary embedding of query and output heads, one program per row and block of heads."""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import encode, store_codes
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import FORMAT, new_codes, new_like, next_pow2, packed, warps_for
from deepinfer.ops import index as index_ops
from deepinfer.ops import rope as rope_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat

_TILE = 8192
"""Elements that one program holds, about."""
_LANE = 16
"""Elements that a lane has: enough loads are under way, and few warps share the table's row."""


@device_function
def rotate(
    x: tl.tensor,
    table: tl.tensor,
    conjugate: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Turn the last WIDTH of DIM channels of a tile.

    Args:
        x: [ROWS, BLOCK] float32, all at one position.
        table: where cosines and then sines of that position start.
        conjugate: turn back.
        ROWS: heads in the tile.
        BLOCK: a power of two that covers DIM.
        DIM: channels of a head.
        WIDTH: channels that turn.
    """
    half: tl.constexpr = BLOCK // 2
    first: tl.constexpr = (DIM - WIDTH) // 2
    pair = tl.arange(0, half)[None, :] - first
    turns = (pair >= 0) & (pair < WIDTH // 2)
    cos = tl.load(table + pair, mask=turns, other=1.0)
    sin = tl.load(table + WIDTH // 2 + pair, mask=turns, other=0.0)
    if conjugate:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (ROWS, half, 2)))
    turned_even = tl.where(turns, even * cos - odd * sin, even)
    turned_odd = tl.where(turns, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (ROWS, BLOCK))


@kernel
def _rope(
    out: tl.tensor,
    scale: tl.tensor,
    x: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    row_pitch: tl.int64,
    head_pitch: tl.int64,
    table_pitch: tl.int64,
    heads: tl.int32,
    eps: tl.float32,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
    NORMALISE: tl.constexpr,
    FMT: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (place < DIM)
    start = x + row * (row_pitch // VEC) * VEC
    value = tl.load(start + head * (head_pitch // VEC) * VEC + place, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    if NORMALISE:
        mean = tl.div_rn(tl.sum(wide * wide, 1), DIM * 1.0)
        wide = wide * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    position = tl.load(positions + row).to(tl.int64)
    turned = rotate(wide, table + position * table_pitch, BACK, ROWS, BLOCK, DIM, WIDTH)
    if FMT == 0:
        tl.store(out + (row * heads + head) * DIM + place, turned.to(out.dtype.element_ty), mask=mask)
    else:
        # rounded to the activations' type before it is quantised
        wide = tl.where(mask, turned.to(x.dtype.element_ty).to(tl.float32), 0.0)
        group: tl.constexpr = 32
        codes, scales = encode(tl.reshape(wide, (ROWS * BLOCK // group, group)), FMT)
        first = (row * heads + tl.program_id(1) * ROWS) * DIM
        left = tl.minimum(heads - tl.program_id(1) * ROWS, ROWS) * DIM
        store_codes(out + first // 2, scale + first // group, codes, scales, left, ROWS * BLOCK // group, FMT)


def turn(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    *,
    back: bool = False,
    normalise: bool = False,
    eps: float = 0.0,
    fmt: str = "plain",
) -> None:
    """Rotate the last channels of every head of x [T, ..., D] into `out`, or its codes into `out` and `scale`."""
    rows, dim = x.shape[0], x.shape[-1]
    if x.dim() != 3 or x.stride(2) != 1:
        x = x.reshape(rows, math.prod(x.shape[1:-1]), dim)
        x = x if x.stride(2) == 1 else x.contiguous()
    heads, table = x.shape[1], packed(cos_sin)
    block = next_pow2(dim)
    tile = min(next_pow2(heads), max(_TILE // block, 1))
    _rope(
        (rows, -(-heads // tile)),
        out,
        scale,
        x,
        packed(positions),
        table,
        x.stride(0),
        x.stride(1),
        table.shape[1],
        heads,
        eps,
        DIM=dim,
        WIDTH=table.shape[1],
        ROWS=tile,
        BLOCK=block,
        BACK=back,
        NORMALISE=normalise,
        FMT=FORMAT[fmt],
        VEC=16 if x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 else 1,
        num_warps=warps_for(tile * block, _LANE),
    )


@KERNELS.implements(rope_ops.rope)
def rope(
    x: Tensor, positions: Tensor, cos_sin: Tensor, conjugate: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Two products and a sum per channel, none of them fused: the reference's bits."""
    out = new_like(out, tuple(x.shape), x.dtype, x.device)
    turn(x, positions, cos_sin, out, back=conjugate)
    return out


@KERNELS.implements(rope_ops.q_norm_rope)
def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    normalise: bool = False,
    eps: float = 1e-20,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotation of a head in one pass."""
    out = new_like(out, tuple(q.shape), q.dtype, q.device)
    turn(q, positions, cos_sin, out, normalise=normalise, eps=eps)
    return out


@KERNELS.implements(rope_ops.o_rope)
def o_rope(o: Tensor, positions: Tensor, cos_sin: Tensor, num_groups: int, *, out: Tensor | None = None) -> Tensor:
    """The rotation back; heads of a group are neighbours already, so grouping is a view."""
    shape = (o.shape[0], num_groups, o.shape[1] // num_groups * o.shape[2])
    out = new_like(out, shape, o.dtype, o.device)
    turn(o, positions, cos_sin, out, back=True)
    return out


def _whole_groups(dims: Dims) -> bool:
    """Codes of neighbouring heads are written as one stretch."""
    dim = int(dims["dim"])
    return dims["fmt"] == "f32" or (dim % GROUP["mxfp4"] == 0 and dim == next_pow2(dim))


@KERNELS.implements(index_ops.index_q_quant, when=_whole_groups)
def index_q_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    fmt: QuantFormat | None,
    *,
    out: Tensor | QTensor | None = None,
) -> Tensor | QTensor:
    """Rotation, and codes while the heads are in registers."""
    shape = tuple(q.shape)
    if fmt is None:
        plain = new_like(out if isinstance(out, Tensor) else None, shape, q.dtype, q.device)
        turn(q, positions, cos_sin, plain)
        return plain
    codes = new_codes(out if isinstance(out, QTensor) else None, shape, fmt, q.device)
    turn(q, positions, cos_sin, codes.data, codes.scale, fmt=fmt)
    return codes
