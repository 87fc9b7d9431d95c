"""The same values in other layouts: sliced out of wider memory, transposed, every second row, one row expanded.

What a view does not name is poison, so a kernel that takes a pitch for a width reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.values import transform
from deepinfer.ops.formats import PagedCache, QTensor
from deepinfer.ops.spec import OpSpec


def layout_variants(op: OpSpec[..., Any], args: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments) with the same values as `args`; for "expanded", with equal rows.

    Arguments that the contract wants packed stay as they are; caches have strided cases of their own.
    """
    for name, change in (("sliced", _sliced), ("every second row", _second_rows), ("transposed", _transposed)):
        yield name, {key: _changed(op, key, value, change) for key, value in args.items()}


def expanded(op: OpSpec[..., Any], args: Mapping[str, Any], rows: tuple[str, ...]) -> dict[str, Any] | None:
    """Row arguments whose rows are all the first one, without memory of their own; None where that is not legal."""
    if not rows or any(name in op.mutates for name in rows) or op.mutates:
        return None
    if any(":" in name for name in rows):
        return None

    def spread(tensor: Tensor) -> Tensor:
        return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor

    return {
        name: transform(value, spread) if name in rows and _movable(value) else value for name, value in args.items()
    }


def _movable(value: Any) -> bool:
    return isinstance(value, Tensor | QTensor)


def _changed(op: OpSpec[..., Any], name: str, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if name in op.rules.packed or isinstance(value, PagedCache) or not _movable(value):
        return value
    if isinstance(value, Tensor) and not value.is_contiguous():
        return value
    return transform(value, change)


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    value: Any = torch.nan if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max
    return torch.full(shape, value, dtype=dtype)


def _sliced(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    wide = _poison((*tensor.shape[:-1], tensor.shape[-1] + 7), tensor.dtype)
    view = wide[..., 3 : 3 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def _second_rows(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    tall = _poison((2 * tensor.shape[0] + 1, *tensor.shape[1:]), tensor.dtype)
    view = tall[1 : 1 + 2 * tensor.shape[0] : 2]
    view.copy_(tensor)
    return view


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return tensor
    other = torch.empty((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), dtype=tensor.dtype)
    view = other.transpose(-1, -2)
    view.copy_(tensor)
    return view
