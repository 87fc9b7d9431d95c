"""Dense products `y = x W^T` with fp32 accumulation, over plain and quantised operands."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import products
from deepinfer.ops.formats import QTensor
from deepinfer.ops.numeric import plain, row_products
from deepinfer.ops.spec import Tolerance, define_op

PRODUCT = Tolerance(
    2 / 256, 2**-7, sim=1e-5, single=(1e-4, 1e-4), why="fp32 accumulation in another order, one bf16 rounding"
)


def _accumulator(x: Tensor | QTensor) -> torch.dtype:
    return torch.float64 if isinstance(x, Tensor) and x.dtype == torch.float64 else torch.float32


@define_op(
    tolerance=PRODUCT,
    determinism="D2",
    cases=products.linear_mx_cases,
    dims={"n": "weight:0", "k": "weight:1", "weight": "weight", "x": "x|plain"},
    results=lambda new, a: new((a.x.shape[0], a.weight.shape[0]), a.out_dtype),
)
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
    y = row_products(plain(x, wide), plain(weight, wide))
    return (y if acc is None else y + acc.to(wide)).to(out_dtype)


@define_op(
    tolerance=PRODUCT,
    determinism="D2",
    cases=products.linear_bf16_cases,
    dims={"n": "weight:0", "k": "weight:1", "weight": "weight.dtype"},
    results=lambda new, a: new((a.x.shape[0], a.weight.shape[0]), a.out_dtype),
)
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
    return (row_products(x.to(wide), weight.to(wide)) * out_scale).to(out_dtype)


@define_op(
    tolerance=PRODUCT,
    determinism="D2",
    cases=products.linear_grouped_o_cases,
    dims={"groups": "weight:0", "n": "weight:1", "k": "weight:2"},
    results=lambda new, a: new((*a.x.shape[:2], a.weight.shape[1]), a.x.dtype),
)
def linear_grouped_o(x: Tensor, weight: Tensor | QTensor) -> Tensor:
    """The grouped half of the output projection: each group of heads has its own matrix.

    Args:
        x: [T, G, K], not quantised (the model dequantises this weight instead).
        weight: [G, N, K], plain or quantised along K.

    Returns:
        [T, G, N], dtype of `x`.
    """
    wide = _accumulator(x)
    matrices = plain(weight, wide)
    groups = [row_products(x[:, g].to(wide), matrices[g]) for g in range(x.shape[1])]
    return torch.stack(groups, 1).to(x.dtype)
