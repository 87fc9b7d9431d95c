"""The suite has teeth: every planted fault is caught, by the case and the check that claim it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from deepinfer.conformance.planting import Fault, run_planted


def planted() -> list[Fault]:
    """The faults of all files beside this one."""
    faults = []
    for path in sorted(Path(__file__).parent.glob("faults_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        faults += module.FAULTS
    return faults


FAULTS = planted()


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f.op.name}: {f.name}" for f in FAULTS])
def test_fault_is_caught_by_its_named_case(fault) -> None:
    result = fault.caught()
    assert result.status == "fail", f"{fault.name} passes {fault.op.name}/{fault.case}"
    assert fault.check in {check.name for check in result.failed()}, result.detail


@pytest.mark.parametrize("op", sorted({fault.op.name for fault in FAULTS}))
def test_without_the_fault_the_same_cases_pass(op) -> None:
    """A case that fails the reference too would prove nothing."""
    spec = next(fault.op for fault in FAULTS if fault.op.name == op)
    for case in sorted({fault.case for fault in FAULTS if fault.op.name == op}):
        result = run_planted(spec, case, spec.reference)
        assert result.status in ("pass", "slow"), result.detail


def test_there_are_enough_faults_and_each_is_another() -> None:
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
