"""A run's report for people and programs: a terminal table, JSON, and one self-contained HTML page."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.conformance.html import page
from deepinfer.conformance.results import CaseResult, Report, implementations

_STYLES = {"pass": "green", "slow": "yellow", "unsupported": "dim", "waived": "yellow", "fail": "bold red"}


def op_table(report: Report) -> Table:
    """A row per op: who ran it, how many cases passed, how close the worst element came to its tolerance."""
    table = Table(title=f"{report.backend}: conformance to op contract {report.contract}", title_justify="left")
    table.add_column("op", no_wrap=True, min_width=12)
    table.add_column("ran on", overflow="fold", min_width=12)
    for name in ("pass", "fail", "other", "error", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.caption = "error: the worst element's share of the tolerance; ops in grey ran on the reference"
    table.caption_justify = "left"
    for op, results in report.by_op().items():
        failed = sum(r.status in ("fail", "unexpected pass") for r in results)
        passed = sum(r.status in ("pass", "slow") for r in results)
        native = any(r.native for r in results)
        ran_on = ", ".join(name for name in implementations(results) if name)
        worst = max((r.worst for r in results), default=0.0)
        table.add_row(
            op,
            f"[cyan]{ran_on}[/]" if native else f"[dim]{ran_on}[/]",
            str(passed),
            f"[bold red]{failed}[/]" if failed else "",
            str(len(results) - passed - failed) if len(results) > passed + failed else "",
            _share(worst),
            f"{sum(r.seconds for r in results):.2f} s",
        )
    return table


def _share(worst: float) -> str:
    if worst == 0:
        return "exact"
    return "< 1 %" if worst < 0.01 else f"{worst * 100:.0f} %"


def print_report(report: Report, console: Console) -> None:
    """Table, failures, findings and a closing line."""
    console.print(op_table(report))
    for result in report.results:
        if result.status in ("fail", "unexpected pass"):
            console.print(f"[bold red]{result.status}[/] {result.name} on {result.implementation}", highlight=False)
            console.print(f"  {result.detail}", style="dim", highlight=False, markup=False)
            console.print(f"  again: {report.again(result)}", highlight=False, markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"[bold red]problem[/] {problem}", highlight=False)
    console.print(summary(report), highlight=False)


def summary(report: Report) -> str:
    """One line: verdict, counts, native share, duration."""
    ops = {name: rows for name, rows in report.by_op().items() if rows[0].level == 1}
    native = sum(any(r.native for r in rows) for rows in ops.values())
    counts = [f"{report.count('pass', 'slow')} passed"]
    for status in ("fail", "waived", "unexpected pass", "unsupported"):
        if report.count(status):
            counts.append(f"{report.count(status)} {status}")
    verdict = "[green]conforms[/]" if report.ok else "[bold red]does not conform[/]"
    share = f", {native} of {len(ops)} ops native" if ops else ""
    reached = max((result.level for result in report.results), default=0)
    level = f"level {report.level}"
    if reached < report.level and not report.count("fail"):
        level = f"level {reached} (nothing of what was chosen stands above it)"
    return f"{report.backend} {verdict} at {level}: {', '.join(counts)}{share}, {report.seconds:.0f} s"


def case_line(result: CaseResult) -> str:
    """One line for a result as it comes."""
    style = _STYLES.get(result.status, "bold red")
    why = f" {escape(result.detail)}" if result.status == "unsupported" else ""
    return f"[{style}]{result.status}[/] {result.name} [dim]{result.implementation}{why}[/]"


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write `report.json` and `report.html`; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, shown = folder / "report.json", folder / "report.html"
    data.write_text(json.dumps(report.to_json(), indent=1, default=str) + "\n", encoding="utf-8")
    shown.write_text(page(report), encoding="utf-8")
    return data, shown
