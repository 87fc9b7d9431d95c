"""One run of the suite: choose levels and cases, run them, hold the outcome against claims, report."""

from __future__ import annotations

import datetime
import fnmatch
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepinfer.conformance.claims import Waiver, apply_waivers, must_pass_gaps
from deepinfer.conformance.failures import load_failure, save_failure
from deepinfer.conformance.results import BAD, CaseResult, Report
from deepinfer.conformance.runner import Made, make_case, run_case
from deepinfer.conformance.subject import Subject, open_runtime, resolve
from deepinfer.ops.backend import Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import API_VERSION

Listener = Callable[[CaseResult], None]


@dataclass
class Session:
    """What a level runs with.

    Attributes:
        backend: loaded.
        runtime: its device.
        level: highest level asked for.
        ops: globs over op names, with commas between.
        case: run this one alone: `op/case`, a case's name (a glob), or a file of `failures`.
        real: also cases with the model's own shapes.
        emulated: the backend is in its emulated form.
        batch_invariant: False for the forms that are chosen only without it, whose rows are not held to it.
        folder: where reports and failing cases go; None for nowhere.
        listener: told of every result.
    """

    backend: Backend
    runtime: Runtime
    level: int = 1
    ops: str = "*"
    case: str = ""
    real: bool = False
    emulated: bool = False
    batch_invariant: bool = True
    folder: Path | None = None
    listener: Listener | None = None
    results: list[CaseResult] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """True when no case is left out on purpose."""
        return self.ops == "*" and not self.case

    def add(self, result: CaseResult) -> None:
        """Record a result."""
        self.results.append(result)
        if self.listener is not None:
            self.listener(result)

    def subject(self, made: Made) -> Subject:
        """The implementation that the registry chooses for a case."""
        dims = made.op.static_dims(made.args)
        return resolve(self.backend, self.runtime, made.op, dims, batch_invariant=self.batch_invariant)

    def wants(self, op: str, case: str) -> bool:
        """True when this case is chosen."""
        if not fits(op, self.ops):
            return False
        return not self.case or any(
            fnmatch.fnmatchcase(name, self.case) or name == self.case for name in (case, f"{op}/{case}")
        )


def fits(op: str, globs: str) -> bool:
    """True when the op's name fits one of several globs with commas between."""
    return any(fnmatch.fnmatchcase(op, glob.strip()) for glob in globs.split(","))


def open_session(backend: Backend, **choices: object) -> Session:
    """A session on a loaded backend; keywords as `Session`."""
    return Session(backend, open_runtime(backend), **choices)  # type: ignore[arg-type]


def run_suite(session: Session, waivers: Sequence[Waiver] = (), today: datetime.date | None = None) -> Report:
    """Run levels 0 to `session.level`.

    Raises:
        OpArgumentError: no case fits what was asked for, or cases were asked for at a level that has none.
    """
    from deepinfer.conformance.levels import run_level

    began = time.perf_counter()
    report = Report(
        backend=session.backend.name,
        contract=API_VERSION,
        level=session.level,
        device=describe_device(session.runtime),
        versions=versions(),
        results=session.results,
        emulated=session.emulated,
    )
    is_file = bool(session.case) and Path(session.case).is_file()
    if session.level == 0 and not session.whole and not is_file:
        raise OpArgumentError("level 0 runs no case: leave out --op and --case, or raise --level")
    if is_file:
        session.add(run_made(session, load_failure(Path(session.case))))
    else:
        for level in range(session.level + 1):
            run_level(level, session)
            if level == 0 and any(result.status == "fail" for result in session.results):
                break  # a backend that does not load has nothing to run
        loads = all(result.status != "fail" for result in session.results)
        asks_for_some = session.level > 0 and not session.whole and loads
        if not session.results or (asks_for_some and not any(r.level for r in session.results)):
            case = f" --case {session.case!r}, which is no file either" if session.case else ""
            raise OpArgumentError(f"no case fits --op {session.ops!r}{case}")
    report.seconds = time.perf_counter() - began
    apply_waivers(report, waivers, today or datetime.date.today())
    report.problems += missing_claims(session)
    return report


def missing_claims(session: Session) -> list[str]:
    """Must-pass cases that a whole run left open, in a sentence; failing ones speak for themselves."""
    if session.level < 1 or not session.whole:
        return []
    failing = {result.name for result in session.results if result.status in BAD}
    levels = [level for level in (1, 5) if level <= session.level]
    gaps = [name for level in levels for name in must_pass_gaps(session.results, level=level) if name not in failing]
    return [f"{len(gaps)} must-pass case(s) did not run to an end: {'; '.join(gaps[:8])}"] if gaps else []


def run_ops(session: Session) -> None:
    """Level 1, what the ops list: every case of every op."""
    for name, op in defined_ops().items():
        for case in op.cases():
            if not session.wants(name, case.name) or (case.tag == "real" and not session.real):
                continue
            session.add(run_made(session, make_case(op, case)))


def run_made(session: Session, made: Made) -> CaseResult:
    """Run a case on the implementation that the registry chooses; save it if it fails."""
    subject = session.subject(made)
    result = run_case(subject, made)
    if result.status == "fail" and session.folder is not None:
        result.failure_file = str(save_failure(session.folder / "failures", made, result))
    return result


def describe_device(runtime: Runtime) -> str:
    """The device in words: a name if the runtime has one, type and memory."""
    memory = runtime.memory_info()
    name = getattr(runtime, "device_name", "") or (_cpu_name() if runtime.device.type == "cpu" else "")
    return f"{name or runtime.device.type}, {memory.total_bytes / 2**30:.0f} GiB"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def versions() -> dict[str, str]:
    """Facts about the software, for reports."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("deepinfer")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "deepinfer": own,
        "op contract": str(API_VERSION),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
