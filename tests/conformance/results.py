"""What the suite records: one result per case, one report per run; plain data that JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "slow", "unsupported", "waived", "unexpected pass"]
BAD: tuple[Status, ...] = ("fail", "unexpected pass")


@dataclass
class Check:
    """One question about one case.

    Attributes:
        name: value, arguments, aliasing, memory, layout, D0, D1, D2, float64 and so on.
        ok: the answer.
        detail: what was wrong.
    """

    name: str
    ok: bool
    detail: str = ""


@dataclass
class CaseResult:
    """One case on one implementation.

    Attributes:
        level: 0 to 6.
        op: op name, or a level's own heading.
        case: case name.
        implementation: `backend.function`, or "reference".
        native: False for a reference row, which does not count as coverage.
        status: outcome; "unsupported" says why in `detail`.
        checks: what was asked.
        histogram: elements by share of the tolerance (`compare.EDGES`).
        worst: largest error as a share of the tolerance.
        seconds: run time of the implementation in the value check.
        detail: reason of a status other than pass.
        failure_file: where the failing case was saved.
        facts: numbers of the performance sheet.
    """

    level: int
    op: str
    case: str
    implementation: str
    native: bool
    status: Status = "pass"
    checks: list[Check] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    worst: float = 0.0
    seconds: float = 0.0
    detail: str = ""
    failure_file: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`op/case`: what `--case` takes."""
        return f"{self.op}/{self.case}"

    def failed(self) -> list[Check]:
        """Checks that did not hold."""
        return [check for check in self.checks if not check.ok]

    def settle(self) -> CaseResult:
        """Set status and detail from the checks."""
        failed = self.failed()
        if failed:
            self.status = "fail"
            self.detail = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        return self


@dataclass
class Report:
    """One run of the suite.

    Attributes:
        backend: name.
        contract: version of the op contract.
        level: highest level asked for.
        emulated: kernels were interpreted on the host.
        device: what the runtime says it runs on.
        versions: facts about software.
        results: all cases.
        problems: findings about the run itself: expired waivers, gaps in the must-pass list.
        seconds: duration.
    """

    backend: str
    contract: int
    level: int
    device: str
    versions: dict[str, str]
    results: list[CaseResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    emulated: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing failed and the run itself is sound."""
        return not self.problems and not any(r.status in BAD for r in self.results)

    def count(self, *statuses: Status) -> int:
        """Cases with one of these outcomes."""
        return sum(r.status in statuses for r in self.results)

    def again(self, result: CaseResult) -> str:
        """The command that runs one of its cases again, alone."""
        emulate = " --emulate" if self.emulated else ""
        level = f" --level {result.level}" if result.level > 1 and not result.failure_file else ""
        case = result.failure_file or result.name
        return f"deepinfer conformance --backend {self.backend}{emulate}{level} --case '{case}'"

    def by_op(self) -> dict[str, list[CaseResult]]:
        """Results of each op, in the order they came."""
        groups: dict[str, list[CaseResult]] = {}
        for result in self.results:
            groups.setdefault(result.op, []).append(result)
        return groups

    def to_json(self) -> dict[str, Any]:
        """The whole report as JSON data."""
        return {"ok": self.ok, **asdict(self)}


def implementations(results: Iterable[CaseResult]) -> list[str]:
    """The implementations that ran these cases, native ones first."""
    return sorted({r.implementation for r in results}, key=lambda name: (name == "reference", name))
