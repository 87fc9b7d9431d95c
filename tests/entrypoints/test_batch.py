import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer.core.errors import RequestError
from deepinfer.entrypoints import batch
from deepinfer.entrypoints.batch import BatchRunner
from deepinfer.entrypoints.openai_batch import dump_line
from deepinfer.entrypoints.result_file import ResultFile, ResultFileError


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def run(make_llm, output):
    def go(source, script=None, llm=None, overwrite=False, **options):
        results = ResultFile(output, overwrite=overwrite)
        try:
            if overwrite:
                results.clear()
            return BatchRunner(llm or (make_llm(script) if script else make_llm()), source, results, **options).run()
        finally:
            results.close()

    return go


def by_id(records):
    assert len({r["custom_id"] for r in records}) == len(records)
    return {r["custom_id"]: r for r in records}


def codes(records):
    return [(r["error"]["line"], r["custom_id"], r["error"]["code"]) for r in records if r["error"]]


def test_chat_result_has_openai_shape(run, output, write_input, lines, read_output, spell) -> None:
    line = lines.chat("a", max_tokens=50, seed=7, logprobs=True, top_logprobs=2)
    summary = run(write_input([line]), spell("hm</think>Hello."))
    (record,) = read_output(output)
    assert set(record) == {"id", "custom_id", "response", "error"} and record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "m" and "seed" in body
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "reasoning_content": "hm"}
    assert choice["finish_reason"] == "stop" and choice["index"] == 0
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == usage["completion_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert entries[0]["logprob"] == -0.5 and bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    assert [e["logprob"] for e in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert (summary.num_answered, summary.exit_status) == (1, 0)


def test_completion_result_has_openai_shape(run, output, write_input, lines, read_output, spell) -> None:
    run(write_input([lines.completion("a", max_tokens=20, logprobs=1)]), spell("é the end"))
    body = read_output(output)[0]["response"]["body"]
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["text"] == "é the end" and choice["finish_reason"] == "stop"
    logprobs = choice["logprobs"]
    count = body["usage"]["completion_tokens"]
    assert {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {count}
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"]) and logprobs["text_offset"][0] == 0


def test_thinking_that_used_all_tokens_is_noted(run, output, write_input, lines, read_output, spell) -> None:
    run(write_input([lines.chat("a")]), spell("hm hm hm hm hm", end=False))
    body = read_output(output)[0]["response"]["body"]
    assert body["choices"][0]["finish_reason"] == "length" and body["choices"][0]["message"]["content"] == ""
    assert "used all 4 tokens" in body["note"]


def test_tool_calls_become_openai_calls(run, output, write_input, lines, read_output, spell, make_llm) -> None:
    text = (
        '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get">\n'
        '<｜DSML｜ parameter name="q" string="true">x</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    llm = make_llm(spell(text))
    llm.session.engine.max_len = 10_000  # the tools section is long
    run(write_input([lines.chat("a", max_tokens=300, tools=tools)]), llm=llm)
    choice = read_output(output)[0]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", "function": {"name": "get", "arguments": '{"q": "x"}'}}
    ]


def test_every_kind_of_bad_item_is_its_own_error(run, output, write_input, lines, read_output) -> None:
    good = lines.chat("good")
    items = [
        good,
        b"not json",
        b"[1, 2]",
        b'{"custom_id": "bytes \xff"}',
        {"url": "/v1/completions", "body": {}},
        {**good, "custom_id": 5},
        {**good, "custom_id": ""},
        good,
        {**good, "custom_id": "m", "method": "GET"},
        {**good, "custom_id": "u", "url": "/v1/embeddings"},
        {**good, "custom_id": "b", "body": "text"},
        lines.chat("p", temprature=1),
        lines.chat("s", stop=["x", 5]),
        lines.chat("n", n=0),
        lines.chat("t", temperature="hot"),
        lines.chat("nan", temperature=float("nan")),
        lines.chat("r", reasoning_effort="medium"),
        lines.chat("long", "x" * 900),
        lines.completion("e", ""),
        lines.completion("two", ["a", "b"]),
        lines.completion("range", [1, 10**6]),
        lines.completion("k", echo=True),
        lines.chat("l", top_logprobs=3),
        lines.chat("ll", logprobs=True, top_logprobs=400),
        b"[" * 100_000,
    ]
    summary = run(write_input(items))
    records = read_output(output)
    assert sorted(codes(records)) == [
        (2, None, "invalid_json"),
        (3, None, "invalid_json"),
        (4, None, "invalid_json"),
        (5, None, "missing_custom_id"),
        (6, None, "missing_custom_id"),
        (7, None, "missing_custom_id"),
        (8, "good", "duplicate_custom_id"),
        (9, "m", "invalid_method"),
        (10, "u", "unknown_url"),
        (11, "b", "invalid_body"),
        (12, "p", "unknown_parameter"),
        (13, "s", "invalid_parameter"),
        (14, "n", "invalid_parameter"),
        (15, "t", "invalid_parameter"),
        (16, "nan", "invalid_parameter"),
        (17, "r", "invalid_chat"),
        (18, "long", "prompt_too_long"),
        (19, "e", "empty_prompt"),
        (20, "two", "unsupported_parameter"),
        (21, "range", "token_out_of_range"),
        (22, "k", "unsupported_parameter"),
        (23, "l", "invalid_parameter"),
        (24, "ll", "invalid_parameter"),
        (25, None, "invalid_json"),
    ]
    messages = {r["error"]["line"]: r["error"]["message"] for r in records if r["error"]}
    assert "'temprature'; did you mean 'temperature'?" in messages[12]
    assert messages[13].startswith("stop must be") and messages[15].startswith("temperature must be")
    assert (summary.num_answered, summary.num_failed, summary.exit_status) == (1, 24, 1)

    before = output.read_bytes()
    again = run(write_input(items))
    assert output.read_bytes() == before
    assert (again.num_skipped, again.num_answered, again.num_failed, again.num_failed_before) == (25, 0, 0, 24)
    assert again.exit_status == 1


def test_parameters_that_ask_for_nothing_are_taken(run, output, write_input, lines, read_output) -> None:
    quiet = {"n": 1, "stop": None, "stream": False, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"}
    run(write_input([lines.chat("a", **quiet, max_completion_tokens=2)]))
    assert read_output(output)[0]["response"]["body"]["usage"]["completion_tokens"] == 2


def test_unstated_max_tokens(run, output, write_input, lines, read_output) -> None:
    source = write_input([lines.chat("c", max_tokens=None), lines.completion("t", max_tokens=None)])
    run(source, max_tokens=3)
    assert {r["response"]["body"]["usage"]["completion_tokens"] for r in read_output(output)} == {3}
    output.unlink()
    run(source)
    used = {k: r["response"]["body"]["usage"]["completion_tokens"] for k, r in by_id(read_output(output)).items()}
    assert used == {"c": 200, "t": 16}


def test_unseeded_requests_are_named_by_their_custom_id(run, write_input, lines, make_llm) -> None:
    llm = make_llm()
    run(write_input([lines.chat("x"), lines.completion("y")]), llm=llm)
    assert [entry for entry in llm.session.engine.log if entry[0] == "add"] == [("add", "x"), ("add", "y")]


def test_results_are_written_as_they_finish(run, output, write_input, lines, read_output) -> None:
    items = [lines.completion("slow", max_tokens=30), lines.completion("fast", max_tokens=1)]
    run(write_input(items))
    assert [r["custom_id"] for r in read_output(output)] == ["fast", "slow"]


def test_in_flight_requests_are_bounded_and_input_is_read_as_needed(run, write_input, lines, make_llm) -> None:
    llm = make_llm(max_num_seqs=4)
    summary = run(write_input([lines.completion(str(i)) for i in range(100)]), llm=llm)
    assert summary.num_answered == 100
    assert llm.session.engine.most_live == 8


def test_resume_skips_what_is_answered(run, output, write_input, lines, read_output) -> None:
    items = [lines.completion(str(i), f"text {i}") for i in range(10)]
    assert run(write_input(items), limit=4).num_answered == 4
    first = output.read_bytes()
    summary = run(write_input(items))
    assert output.read_bytes().startswith(first)
    assert (summary.num_skipped, summary.num_answered) == (4, 6)
    assert set(by_id(read_output(output))) == {str(i) for i in range(10)}


@pytest.mark.parametrize("keep", [1, 10, 200, -1])
def test_an_incomplete_last_line_is_removed(run, output, write_input, lines, read_output, keep) -> None:
    items = [lines.completion(str(i)) for i in range(3)]
    run(write_input(items))
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:2]) + whole[2][:keep])
    summary = run(write_input(items))
    assert (summary.num_skipped, summary.num_answered) == (2, 1)
    assert set(by_id(read_output(output))) == {"0", "1", "2"}


