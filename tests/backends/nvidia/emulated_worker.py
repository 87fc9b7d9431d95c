"""Run some cases of ops in Triton's interpreter; run as a program, writes JSON.

    python emulated_worker.py OUTPUT OP[,OP...]

Most cases are run for their values; one per op also in other layouts and batches, where that does not take long. All of
them: `deepinfer conformance --backend cuda_sm90 --emulate`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer.ops.registry import find_emulated
from deepinfer.ops.spec import Case, OpSpec

QUICK_SECONDS = 0.25
"""A case that took no longer for its value is also run in other layouts and batches."""


def chosen(op: OpSpec[..., Any]) -> list[Case]:
    """Three cases spread over those with rows, none of them with far addresses."""
    cases = [c for c in op.cases() if c.tag == "small" and "2^31" not in c.name and not c.name.startswith("MN-5")]
    count = len(cases)
    return [cases[place] for place in sorted({count // 5, count // 2, 4 * count // 5})]


def main(output: str, ops: str) -> None:
    """Run and write one entry per case."""
    backend = find_emulated("cuda_sm90")
    from deepinfer.conformance.runner import make_case, run_case
    from deepinfer.conformance.subject import open_runtime, resolve
    from deepinfer.ops.catalog import defined_ops

    runtime, report = open_runtime(backend), []
    for name in ops.split(","):
        op, whole = defined_ops()[name], False
        for case in chosen(op):
            made = make_case(op, case)
            subject = resolve(backend, runtime, op, op.static_dims(made.args))
            began = time.perf_counter()
            result = run_case(subject, made, quick=True)
            if not whole and result.status == "pass" and time.perf_counter() - began < QUICK_SECONDS:
                result, whole = run_case(subject, made), True
            report.append(
                {
                    "op": name,
                    "case": case.name,
                    "native": result.native,
                    "status": result.status,
                    "detail": result.detail,
                    "checks": len(result.checks),
                }
            )
    Path(output).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
