"""Options that pytest takes for the suite: `pytest --pyargs deepinfer.conformance --backend NAME`.

Registered as a pytest plugin by the package's entry point. Nothing heavy is imported here, since pytest loads it in
every run of every project that has deepinfer installed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GROUP = "deepinfer conformance"
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--backend", {"help": "backend to hold against the op contracts (default: cpu)"}),
    ("--level", {"type": int, "help": "highest level to run (default: 2)"}),
    ("--op", {"help": "globs over op names, with commas between"}),
    ("--real", {"action": "store_true", "help": "also cases with the model's own shapes"}),
    ("--waivers", {"help": "TOML or JSON file of waivers"}),
    ("--report", {"help": "folder for the report and for failing cases"}),
)


def pytest_addoption(parser: Any) -> None:
    """Add the options; one that another plugin took keeps that plugin's meaning and our default."""
    group = parser.getgroup(_GROUP)
    for name, settings in _OPTIONS:
        try:
            group.addoption(name, dest=f"deepinfer_{name[2:]}", **settings)
        except ValueError:
            continue


@dataclass(frozen=True)
class Choices:
    """What was asked for on the command line."""

    backend: str
    level: int
    op: str
    real: bool
    waivers: Path | None
    report: Path | None


def choices(config: Any) -> Choices:
    """The options of a run, with defaults."""

    def option(name: str) -> Any:
        return config.getoption(f"deepinfer_{name}", default=None)

    level, waivers, report = option("level"), option("waivers"), option("report")
    return Choices(
        backend=option("backend") or os.environ.get("DEEPINFER_CONFORMANCE_BACKEND", "cpu"),
        level=2 if level is None else level,
        op=option("op") or "*",
        real=bool(option("real")),
        waivers=Path(waivers) if waivers else None,
        report=Path(report) if report else None,
    )
