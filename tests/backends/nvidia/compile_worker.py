"""Compile what ops launch at their cases' shapes, for several generations; run as a program, writes JSON.

python compile_worker.py OUTPUT OP[,OP...] CAPABILITY[,CAPABILITY...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kernel_launches import backend_of, launches_of

from deepinfer.backends.nvidia.ahead import compile_ahead, distinct
from deepinfer.backends.nvidia.launch import Launch
from deepinfer.ops.backend import Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.spec import OpSpec

FORMS = 2
"""Forms of a kernel that are compiled at most, for each of its sorts."""
SORTS = ("WIDE", "HEADS")
"""Constants that choose instructions: the dtype of products, and rows of a tile."""
SAME_CODE_AS_100 = 103
"""Differs in its assembler alone, so one form of a kernel will do."""


def forms_of(backend: Backend, op: OpSpec[..., Any]) -> list[Launch]:
    """What the Triton implementations of an op launch, at the model's shapes where the op has cases of them."""
    cases = list(op.cases())
    real = [case for case in cases if case.tag == "real"]
    near = [case for case in cases if "2^31" not in case.name]
    found: list[Launch] = []
    for case in real[:2] or [near[len(near) // 2], near[-1]]:
        found += launches_of(backend, op, case, max_tokens=8192)[0]
    return distinct(found)


def main(output: str, ops: str, capabilities: str) -> None:
    """Compile and write one entry per op, kernel and capability; a kernel of several ops is compiled a few times."""
    report: list[dict[str, Any]] = []
    for capability in map(int, capabilities.split(",")):
        backend = backend_of(capability)
        most = 1 if capability == SAME_CODE_AS_100 else FORMS
        made: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for name in ops.split(","):
            for launch in forms_of(backend, defined_ops()[name]):
                sorts = (str(launch.constants.get(name)) for name in SORTS)
                known = made.setdefault((launch.kernel.jit.__name__, *sorts), [])
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
