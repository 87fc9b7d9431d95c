"""What people do to a batch by accident: wrong files, impossible values, outputs that go away."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from deepinfer.entrypoints import commands, openai_batch
from deepinfer.entrypoints.batch import BatchRunner
from deepinfer.entrypoints.cli import app
from deepinfer.entrypoints.result_file import ResultFile, ResultFileError


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def fake_llm(monkeypatch, make_llm):
    monkeypatch.setattr("deepinfer.entrypoints.llm.LLM", lambda config, **_: make_llm())


@pytest.fixture
def cli():
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def run(make_llm, output):
    def go(source):
        results = ResultFile(output)
        try:
            return BatchRunner(make_llm(), source, results).run()
        finally:
            results.close()

    return go


@pytest.mark.parametrize(
    "content",
    [
        b"my precious data",
        b'{"id": "batch_42", "custom_id": ',
        b'{"id": "batch_req_12", "other',
        b'{"id": "batch_req_x',
        b"\0" * 40,
    ],
)
def test_a_file_whose_only_line_is_unterminated_and_not_ours_is_left_alone(
    cli, fake_llm, write_input, lines, output, content
) -> None:
    output.write_bytes(content)
    result = cli("run", write_input([lines.chat("a")]), "-o", output, "-m", "tiny")
    assert result.exit_code == 2 and "line 1 is not a result of a batch" in result.stderr
    assert output.read_bytes() == content


def test_every_beginning_of_a_line_of_ours_is_known_as_one(run, output, write_input, lines) -> None:
    run(write_input([lines.completion("a"), b"broken", lines.completion("b", n=0)]))
    for line in output.read_bytes().splitlines():
        assert all(openai_batch.begins_like_a_record(line[:size]) for size in range(len(line)))


def test_nothing_is_cut_or_left_behind_before_the_model_is_there(cli, write_input, lines, output, tmp_path) -> None:
    source = write_input([lines.chat("a")])
    for content in (b'{"id": "batch_req_1', None):
        if content is None:
            output.unlink()
        else:
            output.write_bytes(content)
        assert cli("run", source, "-o", output, "-m", tmp_path / "absent").exit_code == 2
        assert (output.read_bytes() if output.exists() else None) == content


def test_a_run_over_nothing_leaves_an_empty_file(run, output, write_input) -> None:
    assert run(write_input([])).exit_status == 0
    assert output.read_bytes() == b""


def test_a_file_removed_while_its_lock_was_awaited_is_made_again(output, monkeypatch) -> None:
    lock, calls = ResultFile._lock, []

    def remove_first(self, fd):
        if not calls:
            output.unlink()
        calls.append(fd)
        lock(self, fd)

    monkeypatch.setattr(ResultFile, "_lock", remove_first)
    results = ResultFile(output)
    results.append({"id": "batch_req_1", "custom_id": "a", "response": {}})
    results.close()
    assert len(calls) == 2 and output.read_bytes().endswith(b"\n")


def test_a_foreign_line_with_an_odd_error_code_is_refused(output) -> None:
    output.write_text('{"error": {"code": []}}\n')
    with pytest.raises(ResultFileError, match="line 1 is not a result"):
        ResultFile(output)


def deep(depth=900):
    return b"[" * depth + b"]" * depth


def test_impossible_values_are_their_items_errors(run, output, write_input, lines, read_output) -> None:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k")
    items = [lines.completion("ok")]
    items += [lines.completion(name, **{name: 10**400}) for name in names if name != "top_k"]
    template = json.dumps(lines.completion("NAME", NAME="VALUE"))
    for name in (*names, "stop", "logit_bias", "seed", "logprobs", "allowed_token_ids", "model", "metadata"):
        line = template.replace('"NAME"', f'"{name} deep"', 1).replace('"NAME"', f'"{name}"')
        items.append(line.encode().replace(b'"VALUE"', deep()))
    items.append(b'{"custom_id": "url", "url": ' + deep() + b"}")
    items.append(b'{"custom_id": "method", "method": ' + deep() + b"}")
    items.append(b'{"custom_id": ' + deep() + b"}")
    for name in ("messages", "reasoning_effort", "tools", "response_format", "thinking"):
        line = json.dumps({**lines.chat(name), "body": {"messages": [{"role": "user", "content": "x"}], name: "VALUE"}})
        items.append(line.encode().replace(b'"VALUE"', deep()))
    summary = run(write_input(items))
    assert summary.num_answered == 1 and summary.num_failed == len(items) - 1
    for record in read_output(output):
        if record["error"]:
            assert record["error"]["code"] != "internal_error", record
            assert len(record["error"]["message"]) < 700


@pytest.mark.parametrize("where", ["prepare", "response_record"])
def test_an_unexpected_fault_is_its_items_error(
    run, output, write_input, lines, read_output, monkeypatch, where
) -> None:
    real = getattr(openai_batch, where)

    def faulty(item, *arguments, **options):
        if item.custom_id == "b":
            raise ZeroDivisionError("by nothing")
        return real(item, *arguments, **options)

    monkeypatch.setattr(f"deepinfer.entrypoints.batch.{where}", faulty)
    summary = run(write_input([lines.completion(name) for name in "abc"]))
    assert (summary.num_answered, dict(summary.errors)) == (2, {"internal_error": 1})
    (error,) = [record["error"] for record in read_output(output) if record["error"]]
    assert error["message"] == "ZeroDivisionError: by nothing"


def test_a_keyboard_interrupt_is_no_items_error(run, write_input, lines, monkeypatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer.entrypoints.batch.prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(write_input([lines.completion("a")]))


def test_errors_of_other_inputs_do_not_count(run, write_input, lines) -> None:
    assert run(write_input([lines.completion("a"), lines.completion("b", n=0)])).exit_status == 1
    summary = run(write_input([lines.completion("a"), lines.completion("c")]))
    assert (summary.num_failed_before, summary.num_skipped, summary.exit_status) == (0, 1, 0)
    assert run(write_input([lines.completion("b", n=0)])).exit_status == 1


@pytest.mark.parametrize(("bad", "status"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("gone", ["full", "pipe", "closed", "absent"])
def test_a_display_that_goes_away_does_not_touch_the_job(
    fake_llm, write_input, lines, output, monkeypatch, gone, bad, status, read_output
) -> None:
    def stream():
        if gone == "absent":
            return None
        if gone == "full":
            return open("/dev/full", "w")
        reader, writer = os.pipe()
        os.close(reader)
        file = os.fdopen(writer, "w")
        if gone == "closed":
            file.close()
        return file

    source = write_input([lines.completion("a"), b"broken"] if bad else [lines.completion("a")])
    work = commands.BatchCommand(source, output, "tiny", {})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        patch.setattr(sys, "stderr", stream())
        assert commands.guarded(work.run) == status
        for file in (sys.stdout, sys.stderr):
            if file is not None:
                file.close()  # does not raise: what could not be written is gone
    assert len(read_output(output)) == 1 + bad


def test_a_process_whose_display_is_full_ends_with_the_status_of_its_job(tmp_path, write_input, lines, output) -> None:
    command = [sys.executable, "-m", "deepinfer.entrypoints.cli", "run", write_input([lines.chat("a")]), "-o", output]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "-m", tmp_path / "absent"], stdout=full, stderr=full)
    assert done.returncode == 2


def test_dashes_and_pipes_are_refused_by_name(cli, fake_llm, write_input, lines, output, tmp_path) -> None:
    source = write_input([lines.chat("a")])
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (("-", "-o", output), "not read from standard input"),
        ((source, "-o", "-"), "results go to a file"),
        ((tmp_path / "pipe", "-o", output), "is no regular file"),
    ]
    for arguments, message in cases:
        result = cli("run", *arguments, "-m", "tiny")
        assert result.exit_code == 2 and message in result.stderr, result.output
    assert not output.exists()


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_inspect_reports_a_tokenizer_that_cannot_be_used(cli, tmp_path, content) -> None:
    folder = tmp_path / "tiny"
    assert cli("make-tiny", folder, "--no-quant").exit_code == 0
    file = folder / "tokenizer.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    result = cli("inspect", folder)
    assert result.exit_code == 1 and "tokenizer.json" in result.stdout
    assert len(json.loads(cli("inspect", folder, "--json").stdout)["problems"]) == 1
