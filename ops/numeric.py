"""Small numeric rules that several references share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.ops.formats import QTensor


def accumulate(x: Tensor) -> Tensor:
    """The dtype that sums are kept in: float64 for float64 (the check of a reference), else float32."""
    return x if x.dtype in (torch.float64, torch.float32) else x.float()


def rounded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)` evaluated in float64 and rounded once, for exp, log, sigmoid and softmax.

    In float32, torch runs other code at the end of a tensor than in its middle, so the last bit of a row would depend
    on its place in the batch.
    """
    return function(x.double()).to(x.dtype)


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` for x [T, K] and weight [N, K] of one dtype, row by row, so that a row's bits are its own.

    A product of matrices may add in another order when it has fewer rows; a product with one vector cannot know.
    """
    if x.dtype == torch.float64:
        return x @ weight.T  # a check of the reference, not an implementation
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row, values in enumerate(x):
        out[row] = torch.mv(weight, values.clone())  # a copy is aligned; the order may depend on alignment
    return out


def plain(x: Tensor | QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor's values in `dtype`, dequantised if need be."""
    from deepinfer.ops.quant import dequantize

    return dequantize(x, dtype) if isinstance(x, QTensor) else x.to(dtype)


def round_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to bfloat16 and back when activations are bfloat16; otherwise return x. A rounding point of the model."""
    return x.to(torch.bfloat16).to(x.dtype) if dtype == torch.bfloat16 else x
