"""Running a kernel's own cases: on first use, for `deepinfer verify`, and to write `proof.json`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from deepinfer.conformance.results import BAD, CaseResult
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import subject_of
from deepinfer.ops.backend import Backend, Implementation
from deepinfer.ops.proof import Gate, ProofLevel, Verdict, cache_file, write_proofs
from deepinfer.ops.runtime import Runtime


def gate_for(runtime: Runtime, *, file: Path | None = None) -> Gate:
    """A gate that verifies on first use."""

    def check(implementation: Implementation, seconds: float) -> Verdict:
        return verify_implementation(implementation, runtime, seconds=seconds, quick=True)

    return Gate(runtime, check, file or cache_file())


def cases_on(
    implementation: Implementation, runtime: Runtime, *, quick: bool = False, seconds: float | None = None
) -> Iterator[CaseResult]:
    """Every case that the implementation takes; those with the model's shapes only on an accelerator.

    Cases with the shapes of the model come first there: a kernel made for them may take no others.
    """
    began = time.monotonic()
    real = runtime.device.type != "cpu"
    cases = [case for case in implementation.op.cases() if real or case.tag == "small"]
    for case in sorted(cases, key=lambda case: case.tag):
        if seconds is not None and time.monotonic() - began > seconds:
            return
        made = make_case(implementation.op, case)
        subject = subject_of(implementation, runtime, implementation.op.static_dims(made.args))
        if subject is not None:
            yield run_case(subject, made, quick=quick)


def verify_implementation(
    implementation: Implementation, runtime: Runtime, *, seconds: float | None = None, quick: bool = False
) -> Verdict:
    """Run its cases; the first that fails decides."""
    ran = 0
    for result in cases_on(implementation, runtime, quick=quick, seconds=seconds):
        if result.status in BAD:
            return Verdict(False, f"{result.name}: {result.detail}")
        ran += result.status != "unsupported"
    if not ran:
        return Verdict(False, "none of its cases fits the dimensions that it takes, or there was no time to run one")
    return Verdict(True, f"{ran} cases")


def prove(backend: Backend, results: list[CaseResult], level: ProofLevel, device: str) -> list[Path]:
    """Write `proof.json` for the implementations that passed every case they ran in a full run of level 1."""
    ran: dict[tuple[str, str], bool] = {}
    for result in results:
        if result.level == 1 and result.native:
            key = (result.op, result.implementation)
            ran[key] = ran.get(key, True) and result.status in ("pass", "slow")
    proven = [i for i in backend.implementations if ran.get((i.op.name, i.name), False)]
    return write_proofs(backend, proven, level, device)
