"""Arguments and results as trees: tensors inside tuples, lists, dicts and the dataclasses of contracts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Any], rebuild: Callable[..., Any] | None = None) -> Any:
    """The same tree with `function(tensor)` in place of every tensor; anything else stays.

    Args:
        value: a tensor, a container of some, a dataclass with some (`QTensor`, `PagedCache`), or anything else.
        function: takes a tensor.
        rebuild: makes a dataclass anew from (class, parts by name); by default its constructor does, with its checks.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, function, rebuild) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, rebuild) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: map_tensors(getattr(value, part.name), function, rebuild) for part in fields(value)}
        return rebuild(type(value), parts) if rebuild is not None else type(value)(**parts)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor of a tree, in order."""
    found: list[Tensor] = []
    map_tensors(value, found.append, _drop)
    return found


def _drop(kind: type, parts: dict[str, Any]) -> None:
    """Rebuild nothing."""
