"""Planting faults: implementations with one mistake each, and the named case that must catch it.

A fault is a plausible slip of somebody who writes kernels; most are the reference with one line wrong. The suite is
worth its name only while every one of them is caught, by the case that says so and by the check that says why. A
backend's own tests may plant theirs the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer.conformance.failures import find_case
from deepinfer.conformance.results import CaseResult
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import Subject
from deepinfer.ops.backend import FunctionPlan
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.spec import OpSpec


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what is wrong.
        op: the contract it breaks.
        case: the case that catches it.
        check: the question of that case that it fails.
        run: the broken implementation.
        scratch_bytes: what its plan asks for.
        persistent_bytes: likewise.
    """

    name: str
    op: OpSpec[..., Any]
    case: str
    check: str
    run: Callable[..., Any]
    scratch_bytes: int = 0
    persistent_bytes: int = 0

    def caught(self) -> CaseResult:
        """What its named case says of it."""
        return run_planted(self.op, self.case, self.run, self.scratch_bytes, self.persistent_bytes)


Plant = Callable[[Callable[..., Any]], Callable[..., Any]]


def planter(faults: list[Fault]) -> Callable[..., Plant]:
    """A decorator that adds to `faults`: `@fault(op, case, check="value")`; a function's name says what is wrong."""

    def fault(
        op: OpSpec[..., Any], case: str, check: str = "value", *, scratch_bytes: int = 0, persistent_bytes: int = 0
    ) -> Plant:
        def plant(run: Callable[..., Any]) -> Callable[..., Any]:
            name = run.__name__.replace("_", " ")
            faults.append(Fault(name, op, case, check, run, scratch_bytes, persistent_bytes))
            return run

        return plant

    return fault


def run_planted(
    op: OpSpec[..., Any], case: str, function: Callable[..., Any], scratch_bytes: int = 0, persistent_bytes: int = 0
) -> CaseResult:
    """One case on one function, as a native implementation on the host."""
    made = make_case(op, find_case(op, case))
    plan = FunctionPlan(function, scratch_bytes, persistent_bytes)
    return run_case(Subject(op, "planted", True, plan, HostRuntime()), made)