def test_overwrite_begins_anew(run, output, write_input, lines, read_output) -> None:
    source = write_input([lines.completion("a")])
    run(source)
    assert run(source, overwrite=True).num_answered == 1
    assert len(read_output(output)) == 1


@pytest.mark.parametrize("content", [b"hello\n", b'{"custom_id": 5}\n', b"[]\n", b"\n"])
def test_a_file_that_is_not_ours_is_left_alone(output, content) -> None:
    output.write_bytes(content + b"cut")
    with pytest.raises(ResultFileError, match="line 1 is not a result"):
        ResultFile(output)
    assert output.read_bytes() == content + b"cut"


def test_a_second_writer_is_refused(output, tmp_path) -> None:
    results = ResultFile(output)
    with pytest.raises(ResultFileError, match="another run is writing"):
        ResultFile(output)
    results.close()
    ResultFile(output).close()
    with pytest.raises(ResultFileError, match="no regular file"):
        ResultFile(os.devnull)
    with pytest.raises(ResultFileError, match="cannot be opened"):
        ResultFile(tmp_path / "absent" / "out.jsonl")


def test_a_line_that_does_not_fit_is_taken_back(output, monkeypatch) -> None:
    results = ResultFile(output)
    results.append({"custom_id": "a", "response": {}})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    with pytest.raises(ResultFileError, match="is the disk full"):
        results.append({"custom_id": "b", "response": {}})
    monkeypatch.undo()
    results.append({"custom_id": "c", "response": {}})
    results.close()
    assert [json.loads(line)["custom_id"] for line in output.read_bytes().splitlines()] == ["a", "c"]


