"""Dense products `y = x W^T` with fp32 accumulation, over plain and quantised operands."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.formats import QTensor
from deepinfer.ops.numeric import plain
from deepinfer.ops.spec import Tolerance, define_op

PRODUCT = Tolerance(2 / 256, 2**-7, sim=1e-5, why="fp32 accumulation in another order, one bf16 rounding")


def _accumulator(x: Tensor | QTensor) -> torch.dtype:
    return torch.float64 if isinstance(x, Tensor) and x.dtype == torch.float64 else torch.float32


@define_op(tolerance=PRODUCT, determinism="D2")
def linear_mx(x: Tensor | QTensor, weight: QTensor, out_dtype: torch.dtype, acc: Tensor | None = None) -> Tensor:
    """Product with a quantised weight.

    Args:
        x: [T, K], quantised along K (activation rounding on) or plain.
        weight: [N, K] quantised along K.
        out_dtype: bfloat16 or float32 (float64 for checks).
        acc: [T, N], added in fp32 before the cast.

    Returns:
        [T, N] of `out_dtype`.
    """
    wide = _accumulator(x)
    y = plain(x, wide) @ plain(weight, wide).T
    return (y if acc is None else y + acc.to(wide)).to(out_dtype)


@define_op(tolerance=PRODUCT, determinism="D2")
def linear_bf16(x: Tensor, weight: Tensor, out_dtype: torch.dtype, out_scale: float = 1.0) -> Tensor:
    """Product with a plain weight (bfloat16 or float32 storage).

    Args:
        x: [T, K] plain.
        weight: [N, K] plain.
        out_dtype: bfloat16 or float32 (float64 for checks).
        out_scale: multiplied in fp32 before the cast.

    Returns:
        [T, N] of `out_dtype`.
    """
    wide = _accumulator(x)
    return ((x.to(wide) @ weight.to(wide).T) * out_scale).to(out_dtype)


@define_op(tolerance=PRODUCT, determinism="D2")
def linear_grouped_o(x: Tensor, weight: Tensor | QTensor) -> Tensor:
    """The grouped half of the output projection: each group of heads has its own matrix.

    Args:
        x: [T, G, K], not quantised (the model dequantises this weight instead).
        weight: [G, N, K], plain or quantised along K.

    Returns:
        [T, G, N], dtype of `x`.
    """
    wide = _accumulator(x)
    return torch.einsum("tgk,gnk->tgn", x.to(wide), plain(weight, wide)).to(x.dtype)
