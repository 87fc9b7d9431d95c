"""Other batches of the same rows: permuted, padded, cut in chunks. Each must give every row the bits it had.

`RowBatch` serves ops whose rows stand alone. Ops with sequences, images or experts have a batch of their own in
`deepinfer.conformance.sequences`. All of them answer the same questions, so the checks know no op by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.conformance.values import plain_leaves, transform
from deepinfer.ops.formats import QTensor
from deepinfer.ops.spec import Case, OpSpec

Arguments = dict[str, Any]
Rows = dict[str, Tensor]
"""Result tensors with rows first, in the order of the original batch; anything that is not per row under `state`."""

STATE = "state:"
CHUNKS = (1, 2, 3, 6, 8)
"""Chunk sizes that stand for every size: a decode row, small ones, a verify block, a power of two."""


@dataclass(frozen=True)
class Part:
    """One call of a variant.

    Attributes:
        make: builds its arguments from the results of the calls before it (sequences carry state through arguments).
        restore: its results as rows of the original batch; a later part adds to an earlier one.
    """

    make: Callable[[], Arguments]
    restore: Callable[[Arguments, Any], Rows]


@dataclass(frozen=True)
class Variant:
    """The same rows in another batch."""

    name: str
    parts: tuple[Part, ...]
    join: Callable[[list[Rows]], Rows]


class RowBatch:
    """Rows that stand alone: arguments in `case.rows` are indexed by row, all others are shared."""

    def __init__(self, op: OpSpec[..., Any], case: Case) -> None:
        self.op = op
        self.axes = {name.partition(":")[0]: int(name.partition(":")[2] or 0) for name in case.rows}

    def count(self, args: Arguments) -> int:
        """Rows of the batch."""
        for name, axis in self.axes.items():
            for tensor in _tensors(args.get(name)):
                return int(tensor.shape[axis])
        return 0

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """Results, and arguments written in place, rows first."""
        rows: Rows = {}
        count = self.count(args)
        for path, tensor in plain_leaves(result, "result"):
            axis = self.op.rules.row_axis
            if tensor.dim() > axis and tensor.shape[axis] == count:
                rows[path] = tensor.movedim(axis, 0)
            else:
                rows[STATE + path] = tensor
        for name in self.op.mutates:
            for path, tensor in plain_leaves(args[name], name):
                prefix = "" if name in self.axes else STATE
                rows[prefix + path] = tensor.movedim(self.axes.get(name, 0), 0)
        return rows

    def take(self, args: Arguments, index: Tensor) -> Arguments:
        """The rows of `index`, as copies."""
        return {
            name: self._each(name, value, lambda t, axis: t.index_select(axis, index)) for name, value in args.items()
        }

    def slice(self, args: Arguments, start: int, stop: int) -> Arguments:
        """Rows [start, stop) as views, so that in-place ops write through."""
        return {
            name: self._each(name, value, lambda t, axis: t.narrow(axis, start, stop - start))
            for name, value in args.items()
        }

    def _each(self, name: str, value: Any, function: Callable[[Tensor, int], Tensor]) -> Any:
        if name not in self.axes:
            return value
        return transform(value, lambda tensor: function(tensor, self.axes[name]))

    def permuted(self, args: Arguments, gen: Generator) -> Variant:
        """All rows in another order."""
        order = torch.randperm(self.count(args), generator=gen)
        return self._single("permuted", lambda: self.take(args, order), order.argsort())

    def padded(self, args: Arguments, gen: Generator) -> Iterator[Variant]:
        """Padding rows of garbage in front, between and behind."""
        count = self.count(args)
        if count == 0:
            return
        spare = 5
        place = torch.randperm(count + spare, generator=gen)[:count].sort().values
        for name, kept in (("padded behind", torch.arange(count)), ("padded between", place)):

            def make(kept: Tensor = kept) -> Arguments:
                return self._with_padding(args, kept, count + spare)

            yield self._single(name, make, kept)

    def _with_padding(self, args: Arguments, kept: Tensor, total: int) -> Arguments:
        source = torch.zeros(total, dtype=torch.long)
        source[kept] = torch.arange(len(kept))
        padding = torch.ones(total, dtype=torch.bool)
        padding[kept] = False
        wide = self.take(args, source)
        for name in self.axes:
            value = wide.get(name)
            fill = self.op.rules.padding.get(name)
            if isinstance(value, QTensor):
                value.scale[padding] = 0x7F if value.fmt == "nvfp4" else 255
            for tensor in _tensors(value):
                rows = tensor.movedim(self.axes[name], 0)
                if fill is not None:
                    rows[padding] = fill
                elif tensor.dtype.is_floating_point:
                    rows[padding] = torch.nan
        return wide

    def chunked(self, args: Arguments, size: int) -> Variant:
        """Chunks of `size` rows, one call each, in order."""
        count = self.count(args)
        starts = range(0, count, size)
        parts = tuple(
            Part(partial(self.slice, args, start, min(start + size, count)), self.canonical) for start in starts
        )
        return Variant(f"chunks of {size}", parts, join_rows)

    def _single(self, name: str, make: Callable[[], Arguments], back: Tensor) -> Variant:
        def restore(args: Arguments, result: Any) -> Rows:
            return select_rows(self.canonical(args, result), back)

        return Variant(name, (Part(make, restore),), lambda rows: rows[0])


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows of `index`; state stays."""
    return {path: tensor if path.startswith(STATE) else tensor[index] for path, tensor in rows.items()}


def join_rows(parts: list[Rows]) -> Rows:
    """Rows below each other; state of the last part."""
    if not parts:
        return {}
    return {
        path: parts[-1][path] if path.startswith(STATE) else torch.cat([part[path] for part in parts])
        for path in parts[0]
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, QTensor):
        yield value.data
        yield value.scale
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def batch_of(op: OpSpec[..., Any], case: Case) -> RowBatch | None:
    """The batch that knows how to rearrange this case; None where the op has no rows."""
    from deepinfer.conformance.sequences import BATCHES
    from deepinfer.conformance.targets import TARGETS

    special: Mapping[str, Callable[[OpSpec[..., Any], Case], RowBatch]] = {**BATCHES, **TARGETS}
    if op.name in special:
        return special[op.name](op, case)
    return RowBatch(op, case) if case.rows else None
