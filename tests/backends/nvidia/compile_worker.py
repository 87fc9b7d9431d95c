"""Compile what ops launch at their cases' shapes, for several generations; run as a program, writes JSON.

python compile_worker.py OUTPUT OP[,OP...] CAPABILITY[,CAPABILITY...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from deepinfer.backends.nvidia.ahead import compile_ahead, distinct
from deepinfer.backends.nvidia.families import KERNELS
from deepinfer.backends.nvidia.launch import Launch, recording
from deepinfer.conformance.runner import make_case
from deepinfer.ops.backend import BindContext
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.spec import OpSpec

FORMS = 2
"""Forms of a kernel that are compiled at most."""
SAME_CODE_AS_100 = 103
"""Differs in its assembler alone, so one form of a kernel will do."""


def launches_of(op: OpSpec[..., Any]) -> list[Launch]:
    """What the shared implementations of an op launch, at the model's shapes where the op has cases of them."""
    cases = list(op.cases())
    real = [case for case in cases if case.tag == "real"]
    near = [case for case in cases if "2^31" not in case.name]
    context = BindContext(torch.device("cpu"), HostRuntime(), max_tokens=8192)
    found: list[Launch] = []
    for case in real[:2] or [near[len(near) // 2], near[-1]]:
        arguments = make_case(op, case).args
        bound = op.signature.bind(**arguments)
        bound.apply_defaults()
        dims = op.static_dims(arguments)
        for entry in KERNELS.entries:
            if entry.op == op and entry.when(dims):
                with recording() as launches:
                    entry.bind(dims, context).run(*bound.args)
                found += launches
    return distinct(found)


def main(output: str, ops: str, capabilities: str) -> None:
    """Compile and write one entry per op, kernel and capability; a kernel of several ops is compiled a few times."""
    names, report = set(ops.split(",")), []
    made: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for op in dict.fromkeys(entry.op for entry in KERNELS.entries):
        if op.name not in names:
            continue
        for launch in launches_of(op):
            for capability in map(int, capabilities.split(",")):
                known = made.setdefault((launch.kernel.jit.__name__, capability), [])
                if len(known) < (1 if capability == SAME_CODE_AS_100 else FORMS):
                    known.append(facts_of(launch, capability))
                report.append({"op": op.name, **known[-1]})
    Path(output).write_text(json.dumps(report))


def facts_of(launch: Launch, capability: int) -> dict[str, Any]:
    """What became of one kernel."""
    facts: dict[str, Any] = {"capability": capability, "kernel": launch.kernel.jit.__name__, "error": ""}
    try:
        made = compile_ahead(launch, capability)
    except Exception as error:  # whatever a compiler raises, the test must say it
        return facts | {"error": f"{type(error).__name__}: {error}"}
    target = made.ptx.partition(".target ")[2].split()[0].rstrip(",")
    return facts | {"registers": made.registers, "spilled_bytes": made.spilled_bytes, "target": target}


if __name__ == "__main__":
    main(*sys.argv[1:])
