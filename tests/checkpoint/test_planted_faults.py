"""Faults of an engine show in the small checkpoint's answers."""

import pytest

from tools.planted_faults import FAULTS, ask, differences, main

SAMPLE = ("copy", "add", "tool_call", "pass_key_512")
NAMED = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def sound(tiny):
    return ask(str(tiny), NAMED["none"], 4, SAMPLE)


def test_without_a_fault_there_is_no_difference(tiny, sound) -> None:
    assert differences(sound, ask(str(tiny), NAMED["none"], 4, SAMPLE)) == (0, 0.0)
    assert sound.total.accuracy == 1


@pytest.mark.parametrize(
    "name",
    [
        "window off by one: a row does not see itself",
        "wrong slot: the neighbour of each compressed record",
        "wrong pool: each candidate block is the one before",
        "window records are half as large",
    ],
)
def test_a_fault_gives_wrong_answers(tiny, sound, name) -> None:
    faulty = ask(str(tiny), NAMED[name], 4, SAMPLE)
    assert faulty.total.correct < sound.total.correct
    assert differences(sound, faulty)[0] > 0


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("dropped rounding")])
def test_dropped_rounding_changes_log_probabilities(tiny, sound, name) -> None:
    assert differences(sound, ask(str(tiny), NAMED[name], 4, SAMPLE))[1] > 1e-6


def test_a_model_that_cannot_be_asked_is_named(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "none' is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--limit", "0"])
    assert "--limit must be at least 1, got 0" in capsys.readouterr().err
