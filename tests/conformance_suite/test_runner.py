"""The suite's own machinery: cases, contracts, reports, waivers, saved failures, proofs."""

import datetime
import importlib
import json

import pytest
import torch

from deepinfer.conformance.claims import Waiver, apply_waivers, must_pass, must_pass_gaps, read_waivers
from deepinfer.conformance.compare import compare
from deepinfer.conformance.failures import find_case, load_failure, save_failure
from deepinfer.conformance.html import histogram, page
from deepinfer.conformance.levels import LEVELS, run_level
from deepinfer.conformance.report import summary, write_report
from deepinfer.conformance.results import CaseResult, Check, Report
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.suite import Session, run_suite
from deepinfer.conformance.values import copied, extent, same_bits, snapshot
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.contract import check_arguments
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.spec import EXACT, Case, Tolerance, define_op

TODAY = datetime.date(2026, 12, 1)


def backend_with(*functions, op=rms_norm):
    """A backend on the host; later functions have higher priority."""
    backend = Backend("planted", "cpu", probe=lambda: Availability(True))
    for priority, function in enumerate(functions):
        backend.implements(op, priority=priority)(function)
    return backend


def good(x, weight, eps):
    return rms_norm.reference(x, weight, eps)


def wrong(x, weight, eps):
    return rms_norm.reference(x, weight, eps) * 1.1


def session(backend, **choices):
    return Session(backend, HostRuntime(), ops="rms_norm", **choices)


# --- contracts and cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", defined_ops())
def test_every_op_has_cases_that_fit_its_contract(name) -> None:
    op = defined_ops()[name]
    cases = list(op.cases())
    assert len({case.name for case in cases}) == len(cases), "case names are unique within an op"
    assert any(case.tag == "small" for case in cases)
    assert op.arguments and set(op.mutates) <= set(op.arguments)
    assert op.tolerance.why, "a tolerance says why"


@pytest.mark.parametrize("name", defined_ops())
def test_mn5_every_op_has_a_case_without_rows(name) -> None:
    assert any(
        "no " in case.name or "none" in case.name.lower() or case.name.startswith("0 rows")
        for case in defined_ops()[name].cases()
    )


@pytest.mark.parametrize("report", ["MN-1", "MN-2", "MN-3", "MN-4", "MN-5", "MN-6"])
def test_every_reported_fault_is_a_case_by_name(report) -> None:
    names = [case.name for op in defined_ops().values() for case in op.cases()]
    assert any(report in name for name in names)


def test_a_case_that_breaks_its_contract_is_refused() -> None:
    x = torch.zeros(3, 4)
    arguments = rms_norm.arguments
    with pytest.raises(OpArgumentError, match="weight has N = 5, elsewhere it is 4"):
        check_arguments("rms_norm", arguments, {"x": x, "weight": torch.zeros(5)})
    with pytest.raises(OpArgumentError, match=r"x is torch\.int32"):
        check_arguments("rms_norm", arguments, {"x": x.int(), "weight": None})


def test_static_dims_are_those_the_model_binds_with() -> None:
    attn = defined_ops()["sparse_attn"]
    made = make_case(attn, find_case(attn, "window only, one row, bf16"))
    assert attn.static_dims(made.args) == {"heads": 4, "dim": 64, "window_kind": "fp8", "kv_kind": "none"}


def test_far_caches_take_no_memory_and_survive_copies() -> None:
    op = defined_ops()["kv_norm_rope_store"]
    made = make_case(op, find_case(op, "MN-3 page offsets past 2^31, fp8"))
    data = made.args["cache"].data
    assert extent(data) > 2**31 and data.stride(0) * 4 > 2**30
    assert copied(data).stride() == data.stride()


def test_forms_without_batch_invariance_are_run_when_asked_for_and_not_held_to_it() -> None:
    def varying(x, weight, eps):  # bits depend on the number of rows
        return rms_norm.reference(x, weight, eps) * (1 + 2.0**-20 * (x.shape[0] % 2))

    backend = backend_with(good)
    backend.implements(rms_norm, priority=9, batch_invariant=False)(varying)
    assert {r.implementation for r in run_suite(session(backend)).results if r.level} == {"planted.good"}
    report = run_suite(session(backend, batch_invariant=False))
    assert {r.implementation for r in report.results if r.level} == {"planted.varying"}
    kinds = {check.name for result in report.results for check in result.checks}
    assert "D0" in kinds and not kinds & {"D1", "D2"}
    held = run_suite(session(backend_with(varying)))
    assert any(not check.ok and check.name in ("D1", "D2") for r in held.results for check in r.checks)


