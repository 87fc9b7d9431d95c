"""Weights bound to the ops that multiply with them, and activations in the forms those ops want.

Activation rounding (specification section 8.3) is decided here and nowhere else: the input of a product with a
quantised weight is quantised when it is on; products with plain weights, and the grouped output projection, never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.ops.formats import QTensor
from deepinfer.ops.linear import linear_bf16, linear_mx
from deepinfer.ops.norm import rms_norm, rms_norm_quant
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import OpTable

Weight = Tensor | QTensor


def place(ops: OpTable, weight: Tensor) -> Tensor:
    """A host tensor on the device of `ops`."""
    return ops.context.runtime.to_device(weight)


def place_weight(ops: OpTable, weight: Weight) -> Weight:
    """A host weight, plain or quantised, on the device of `ops`."""
    if isinstance(weight, QTensor):
        return QTensor(place(ops, weight.data), place(ops, weight.scale), weight.fmt, weight.layout)
    return place(ops, weight)


class Rows(NamedTuple):
    """Activations of a step's rows: plain, and quantised where a product wants that (else None)."""

    plain: Tensor
    quant: QTensor | None = None

    def for_weight(self, weight: Weight) -> Tensor | QTensor:
        """The form that a product with `weight` reads."""
        return self.quant if self.quant is not None and isinstance(weight, QTensor) else self.plain


@dataclass(frozen=True)
class Numerics:
    """How the model computes.

    Attributes:
        dtype: activations between ops, bfloat16 or float32.
        activation_rounding: quantise inputs of products with quantised weights.
        kv_rounding: store caches in their quantised records; off stores float32.
    """

    dtype: torch.dtype
    activation_rounding: bool
    kv_rounding: bool


class Linear:
    """`y = x W^T` with a fixed weight."""

    def __init__(
        self,
        ops: OpTable,
        weight: Weight,
        numerics: Numerics,
        *,
        out_dtype: torch.dtype | None = None,
        out_scale: float = 1.0,
    ) -> None:
        self.out_dtype = out_dtype or numerics.dtype
        self.out_scale = out_scale
        n, k = weight.shape[-2:]
        if isinstance(weight, QTensor):
            rounding = numerics.activation_rounding
            self._mx = ops.bind(linear_mx, n=n, k=k, weight=weight.fmt, x="mxfp8" if rounding else "plain")
            self._quantize = ops.bind(quantize, k=k, fmt="mxfp8") if rounding else None
            self.weight = self._mx.prepare("weight", place_weight(ops, weight))
        else:
            self._bf16 = ops.bind(linear_bf16, n=n, k=k, weight=str(weight.dtype))
            self.weight = self._bf16.prepare("weight", place_weight(ops, weight))

    def __call__(self, x: Rows) -> Tensor:
        """[T, K] to [T, N]."""
        if not isinstance(self.weight, QTensor):
            return self._bf16(x.plain, self.weight, self.out_dtype, self.out_scale)
        operand: Tensor | QTensor = x.for_weight(self.weight)
        if self._quantize is not None and isinstance(operand, Tensor):
            operand = self._quantize(operand, "mxfp8")
        return self._mx(operand, self.weight, self.out_dtype)


class Norm:
    """RMSNorm with a fixed weight; also quantises its result when a product behind it wants that."""

    def __init__(self, ops: OpTable, weight: Tensor, eps: float, *, quantised: bool) -> None:
        self.weight = place(ops, weight.float())
        self.eps = eps
        n = weight.shape[-1]
        self._plain = ops.bind(rms_norm, n=n)
        self._quant = ops.bind(rms_norm_quant, n=n, fmt="mxfp8") if quantised else None

    def __call__(self, x: Tensor) -> Rows:
        """[..., N] to rows like it."""
        if self._quant is None:
            return Rows(self._plain(x, self.weight, self.eps))
        quant, plain = self._quant(x, self.weight, self.eps, "mxfp8")
        return Rows(plain, quant)


def wants_quantised(numerics: Numerics, *weights: Weight) -> bool:
    """True when any of these products reads quantised activations."""
    return numerics.activation_rounding and any(isinstance(w, QTensor) for w in weights)
