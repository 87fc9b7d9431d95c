"""RMSNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, QUANT_KIND, address, dense, empty_codes, floats, ids, num_threads
from deepinfer.ops import norm as norm_ops
from deepinfer.ops import rope as rope_ops
from deepinfer.ops.formats import QTensor, QuantFormat


def _norm(x: Tensor, weight: Tensor | None, eps: float, codes: QTensor | None) -> Tensor:
    x = dense(x)
    kind, width = KIND[x.dtype], x.shape[-1]
    rows = x.numel() // width if width else 0
    if weight is not None:
        weight = dense(weight)
    out = torch.empty_like(x)
    _kernels.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        kind,
        rows,
        width,
        address(weight),
        0 if weight is None else KIND[weight.dtype],
        eps,
        0 if codes is None else codes.data.data_ptr(),
        0 if codes is None else codes.scale.data_ptr(),
        0 if codes is None else QUANT_KIND[codes.fmt],
        num_threads(),
    )
    return out


@BACKEND.implements(norm_ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Eight running sums of squares per row, whatever the batch."""
    return _norm(x, weight, eps, None)


@BACKEND.implements(norm_ops.rms_norm_quant)
def rms_norm_quant(x: Tensor, weight: Tensor | None, eps: float, fmt: QuantFormat) -> tuple[QTensor, Tensor]:
    """The norm, and its codes while the row is still in cache."""
    codes = empty_codes(tuple(x.shape), fmt)
    return codes, _norm(x, weight, eps, codes)


def rotate(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    conjugate: bool = False,
    normalise: bool = False,
    eps: float = 0.0,
    codes: QTensor | None = None,
) -> Tensor:
    """Rotate the last channels of every head of x [T, ..., D]; with `codes`, quantise instead and return x."""
    x, positions, cos_sin = dense(x), ids(positions), floats(cos_sin)
    rows, dim = x.shape[0], x.shape[-1]
    out = torch.empty_like(x) if codes is None else x
    _kernels.rope(
        out.data_ptr(),
        x.data_ptr(),
        KIND[x.dtype],
        rows,
        x.numel() // (rows * dim) if rows * dim else 0,
        dim,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        cos_sin.shape[1],
        conjugate,
        normalise,
        eps,
        0 if codes is None else codes.data.data_ptr(),
        0 if codes is None else codes.scale.data_ptr(),
        0 if codes is None else QUANT_KIND[codes.fmt],
        num_threads(),
    )
    return out


@BACKEND.implements(rope_ops.rope)
def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, conjugate: bool = False) -> Tensor:
    """Two products and a sum per channel."""
    return rotate(x, positions, cos_sin, conjugate=conjugate)


@BACKEND.implements(rope_ops.q_norm_rope)
def q_norm_rope(q: Tensor, positions: Tensor, cos_sin: Tensor, normalise: bool = False, eps: float = 1e-20) -> Tensor:
    """Norm and rotation of a head in one pass."""
    return rotate(q, positions, cos_sin, normalise=normalise, eps=eps)


@BACKEND.implements(rope_ops.o_rope)
def o_rope(o: Tensor, positions: Tensor, cos_sin: Tensor, num_groups: int) -> Tensor:
    """The rotation back; heads of a group are neighbours already, so grouping is a view."""
    turned = rotate(o, positions, cos_sin, conjugate=True)
    return turned.view(o.shape[0], num_groups, o.shape[1] * o.shape[2] // num_groups)
