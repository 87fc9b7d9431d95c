"""Drawn sizes find what no listed case has, and say the smallest."""

import sys
from functools import partial

import torch

from deepinfer.conformance import drawn
from deepinfer.conformance.failures import load_failure
from deepinfer.conformance.suite import Session
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.index import topk_select
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.spec import Case


def session_of(op, function, **choices):
    backend = Backend("planted", "cpu", probe=lambda: Availability(True))
    backend.implements(op)(function)
    return Session(backend, HostRuntime(), **choices)


def drops_the_tail_of_wide_rows(x, weight, eps):
    out = rms_norm.reference(x, weight, eps)
    if _is_ragged(x.shape[-1]):
        out[..., -2:] = 0
    return out


def _is_ragged(width):
    return width > 64 and width % 2 == 0 and width % 32 != 0


def test_a_width_that_no_listed_case_has_is_found_and_made_small(tmp_path) -> None:
    listed = {case.make.keywords.get("width") for case in drawn.drawable(rms_norm)}
    assert not any(width is not None and _is_ragged(width) for width in listed)
    result = drawn.search(session_of(rms_norm, drops_the_tail_of_wide_rows, folder=tmp_path), rms_norm)
    assert result.status == "fail" and "width 66" in result.detail and "rows 1" in result.detail
    again = load_failure(tmp_path / "failures" / result.failure_file.rpartition("/")[2])
    assert again.args["x"].shape == (1, 66)


def test_a_right_implementation_passes_with_as_many_cases_as_asked_for() -> None:
    result = drawn.search(session_of(rms_norm, rms_norm.reference), rms_norm)
    assert result.status == "pass" and result.detail == f"{drawn.EXAMPLES} cases"


def test_a_fault_of_one_length_is_found() -> None:
    def forgets_the_last_column(x, k, lens):
        return topk_select.reference(x, k, torch.where(lens == x.shape[1], lens - 1, lens).clamp(min=0))

    assert drawn.search(session_of(topk_select, forgets_the_last_column), topk_select).status == "fail"


def test_most_ops_have_sizes_to_draw() -> None:
    without = [name for name, op in defined_ops().items() if not drawn.drawable(op)]
    assert len(without) <= 7, without


def test_every_size_is_one_that_some_case_takes() -> None:
    taken = {name for op in defined_ops().values() for case in drawn.drawable(op) for name in drawn._sizes(op, case)}
    assert taken == set(drawn.SIZES)
    ops = defined_ops()
    for op, name in drawn._NARROWER:
        assert any(name in drawn._sizes(ops[op], case) for case in drawn.drawable(ops[op])), (op, name)


def test_sizes_that_go_together_in_no_case_are_reported(monkeypatch) -> None:
    def refuse(gen, rows):
        raise ValueError("no such rows")

    monkeypatch.setattr(drawn, "drawable", lambda op: [Case("a", partial(refuse, rows=1))])
    result = drawn.search(session_of(rms_norm, rms_norm.reference), rms_norm)
    assert result.status == "fail" and "none that a case can have" in result.detail


def test_without_hypothesis_the_result_says_so(monkeypatch) -> None:
    monkeypatch.setattr(drawn, "find_spec", lambda name: None)
    result = drawn.search(session_of(rms_norm, rms_norm.reference), rms_norm)
    assert result.status == "unsupported" and "pip install hypothesis" in result.detail
    assert "hypothesis" in sys.modules, "it is here"
