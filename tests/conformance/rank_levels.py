"""Level 5, the part of several ranks: collectives, and ranks that die, leave, come late or never.

Ranks are processes on this host, so only a backend that is installed under its name can be asked, and there must be a
device for each unless devices are software.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from deepinfer.conformance.rank_process import ENDINGS, RANKS, VICTIMS, RankRun, run_processes
from deepinfer.conformance.rank_programs import PROGRAMS, settle_same
from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.suite import Session
from deepinfer.ops.registry import discover_backends

OP = "ranks"


def run_ranks(session: Session) -> None:
    """Run the rank cases that are wanted, or say why they cannot run."""
    wanted = [name for name in rank_cases() if session.wants(OP, name)]
    reason = _why_not(session)
    if reason:
        for name in wanted:
            session.add(CaseResult(5, OP, name, session.backend.name, True, "unsupported", detail=reason))
    elif wanted:
        runs = run_processes(session.backend.name, wanted)
        for name in wanted:
            result = CaseResult(5, OP, name, session.backend.name, True)
            result.checks += judge(name, runs, wanted)
            session.add(result.settle())


def rank_cases() -> tuple[str, ...]:
    """Names of all rank cases, in the order in which they run."""
    return (*PROGRAMS, *ENDINGS)


def judge(case: str, runs: Sequence[RankRun], cases: Sequence[str]) -> list[Check]:
    """What all ranks say of a case, and whether their processes ended as they should.

    Args:
        case: the one to judge.
        runs: one per process.
        cases: all that ran.
    """
    doomed = {VICTIMS[name] for name in cases if name in VICTIMS}
    over = ENDINGS[: ENDINGS.index(case) + 1] if case in ENDINGS else ()
    dead = {VICTIMS[name] for name in over if name in VICTIMS and name in cases}
    answers = []
    for rank, run in enumerate(runs):
        want = -signal.SIGKILL if rank in doomed else 0
        ends = [Check("ends", run.status == want, f"exit status {run.status}, not {want}: {run.errors[-500:]}")]
        silent = [] if rank in dead else [Check("runs", False, f"no answer: {run.errors[-500:]}")]
        answers.append(ends + run.checks.get(case, silent))
    return settle_same(answers)


def _why_not(session: Session) -> str:
    capabilities = session.runtime.capabilities
    if not capabilities.collectives:
        return "the runtime joins no ranks (capabilities.collectives is False)"
    if discover_backends().get(session.backend.name) is not session.backend:
        return "ranks are processes, which find a backend by its name; this one is not installed"
    is_software = session.backend.software or session.runtime.device.type == "cpu"
    if not is_software and capabilities.num_devices < RANKS:
        return f"ranks have a device each: {capabilities.num_devices} here, {RANKS} are needed"
    return ""