def test_a_line_is_one_line_to_every_reader() -> None:
    nasty = "".join(map(chr, range(0x250))) + "\u2028\u2029\ud800 中文 🙂"
    line = dump_line({"custom_id": nasty})
    text = line.decode()
    assert len(text.splitlines()) == 1 and line.endswith(b"\n")
    assert json.loads(text)["custom_id"] == nasty
    assert "中文" in text


def test_blank_lines_and_a_mark_at_the_start_are_no_items(run, output, tmp_path, lines, read_output) -> None:
    source = tmp_path / "in.jsonl"
    line = json.dumps(lines.completion("a")).encode()
    source.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n  \n" + line.replace(b'"a"', b'"b"'))
    summary = run(source)
    assert summary.num_items == batch.count_items(source) == 2
    assert set(by_id(read_output(output))) == {"a", "b"}


def test_an_error_of_the_engine_becomes_the_items_error(run, output, write_input, lines, read_output) -> None:
    def script(ids, step):
        return None if ids[1:] == [9] else 50

    run(write_input([lines.completion("a", [3, 9]), lines.completion("b", [3, 8])]), script)
    records = by_id(read_output(output))
    assert records["a"]["error"]["code"] == "numerical_error" and records["a"]["response"] is None
    assert records["b"]["error"] is None


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_between_steps(run, output, write_input, lines, read_output, kind) -> None:
    handler = signal.getsignal(kind)

    def script(ids, step):
        if ids[-1] == 9 and step == 1:
            os.kill(os.getpid(), kind)
        return 50

    items = [lines.completion(str(i), [3, i], max_tokens=1 + i) for i in range(12)]
    summary = run(write_input(items), script)
    assert summary.exit_status == 128 + kind
    assert signal.getsignal(kind) is handler
    done = set(by_id(read_output(output)))
    assert done == {"0", "1"}
    assert run(write_input(items)).num_answered == 10
    assert set(by_id(read_output(output))) == {str(i) for i in range(12)}