# --- comparing ------------------------------------------------------------------------------------------------------


def test_compare_names_the_first_element_out_of_tolerance() -> None:
    want = torch.ones(2, 3)
    got = want.clone()
    got[1, 2] = 1.5
    outcome = compare({"result": got}, {"result": want}, Tolerance(0.1, 0.0))
    assert "first at [1, 2]: got 1.5, want 1" in outcome.failures[0]
    assert outcome.histogram[-1] == 1 and outcome.histogram[0] == 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_compare_does_not_take_nan_for_close(bad) -> None:
    assert compare(torch.tensor([bad]), torch.tensor([1.0]), Tolerance(1.0, 1.0)).failures
    assert not compare(torch.tensor([bad]), torch.tensor([bad]), Tolerance(1.0, 1.0)).failures


def test_compare_takes_codes_one_step_apart_only_as_often_as_allowed() -> None:
    data = torch.full((64, 32), 0x38, dtype=torch.uint8)
    want = QTensor(data, torch.full((64, 1), 127, dtype=torch.uint8), "mxfp8")
    one, far = data.clone(), data.clone()
    one[0, 0] += 1
    far[0, 0] += 9
    loose = Tolerance(off_by_one=1e-3)
    assert not compare(QTensor(one, want.scale, "mxfp8"), want, loose).failures
    assert "more than one code" in compare(QTensor(far, want.scale, "mxfp8"), want, loose).failures[0]
    assert compare(QTensor(data + 1, want.scale, "mxfp8"), want, loose).failures
    assert compare(QTensor(one, want.scale, "mxfp8"), want, EXACT).failures


def test_bits_tell_zeros_apart_and_nans_alike() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), -torch.tensor([torch.nan]))
    view = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    assert torch.equal(copied(view), view) and copied(view).stride() == view.stride()
    assert snapshot({"a": view}).keys() == {"a"}


# --- running --------------------------------------------------------------------------------------------------------


def test_a_native_row_and_a_reference_row_are_told_apart() -> None:
    native = run_suite(session(backend_with(good)))
    assert native.ok and {r.implementation for r in native.results if r.level} == {"planted.good"}
    reference = run_suite(session(Backend("empty", "cpu", probe=lambda: Availability(True))))
    rows = [r for r in reference.results if r.level]
    assert reference.ok and not any(r.native for r in rows)
    assert all("float64" in {check.name for check in r.checks} for r in rows)


def test_a_failing_case_is_saved_and_runs_again_alone(tmp_path) -> None:
    report = run_suite(session(backend_with(wrong), case="one row, bf16", folder=tmp_path))
    (result,) = (r for r in report.results if r.level)
    assert result.status == "fail" and not report.ok
    again = run_suite(session(backend_with(wrong), case=result.failure_file))
    assert [r.name for r in again.results] == ["rms_norm/one row, bf16"] and again.count("fail") == 1
    assert run_suite(session(backend_with(good), case=result.failure_file)).ok


@pytest.mark.parametrize("op", ["sparse_attn", "ep_combine", "moe_grouped_gemm", "kv_norm_rope_store"])
def test_saved_cases_keep_every_kind_of_argument(op, tmp_path) -> None:
    spec = defined_ops()[op]
    for case in list(spec.cases())[1:40:5]:
        if case.tag != "small":
            continue
        made = make_case(spec, case)
        path = save_failure(tmp_path, made, CaseResult(1, op, case.name, "x", True))
        back = load_failure(path)
        assert path.stat().st_size < 1 << 22
        assert snapshot(back.args).keys() == snapshot(made.args).keys()
        assert all(
            torch.equal(a, b) for a, b in zip(snapshot(back.args).values(), snapshot(made.args).values(), strict=True)
        )


