"""The block quantisers, bit for bit those of `deepinfer.ops.quant`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, QUANT_KIND, dense, empty_codes, num_threads
from deepinfer.ops import quant as quant_ops
from deepinfer.ops.formats import QTensor, QuantFormat


@BACKEND.implements(quant_ops.quantize)
def quantize(x: Tensor, fmt: QuantFormat) -> QTensor:
    """A group at a time: largest magnitude, scale, codes."""
    if x.dtype not in KIND:
        x = x.float()  # the contract rounds float64 first
    x = dense(x)
    codes = empty_codes(tuple(x.shape), fmt)
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    _kernels.quantize(
        codes.data.data_ptr(),
        codes.scale.data_ptr(),
        QUANT_KIND[fmt],
        x.data_ptr(),
        KIND[x.dtype],
        rows,
        width,
        num_threads(),
    )
    return codes


@BACKEND.implements(quant_ops.dequantize)
def dequantize(x: QTensor, dtype: torch.dtype) -> Tensor:
    """Code times scale; float64 results are left to the reference."""
    if dtype not in KIND:
        return quant_ops.dequantize(x, dtype)
    data, scale = dense(x.data), dense(x.scale)
    out = torch.empty(x.shape, dtype=dtype)
    width = out.shape[-1]
    rows = out.numel() // width if width else 0
    _kernels.dequantize(
        out.data_ptr(), KIND[dtype], data.data_ptr(), scale.data_ptr(), QUANT_KIND[x.fmt], rows, width, num_threads()
    )
    return out
