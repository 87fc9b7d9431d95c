"""Run conformance levels 0 and 1 in several processes that share one device, and write one report.

Most of a first run on an accelerator is the host compiling kernels, which spreads over cores. Each process loads the
backend once and takes ops from a queue. Levels above 1 run the engine: use `deepinfer conformance` for those.

    python tools/conformance_shards.py --backend cuda_sm90 --jobs 14 --real --report DIR [--op GLOB,GLOB]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from deepinfer.conformance.results import BAD, CaseResult, Report

SLOWEST_FIRST = ("verify", "sample", "process_logits", "token_logprobs", "quantize", "dequantize", "rms_norm_quant")
PORTION = 12
"""Cases that a process takes at once."""


@dataclass(frozen=True)
class Portion:
    """Some cases of one op.

    Attributes:
        op: its name.
        first: place of the first among its cases.
        stop: place behind the last.
    """

    op: str
    first: int
    stop: int


_session: Any = None


def _start(backend: str, emulate: bool, real: bool, batch_invariant: bool) -> None:
    """Open the backend in this process."""
    global _session
    import torch

    from deepinfer.conformance.suite import open_session
    from deepinfer.ops.registry import find_backend, find_emulated

    torch.set_num_threads(1)
    found = find_emulated(backend) if emulate else find_backend(backend)
    _session = open_session(found, level=1, real=real, batch_invariant=batch_invariant)


def _run(portion: Portion) -> list[CaseResult]:
    """Run the cases of a portion; those that are not for this device are left out."""
    from deepinfer.conformance.runner import make_case
    from deepinfer.conformance.suite import run_made
    from deepinfer.ops.catalog import defined_ops

    op = defined_ops()[portion.op]
    cases = list(op.cases())[portion.first : portion.stop]
    return [run_made(_session, make_case(op, case)) for case in cases if case.tag != "real" or _session.real]


def _loads() -> tuple[list[CaseResult], str, dict[str, str]]:
    """Level 0, the device in words, and versions."""
    from deepinfer.conformance.levels import run_loads
    from deepinfer.conformance.suite import describe_device, versions

    run_loads(_session)
    return list(_session.results), describe_device(_session.runtime), versions()


def portions(globs: str) -> list[Portion]:
    """The work, slow ops first."""
    from deepinfer.conformance.suite import fits
    from deepinfer.ops.catalog import defined_ops

    work = []
    chosen = [n for n in defined_ops() if fits(n, globs)]
    for name in sorted(chosen, key=lambda n: SLOWEST_FIRST.index(n) if n in SLOWEST_FIRST else len(SLOWEST_FIRST)):
        count = len(list(defined_ops()[name].cases()))
        work += [Portion(name, first, min(first + PORTION, count)) for first in range(0, count, PORTION)]
    return work


def main() -> int:
    """Parse, run, write, print what failed; 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--op", default="*", help="globs over op names, with commas between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--real", action="store_true", help="also cases with the model's own shapes")
    parser.add_argument("--variant", action="store_true", help="the forms that are chosen without batch invariance")
    parser.add_argument("--emulate", action="store_true", help="interpret the kernels on the host")
    parser.add_argument("--write-proof", action="store_true", help="record what passed in proof.json")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop handing out work after this")
    options = parser.parse_args()
    began = time.monotonic()
    report = Report(options.backend, _contract(), 1, "", {})
    with ProcessPoolExecutor(
        options.jobs,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(options.backend, options.emulate, options.real, not options.variant),
    ) as pool:
        loads, report.device, report.versions = pool.submit(_loads).result()
        report.results += loads
        waiting = {pool.submit(_run, portion): portion for portion in portions(options.op)}
        _collect(report, waiting, began, options.seconds)
    report.seconds = time.monotonic() - began
    _finish(report, options.report)
    if options.write_proof:
        _prove(report, options.emulate)
    return 0 if report.ok else 1


def _contract() -> int:
    from deepinfer.ops.spec import API_VERSION

    return API_VERSION


def _collect(report: Report, waiting: dict[Future[list[CaseResult]], Portion], began: float, seconds: float) -> None:
    for done in as_completed(waiting):
        portion = waiting[done]
        if done.cancelled():
            continue
        try:
            results = done.result()
        except BrokenProcessPool as error:
            report.problems.append(f"a process ended while {portion} ran or waited: {error}")
            break
        except Exception as error:
            report.problems.append(f"{portion}: {type(error).__name__}: {error}")
            continue
        report.results += results
        for result in results:
            if result.status in BAD:
                print(f"{result.status} {result.name} on {result.implementation}: {result.detail[:300]}", flush=True)
        if time.monotonic() - began > seconds:
            left = [other for other in waiting if other.cancel()]
            if left:
                report.problems.append(f"{len(left)} portions did not run: {seconds:.0f} seconds were over")
            seconds = float("inf")


def _prove(report: Report, emulate: bool) -> None:
    from deepinfer.conformance.selfcheck import prove
    from deepinfer.ops.registry import find_backend, find_emulated

    backend = find_emulated(report.backend) if emulate else find_backend(report.backend)
    for path in prove(backend, report.results, "emulated" if emulate else "hardware", report.device):
        print(f"proofs: {path}")


def _finish(report: Report, folder: Path) -> None:
    from deepinfer.conformance.report import summary, write_report

    write_report(report, folder)
    print(f"\n{'op':24} {'passed':>6} {'bad':>4} {'other':>5}  on")
    for op, results in sorted(report.by_op().items()):
        bad = sum(r.status in BAD for r in results)
        passed = sum(r.status in ("pass", "slow") for r in results)
        if bad or passed < len(results) or not any(r.native for r in results):
            names = ", ".join(sorted({r.implementation for r in results}))
            print(f"{op:24} {passed:6} {bad:4} {len(results) - passed - bad:5}  {names}")
    for problem in report.problems:
        print(f"problem: {problem}")
    print(summary(report).replace("[/]", "").split("]", 1)[-1] if "[" in summary(report) else summary(report))


if __name__ == "__main__":
    sys.exit(main())
