"""Rows that only move: one kernel copies rows named by lists, and casts where the target's type differs."""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import index as index_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops.formats import QTensor

_STRETCH = 2048
"""Elements of a row that one program copies."""


@kernel
def _move(
    target: tl.tensor,
    source: tl.tensor,
    source_rows: tl.tensor,
    target_rows: tl.tensor,
    target_pitch: tl.int64,
    source_pitch: tl.int64,
    target_step: tl.int64,
    source_step: tl.int64,
    width: tl.int64,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    read = row
    write = row
    if source_rows is not None:
        read = tl.load(source_rows + row).to(tl.int64)
    if target_rows is not None:
        write = tl.load(target_rows + row).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < (width // VEC) * VEC
    if DENSE:
        value = tl.load(source + read * (source_pitch // VEC) * VEC + column, mask=mask)
        tl.store(target + write * (target_pitch // VEC) * VEC + column, value.to(target.dtype.element_ty), mask=mask)
    else:
        value = tl.load(source + read * source_pitch + column * source_step, mask=mask)
        tl.store(target + write * target_pitch + column * target_step, value.to(target.dtype.element_ty), mask=mask)


def _matrix(x: Tensor) -> Tensor | None:
    """[T, ...] as [T, W] without a copy; None where the strides do not allow it."""
    if x.dim() == 2:
        return x
    if x.dim() == 1:
        return x[:, None]
    try:
        return x.view(x.shape[0], math.prod(x.shape[1:]))
    except RuntimeError:
        return None


def move_rows(
    target: Tensor, source: Tensor, source_rows: Tensor | None = None, target_rows: Tensor | None = None
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]`; a list that is None counts 0, 1, ...

    Args:
        target: [T, ...] written, any strides that fold into rows; others are written by way of a copy.
        source: [S, ...] of the same trailing shape.
        source_rows: [n] integers.
        target_rows: [n] integers.
    """
    rows = source_rows if source_rows is not None else target_rows
    count = source.shape[0] if rows is None else rows.shape[0]
    into, taken = _matrix(target), _matrix(source)
    if into is None:
        whole = target.contiguous()
        move_rows(whole, whole if source is target else source, source_rows, target_rows)
        target.copy_(whole)
        return
    if taken is None:
        taken = source.reshape(source.shape[0], -1)
    width = taken.shape[1]
    dense = width == 1 or (into.stride(1) == 1 and taken.stride(1) == 1)
    aligned = all(n % 16 == 0 for n in (into.stride(0), taken.stride(0), width))
    block = min(next_pow2(width), _STRETCH)
    _move(
        (count, -(-width // block)),
        into,
        taken,
        None if source_rows is None else packed(source_rows),
        None if target_rows is None else packed(target_rows),
        into.stride(0),
        taken.stride(0),
        into.stride(1),
        taken.stride(1),
        width,
        BLOCK=block,
        DENSE=dense,
        VEC=16 if dense and aligned else 1,
        num_warps=warps_for(block),
    )


@KERNELS.implements(heads_ops.embedding)
def embedding(weight: Tensor, input_ids: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Rows of the table, cast."""
    out = new_like(out, (input_ids.shape[0], weight.shape[1]), out_dtype, weight.device)
    move_rows(out, weight, input_ids)
    return out


@KERNELS.implements(heads_ops.gather_rows)
def gather_rows(x: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows named by a list."""
    out = new_like(out, (rows.shape[0], *x.shape[1:]), x.dtype, x.device)
    move_rows(out, x, rows)
    return out


@KERNELS.implements(shaping_ops.put_rows)
def put_rows(x: Tensor, rows: Tensor, values: Tensor, *, out: None = None) -> None:
    """Rows written where a list says."""
    move_rows(x, values, target_rows=rows)


def _side_by_side(parts: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
    first = parts[0]
    out = new_like(out, (first.shape[0], sum(part.shape[1] for part in parts)), first.dtype, first.device)
    column = 0
    for part in parts:
        move_rows(out[:, column : column + part.shape[1]], part)
        column += part.shape[1]
    return out


@KERNELS.implements(heads_ops.concat_columns)
def concat_columns(parts: tuple[Tensor, ...], *, out: Tensor | None = None) -> Tensor:
    """A launch per part."""
    return _side_by_side(parts, out)


@KERNELS.implements(index_ops.concat_index)
def concat_index(first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Two launches."""
    return _side_by_side((first, second), out)


@KERNELS.implements(index_ops.concat_rows)
def concat_rows(parts: tuple[Tensor, ...], *, out: Tensor | None = None) -> Tensor:
    """A launch per part."""
    first = parts[0]
    out = new_like(out, (sum(part.shape[0] for part in parts), first.shape[1]), first.dtype, first.device)
    row = 0
    for part in parts:
        move_rows(out[row : row + part.shape[0]], part)
        row += part.shape[0]
    return out


@KERNELS.implements(moe_ops.expert_shuffle)
def expert_shuffle(
    weight: Tensor | QTensor, source: Tensor, *, out: Tensor | QTensor | None = None
) -> Tensor | QTensor:
    """Whole experts as rows, codes and scales together."""
    count = source.shape[0]
    if isinstance(weight, Tensor):
        given = out if isinstance(out, Tensor) else None
        plain = new_like(given, (count, *weight.shape[1:]), weight.dtype, weight.device)
        move_rows(plain, weight, source)
        return plain
    if isinstance(out, QTensor):
        data, scale = out.data, out.scale
    else:
        data, scale = (part.new_empty(count, *part.shape[1:]) for part in (weight.data, weight.scale))
    move_rows(data, weight.data, source)
    move_rows(scale, weight.scale, source)
    return QTensor(data, scale, weight.fmt, weight.layout)
