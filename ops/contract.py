"""The contract of an op as data: symbolic shapes, dtypes and edge rules, and a check of arguments against them.

Shapes and dtypes are read from the reference's docstring (`x: [T, heads, D] bfloat16 or float32.`), so what a reader
sees is what the suite checks, and neither can go stale. Rules of nearly every op are the defaults of `Rules`.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import PagedCache, QTensor

Layout = Literal["strided", "packed"]

_ENTRY = re.compile(r"^    (\w+): (.*)$")
_SHAPE = re.compile(r"^\[([^\]]*)\]\s*(.*)$", re.DOTALL)
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Rules:
    """Edge rules of an op. The defaults hold unless its definition says otherwise.

    Attributes:
        aliasing: what results and written arguments may share memory with.
        zero_rows: what a call without rows does.
        offsets: width of address arithmetic.
        nan: what a NaN or an Inf in one row may do.
        packed: arguments that must be contiguous; all others may be any view (sliced, transposed, expanded).
        row_axis: axis of the results that counts rows.
        padding: integer that a padding row holds, by argument; in others a padding row may hold anything legal.
        host: arguments that may be host tensors on any device, such as memory-mapped tables.
    """

    aliasing: str = "results are new memory; an argument is written only where `mutates` names it"
    zero_rows: str = "legal: results have no rows, nothing is written"
    offsets: str = "64 bits: page times bytes, and row times row stride, may pass 2^31"
    nan: str = "a NaN or Inf reaches results of its own row and no others"
    packed: tuple[str, ...] = ()
    row_axis: int = 0
    padding: Mapping[str, int] = field(default_factory=dict)
    host: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """One argument of an op.

    Attributes:
        name: as in the signature.
        shape: symbols and expressions, None for scalars; a cache is [slots, D], a quantised tensor counts values.
        dtypes: those allowed; empty for any.
        layout: "strided" takes any view, "packed" asks for contiguous memory.
        text: the rest of its entry in the docstring.
    """

    name: str
    shape: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]
    layout: Layout
    text: str

    def __str__(self) -> str:
        dtypes = "|".join(str(d).removeprefix("torch.") for d in self.dtypes)
        shape = f"[{', '.join(self.shape)}]" if self.shape is not None else "scalar"
        return " ".join(filter(None, (shape, dtypes, self.layout if self.shape is not None else "")))


def read_arguments(function: Callable[..., Any], packed: tuple[str, ...]) -> dict[str, Argument]:
    """Every argument of a reference, with what its docstring says about it."""
    entries = _docstring_entries(inspect.getdoc(function) or "")
    arguments = {}
    for name in inspect.signature(function).parameters:
        text = entries.get(name, "")
        found = _SHAPE.match(text)
        shape = tuple(part.strip() for part in found[1].split(",")) if found else None
        rest = found[2] if found else ""
        head = re.split(r"[.;]|, (?=[a-z])", rest, maxsplit=1)[0]
        dtypes = tuple(_DTYPES[word] for word in re.findall(r"\w+", head) if word in _DTYPES)
        arguments[name] = Argument(name, shape, dtypes, "packed" if name in packed else "strided", text)
    return arguments


def _docstring_entries(doc: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    inside = False
    for line in doc.splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside and (found := _ENTRY.match(line)):
            name = found[1]
            entries[name] = found[2]
        elif inside and name and line.strip():
            entries[name] += " " + line.strip()
    return entries


def logical_shape(value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor, of a quantised tensor in values, of a cache as (slots, D); None for anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, QTensor):
        return value.shape
    if isinstance(value, PagedCache):
        return value.num_slots, value.format.head_dim
    return None


def check_arguments(name: str, arguments: Mapping[str, Argument], values: Mapping[str, Any]) -> dict[str, int]:
    """Unify the shapes of `values` with the contract.

    Returns:
        The symbols and what they stand for.

    Raises:
        OpArgumentError: a rank, size or dtype is not what the contract says; it is named.
    """
    symbols = {k: v for k, v in values.items() if isinstance(v, int) and not isinstance(v, bool)}
    late: list[tuple[str, str, int]] = []
    for key, argument in arguments.items():
        value = values.get(key)
        if argument.shape is None or value is None:
            continue
        shape = logical_shape(value)
        if shape is None:
            continue
        wanted = argument.shape
        if "..." in wanted:
            front, back = wanted[: wanted.index("...")], wanted[wanted.index("...") + 1 :]
            wanted = front + back
            if len(shape) > len(wanted):
                shape = shape[: len(front)] + shape[len(shape) - len(back) :]
        if len(shape) != len(wanted):
            raise OpArgumentError(f"{name}: {key} has shape {shape}, the contract says [{', '.join(wanted)}]")
        if isinstance(value, Tensor) and argument.dtypes and value.dtype not in (*argument.dtypes, *_wider(argument)):
            raise OpArgumentError(f"{name}: {key} is {value.dtype}, the contract says {argument}")
        for size, symbol in zip(shape, wanted, strict=True):
            if symbol.isidentifier() and symbols.setdefault(symbol, size) != size:
                raise OpArgumentError(f"{name}: {key} has {symbol} = {size}, elsewhere it is {symbols[symbol]}")
            if not symbol.isidentifier():
                late.append((key, symbol, size))
    for key, expression, size in late:
        value = _evaluate(expression, symbols)
        if value is not None and value != size:
            raise OpArgumentError(f"{name}: {key} has {size} where the contract says {expression} = {value}")
    return symbols


def _wider(argument: Argument) -> tuple[torch.dtype, ...]:
    return (torch.float64,) if torch.float32 in argument.dtypes else ()


def _evaluate(expression: str, symbols: Mapping[str, int]) -> int | None:
    """Value of a shape expression, None when a symbol is free or the text is not plain arithmetic."""

    def value(node: ast.AST) -> int | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return symbols.get(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)
        return None

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        return None


def static_dims(recipe: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The static dimensions a model would bind with, read off example arguments.

    A recipe entry is `argument:axis` for a size, or `argument` for a value: a number or name as it is, the format of a
    quantised tensor, the kind of a cache; `argument|default` gives what stands for a plain tensor or None, and
    `argument.dtype` the dtype's name.
    """
    dims: dict[str, Any] = {}
    for key, entry in recipe.items():
        source, _, default = entry.partition("|")
        name, _, axis = source.partition(":")
        if name.endswith(".dtype"):
            value = values.get(name.removesuffix(".dtype"))
            dims[key] = str(value.dtype) if isinstance(value, Tensor) else default
            continue
        value = values.get(name)
        if axis:
            shape = logical_shape(value)
            dims[key] = shape[int(axis)] if shape is not None else default
        elif isinstance(value, QTensor):
            dims[key] = value.fmt
        elif isinstance(value, PagedCache):
            dims[key] = value.format.kind
        elif value is None or isinstance(value, Tensor):
            dims[key] = default
        else:
            dims[key] = value
    return dims
