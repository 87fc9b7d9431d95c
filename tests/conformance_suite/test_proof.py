"""Self-verified kernels: proof levels, verification on first use, the next implementation."""

from functools import partial

import pytest

from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.proof import Gate, Verdict, kernel_hash, proof_level, write_proofs
from deepinfer.ops.registry import OpTable


def backend_with(*functions):
    """A backend on the host; later functions have higher priority."""
    backend = Backend("planted", "cpu", probe=lambda: Availability(True))
    for priority, function in enumerate(functions):
        backend.implements(rms_norm, priority=priority)(function)
    return backend


def good(x, weight, eps):
    return rms_norm.reference(x, weight, eps)


def wrong(x, weight, eps):
    return rms_norm.reference(x, weight, eps) * 1.1


def gate(tmp_path, verdicts, **settings):
    """A gate whose checks answer from a table, and what it told the user."""
    told, asked = [], []

    def check(implementation, seconds):
        asked.append(implementation.name)
        return verdicts[implementation.name]

    made = Gate(HostRuntime(), check, tmp_path / "verified.json", tell=told.append, **settings)
    return made, told, asked


def table(backend, gate):
    from deepinfer.conformance.subject import context

    return OpTable(backend, context(HostRuntime()), overrides={}, gate=gate)


def test_a_kernel_that_fails_its_cases_is_replaced_by_the_next_with_a_message(tmp_path) -> None:
    backend = backend_with(good, wrong)
    guard, told, _ = gate(
        tmp_path, {"planted.good": Verdict(True), "planted.wrong": Verdict(False, "rms_norm/one row: off")}
    )
    assert table(backend, guard).bind(rms_norm, n=4).implementation == "planted.good"
    assert "planted.wrong is not used: it fails its own cases" in told[0] and "rms_norm/one row: off" in told[0]


def test_when_all_fail_the_reference_runs(tmp_path) -> None:
    guard, told, _ = gate(tmp_path, {"planted.wrong": Verdict(False, "off")})
    bound = table(backend_with(wrong), guard).bind(rms_norm, n=4)
    assert not bound.native and told


def test_a_verdict_is_kept_by_kernel_and_device(tmp_path) -> None:
    backend = backend_with(good)
    for _ in range(2):
        guard, _, asked = gate(tmp_path, {"planted.good": Verdict(True)})
        table(backend, guard).bind(rms_norm, n=4)
    assert asked == []
    assert guard.known(backend.implementations[0]) == Verdict(True)


def test_a_verdict_that_cannot_be_kept_is_used_with_a_message(tmp_path) -> None:
    (tmp_path / "file").touch()
    guard, told, asked = gate(tmp_path / "file", {"planted.good": Verdict(True)})
    assert table(backend_with(good), guard).bind(rms_norm, n=4).implementation == "planted.good"
    assert asked == ["planted.good"]
    assert len(told) == 1 and "the verdict on planted.good could not be kept in" in told[0]


def test_what_there_is_no_time_for_is_not_used(tmp_path) -> None:
    ticks = iter(range(0, 10**6, 50))
    guard, told, _ = gate(
        tmp_path,
        {"planted.wrong": Verdict(False, "off"), "planted.good": Verdict(True)},
        clock=partial(next, ticks),
        budget_seconds=50.0,
    )
    assert not table(backend_with(good, wrong), guard).bind(rms_norm, n=4).native
    assert "deepinfer verify" in told[-1]


def test_a_check_that_raises_counts_as_failed(tmp_path) -> None:
    def check(implementation, seconds):
        raise RuntimeError("device lost")

    guard = Gate(HostRuntime(), check, tmp_path / "verified.json", tell=lambda message: None)
    (kernel,) = backend_with(good).implementations
    assert not guard(kernel)
    assert guard.known(kernel) is None, "a device that fails says nothing about the kernel"


def test_a_verdict_on_a_part_of_the_cases_is_neither_used_nor_kept(tmp_path) -> None:
    backend = backend_with(good, wrong)
    guard, told, _ = gate(
        tmp_path, {"planted.wrong": Verdict(False, "3 cases ran", "time"), "planted.good": Verdict(True)}
    )
    assert table(backend, guard).bind(rms_norm, n=4).implementation == "planted.good"
    assert "planted.wrong is not used: not verified within 60 s" in told[0] and "3 cases ran" in told[0]
    assert guard.known(backend.implementations[1]) is None and guard.known(backend.implementations[0])


def test_wrong_values_are_kept(tmp_path) -> None:
    backend = backend_with(wrong)
    guard, _, _ = gate(tmp_path, {"planted.wrong": Verdict(False, "off")})
    assert not guard(backend.implementations[0])
    assert guard.known(backend.implementations[0]) == Verdict(False, "off")


