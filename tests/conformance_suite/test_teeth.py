"""The suite has teeth: every planted fault is caught, by the case and the check that claim it."""

import importlib.util
from pathlib import Path

import pytest

from deepinfer.conformance.failures import find_case
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import Subject
from deepinfer.ops.backend import FunctionPlan
from deepinfer.ops.host import HostRuntime

_spec = importlib.util.spec_from_file_location("planted_faults", Path(__file__).with_name("faults.py"))
_module = importlib.util.module_from_spec(_spec)
__import__("sys").modules["planted_faults"] = _module
_spec.loader.exec_module(_module)
FAULTS = _module.FAULTS


def outcome(op, case, function):
    made = make_case(op, find_case(op, case))
    return run_case(Subject(op, "planted", True, FunctionPlan(function), HostRuntime()), made)


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f.op.name}: {f.name}" for f in FAULTS])
def test_fault_is_caught_by_its_named_case(fault) -> None:
    result = outcome(fault.op, fault.case, fault.run)
    assert result.status == "fail", f"{fault.name} passes {fault.op.name}/{fault.case}"
    assert fault.check in {check.name for check in result.failed()}, result.detail


def test_without_the_fault_the_same_cases_pass() -> None:
    """A case that fails the reference too would prove nothing."""
    for op, case in sorted({(f.op.name, f.case) for f in FAULTS}):
        spec = next(f.op for f in FAULTS if f.op.name == op)
        result = outcome(spec, case, spec.reference)
        assert result.status in ("pass", "slow"), result.detail


def test_there_are_at_least_thirty_faults() -> None:
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
