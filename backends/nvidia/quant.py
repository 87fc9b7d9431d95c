"""Quantise and dequantise: a program per stretch of groups, of several rows where codes are made."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import load_values, store_tile
from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import (
    FORMAT,
    new_codes,
    new_like,
    next_pow2,
    pitch,
    rows_of,
    vector_width,
    warps_for,
)
from deepinfer.ops import quant as quant_ops
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat

_STRETCH = 1024
"""Values of a row that one program of `dequantize` takes."""
_BLOCK = 256
"""Values of a row that one program of `quantize` takes: a divisor of the model's widths."""
_TILE = 1024
"""Values that it takes in all."""


@kernel
def _quantize(
    data: tl.tensor,
    scale: tl.tensor,
    x: tl.tensor,
    rows: tl.int32,
    x_pitch: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FMT: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (tiles of ROWS rows, stretches of BLOCK values)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (place < WIDTH)
    at = x + row.to(tl.int64)[:, None] * (x_pitch // VEC) * VEC + place
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    store_tile(data, scale, value, row, rows, tl.program_id(1), WIDTH, ROWS, BLOCK, GROUP_SIZE, FMT)


@kernel
def _dequantize(
    out: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    data_pitch: tl.int64,
    scale_pitch: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FMT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < WIDTH
    value = load_values(data + row * data_pitch, scale + row * scale_pitch, place, mask, FMT)
    tl.store(out + row * WIDTH + place, value.to(out.dtype.element_ty), mask=mask)


@KERNELS.implements(quant_ops.quantize)
def quantize(x: Tensor, fmt: QuantFormat, *, out: QTensor | None = None) -> QTensor:
    """Whole groups of several rows a program."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        x = x.float()
    codes = new_codes(out, tuple(x.shape), fmt, x.device)
    flat, width, group = rows_of(x), x.shape[-1], GROUP[fmt]
    rows, block = flat.shape[0], min(max(next_pow2(width), group), _BLOCK)
    tile = _TILE // block
    _quantize(
        (-(-rows // tile), -(-width // block)),
        codes.data,
        codes.scale,
        flat,
        rows,
        pitch(flat),
        WIDTH=width,
        BLOCK=block,
        ROWS=tile,
        GROUP_SIZE=group,
        FMT=FORMAT[fmt],
        VEC=vector_width(pitch(flat)),
        num_warps=warps_for(tile * block, 32),
    )
    return codes


@KERNELS.implements(quant_ops.dequantize)
def dequantize(x: QTensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Code times scale, exact."""
    out = new_like(out, x.shape, dtype, x.device)
    data, scale, width = rows_of(x.data), rows_of(x.scale), x.shape[-1]
    block = min(next_pow2(width), _STRETCH)
    _dequantize(
        (data.shape[0], -(-width // block)),
        out,
        data,
        scale,
        pitch(data),
        pitch(scale),
        WIDTH=width,
        BLOCK=block,
        FMT=FORMAT[x.fmt],
        num_warps=warps_for(block, 32),
    )
    return out