def test_a_file_that_is_no_case_is_refused(tmp_path) -> None:
    path = tmp_path / "x.case"
    path.write_bytes(b"nothing")
    with pytest.raises(OpArgumentError, match="is not a saved case"):
        load_failure(path)
    for content, lacks in (([1], "args, case, contract, op, rows"), ({"contract": 1, "op": "x"}, "args, case, rows")):
        torch.save(content, path)
        with pytest.raises(OpArgumentError, match=f"is not a saved case: it lacks {lacks}$"):
            load_failure(path)
    for name in ("no such case", str(tmp_path / "*.case"), str(tmp_path / "absent.case"), str(tmp_path)):
        with pytest.raises(OpArgumentError, match=r"no case fits .* which is no file either"):
            run_suite(session(backend_with(good), case=name))


@pytest.mark.parametrize("choice", [{"case": "rms_norm/*"}, {"ops": "rms*"}])
def test_cases_at_a_level_that_has_none_are_no_pass(choice) -> None:
    with pytest.raises(OpArgumentError, match="level 0 runs no case"):
        run_suite(Session(backend_with(good), HostRuntime(), level=0, **choice))


def test_ops_are_chosen_by_several_globs() -> None:
    chosen = Session(backend_with(good), HostRuntime(), ops="rms_n*, no_such_op")
    assert chosen.wants("rms_norm", "any") and not chosen.wants("rope", "any")


def test_a_report_names_the_level_that_was_reached() -> None:
    report = run_suite(Session(backend_with(good), HostRuntime(), level=2, ops="rms_norm"))
    assert report.ok and "conforms[/] at level 1 (nothing of what was chosen stands above it)" in summary(report)


def test_a_glob_that_fits_no_op_is_no_pass() -> None:
    empty = Session(backend_with(good), HostRuntime(), ops="no_such_op")
    with pytest.raises(OpArgumentError, match="no case fits --op 'no_such_op'"):
        run_suite(empty)


def test_an_implementation_that_raises_fails_its_case_and_the_suite_goes_on() -> None:
    def broken(x, weight, eps):
        raise RuntimeError("launch failed")

    report = run_suite(session(backend_with(broken)))
    assert report.count("fail") == len([r for r in report.results if r.level])
    assert "RuntimeError: launch failed" in report.results[-1].detail


def test_a_predicate_that_refuses_leaves_the_case_to_the_reference() -> None:
    backend = Backend("picky", "cpu", probe=lambda: Availability(True))
    backend.implements(rms_norm, when=lambda dims: dims["n"] == 96)(good)
    rows = {r.case: r.native for r in run_suite(session(backend)).results if r.level}
    assert rows["one row, bf16"] and not rows["width 33, bf16"]


def test_every_level_has_its_function() -> None:
    for level in LEVELS.values():
        module, _, name = level.run.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), level


def test_level_0_refuses_a_backend_of_another_contract() -> None:
    backend = Backend("old", "cpu", probe=lambda: Availability(False, "no driver"), api_version=0)
    quiet = Session(backend, HostRuntime(), level=0)
    run_level(0, quiet)
    assert "probe: no driver" in quiet.results[0].detail and "version 0" in quiet.results[0].detail


# --- claims ---------------------------------------------------------------------------------------------------------


def report_of(*results):
    return Report("b", 1, 1, "device", {}, list(results))


def case_result(case, ok):
    return CaseResult(1, "rms_norm", case, "b.x", True, checks=[Check("value", ok, "off")]).settle()


def test_a_waiver_excuses_until_its_day_and_no_longer() -> None:
    waiver = Waiver("rms_norm/a*", "driver bug 12", TODAY)
    report = report_of(case_result("a", False), case_result("b", True))
    apply_waivers(report, [waiver], TODAY)
    assert report.ok and report.results[0].status == "waived" and "driver bug 12" in report.results[0].detail
    late = report_of(case_result("a", False))
    apply_waivers(late, [waiver], TODAY + datetime.timedelta(days=1))
    assert not late.ok and late.results[0].status == "fail" and "expired on 2026-12-01" in late.problems[0]