def test_a_run_that_is_cut_short_is_no_pass(monkeypatch) -> None:
    from deepinfer.conformance import selfcheck

    (kernel,) = backend_with(good).implementations
    assert selfcheck.verify_implementation(kernel, HostRuntime(), seconds=0.0).cause == "time"
    ticks = iter(range(1000))
    monkeypatch.setattr(selfcheck.time, "monotonic", lambda: next(ticks))
    verdict = selfcheck.verify_implementation(kernel, HostRuntime(), seconds=3.0, quick=True)
    assert (verdict.passed, verdict.cause, verdict.detail) == (False, "time", "2 cases ran")


def test_a_case_that_raises_is_no_wrong_value() -> None:
    from deepinfer.conformance.selfcheck import verify_implementation

    def full(x, weight, eps):
        raise MemoryError("no room")

    first, second = backend_with(full, wrong).implementations
    assert verify_implementation(first, HostRuntime(), quick=True).cause == "error"
    assert verify_implementation(second, HostRuntime(), quick=True).cause == "cases"


def test_hardware_on_an_accelerator_takes_the_models_own_shapes(monkeypatch) -> None:
    from deepinfer.conformance import selfcheck
    from deepinfer.conformance.results import CaseResult
    from deepinfer.ops.step import shift

    written = []
    monkeypatch.setattr(selfcheck, "write_proofs", lambda backend, proven, *rest: written.append(list(proven)))
    real = next(case.name for case in rms_norm.cases() if case.tag == "real")
    assert all(case.tag == "small" for case in shift.cases())

    def prove(device_type, *rows, software=False, level="hardware"):
        backend = Backend("acme", device_type, probe=lambda: Availability(True), software=software)
        backend.implements(rms_norm)(good)
        backend.implements(shift)(shift.reference)
        results = [CaseResult(1, op, case, name, True) for op, case, name in rows]
        selfcheck.prove(backend, results, level, "device")
        return {i.op.name for i in written.pop()}

    small = [("rms_norm", "one row, bf16", "acme.good"), ("shift", "by 5", "acme.shift")]
    both = {"rms_norm", "shift"}
    assert prove("cpu", *small) == prove("npu", *small, software=True) == prove("npu", *small, level="emulated") == both
    with pytest.raises(OpArgumentError, match="--real"):
        prove("npu", *small)
    assert prove("npu", *small, ("rms_norm", real, "acme.good")) == both
    other = ("linear_bf16", "x", "acme.y")
    with pytest.raises(OpArgumentError, match="--real"):
        prove("npu", *small, other)


@pytest.mark.parametrize(("software", "proven"), [(True, {"rms_norm"}), (False, set())])
def test_a_case_that_a_device_is_too_small_for_proves_nothing_unless_there_is_no_hardware(
    monkeypatch, software, proven
) -> None:
    from deepinfer.conformance import selfcheck
    from deepinfer.conformance.results import CaseResult
    from deepinfer.ops.step import shift

    written = []
    monkeypatch.setattr(selfcheck, "write_proofs", lambda backend, proven, *rest: written.append(list(proven)))
    backend = Backend("acme", "cpu", probe=lambda: Availability(True), software=software)
    backend.implements(rms_norm)(good)
    backend.implements(shift)(shift.reference)
    rows = [("rms_norm", "near", "pass"), ("rms_norm", "far", "unsupported"), ("shift", "far", "unsupported")]
    names = {"rms_norm": "acme.good", "shift": "acme.shift"}
    results = [CaseResult(1, op, case, names[op], True, status) for op, case, status in rows]
    selfcheck.prove(backend, results, "hardware", "device")
    assert {i.op.name for i in written.pop()} == proven


def test_an_edited_kernel_falls_to_compiled(tmp_path, monkeypatch) -> None:
    source = tmp_path / "kernels" / "acme_norm.py"
    source.parent.mkdir()
    source.write_text("def fast(x, weight, eps):\n    return x\n")
    (source.parent / "norm.cu").write_text("// one")
    monkeypatch.syspath_prepend(str(source.parent))
    import acme_norm

    backend = Backend("acme", "cpu", probe=lambda: Availability(True), sources=("*.cu",))
    backend.implements(rms_norm)(acme_norm.fast)
    (kernel,) = backend.implementations
    assert proof_level(kernel) == "compiled"
    (file,) = write_proofs(backend, [kernel], "hardware", "acme 1")
    assert file.parent == source.parent and proof_level(kernel) == "hardware"
    before = kernel_hash(kernel)
    (source.parent / "norm.cu").write_text("// two")
    assert kernel_hash(kernel) != before and proof_level(kernel) == "compiled"


def test_verification_runs_the_cases_of_one_implementation() -> None:
    from deepinfer.conformance.selfcheck import verify_implementation

    first, second = backend_with(good, wrong).implementations
    assert verify_implementation(first, HostRuntime(), quick=True).passed
    assert "rms_norm/" in verify_implementation(second, HostRuntime(), quick=True).detail
    picky = Backend("picky", "cpu", probe=lambda: Availability(True))
    picky.implements(rms_norm, when=lambda dims: dims["n"] == 7)(good)
    assert "none of its cases" in verify_implementation(picky.implementations[0], HostRuntime()).detail
