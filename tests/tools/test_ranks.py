"""Ranks as many as there are: which cases those can run, and a run of them."""

import pytest

from deepinfer.conformance.rank_process import ABSENT, ENDINGS, KILLED_WAITED_FOR
from deepinfer.conformance.rank_programs import FOR_SEVERAL, PROGRAMS
from tools import ranks


def test_fewer_ranks_run_fewer_cases() -> None:
    assert PROGRAMS.keys() > FOR_SEVERAL
    assert ranks.possible_cases(1) == [*(name for name in PROGRAMS if name not in FOR_SEVERAL), ABSENT]
    assert ranks.possible_cases(2) == [*PROGRAMS, ABSENT, KILLED_WAITED_FOR]
    assert ranks.possible_cases(3) == ranks.possible_cases(8) == [*PROGRAMS, *ENDINGS]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_cases_that_so_many_ranks_can_run_pass(count, capsys) -> None:
    assert ranks.main(["--backend", "cpu", "--ranks", str(count)]) == 0
    *cases, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in cases) and len(cases) == len(ranks.possible_cases(count))
    assert last.startswith(f"cpu, {count} rank(s): {len(cases)} of {len(cases)} cases passed")


def test_a_case_that_fails_is_told_with_its_reason(monkeypatch, capsys) -> None:
    monkeypatch.setattr(ranks, "possible_cases", lambda count: ["all_reduce takes maxima, and NaN"])
    assert ranks.main(["--backend", "cpu", "--ranks", "1"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL all_reduce takes maxima") and "rank 0: runs" in second and "0 of 1" in last