def test_a_waived_case_that_passes_is_reported() -> None:
    report = report_of(case_result("a", True))
    apply_waivers(report, [Waiver("rms_norm/a", "driver bug", TODAY)], TODAY)
    assert report.results[0].status == "unexpected pass" and not report.ok


def test_waiver_files_need_a_case_a_reason_and_a_day(tmp_path) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text('[[waiver]]\ncase = "rms_norm/*"\nreason = "driver bug"\nexpires = 2026-12-31\n')
    assert read_waivers(file) == [Waiver("rms_norm/*", "driver bug", datetime.date(2026, 12, 31))]
    other = tmp_path / "waivers.json"
    other.write_text(json.dumps({"waiver": [{"case": "x", "reason": " ", "expires": "2026-12-31"}]}))
    with pytest.raises(OpArgumentError, match="has no reason"):
        read_waivers(other)
    other.write_text(json.dumps({"waiver": [{"case": "x", "reason": "y"}]}))
    with pytest.raises(OpArgumentError, match="expires"):
        read_waivers(other)


def test_the_must_pass_list_names_cases_that_exist() -> None:
    ops = defined_ops()
    for name, cases in must_pass().items():
        assert name in ops
        missing = set(cases) - {case.name for case in ops[name].cases()}
        assert not missing, f"{name}: renamed or removed without a new contract version: {sorted(missing)}"


def test_a_must_pass_case_that_does_not_run_is_a_gap() -> None:
    gaps = must_pass_gaps([case_result("one row, bf16", True)], ops=["rms_norm"])
    assert "rms_norm/one row, bf16" not in gaps and "rms_norm/two rows, bf16" in gaps


# --- reports --------------------------------------------------------------------------------------------------------


def test_the_html_page_is_one_file_that_says_what_failed(tmp_path) -> None:
    report = run_suite(session(backend_with(wrong), folder=tmp_path))
    data, shown = write_report(report, tmp_path)
    text = shown.read_text()
    assert "does not conform" in text and "planted.wrong" in text and "<svg" in text
    assert "http" not in text and "<script" not in text and "src=" not in text
    loaded = json.loads(data.read_text())
    assert loaded["ok"] is False and loaded["results"][1]["op"] == "rms_norm"


def test_names_from_outside_cannot_break_the_page() -> None:
    result = CaseResult(1, "rms_norm", "<b>case</b>", "<script>", True)
    assert "<script>" not in page(report_of(result)) and "<b>case" not in page(report_of(result))
    assert histogram([0] * 9) and "beyond: 3" in histogram([1, 0, 0, 0, 0, 0, 0, 0, 3])


def test_an_op_of_one_file_is_all_the_suite_needs() -> None:
    """A new op is its definition and its cases; the suite finds shapes, rows and rules there."""

    @define_op(
        tolerance=EXACT,
        determinism="D1",
        cases=lambda: [Case("four", lambda gen: {"x": torch.randn(4, 3, generator=gen)}, rows=("x",))],
    )
    def doubled_for_the_test(x):
        """Twice.

        Args:
            x: [T, N] float32.
        """
        return x + x

    try:
        backend = Backend("b", "cpu", probe=lambda: Availability(True))
        from deepinfer.conformance.subject import resolve

        (case,) = doubled_for_the_test.cases()
        made = make_case(doubled_for_the_test, case)
        result = run_case(resolve(backend, HostRuntime(), doubled_for_the_test, {}), made)
        assert result.status == "pass" and {"D0", "D1", "layout", "float64"} <= {c.name for c in result.checks}
    finally:
        from deepinfer.ops import spec

        spec._DEFINED.pop("doubled_for_the_test")


def test_a_case_can_be_run_again_as_it_was_run() -> None:
    result = case_result("heads", False)
    assert report_of(result).again(result) == "deepinfer conformance --backend b --case 'rms_norm/heads'"
    layer = CaseResult(2, "layers", "full", "b.x", True)
    emulated = report_of(layer)
    emulated.emulated = True
    assert emulated.again(layer) == "deepinfer conformance --backend b --emulate --level 2 --case 'layers/full'"
    layer.failure_file = "report/failures/x.pt"
    assert emulated.again(layer).endswith("--emulate --case 'report/failures/x.pt'")
