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
"""Unsupported leaves no gap. The suite says it, with the reason, where a device cannot be asked: one that is too small
for far addresses, or whose runtime joins no ranks."""


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


def must_pass(version: int = API_VERSION, level: int = 1) -> dict[str, list[str]]:
    """Case names by op that a backend must pass to claim a level of a contract version, beyond the level before.

    Args:
        version: of the contract.
        level: 1, or 5 for the cases of several ranks.

    Raises:
        OpArgumentError: no list for that version.
    """
    file = resources.files("deepinfer.conformance") / "mustpass.json"
    lists: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    if _key(version, level) not in lists:
        there = ", ".join(lists)
        raise OpArgumentError(f"no must-pass list for contract version {_key(version, level)}; there are {there}")
    return lists[_key(version, level)]


def must_pass_gaps(results: Iterable[CaseResult], ops: Iterable[str] | None = None, level: int = 1) -> list[str]:
    """Names of the must-pass list that did not pass.

    Args:
        results: of a run.
        ops: look at these ops only; None for all.
        level: as in `must_pass`.
    """
    passed = {result.name for result in results if result.status in PASSING}
    chosen = None if ops is None else set(ops)
    return [
        f"{op}/{case}"
        for op, cases in must_pass(level=level).items()
        if chosen is None or op in chosen
        for case in cases
        if f"{op}/{case}" not in passed
    ]


def write_must_pass(path: Path) -> None:
    """Write the list of this contract version from the cases as they are; done once per version.

    `python -m deepinfer.conformance.claims` does so for the list in the package.
    """
    from deepinfer.conformance.rank_levels import OP, rank_cases
    from deepinfer.ops.catalog import defined_ops

    lists = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = {op: [case.name for case in spec.cases() if case.tag == "small"] for op, spec in defined_ops().items()}
    lists[_key(API_VERSION, 1)] = names
    lists[_key(API_VERSION, 5)] = {OP: list(rank_cases())}
    path.write_text(json.dumps(lists, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _key(version: int, level: int) -> str:
    return str(version) if level == 1 else f"{version}, level {level}"


if __name__ == "__main__":
    write_must_pass(Path(__file__).with_name("mustpass.json"))
