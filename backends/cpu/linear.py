"""Dense products. Quantised weights are decoded tile by tile and multiplied as float32 weights would be: equal bits."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, address, dense, num_threads, operand
from deepinfer.ops import linear as linear_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor


def product(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`x [T, K] weight [N, K]^T * scale + acc` with one rounding at the end."""
    values, x_scale, x_kind = operand(x)
    codes, w_scale, w_kind = operand(weight)
    rows, width = x.shape
    num_out, depth = weight.shape
    if width != depth:
        raise OpArgumentError(f"x has {width} columns, the weight {depth}")
    acc_kind = 0
    if acc is not None:
        acc = dense(acc)
        acc_kind = KIND[acc.dtype]
    out = torch.empty((rows, num_out), dtype=out_dtype)
    _kernels.linear(
        out.data_ptr(),
        KIND[out_dtype],
        rows,
        num_out,
        width,
        values.data_ptr(),
        address(x_scale),
        x_kind,
        codes.data_ptr(),
        address(w_scale),
        w_kind,
        address(acc),
        acc_kind,
        scale,
        num_threads(),
    )
    return out


@BACKEND.implements(linear_ops.linear_mx)
def linear_mx(x: Tensor | QTensor, weight: QTensor, out_dtype: torch.dtype, acc: Tensor | None = None) -> Tensor:
    """The weight stays quantised in memory."""
    return product(x, weight, out_dtype, acc)


@BACKEND.implements(linear_ops.linear_bf16)
def linear_bf16(x: Tensor, weight: Tensor, out_dtype: torch.dtype, out_scale: float = 1.0) -> Tensor:
    """The weight stays in its own dtype in memory."""
    return product(x, weight, out_dtype, scale=out_scale)


@BACKEND.implements(linear_ops.linear_grouped_o)
def linear_grouped_o(x: Tensor, weight: Tensor | QTensor) -> Tensor:
    """One product per group, all groups in one call."""
    x = dense(x)
    codes, w_scale, w_kind = operand(weight)
    rows, groups, width = x.shape
    num_out = weight.shape[1]
    if weight.shape[0] != groups or weight.shape[2] != width:
        raise OpArgumentError(f"x has {groups} groups of {width}, the weight {weight.shape[0]} of {weight.shape[2]}")
    out = torch.empty((rows, groups, num_out), dtype=x.dtype)
    _kernels.linear_groups(
        out.data_ptr(),
        KIND[x.dtype],
        rows,
        groups,
        num_out,
        width,
        x.data_ptr(),
        KIND[x.dtype],
        codes.data_ptr(),
        address(w_scale),
        w_kind,
        num_threads(),
    )
    return out
