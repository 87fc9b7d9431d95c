"""What the suite must ask: determinism of every op that promises it, must-pass cases, levels that give results."""

import pytest

from deepinfer.conformance import test_suite as under_pytest
from deepinfer.conformance.batches import batch_of
from deepinfer.conformance.claims import must_pass
from deepinfer.conformance.determinism import MAX_ROWS
from deepinfer.conformance.fault_levels import run_faults
from deepinfer.conformance.performance import run_performance
from deepinfer.conformance.results import CaseResult
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import resolve
from deepinfer.conformance.suite import Session, missing_claims, open_session
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.registry import find_backend

EMPTY = Backend("empty", "cpu", probe=lambda: Availability(True))
PROMISED = [name for name, op in defined_ops().items() if op.determinism != "D0"]


@pytest.mark.parametrize("name", PROMISED)
def test_every_op_that_promises_d1_is_held_to_it_in_other_batches(name) -> None:
    op = defined_ops()[name]
    small = [case for case in op.cases() if case.tag == "small"]
    batches = {case.name: batch_of(op, case) for case in small}
    bare = [case for case, batch in batches.items() if batch is None]
    assert not bare, f"{name}: these cases name no rows, so nobody rearranges them: {bare}"
    assert any(2 <= batches[case.name].count(make_case(op, case).args) <= MAX_ROWS for case in small[:40])


@pytest.mark.parametrize("op", ["adjust_logits", "put_rows", "draft_rows", "concat_rows", "advance_history", "rewind"])
def test_small_ops_are_rearranged_and_cut(op) -> None:
    spec = defined_ops()[op]
    checked = set()
    for case in spec.cases():
        if case.tag == "small":
            made = make_case(spec, case)
            result = run_case(resolve(EMPTY, HostRuntime(), spec, spec.static_dims(made.args)), made)
            assert result.status in ("pass", "slow"), result.detail
            checked |= {check.detail for check in result.checks if check.name in ("D1", "D2")}
    assert {"permuted", "padded between", "padded behind", "chunks of 3"} <= checked


def test_a_level_without_results_does_not_pass() -> None:
    with pytest.raises(pytest.fail.Exception, match="no results"):
        under_pytest.settle(Session(EMPTY, HostRuntime()), [], [])


def test_a_whole_run_that_leaves_must_pass_cases_open_says_so() -> None:
    whole = Session(EMPTY, HostRuntime(), level=1)
    whole.results = [CaseResult(1, op, case, "x", True) for op, cases in must_pass().items() for case in cases]
    assert missing_claims(whole) == []
    under_pytest.check_claims(whole)
    gone = whole.results.pop()
    assert gone.name in missing_claims(whole)[0]
    with pytest.raises(pytest.fail.Exception, match="must-pass"):
        under_pytest.check_claims(whole)
    whole.add(CaseResult(1, gone.op, gone.case, "x", True, "fail"))
    assert missing_claims(whole) == [], "a case that fails has been reported"
    assert missing_claims(Session(EMPTY, HostRuntime(), level=1, ops="shift")) == []


def test_a_device_without_faults_to_inject_is_not_asked_for_them() -> None:
    session = Session(EMPTY, HostRuntime(), level=5)
    run_faults(session)
    assert {r.status for r in session.results} == {"unsupported"}
    assert sum("this one is not installed" in r.detail for r in session.results) == len(session.results) - 3
    assert sum("inject_fault" in r.detail for r in session.results) == 3


def test_the_fake_device_fails_when_it_is_told_to_and_the_engine_goes_on() -> None:
    session = open_session(find_backend("fake"), level=5, ops="engine")
    run_faults(session)
    assert [r.status for r in session.results] == ["pass", "pass", "pass"], [r.detail for r in session.results]


@pytest.mark.parametrize(("name", "has_roof"), [("cpu", True), ("fake", False)])
def test_the_performance_sheet_has_a_share_where_torch_knows_the_roof(name, has_roof) -> None:
    session = open_session(find_backend(name), level=6, ops="rms_norm")
    run_performance(session)
    assert session.results and {r.status for r in session.results} == {"pass"}
    for result in session.results:
        assert result.facts["us"] > 0 and result.facts["rate"].endswith("B/s")
        assert ("share" in result.facts) == ("measured roof" in result.detail) == has_roof
