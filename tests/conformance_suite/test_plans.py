"""Plans with scratch and persistent memory: the suite and the fake device give them what an engine gives."""

from dataclasses import dataclass

import pytest
import torch

from deepinfer.backends.fake import ops as fake_ops
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.conformance.failures import find_case
from deepinfer.conformance.planting import run_planted
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import Subject, context
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.norm import rms_norm

CASE = "21 rows, bf16"


def scratched(x, weight, eps, *, scratch):
    scratch.zero_()
    return rms_norm.reference(x, weight, eps) + scratch.view(torch.float32)[0].to(x.dtype)


def counting(x, weight, eps, *, persistent):
    assert not persistent.any()
    persistent[0] = 7
    result = rms_norm.reference(x, weight, eps)
    persistent.zero_()
    return result


@dataclass(frozen=True)
class Whole:
    """Wants everything; writes to `out` where it is given one."""

    scratch_bytes: int = 16
    persistent_bytes: int = 8
    capturable: bool = True

    def run(self, x, weight, eps, *, out=None, scratch, persistent):
        assert len(scratch) == 16 and len(persistent) == 8 and not persistent.any()
        scratch.zero_()
        result = rms_norm.reference(x, weight, eps)
        return result if out is None else out.copy_(result)


@pytest.mark.parametrize(("function", "memory"), [(scratched, (64, 0)), (counting, (0, 64))])
def test_a_plan_gets_what_it_asks_for_and_nothing_else(function, memory) -> None:
    result = run_planted(rms_norm, CASE, function, *memory)
    assert result.status == "pass", result.detail
    assert ("persistent" in {check.name for check in result.checks}) == bool(memory[1])


def test_a_capturable_plan_gets_out_too() -> None:
    subject = Subject(rms_norm, "planted", True, Whole(), HostRuntime())
    made = make_case(rms_norm, find_case(rms_norm, CASE))
    assert set(subject.options(made.args)) == {"out", "scratch", "persistent"}
    assert run_case(subject, made).status == "pass"


def test_the_fake_device_runs_host_plans_with_their_memory(monkeypatch) -> None:
    host = Backend("planted", "cpu", probe=lambda: Availability(True), runtime=HostRuntime)
    host.implements_plan(rms_norm)(lambda dims, ctx: Whole(capturable=False))
    monkeypatch.setattr(fake_ops, "_HOST", host)
    runtime = FakeRuntime()
    (own,) = (i for i in fake_ops.BACKEND.implementations if i.op.name == "rms_norm")
    plan = own.bind({"n": 33}, context(runtime))
    x = torch.randn(3, 33)
    got = runtime.to_host(plan.run(runtime.to_device(x), runtime.to_device(torch.ones(33)), 1e-6))
    assert torch.equal(got, rms_norm.reference(x, torch.ones(33), 1e-6))


@dataclass(frozen=True)
class Halving:
    """Reads its weight in a form of its own: half of it."""

    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = True

    def prepare(self, name, value):
        return value / 2 if name == "weight" else value

    def run(self, x, weight, eps, *, out):
        return out.copy_(rms_norm.reference(x, weight * 2, eps))


def test_the_suite_prepares_weights_as_a_model_does() -> None:
    made = make_case(rms_norm, find_case(rms_norm, CASE))
    result = run_case(Subject(rms_norm, "planted", True, Halving(), HostRuntime()), made)
    assert result.status == "pass", result.detail
