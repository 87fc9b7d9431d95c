"""The example that prints a batch: answers that are missing, failed or half written."""

import json

import pytest

from examples.show_answers import main


@pytest.fixture
def requests(tmp_path):
    file = tmp_path / "requests.jsonl"
    asked = [
        {"custom_id": name, "body": {"messages": [{"role": "user", "content": f"about {name}"}]}}
        for name in ("first", "second", "third")
    ]
    file.write_text("\n".join(map(json.dumps, asked)))
    return file


def test_every_request_has_a_row_whatever_became_of_it(requests, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    message = {"content": "said [/x]\u2028on", "tool_calls": None}
    lines = [
        {"custom_id": "second", "response": {"body": {"choices": [{"message": message}]}}, "error": None},
        {"custom_id": "first", "response": None, "error": {"code": "prompt_too_long", "message": "too long"}},
    ]
    answers = tmp_path / "answers.jsonl"
    written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    answers.write_text(written + '{"custom_id": "thi', encoding="utf-8")
    main(requests, answers)
    shown = capsys.readouterr()
    rows = [line for line in shown.out.splitlines() if "about" in line]
    assert ["error: too long" in rows[0], "said [/x]" in rows[1], "(no answer yet)" in rows[2]] == [True] * 3
    assert "line 3: left out, no JSON" in shown.err
