"""Run some cases of ops in Triton's interpreter; run as a program, writes JSON.

    python emulated_worker.py OUTPUT OP[,OP...] BACKEND

Most cases are run for their values; one per op also in other layouts and batches, where that does not take long. All of
them: `deepinfer conformance --backend NAME --emulate`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer.conformance.runner import make_case, run_case
from deepinfer.ops.backend import Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.registry import find_emulated
from deepinfer.ops.spec import Case, OpSpec

QUICK_SECONDS = 0.25
"""A case that took no more of a core for its value is also run in other layouts and batches."""


def chosen(op: OpSpec[..., Any], backend: Backend) -> list[Case]:
    """Three cases spread over those with rows, none of them with far addresses.

    Where a backend has a kernel of its own beside the shared one, they are cases of that, with the model's shapes if it
    takes no others.
    """
    near = [c for c in op.cases() if "2^31" not in c.name and not c.name.startswith("MN-5")]
    small = [case for case in near if case.tag == "small"]
    own = [i for i in backend.implementations if i.op == op and i.priority > 0]
    if not own:
        return spread(small)
    for cases in (small, near):  # those with the model's shapes take long to make
        taken = [case for case in cases if any(i.when(op.static_dims(make_case(op, case).args)) for i in own)]
        if taken:
            break
    return spread(taken)


def spread(cases: list[Case]) -> list[Case]:
    """Three of them, from the first fifth, the middle and the last."""
    count = len(cases)
    return [cases[place] for place in sorted({count // 5, count // 2, 4 * count // 5})]


def main(output: str, ops: str, name_of_backend: str) -> None:
    """Run and write one entry per case."""
    backend = find_emulated(name_of_backend)
    from deepinfer.conformance.subject import open_runtime, resolve

    runtime, report = open_runtime(backend), []
    for name in ops.split(","):
        op, whole = defined_ops()[name], False
        for case in chosen(op, backend):
            made = make_case(op, case)
            subject = resolve(backend, runtime, op, op.static_dims(made.args))
            began = time.process_time()  # others may have the cores
            result = run_case(subject, made, quick=True)
            if not whole and result.status == "pass" and time.process_time() - began < QUICK_SECONDS:
                result, whole = run_case(subject, made), True
            report.append(
                {
                    "op": name,
                    "case": case.name,
                    "native": result.native,
                    "implementation": result.implementation,
                    "status": result.status,
                    "detail": result.detail,
                    "checks": len(result.checks),
                }
            )
    Path(output).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
