"""The suite as pytest sees it: one test per case of an op, one per level above."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.conformance.claims import Waiver, apply_waivers, read_waivers
from deepinfer.conformance.drawn import CASE, drawable, search
from deepinfer.conformance.levels import LEVELS, run_level
from deepinfer.conformance.plugin import Choices, choices
from deepinfer.conformance.results import BAD, CaseResult, Report
from deepinfer.conformance.runner import make_case
from deepinfer.conformance.suite import Session, missing_claims, open_session, run_made
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.registry import find_backend
from deepinfer.ops.spec import Case


def chosen_cases(asked: Choices) -> list[tuple[Any, Case]]:
    """The cases of level 1 that the command line asks for."""
    if asked.level < 1:
        return []
    session = Session(None, None, ops=asked.op, real=asked.real)  # type: ignore[arg-type]
    return [
        (op, case)
        for name, op in defined_ops().items()
        for case in op.cases()
        if session.wants(name, case.name) and (asked.real or case.tag == "small")
    ]


def pytest_generate_tests(metafunc: Any) -> None:
    asked = choices(metafunc.config)
    if "op_case" in metafunc.fixturenames:
        cases = chosen_cases(asked)
        metafunc.parametrize("op_case", cases, ids=[f"{op.name}/{case.name}" for op, case in cases])
    if "drawn_op" in metafunc.fixturenames:
        session = Session(None, None, ops=asked.op)  # type: ignore[arg-type]
        chosen = [op for name, op in defined_ops().items() if session.wants(name, CASE) and drawable(op)]
        metafunc.parametrize("drawn_op", chosen if asked.level >= 1 else [], ids=lambda op: op.name)
    if "level" in metafunc.fixturenames:
        higher = [n for n in LEVELS if n != 1 and n <= asked.level] if asked.op == "*" else [0]
        metafunc.parametrize("level", higher, ids=[f"level {n}" for n in higher])


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    asked = choices(request.config)
    session = open_session(
        find_backend(asked.backend), level=asked.level, ops=asked.op, real=asked.real, folder=asked.report
    )
    yield session
    own = [item for item in request.session.items if "op_case" in getattr(item, "fixturenames", ())]
    stopped = request.session.shouldstop or request.session.shouldfail or hasattr(request.config, "workerinput")
    if not stopped and len(own) >= len(chosen_cases(asked)):  # else some were deselected, or run elsewhere
        check_claims(session)


def check_claims(session: Session) -> None:
    """Fail at the end of a whole run that left must-pass cases open."""
    problems = missing_claims(session)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture(scope="session")
def waivers(request: pytest.FixtureRequest) -> list[Waiver]:
    asked = choices(request.config)
    return read_waivers(asked.waivers) if asked.waivers else []


def settle(session: Session, results: list[CaseResult], waivers: list[Waiver]) -> None:
    """Fail, skip or pass as the results say; nothing passes that gave none."""
    if not results:
        pytest.fail("no results: what was asked for did not run", pytrace=False)
    report = Report(session.backend.name, 0, session.level, "", {}, results)
    apply_waivers(report, waivers, datetime.date.today())
    wrong = [f"{r.name} on {r.implementation}: {r.detail}" for r in results if r.status in BAD]
    assert not wrong, "\n".join([*wrong, *report.problems])
    excused = [r.detail for r in results if r.status in ("unsupported", "waived")]
    if excused and len(excused) == len(results):
        pytest.skip(excused[0])


def test_case(session: Session, waivers: list[Waiver], op_case: Any) -> None:
    result = run_made(session, make_case(*op_case))
    session.add(result)
    settle(session, [result], waivers)


def test_drawn_sizes(session: Session, waivers: list[Waiver], drawn_op: Any) -> None:
    result = search(session, drawn_op)
    session.add(result)
    settle(session, [result], waivers)


def test_level(session: Session, waivers: list[Waiver], level: int) -> None:
    before = len(session.results)
    run_level(level, session)
    results = session.results[before:]
    if not results and level == max(LEVELS):
        pytest.skip("the backend has no native op to time")
    settle(session, results, waivers)
