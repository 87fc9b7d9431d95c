"""Compile what ops launch at their cases' shapes, for several generations; run as a program, writes JSON.

python compile_worker.py OUTPUT OP[,OP...] CAPABILITY[,CAPABILITY...]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernel_launches import backend_of, launches_with

from deepinfer.backends.nvidia.ahead import compile_ahead, distinct
from deepinfer.backends.nvidia.launch import Launch
from deepinfer.conformance.runner import make_case
from deepinfer.ops.backend import Backend
from deepinfer.ops.cases import common
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.spec import OpSpec

FORMS = 2
"""Forms of a kernel that are compiled at most, for each of its sorts."""
SORTS = ("WIDE", "HEADS")
"""Constants that choose instructions: the dtype of products, and rows of a tile."""
SAME_CODE_AS_100 = 103
"""Differs in its assembler alone, so one form of a kernel will do."""
LARGE = 1 << 22
"""Values of a weight that take long to draw."""


def forms_of(op: OpSpec[..., Any], backends: Iterable[Backend]) -> dict[str, list[Launch]]:
    """What the Triton implementations of an op launch by backend, at the model's shapes where it has cases of them.

    A case is made once for all backends: with the model's shapes that takes seconds.
    """
    cases = list(op.cases())
    real = [case for case in cases if case.tag == "real"]
    near = [case for case in cases if "2^31" not in case.name]
    found: dict[str, list[Launch]] = {backend.name: [] for backend in backends}
    for case in real[:2] or [near[len(near) // 2], near[-1]]:
        arguments = make_case(op, case).args
        for backend in backends:
            found[backend.name] += launches_with(backend, op, arguments, max_tokens=8192)
    return {name: distinct(launches) for name, launches in found.items()}


@contextmanager
def large_weights_without_values() -> Iterator[None]:
    """Codes and scales of zero for them, in memory that nothing touches: what is launched follows from their shapes."""
    quantised = common.quantised

    def shaped(gen: torch.Generator, *shape: int, fmt: QuantFormat, scale: float = 1.0) -> QTensor:
        if math.prod(shape) < LARGE:
            return quantised(gen, *shape, fmt=fmt, scale=scale)
        row = quantised(gen, shape[-1], fmt=fmt)
        codes, scales = (torch.zeros(*shape[:-1], t.shape[-1], dtype=t.dtype) for t in (row.data, row.scale))
        return QTensor(codes, scales, fmt)

    common.quantised = shaped
    try:
        yield
    finally:
        common.quantised = quantised


def main(output: str, ops: str, capabilities: str) -> None:
    """Compile and write one entry per op, kernel and capability; a kernel of several ops is compiled a few times."""
    report: list[dict[str, Any]] = []
    backends = {capability: backend_of(capability) for capability in map(int, capabilities.split(","))}
    different = {backend.name: backend for backend in backends.values()}
    made: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name in ops.split(","):
        with large_weights_without_values():
            forms = forms_of(defined_ops()[name], different.values())
        for capability, backend in backends.items():
            most = 1 if capability == SAME_CODE_AS_100 else FORMS
            for launch in forms[backend.name]:
                sorts = (str(launch.constants.get(name)) for name in SORTS)
                known = made.setdefault((capability, launch.kernel.jit.__name__, *sorts), [])
                if len(known) < most:
                    known.append(facts_of(launch, capability))
                report.append({"op": name, **known[-1]})
    Path(output).write_text(json.dumps(report))


def facts_of(launch: Launch, capability: int) -> dict[str, Any]:
    """What became of one kernel."""
    facts: dict[str, Any] = {
        "capability": capability,
        "kernel": launch.kernel.jit.__name__,
        "constants": {name: str(value) for name, value in launch.constants.items()},
        "error": "",
    }
    try:
        made = compile_ahead(launch, capability)
    except Exception as error:  # whatever a compiler raises, the test must say it
        return facts | {"error": f"{type(error).__name__}: {error}"}
    return facts | {
        "registers": made.registers,
        "stack_bytes": made.stack_bytes,
        "spilled_bytes": made.spilled_bytes,
        "target": made.target,
        "matrix": sorted(made.matrix_instructions()),
        "kinds": sorted(made.asynchronous_kinds()),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
