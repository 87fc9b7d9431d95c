"""What a backend must pass to claim a level, and what it may be excused from, for how long.

The must-pass list of a contract version is fixed: a case that is renamed, removed or skipped shows as a gap. A waiver
names cases, a reason and a day after which it no longer counts; a waived case that passes is reported, so that silent
fixes are noticed.
"""

from __future__ import annotations

import datetime
import fnmatch
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from deepinfer.conformance.results import CaseResult, Report
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.spec import API_VERSION

PASSING = ("pass", "slow", "waived", "unsupported")
"""Unsupported is for the suite alone to say (a device too small for far addresses), so it leaves no gap."""


@dataclass(frozen=True)
class Waiver:
    """One excuse.

    Attributes:
        case: `op/case`, with * and ? as in file names.
        reason: why, in words.
        expires: last day on which it counts.
    """

    case: str
    reason: str
    expires: datetime.date

    def covers(self, result: CaseResult) -> bool:
        """True when the waiver names this case."""
        return fnmatch.fnmatchcase(result.name, self.case)


def read_waivers(path: Path) -> list[Waiver]:
    """Read a TOML or JSON file of `waiver` entries.

    Raises:
        OpArgumentError: the file cannot be read, or an entry lacks its case, its reason or its day.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        entries = data["waiver"]
        waivers = []
        for entry in entries:
            day = entry["expires"]
            expires = day if isinstance(day, datetime.date) else datetime.date.fromisoformat(day)
            if not str(entry["reason"]).strip():
                raise ValueError(f"the waiver of {entry['case']!r} has no reason")
            waivers.append(Waiver(entry["case"], entry["reason"], expires))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OpArgumentError(f"waivers {path}: {error}; an entry has case, reason and expires") from error
    return waivers


def apply_waivers(report: Report, waivers: Sequence[Waiver], today: datetime.date) -> None:
    """Excuse failing cases; report expired waivers and cases that pass in spite of one."""
    for waiver in waivers:
        covered = [result for result in report.results if waiver.covers(result)]
        failing = [result for result in covered if result.status == "fail"]
        if waiver.expires < today:
            if failing:
                report.problems.append(f"waiver of {waiver.case} expired on {waiver.expires}: {waiver.reason}")
            continue
        for result in failing:
            result.status = "waived"
            result.detail = f"waived until {waiver.expires} ({waiver.reason}): {result.detail}"
        if covered and not failing:
            for result in covered:
                if result.status in ("pass", "slow"):
                    result.status = "unexpected pass"
                    result.detail = f"passes, though waived until {waiver.expires} ({waiver.reason}); remove the waiver"


def must_pass(version: int = API_VERSION) -> dict[str, list[str]]:
    """Case names by op that a backend must pass to claim level 1 of a contract version.

    Raises:
        OpArgumentError: no list for that version.
    """
    file = resources.files("deepinfer.conformance") / "mustpass.json"
    lists: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    if str(version) not in lists:
        raise OpArgumentError(f"no must-pass list for contract version {version}; there are {', '.join(lists)}")
    return lists[str(version)]


def must_pass_gaps(results: Iterable[CaseResult], ops: Iterable[str] | None = None) -> list[str]:
    """Names of the must-pass list that did not pass.

    Args:
        results: of a run.
        ops: look at these ops only; None for all.
    """
    passed = {result.name for result in results if result.status in PASSING}
    chosen = None if ops is None else set(ops)
    return [
        f"{op}/{case}"
        for op, cases in must_pass().items()
        if chosen is None or op in chosen
        for case in cases
        if f"{op}/{case}" not in passed
    ]


def write_must_pass(path: Path) -> None:
    """Write the list of this contract version from the cases as they are; done once per version.

    `python -m deepinfer.conformance.claims` does so for the list in the package.
    """
    from deepinfer.ops.catalog import defined_ops

    lists = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = {op: [case.name for case in spec.cases() if case.tag == "small"] for op, spec in defined_ops().items()}
    lists[str(API_VERSION)] = names
    path.write_text(json.dumps(lists, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_must_pass(Path(__file__).with_name("mustpass.json"))
