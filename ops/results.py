"""What an op returns, known before it runs: makers of results, declared in `define_op(results=...)`.

An engine provides the memory of results (`ops.outputs`), and a device that is late has to know shapes when an op is
queued. So a contract says shapes and dtypes of its results as a function of the arguments. Only an op whose result's
size depends on values has none; it cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.formats import GROUP, QTensor, QuantFormat

New = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes one result: (shape, dtype) to uninitialised memory."""

Results = Callable[[New, Any], Any]
"""Makes all results of a call: (new, arguments as attributes) to the tree that the op returns. It asks tensors for
their geometry, not for values."""


def nothing(new: New, a: Any) -> None:
    """Of an op that only writes in place."""


def like(name: str) -> Results:
    """One tensor of the shape and dtype of the argument `name`."""

    def make(new: New, a: Any) -> Tensor:
        x = getattr(a, name)
        return new(tuple(x.shape), x.dtype)

    return make


def int32_like(name: str) -> Results:
    """One int32 tensor of the shape of the argument `name`."""
    return lambda new, a: new(tuple(getattr(a, name).shape), torch.int32)


def float32_like(name: str) -> Results:
    """One float32 tensor of the shape of the argument `name`."""
    return lambda new, a: new(tuple(getattr(a, name).shape), torch.float32)


def plain_or_codes(name: str) -> Results:
    """Like the argument `name`: quantised to `fmt`, or plain where that is None."""
    plain = like(name)
    return lambda new, a: plain(new, a) if a.fmt is None else codes(new, getattr(a, name).shape, a.fmt)


def codes(new: New, shape: tuple[int, ...], fmt: QuantFormat) -> QTensor:
    """A quantised tensor of `shape` in values, canonical."""
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    scales = -(-shape[-1] // GROUP[fmt])
    return QTensor(new((*shape[:-1], width), torch.uint8), new((*shape[:-1], scales), torch.uint8), fmt)


def rows_like(new: New, x: Tensor | QTensor, count: int) -> Tensor | QTensor:
    """`count` rows like those of `x`."""
    if isinstance(x, QTensor):
        data = new((count, *x.data.shape[1:]), x.data.dtype)
        return QTensor(data, new((count, *x.scale.shape[1:]), x.scale.dtype), x.fmt, x.layout)
    return new((count, *x.shape[1:]), x.dtype)
