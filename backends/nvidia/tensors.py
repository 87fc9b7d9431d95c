"""From tensors to what kernels take: rows with a stride, packed lists, results in the caller's memory."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from deepinfer.ops.formats import GROUP, QTensor, QuantFormat

FORMAT: Final[dict[str, int]] = {"plain": 0, "mxfp8": 1, "mxfp4": 2, "nvfp4": 3}
"""Record and operand formats as kernels number them (`codes.py`)."""


def rows_of(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with neighbouring elements in a row; a copy only where strides do not allow a view."""
    if x.dim() == 2 and x.stride(1) == 1:
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


def pitch(x: Tensor) -> int:
    """Elements from row to row of a tensor that `rows_of` gave."""
    return x.stride(0)


def vector_width(*pitches: int) -> int:
    """Elements that every row start is a multiple of: 16, or 1 where some row is not aligned."""
    return 16 if all(p % 16 == 0 for p in pitches) else 1


def next_pow2(n: int) -> int:
    """Smallest power of two that is at least `n` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def warps_for(block: int, per_thread: int = 8) -> int:
    """Warps for a program that holds `block` elements, so many of them a thread; between 1 and 16."""
    return max(1, min(16, block // (32 * per_thread)))