def test_memory_is_flat_whatever_the_input(run, make_llm, tmp_path, lines) -> None:
    import tracemalloc

    source = tmp_path / "in.jsonl"
    peaks = []
    for count in (200, 2000):
        with open(source, "w") as file:
            for i in range(count):
                file.write(json.dumps(lines.completion(str(i), "x" * 100, max_tokens=1)) + "\n")
        llm = make_llm(lambda ids, step: 50, max_num_seqs=4)
        tracemalloc.start()
        run(source, llm=llm, overwrite=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2000 * 400


def test_request_error_lines_name_the_input_line() -> None:
    from deepinfer.entrypoints.openai_batch import error_record

    record = error_record(7, None, RequestError("invalid_json", "broken"))
    assert record["error"] == {"code": "invalid_json", "message": "broken", "line": 7}


KILLED_RUNS = """
import importlib.util, json, os, random, signal, sys, time
from deepinfer.core.config import EngineConfig
from deepinfer.entrypoints.batch import BatchRunner
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.result_file import ResultFile

FEW = 20_000  # bytes: all kills together leave work over, however late they come
fakes_file, source, output, kills = sys.argv[1:5]
spec = importlib.util.spec_from_file_location("fakes", fakes_file)
fakes = sys.modules["fakes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fakes)

def start(most=float("inf")):
    def script(ids, step):
        while os.path.getsize(output) > most:
            time.sleep(0.001)  # until it is killed
        return fakes.letters(ids, step)

    pid = os.fork()  # a fresh process each time would spend the test on imports
    if pid == 0:
        llm = LLM.from_engine(fakes.FakeEngine(EngineConfig(max_num_seqs=4), None, script))
        os._exit(BatchRunner(llm, source, ResultFile(output)).run().exit_status)
    return pid

rng = random.Random(1)
for _ in range(int(kills)):
    enough = os.path.getsize(output) + rng.randrange(8000)  # by what is written: how fast that is differs by machine
    pid = start(enough + FEW)
    while os.path.getsize(output) < enough:
        time.sleep(0.0005)
    time.sleep(rng.random() * 0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(output, "rb") as file:
        for line in file.read().split(b"\\n")[:-1]:
            json.loads(line)
print(sum(1 for _ in open(output, "rb")), flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(start(), 0)[1]))
"""


def test_killed_runs_lose_and_double_nothing(output, write_input, lines) -> None:
    source = write_input([lines.completion(str(i), [3, 4 + i % 200], max_tokens=20) for i in range(2000)])
    fakes = Path(__file__).with_name("conftest.py")
    command = [sys.executable, "-c", KILLED_RUNS, str(fakes), str(source), str(output), "20"]
    output.touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 2000, "the kills must fall into the work"
    ids = [json.loads(line)["custom_id"] for line in output.read_bytes().splitlines()]
    assert sorted(ids) == sorted(str(i) for i in range(2000))


def test_a_lock_dies_with_its_process(output) -> None:
    code = "import sys; from deepinfer.entrypoints.result_file import ResultFile; ResultFile(sys.argv[1]); "
    code += "print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with open(output) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ResultFileError):
        ResultFile(output)
    process.kill()
    process.communicate()
    ResultFile(output).close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny(folder, seed=1, quant=False)
    return folder


def check_killed_runs(source: Path, output: Path, tiny: Path, num_items: int, kills: int, seed: int) -> None:
    """Start the real command and kill it at a random moment, `kills` times, then let it end."""
    command = [sys.executable, "-m", "deepinfer.entrypoints.cli", "run", source, "-o", output, "--model", tiny]
    command += ["--dtype", "float32", "--max-num-seqs", "4", "--num-threads", "1"]
    rng = random.Random(seed)
    num_lines = 0
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = output.stat().st_size if output.exists() else 0
        while process.poll() is None and (not output.exists() or output.stat().st_size <= size):
            time.sleep(0.005)  # the time before the first result is spent on imports; most kills belong after it
            if rng.random() < 0.0002:
                break
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.wait()
        whole = output.read_bytes().split(b"\n")[:-1] if output.exists() else []
        assert len([json.loads(line) for line in whole]) >= num_lines
        num_lines = len(whole)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in output.read_bytes().splitlines()]
    assert sorted(ids) == sorted(str(i) for i in range(num_items))


@pytest.mark.parametrize(
    ("num_items", "kills"), [(40, 2), pytest.param(120, 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_commands_lose_and_double_nothing(output, write_input, lines, tiny, num_items, kills) -> None:
    source = write_input([lines.chat(str(i), f"number {i}", max_tokens=12) for i in range(num_items)])
    check_killed_runs(source, output, tiny, num_items, kills, seed=num_items)


def test_a_resumed_run_gives_the_answers_of_an_unbroken_one(output, write_input, lines, tiny, tmp_path) -> None:
    from deepinfer.entrypoints.llm import LLM

    source = write_input([lines.chat(str(i), f"number {i}", max_tokens=6, temperature=1) for i in range(6)])
    whole = tmp_path / "whole.jsonl"
    for path, limits in ((whole, (None,)), (output, (2, 5, None))):
        for limit in limits:
            with LLM(tiny, dtype="float32", max_num_seqs=3) as llm:
                results = ResultFile(path)
                BatchRunner(llm, source, results, limit=limit).run()
                results.close()

    def answers(path):
        records = by_id([json.loads(line) for line in path.read_bytes().splitlines()])
        return {k: (r["response"]["body"]["choices"], r["response"]["body"]["seed"]) for k, r in records.items()}

    assert answers(output) == answers(whole)
