"""Running a kernel's own cases: on first use, for `deepinfer verify`, and to write `proof.json`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from deepinfer.conformance.results import BAD, CaseResult
from deepinfer.conformance.runner import RAISED, make_case, run_case
from deepinfer.conformance.subject import subject_of
from deepinfer.ops.backend import Backend, Implementation
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.proof import Gate, ProofLevel, Verdict, cache_file, write_proofs
from deepinfer.ops.runtime import Runtime


class CutShortError(Exception):
    """Time ran out before the last case."""


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

    Raises:
        CutShortError: `seconds` have passed and a case is left.
    """
    began = time.monotonic()
    real = runtime.device.type != "cpu"
    cases = [case for case in implementation.op.cases() if real or case.tag == "small"]
    for case in sorted(cases, key=lambda case: case.tag):
        if seconds is not None and time.monotonic() - began >= seconds:
            raise CutShortError
        made = make_case(implementation.op, case)
        subject = subject_of(implementation, runtime, implementation.op.static_dims(made.args))
        if subject is not None:
            yield run_case(subject, made, quick=quick)


def verify_implementation(
    implementation: Implementation, runtime: Runtime, *, seconds: float | None = None, quick: bool = False
) -> Verdict:
    """Run its cases; the first that fails decides. A case that raised is no wrong value, so its verdict is not kept."""
    ran = skipped = 0
    try:
        for result in cases_on(implementation, runtime, quick=quick, seconds=seconds):
            if result.status in BAD:
                raised = any(check.name == RAISED for check in result.failed())
                return Verdict(False, f"{result.name}: {result.detail}", "error" if raised else "cases")
            ran += result.status != "unsupported"
            skipped += result.status == "unsupported"
    except CutShortError:
        return Verdict(False, f"{ran} cases ran", "time")
    if not ran and skipped:
        return Verdict(False, f"the device has no room now for any of its {skipped} cases", "error")
    if not ran:
        return Verdict(False, "none of its cases fits the dimensions that it takes")
    return Verdict(True, f"{ran} cases")


def needs_real_cases(backend: Backend) -> bool:
    """Whether "hardware" may be claimed only with the model's own shapes: on every device that is not software."""
    return backend.device_type != "cpu" and not backend.software


def prove(backend: Backend, results: list[CaseResult], level: ProofLevel, device: str) -> list[Path]:
    """Write `proof.json` for the implementations that passed every case they ran in a full run of level 1.

    A case that is unsupported leaves a kernel unproven, but on a software device: that has no addresses of its own, so
    one that is too small for far offsets has nothing to show there. On an accelerator "hardware" also takes a case with
    the model's own shapes, of every kernel whose op has one; what only met small shapes keeps its level and is verified
    on first use.

    Raises:
        OpArgumentError: "hardware" is asked for on an accelerator, and no kernel ran such a case; nothing is written.
    """
    passed = {"pass", "slow"}
    allowed = passed | {"unsupported"} if backend.software else passed
    ran: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for result in results:
        if result.level == 1 and result.native:
            ran[result.op, result.implementation].add(result.status)
    sound = {key for key, statuses in ran.items() if statuses <= allowed and statuses & passed}
    proven = [i for i in backend.implementations if (i.op.name, i.name) in sound]
    if level == "hardware" and needs_real_cases(backend):
        real = {op.name: {case.name for case in op.cases() if case.tag == "real"} for op in {i.op for i in proven}}
        met = {
            (r.op, r.implementation)
            for r in results
            if r.level == 1 and r.case in real.get(r.op, ()) and r.status in passed
        }
        if not met:
            raise OpArgumentError(
                f"proofs of level 'hardware' on {backend.name!r} need the cases with the model's own shapes, and none "
                "ran; run with --real"
            )
        proven = [i for i in proven if not real[i.op.name] or (i.op.name, i.name) in met]
    return write_proofs(backend, proven, level, device)
