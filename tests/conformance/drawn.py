"""Cases whose sizes Hypothesis draws: per op one search for sizes that fail, narrowed to the smallest that do.

A search starts from the op's own small cases and replaces the sizes that their makers take (`SIZES`). It is seeded by
nothing but the op, so a run finds what the run before found. What a maker cannot build from a drawn size is left out,
and a search in which that is the rule says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

from deepinfer.conformance.failures import save_failure
from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.runner import Made, make_case, run_case
from deepinfer.conformance.suite import Session, run_ops
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.spec import Case, OpSpec

CASE: Final = "drawn sizes"
"""What the results are called."""
EXAMPLES: Final = 12
"""Cases per op; a failure adds those that make it small."""

_WHOLE_GROUPS: Final = range(32, 289, 32)
SIZES: Final[Mapping[str, range]] = {
    "rows": range(41),
    "num_rows": range(41),
    "num_ids": range(1, 140),
    "columns": range(90),
    "num_columns": range(40),
    "keys": range(80),
    "n": range(1, 90),
    "k": range(1, 90),
    "a": range(9),
    "b": range(9),
    "window": range(1, 40),
    "topk": range(40),
    "blocks": range(6),
    "block": range(1, 12),
    "splits": range(1, 7),
    "groups": range(1, 5),
    "ids": range(1, 90),
    "rank": range(1, 40),
    "h": range(1, 80),
    "m": range(1, 5),
    "streams": range(1, 5),
    "width": range(2, 161, 2),
    "dim": range(32, 129, 32),
    "pairs": range(10),
    "experts": range(8, 40),
    "drafts": range(7),
    "ratio": range(1, 5),
    "num_top": range(12),
    "chunk": range(1, 10),
    "amount": range(-9, 10),
}
"""Keywords of case makers that are sizes, and what may be drawn for them."""
_NARROWER: Final[Mapping[tuple[str, str], range]] = {
    ("linear_mx", "k"): _WHOLE_GROUPS,
    ("linear_grouped_o", "k"): _WHOLE_GROUPS,
    ("moe_grouped_gemm", "k"): _WHOLE_GROUPS,
    ("rms_norm_quant", "width"): _WHOLE_GROUPS,
    ("swiglu_quant", "width"): _WHOLE_GROUPS,
    ("moe_gate", "k"): range(1, 8),
    ("ep_dispatch", "k"): range(1, 6),
    ("ep_combine", "k"): range(1, 6),
    ("rope", "dim"): range(16, 65, 16),
    ("o_rope", "groups"): range(1, 5, 3),  # four heads
    ("blocks_to_positions", "blocks"): range(1, 6),
    ("advance_history", "drafts"): range(5, 9),  # its cases emit up to six
}
"""Where a format or an argument beside it asks for more than `SIZES` says."""


def drawable(op: OpSpec[..., Any]) -> list[Case]:
    """Small cases of an op whose maker takes a size that can be drawn; those about far addresses are left alone."""
    return [case for case in op.cases() if case.tag == "small" and _sizes(op, case) and not _is_far(case)]


def _keywords(case: Case) -> dict[str, Any]:
    return dict(case.make.keywords) if isinstance(case.make, partial) else {}


def _sizes(op: OpSpec[..., Any], case: Case) -> dict[str, range]:
    names = [name for name, value in _keywords(case).items() if name in SIZES and type(value) is int]
    return {name: _NARROWER.get((op.name, name), SIZES[name]) for name in names}


def _is_far(case: Case) -> bool:
    return any(name in _keywords(case) for name in ("page_stride", "stride"))


def with_sizes(case: Case, sizes: Mapping[str, int]) -> Case:
    """The case with other sizes; its name tells them, and makes its seed."""
    assert isinstance(case.make, partial), "only such cases are drawn"
    make = partial(case.make.func, *case.make.args, **{**case.make.keywords, **sizes})
    told = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return replace(case, name=f"{case.name} with {told}", make=make)


def run_level_one(session: Session) -> None:
    """Every case of every op, then drawn ones."""
    run_ops(session)
    run_drawn(session)


def run_drawn(session: Session) -> None:
    """One result per op that has sizes to draw."""
    for name, op in defined_ops().items():
        if session.wants(name, CASE) and drawable(op):
            session.add(search(session, op))


def search(session: Session, op: OpSpec[..., Any]) -> CaseResult:
    """Draw cases until one fails or enough have passed: the result of the last one, or of the smallest that fails."""
    if find_spec("hypothesis") is None:
        detail = "hypothesis draws the sizes and is not installed; pip install hypothesis"
        return CaseResult(1, op.name, CASE, session.backend.name, False, "unsupported", detail=detail)
    tried = list(_tried(session, op))
    made = [result for result in tried if result is not None]
    failed = [result for result in made if result.status == "fail"]
    if failed:
        return replace(failed[-1], case=CASE, detail=f"{failed[-1].case}: {failed[-1].detail}")
    last = made[-1] if made else CaseResult(1, op.name, CASE, session.backend.name, False)
    fits = 2 * len(made) >= len(tried)
    check = Check("sizes", fits, f"{len(tried) - len(made)} of {len(tried)} drawn sizes are none that a case can have")
    return replace(last, case=CASE, status="pass", detail=f"{len(made)} cases", checks=[*last.checks, check]).settle()


def _tried(session: Session, op: OpSpec[..., Any]) -> Iterator[CaseResult | None]:
    """A result per drawn case, None where the case could not be made; the last failing one is the smallest."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    cases = drawable(op)
    results: list[CaseResult | None] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def explore(data: Any) -> None:
        case = data.draw(st.sampled_from(cases))
        ranges = _sizes(op, case)
        sizes = {name: data.draw(st.sampled_from(choices)) for name, choices in ranges.items()}
        result = _run(session, op, with_sizes(case, sizes))
        results.append(result)
        assert result is None or result.status != "fail", "narrows to the smallest"

    with suppress(AssertionError):  # the failing result is the last one that was kept
        explore()
    yield from results


def _run(session: Session, op: OpSpec[..., Any], case: Case) -> CaseResult | None:
    try:
        made = make_case(op, case)
    except (OpArgumentError, ValueError, IndexError, RuntimeError):
        return None  # sizes that do not go together; `search` counts them
    return _judge(session, made)


def _judge(session: Session, made: Made) -> CaseResult:
    subject = session.subject(made)
    result = run_case(subject, made)
    if result.status == "slow":
        result.status, result.detail = "pass", ""  # of sizes that nobody uses
    if result.status == "fail" and session.folder is not None:
        result.failure_file = str(save_failure(session.folder / "failures", made, result))
    return result
