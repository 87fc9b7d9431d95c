"""RMSNorm, alone and with the quantiser that follows it."""

from __future__ import annotations

from torch import Tensor

from deepinfer.ops.cases import rows
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.numeric import accumulate
from deepinfer.ops.quant import quantize
from deepinfer.ops.results import codes, like
from deepinfer.ops.spec import Tolerance, define_op


@define_op(
    tolerance=Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="fp32 inside, one bf16 rounding"),
    determinism="D2",
    cases=rows.rms_norm_cases,
    dims={"n": "x:-1"},
    results=like("x"),
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in fp32, cast once at the end.

    Args:
        x: [..., N] bfloat16 or float32.
        weight: [N] or None for ones; multiplied before the cast.
        eps: added to the mean; 1e-20 in V4.1, so an all-zero row stays zero.

    Returns:
        Like `x`.
    """
    wide = accumulate(x)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight.to(wide.dtype)
    return y.to(x.dtype)


@define_op(
    tolerance=Tolerance(
        2**-7, 1e-6, single=(1e-5, 1e-6), off_by_one=1e-3, why="a bf16 ulp of the norm may move a code by one"
    ),
    determinism="D2",
    cases=rows.rms_norm_quant_cases,
    dims={"n": "x:-1", "fmt": "fmt"},
    rules=Rules(nan="a group with NaN or Inf has a NaN scale, its codes are undefined; other rows do not change"),
    results=lambda new, a: (codes(new, a.x.shape, a.fmt), new(tuple(a.x.shape), a.x.dtype)),
)
def rms_norm_quant(x: Tensor, weight: Tensor | None, eps: float, fmt: QuantFormat) -> tuple[QTensor, Tensor]:
    """RMSNorm, rounded to the activation dtype and then quantised (that rounding is part of the model).

    Args:
        x: [..., N] bfloat16 or float32.
        weight: [N] or None.
        eps: as in `rms_norm`.
        fmt: format of the quantised result.

    Returns:
        The quantised rows, and the rows before quantisation (like `x`).
    """
    y = rms_norm(x, weight, eps)
    return quantize(y, fmt), y
