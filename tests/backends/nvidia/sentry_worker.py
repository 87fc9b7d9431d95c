"""Check how the kernels of ops synchronise on Blackwell, at small cases; run as a program, writes JSON.

python sentry_worker.py OUTPUT OP[,OP...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kernel_launches import backend_of, launches_of

from deepinfer.backends.nvidia.ahead import compile_ahead
from deepinfer.backends.nvidia.sentry import check, kernel_input
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.spec import Case, OpSpec

CAPABILITY = 100
SECONDS = 120
CASES = {
    "engram_gate": ("two rows, bf16", "one row, f32"),
    "index_logits_blocks": ("blocks of 3, not a divisor of a page",),
    "index_logits_paged": ("one row, index, weights f32",),
    "index_logits_ragged": ("one row, mxfp4, weights bf16", "two rows, mxfp4, weights f32"),
    "kv_norm_rope_store": ("two rows, bf16 to fp4", "two rows, f32 to fp8"),
    "linear_grouped_o": ("3 groups, one row, bf16 x bf16",),
    "mhc_prenorm_mix": ("one row, f32",),
    "sparse_attn": ("window only, two rows, f32",),
    "vision_attn": ("ragged, bf16",),
}
"""Cases whose launches are small enough to be proven soon, for ops whose usual ones are not."""


ENOUGH = 2
"""Cases of an op that launch something."""


def chosen(op: OpSpec[..., Any]) -> list[Case]:
    """Some cases over all of them, none with far addresses."""
    cases = [c for c in op.cases() if c.tag == "small" and "2^31" not in c.name and not c.name.startswith("MN-5")]
    if op.name in CASES:
        return [case for case in cases if case.name in CASES[op.name]]
    return [cases[place] for place in sorted({len(cases) // 5, len(cases) // 2, 4 * len(cases) // 5, len(cases) - 1})]


def main(output: str, ops: str) -> None:
    """Check one form of each kernel per case, and write one entry per check."""
    backend, report = backend_of(CAPABILITY), []
    for name in ops.split(","):
        op, launched = defined_ops()[name], 0
        for case in chosen(op):
            launches, known = launches_of(backend, op, case, max_tokens=64)
            launched += bool(launches)
            if launched > ENOUGH:
                break
            for launch in {launch.kernel.jit.__name__: launch for launch in launches}.values():
                made = compile_ahead(launch, CAPABILITY)
                outcome = check(made.ptx, kernel_input(launch, made, known), seconds=SECONDS)
                report.append(
                    {
                        "op": name,
                        "case": case.name,
                        "kernel": made.name,
                        "result": outcome.result,
                        "detail": outcome.detail,
                        "copies": len(outcome.copies),
                        "seconds": round(outcome.seconds, 1),
                    }
                )
    Path(output).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
