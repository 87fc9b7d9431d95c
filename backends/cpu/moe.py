"""Mixture of experts: work follows the routed rows, and experts without rows are not touched."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import (
    KIND,
    QUANT_KIND,
    address,
    dense,
    empty_codes,
    floats,
    ids,
    num_threads,
    operand,
)
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor, QuantFormat


@BACKEND.implements(moe_ops.moe_gate)
def moe_gate(
    logits: Tensor, bias: Tensor, image_bias: Tensor | None, image_mask: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """K passes over the affinities of a row."""
    logits, bias = floats(logits), floats(bias)
    if image_bias is not None:
        image_bias = floats(image_bias)
    if image_mask is not None:
        image_mask = dense(image_mask)
    rows, experts = logits.shape
    k = min(k, experts)
    expert_ids = torch.empty((rows, k), dtype=torch.int64)
    weights = torch.empty((rows, k), dtype=torch.float32)
    _kernels.moe_gate(
        expert_ids.data_ptr(),
        weights.data_ptr(),
        logits.data_ptr(),
        rows,
        experts,
        bias.data_ptr(),
        address(image_bias),
        address(image_mask),
        k,
        scale,
        num_threads(),
    )
    return expert_ids, weights


@BACKEND.implements(moe_ops.ep_dispatch)
def ep_dispatch(
    x: Tensor | QTensor, expert_ids: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor | QTensor, Tensor, Tensor, moe_ops.DispatchHandle]:
    """A counting sort by expert, codes and scales of a row travelling together."""
    values = dense(x.data) if isinstance(x, QTensor) else dense(x)
    scale = dense(x.scale) if isinstance(x, QTensor) else None
    expert_ids, weights = dense(expert_ids), floats(weights)
    if expert_ids.dtype is not torch.int64:
        expert_ids = expert_ids.to(torch.int64)
    tokens, k = expert_ids.shape
    count = tokens * k
    rows = torch.empty((count, values.shape[1]), dtype=values.dtype)
    row_scale = None if scale is None else torch.empty((count, scale.shape[1]), dtype=scale.dtype)
    row_weights = torch.empty((count,), dtype=torch.float32)
    psum = torch.empty((num_experts,), dtype=torch.int32)
    slot_to_row = torch.empty((tokens, k), dtype=torch.int32)
    _kernels.dispatch(
        expert_ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        k,
        num_experts,
        row_weights.data_ptr(),
        psum.data_ptr(),
        slot_to_row.data_ptr(),
        values.data_ptr(),
        values.shape[1] * values.element_size(),
        rows.data_ptr(),
        address(scale),
        0 if scale is None else scale.shape[1],
        address(row_scale),
    )
    out: Tensor | QTensor = rows
    if isinstance(x, QTensor) and row_scale is not None:
        out = QTensor(rows, row_scale, x.fmt, x.layout)
    return out, row_weights, psum, moe_ops.DispatchHandle(slot_to_row)


@BACKEND.implements(moe_ops.moe_grouped_gemm)
def moe_grouped_gemm(x: Tensor | QTensor, weight: Tensor | QTensor, psum: Tensor, out_dtype: torch.dtype) -> Tensor:
    """One product per expert that has rows; its weight is decoded once for all of them."""
    values, x_scale, x_kind = operand(x)
    codes, w_scale, w_kind = operand(weight)
    psum = ids(psum)
    rows, width = x.shape
    experts, num_out, depth = weight.shape
    if width != depth:
        raise OpArgumentError(f"x has {width} columns, the weights {depth}")
    out = torch.empty((rows, num_out), dtype=out_dtype)
    _kernels.linear_experts(
        out.data_ptr(),
        KIND[out_dtype],
        rows,
        experts,
        num_out,
        width,
        values.data_ptr(),
        address(x_scale),
        x_kind,
        codes.data_ptr(),
        address(w_scale),
        w_kind,
        psum.data_ptr(),
        num_threads(),
    )
    return out


@BACKEND.implements(moe_ops.swiglu_quant)
def swiglu_quant(
    gate: Tensor, up: Tensor, limit: float, row_weight: Tensor | None, fmt: QuantFormat | None
) -> Tensor | QTensor:
    """The two inputs may be the halves of one product: rows may be strided."""
    if gate.stride(-1) != 1:
        gate = gate.contiguous()
    if up.stride(-1) != 1:
        up = up.contiguous()
    if up.dtype is not gate.dtype:
        gate, up = gate.to(torch.float32), up.to(torch.float32)
    if row_weight is not None:
        row_weight = floats(row_weight)
    rows, width = gate.shape
    size = gate.element_size()
    codes = None if fmt is None else empty_codes((rows, width), fmt)
    out = torch.empty((rows, width) if codes is None else (0, width), dtype=gate.dtype)
    _kernels.swiglu(
        out.data_ptr(),
        0 if codes is None else codes.data.data_ptr(),
        0 if codes is None else codes.scale.data_ptr(),
        0 if codes is None else QUANT_KIND[codes.fmt],
        gate.data_ptr(),
        gate.stride(0) * size,
        up.data_ptr(),
        up.stride(0) * size,
        KIND[gate.dtype],
        rows,
        width,
        limit,
        address(row_weight),
        num_threads(),
    )
    return out if codes is None else codes


@BACKEND.implements(moe_ops.ep_combine)
def ep_combine(y: Tensor, handle: moe_ops.DispatchHandle, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Choices are added in order, then the bias."""
    y, slots = dense(y), ids(handle.slot_to_row)
    if bias is not None:
        bias = dense(bias)
    tokens, k = slots.shape
    num_rows, width = y.shape
    out = torch.empty((tokens, width), dtype=out_dtype)
    _kernels.combine(
        out.data_ptr(),
        KIND[out_dtype],
        y.data_ptr(),
        KIND[y.dtype],
        num_rows,
        slots.data_ptr(),
        tokens,
        k,
        width,
        address(bias),
        0 if bias is None else KIND[bias.dtype],
        num_threads(),
    )
    return out


@BACKEND.implements(moe_ops.expert_shuffle)
def expert_shuffle(weight: Tensor | QTensor, source: Tensor) -> Tensor | QTensor:
    """A copy of whole experts, which torch does at memory speed."""
    if isinstance(weight, QTensor):
        data, scale = weight.data.index_select(0, source), weight.scale.index_select(0, source)
        return QTensor(data, scale, weight.fmt, weight.layout)
    return weight.index_select(0, source)
