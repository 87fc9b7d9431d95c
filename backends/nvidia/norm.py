"""RMSNorm, alone and with the quantiser behind it: one program per row, whose sum has one order whatever the batch."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import encode, store_codes
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
from deepinfer.ops import norm as norm_ops
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat


@device_function
def normed_row(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, mask: tl.tensor, place: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """float32 values of a normed row; elements outside `mask` are 0.

    Args:
        x: the row in float32, 0 outside `mask`.
        weight: where the norm's weight starts, or None.
        eps: added to the mean of squares.
        mask: elements of the row.
        place: their indices.
        WIDTH: how many there are.
    """
    mean = tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0)
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if weight is not None:
        y = y * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, y, 0.0)


@device_function
def normed_rows(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, mask: tl.tensor, place: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """As `normed_row`, for a tile [rows, block] with places [1, block]."""
    mean = tl.div_rn(tl.sum(x * x, 1), WIDTH * 1.0)
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    if weight is not None:
        y = y * tl.load(weight + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    return tl.where(mask, y, 0.0)


@kernel
def _norm(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    x_pitch: tl.int64,
    eps: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FMT: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < WIDTH
    value = tl.load(x + row * (x_pitch // VEC) * VEC + place, mask=mask, other=0.0).to(tl.float32)
    y = normed_row(value, weight, eps, mask, place, WIDTH).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + place, y, mask=mask)
    if FMT != 0:
        groups: tl.constexpr = BLOCK // GROUP_SIZE
        codes, factors = encode(tl.reshape(y.to(tl.float32), (groups, GROUP_SIZE)), FMT)
        packing: tl.constexpr = 1 if FMT == 1 else 2
        scales: tl.constexpr = (WIDTH + GROUP_SIZE - 1) // GROUP_SIZE
        store_codes(data + row * (WIDTH // packing), scale + row * scales, codes, factors, WIDTH, groups, FMT)


def _launch(x: Tensor, weight: Tensor | None, eps: float, out: Tensor, codes: QTensor | None) -> None:
    flat, width = rows_of(x), x.shape[-1]
    group = 32 if codes is None else GROUP[codes.fmt]
    block = max(next_pow2(width), group)
    _norm(
        (flat.shape[0],),
        out,
        flat,
        None if weight is None else packed(weight),
        None if codes is None else codes.data,
        None if codes is None else codes.scale,
        pitch(flat),
        eps,
        WIDTH=width,
        BLOCK=block,
        GROUP_SIZE=group,
        FMT=FORMAT["plain" if codes is None else codes.fmt],
        VEC=vector_width(pitch(flat), width),
        num_warps=warps_for(block, 64),  # a row in few warps: more rows are under way, and codes cost less
    )


@KERNELS.implements(norm_ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """A row in registers, one reduction."""
    out = new_like(out, tuple(x.shape), x.dtype, x.device)
    _launch(x, weight, eps, out, None)
    return out


@KERNELS.implements(norm_ops.rms_norm_quant)
def rms_norm_quant(
    x: Tensor, weight: Tensor | None, eps: float, fmt: QuantFormat, *, out: tuple[QTensor, Tensor] | None = None
) -> tuple[QTensor, Tensor]:
    """The norm, rounded, and its codes while the row is still in registers."""
    codes = new_codes(None if out is None else out[0], tuple(x.shape), fmt, x.device)
    y = new_like(None if out is None else out[1], tuple(x.shape), x.dtype, x.device)
    _launch(x, weight, eps, y, codes)
    return codes, y


__all__ = ["normed_row", "normed_rows", "rms_norm", "rms_norm_quant"]
