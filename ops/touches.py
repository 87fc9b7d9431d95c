"""Which rows and records of a large argument one call touches: declared in the op's contract, read by whoever copies.

A pool of KV records, a table of rotations or an embedding is far larger than what a call looks at. An op says in
`touches` where its indices are; `ops.fallback` copies those parts and no others between a device and the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer.ops.formats import PagedCache
from deepinfer.ops.trees import tensors_of

Where = str | Callable[[Any], Tensor]
"""The name of an integer argument, or a function of all arguments (as attributes) that gives an integer tensor. Of an
argument that itself is touched in part, a function may ask the geometry only."""

Run = tuple[int, int]
"""Consecutive units [start, stop)."""


@dataclass(frozen=True)
class Touch:
    """The part of an argument that a call reads or writes; the rest it neither reads nor writes.

    Attributes:
        unit: "rows" of the first axis of a tensor or a quantised tensor, or "records" of a cache, counted in slots.
        at: where they are; entries below 0 touch nothing. More than is touched may be named, never less.
        written: where an argument in `mutates` is written; None when that is wherever it is touched.
    """

    unit: Literal["rows", "records"]
    at: tuple[Where, ...]
    written: tuple[Where, ...] | None = None


def at_rows(*at: Where, written: Where | None = None) -> Touch:
    """Rows of the first axis, at the values of `at`."""
    return Touch("rows", at, None if written is None else (written,))


def at_records(*at: Where) -> Touch:
    """Records of a `PagedCache`, at the slots in `at`."""
    return Touch("records", at)


def runs(where: Sequence[Where], arguments: Any, count: int) -> list[Run]:
    """The units that `where` names among `count`, ascending, each once, neighbours joined.

    Args:
        where: of a `Touch`.
        arguments: the op's arguments as attributes; index arguments on the host.
        count: units of the whole argument; an index from there on is left for the reference to refuse.
    """
    parts = [getattr(arguments, at) if isinstance(at, str) else at(arguments) for at in where]
    index = torch.cat([part.reshape(-1).long() for part in parts]).unique()
    index = index[(index >= 0) & (index < count)]
    if len(index) == 0:
        return []
    breaks = (index.diff() != 1).nonzero()[:, 0] + 1
    firsts = torch.cat((breaks.new_zeros(1), breaks))
    lasts = torch.cat((breaks - 1, breaks.new_tensor([len(index) - 1])))
    return list(zip(index[firsts].tolist(), (index[lasts] + 1).tolist(), strict=True))


def num_units(value: Any, touch: Touch) -> int:
    """How many rows or records an argument has."""
    return value.num_slots if isinstance(value, PagedCache) and touch.unit == "records" else len(tensors_of(value)[0])


def views(value: Any, touch: Touch, found: Sequence[Run]) -> Iterator[Tensor]:
    """Views of an argument that hold the units of `found` and nothing else.

    The views of two arguments of equal geometry correspond one to one.
    """
    if touch.unit == "records":
        for start, stop in found:
            yield from value.record_views(start, stop)
        return
    for tensor in tensors_of(value):
        for start, stop in found:
            yield tensor[start:stop]
