"""Rows that only move: bytes from rows that a list names to rows that a list names, and rows cast on the way."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import index as index_ops
from deepinfer.ops import kv as kv_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops.formats import QTensor

_SOURCES: Final = (*SOURCES, "moves.py", "kernels/generated/moves.asc")
_STRETCH: Final = 65536
"""Bytes of a row that move at a time (`tiles/moves.py`)."""
_CAST: Final = 8192
"""Elements of a row that are cast at a time."""


def _flat_rows(x: Tensor) -> Tensor | None:
    """[T, ...] as [T, W] with neighbouring elements in a row; None where the strides do not allow it."""
    if x.dim() == 1:
        return x[:, None]
    try:
        flat = x.view(x.shape[0], math.prod(x.shape[1:]))
    except RuntimeError:
        return None
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else None


def move_rows(
    target: Tensor, source: Tensor, source_rows: Tensor | None = None, target_rows: Tensor | None = None
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]`; a list that is None counts 0, 1, ...

    Args:
        target: [T, ...] written; where its rows are not dense in memory it is written by way of a copy.
        source: [S, ...] of the same dtype and trailing shape.
        source_rows: [n] int32 or int64.
        target_rows: [n] int32 or int64.
    """
    into, taken = _flat_rows(target), _flat_rows(source)
    if into is None:
        whole = target.contiguous()
        move_rows(whole, whole if source is target else source, source_rows, target_rows)
        target.copy_(whole)
        return
    if taken is None:
        taken = source.contiguous().view(source.shape[0], math.prod(source.shape[1:]))
    named = source_rows if source_rows is not None else target_rows
    rows = source.shape[0] if named is None else named.shape[0]
    size = taken.element_size()
    row_bytes = taken.shape[1] * size
    stretches = tasks_of(row_bytes, _STRETCH)
    family("moves")["move_rows"](
        rows * stretches,
        source=taken,
        source_rows=None if source_rows is None else packed(source_rows),
        target=into,
        target_rows=None if target_rows is None else packed(target_rows),
        rows=rows,
        stretches=stretches,
        row_bytes=row_bytes,
        source_pitch=taken.stride(0) * size,
        target_pitch=into.stride(0) * size,
        source_step=_words(source_rows),
        target_step=_words(target_rows),
    )


def _words(rows: Tensor | None) -> int:
    """32-bit words from one entry of a list to the next, the low one first; 0 for no list."""
    return 0 if rows is None else rows.element_size() // 4


@implements(heads_ops.embedding, sources=_SOURCES)
def embedding(weight: Tensor, input_ids: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Rows of the table, cast where the result has another type."""
    rows, width = input_ids.shape[0], weight.shape[1]
    out = new_like(out, (rows, width), out_dtype, weight.device)
    if weight.dtype == out_dtype:
        move_rows(out, weight, input_ids)
        return out
    table = weight if weight.stride(1) == 1 else weight.contiguous()
    stretches = tasks_of(width, _CAST)
    family("moves")["widen_rows" if out_dtype == torch.float32 else "narrow_rows"](
        rows * stretches,
        source=table,
        source_rows=packed(input_ids),
        target=out,
        rows=rows,
        stretches=stretches,
        width=width,
        source_pitch=table.stride(0),
    )
    return out


@implements(heads_ops.gather_rows, sources=_SOURCES)
def gather_rows(x: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows named by a list."""
    out = new_like(out, (rows.shape[0], *x.shape[1:]), x.dtype, x.device)
    move_rows(out, x, rows)
    return out


@implements(shaping_ops.put_rows, sources=_SOURCES)
def put_rows(x: Tensor, rows: Tensor, values: Tensor, *, out: None = None) -> None:
    """Rows written where a list says."""
    move_rows(x, values, target_rows=rows)


@implements(kv_ops.copy_blocks, sources=_SOURCES)
def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor, *, out: None = None) -> None:
    """Blocks as rows of bytes, cut so that a few long ones keep every core busy."""
    move_rows(pool, pool, sources, destinations)


def _side_by_side(parts: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
    first = parts[0]
    out = new_like(out, (first.shape[0], sum(part.shape[1] for part in parts)), first.dtype, first.device)
    column = 0
    for part in parts:
        move_rows(out[:, column : column + part.shape[1]], part)
        column += part.shape[1]
    return out


@implements(heads_ops.concat_columns, sources=_SOURCES)
def concat_columns(parts: tuple[Tensor, ...], *, out: Tensor | None = None) -> Tensor:
    """A launch per part."""
    return _side_by_side(parts, out)


@implements(index_ops.concat_index, sources=_SOURCES)
def concat_index(first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Two launches."""
    return _side_by_side((first, second), out)


@implements(index_ops.concat_rows, sources=_SOURCES)
def concat_rows(parts: tuple[Tensor, ...], *, out: Tensor | None = None) -> Tensor:
    """A launch per part."""
    first = parts[0]
    out = new_like(out, (sum(part.shape[0] for part in parts), first.shape[1]), first.dtype, first.device)
    row = 0
    for part in parts:
        move_rows(out[row : row + part.shape[0]], part)
        row += part.shape[0]
    return out


@implements(moe_ops.expert_shuffle, sources=_SOURCES)
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
