"""From tensors to what kernels take: rows with a stride, dense lists, results in the caller's memory."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat

FORMAT: Final[dict[str, int]] = {"plain": 0, "mxfp8": 1, "mxfp4": 2, "nvfp4": 3}
"""Formats as kernels number them (`kernels/norm.asc`)."""

SHORT: Final[dict[torch.dtype, str]] = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Dtypes as names of kernels end in them."""

WEIGHT_KIND: Final[dict[torch.dtype, int]] = {torch.float32: 1, torch.bfloat16: 2}
"""Dtypes of norm weights as kernels number them; 0 is a weight of ones (`kernels/norms.h`)."""

RECORD_KIND: Final[dict[str, int]] = {"f32": 0, "fp8": 1, "index": 2, "fp4": 3}
"""Kinds of cache records as kernels number them (`kernels/records.h`)."""


def short(dtype: torch.dtype) -> str:
    """The end of a kernel's name for a dtype.

    Raises:
        OpArgumentError: the kernels do not read this dtype.
    """
    if dtype not in SHORT:
        raise OpArgumentError(f"the kernels take float32 and bfloat16, got {dtype}; float64 is the reference's")
    return SHORT[dtype]


def rows_of(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with neighbouring elements in a row; a copy only where strides do not allow a view."""
    if x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1):
        return x
    width = x.shape[-1]
    if x.dim() == 1:
        x = x[None]
    if x.stride(-1) != 1 and width > 1:
        x = x.contiguous()
    count = math.prod(x.shape[:-1])
    try:
        return x.view(count, width)
    except RuntimeError:  # leading axes that do not fold into one
        return x.reshape(count, width)


def packed(x: Tensor) -> Tensor:
    """The tensor with its elements in a row; a copy only where they are not."""
    return x if x.is_contiguous() else x.contiguous()


def new_like(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The caller's memory for a result, or new memory."""
    return out if out is not None else torch.empty(shape, dtype=dtype, device=device)


def new_codes(out: QTensor | None, shape: tuple[int, ...], fmt: QuantFormat, device: torch.device) -> QTensor:
    """The caller's memory for a quantised result of a logical shape, or new memory."""
    if out is not None:
        return out
    width = shape[-1]
    data = torch.empty((*shape[:-1], width // (1 if fmt == "mxfp8" else 2)), dtype=torch.uint8, device=device)
    scale = torch.empty((*shape[:-1], -(-width // GROUP[fmt])), dtype=torch.uint8, device=device)
    return QTensor(data, scale, fmt)
