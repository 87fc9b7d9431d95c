"""Failing cases as files: the inputs that failed, to be run again alone, here or by somebody else.

A file holds plain tensors and numbers only and is read without executing anything. Cases with far addresses are not
copied (they are gigabytes of nothing); their file holds the name, from which they are made anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from deepinfer.conformance.results import CaseResult
from deepinfer.conformance.runner import Made, make_case
from deepinfer.conformance.values import HUGE_BYTES, extent, transform, walk
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.moe import DispatchHandle
from deepinfer.ops.spec import API_VERSION, Case, OpSpec

_SAFE: list[Any] = [QTensor, PagedCache, CacheFormat, DispatchHandle]
_KEYS = frozenset({"contract", "op", "case", "rows", "args"})
"""Without these a file is no case of ours."""


def save_failure(folder: Path, made: Made, result: CaseResult) -> Path:
    """Write a failing case; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    far = any(extent(t) * t.element_size() > HUGE_BYTES for _, t in walk(made.args))
    slug = re.sub(r"[^\w.+-]+", "-", f"{made.op.name}--{made.case.name}").strip("-")
    path = folder / f"{slug}.case"
    content: dict[str, Any] = {
        "contract": API_VERSION,
        "op": made.op.name,
        "case": made.case.name,
        "rows": list(made.case.rows),
        "implementation": result.implementation,
        "detail": result.detail,
        "args": None if far else transform(make_case(made.op, made.case).args, lambda t: t.clone()),
    }
    torch.save(content, path)
    return path


def load_failure(path: Path) -> Made:
    """Read a failing case back.

    Raises:
        OpArgumentError: not such a file, of another contract version, or of an op that is not here.
    """
    try:
        with torch.serialization.safe_globals(_SAFE):
            content = torch.load(path, weights_only=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise OpArgumentError(f"{path} is not a saved case: {why or type(error).__name__}") from error
    missing = sorted(_KEYS - content.keys() if isinstance(content, dict) else _KEYS)
    if missing:
        raise OpArgumentError(f"{path} is not a saved case: it lacks {', '.join(missing)}")
    if content["contract"] != API_VERSION:
        raise OpArgumentError(f"{path} is of op contract version {content['contract']}, this is {API_VERSION}")
    ops = defined_ops()
    if content["op"] not in ops:
        raise OpArgumentError(f"{path} is a case of op {content['op']!r}, which is not defined here")
    op: OpSpec[..., Any] = ops[content["op"]]
    if content["args"] is None:
        return make_case(op, find_case(op, content["case"]))
    args = content["args"]
    case = Case(content["case"], lambda gen: transform(args, lambda t: t.clone()), rows=tuple(content["rows"]))
    return Made(op, case, args)


def find_case(op: OpSpec[..., Any], name: str) -> Case:
    """The case of that name.

    Raises:
        OpArgumentError: there is none; close ones are listed.
    """
    cases = {case.name: case for case in op.cases()}
    if name not in cases:
        raise OpArgumentError(f"op {op.name} has no case {name!r}; it has: {'; '.join(cases)}")
    return cases[name]
