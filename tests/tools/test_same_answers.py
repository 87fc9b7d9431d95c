"""Answers of two programs compared: which differences count."""

import pytest

from deepinfer.core.outputs import CompletionOutput, Logprob
from deepinfer.entrypoints.eval_tasks import SUITES
from tools import same_answers
from tools.same_answers import Comparison, compare, main, scores_agree


def answer(ids, *tops):
    """An answer with the two best ids of each position and their log probabilities."""
    logprobs = [{i: Logprob(logprob=value, rank=rank) for rank, (i, value) in enumerate(top, 1)} for top in tops]
    return CompletionOutput(token_ids=list(ids), logprobs=logprobs)


SURE = ((5, -0.1), (6, -3.0))
TIE = ((7, -0.7), (8, -0.7004))


def test_equal_answers_differ_nowhere():
    mine = answer([5, 7], SURE, TIE)
    found = compare([mine], [answer([5, 7], SURE, TIE)], [mine], 1e-3)
    assert found == Comparison(positions=2, different=0, sure=0, equal_answers=1, answers=1, largest=0.0)
    assert found.holds("float32")


def test_another_choice_counts_only_where_the_first_was_sure():
    mine = answer([5, 7], SURE, TIE)
    at_the_tie = answer([5, 7], SURE, ((8, -0.7), (7, -0.7002)))
    found = compare([mine], [at_the_tie], [answer([5, 8])], 1e-3)
    assert (found.different, found.sure, found.equal_answers) == (1, 0, 0) and found.holds("float32")
    assert found.largest == pytest.approx(2e-4)
    elsewhere = answer([5, 7], ((6, -0.1), (5, -3.0)), TIE)
    found = compare([mine], [elsewhere], [mine], 1e-3)
    assert (found.different, found.sure) == (1, 1) and not found.holds("float32") and not found.holds("bfloat16")
    assert found.largest == pytest.approx(2.9)


def test_nothing_compared_holds_nothing():
    assert not Comparison().holds("bfloat16")


def test_a_backend_answers_like_itself(monkeypatch, capsys):
    chosen = {name: SUITES["tiny"][name] for name in ("copy", "add")}
    monkeypatch.setattr(same_answers, "chosen_tasks", lambda suite: chosen)
    monkeypatch.setattr("sys.argv", ["same_answers.py", "--backend", "cpu", "--limit", "1", "--score", "1"])
    assert main() == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("ok   float32") and second.startswith("ok   bfloat16")
    assert "2 of 2 free answers are equal; largest difference of a log probability 0" in second
    assert third == "ok   bfloat16: 0 of 2 answers are right on the CPU, 0 on cpu; 0 answers differ, 0 failed"


def test_scores_may_differ_as_far_as_answers_do():
    assert scores_agree(90, 90, 0) and scores_agree(90, 88, 1) and scores_agree(90, 84, 6)
    assert not scores_agree(90, 89, 0) and not scores_agree(90, 83, 7) and not scores_agree(83, 90, 7)
