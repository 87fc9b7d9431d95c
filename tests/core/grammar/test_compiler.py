"""Compiling beside the steps: deadlines, cancelling, sharing, and workers that die."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.grammar import matching
from deepinfer.core.grammar import service as service_module
from deepinfer.core.grammar.compiler import GrammarCompiler
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import GrammarSource
from deepinfer.core.grammar.spec import StructuredOutput, StructuredOutputError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import HashModel
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS = 384, 1

pytestmark = pytest.mark.usefixtures("one_thread")


def endless(name="x"):
    """A grammar of a megabyte at most that takes the library most of a minute, and much memory."""
    rule = f'"{name}"'
    for level in range(10):
        rule = f'("a{level}" {rule} | "b{level}" {rule} | "c" {rule})'
    return "root ::= " + rule


@pytest.fixture(scope="module")
def compiler(vocabulary):
    """One for all tests, because a worker takes seconds to start."""
    made = GrammarCompiler(vocabulary, num_workers=1, cache_bytes=1 << 20)
    yield made
    made.close()


def finish(compiler, job, seconds=120):
    compiler.wait([job], seconds)
    assert job.is_done
    return job


def regex(text):
    return GrammarSource("regex", text)


def is_unknown(compiler, source):
    """Whether a grammar that is asked for has to be compiled; `is_done` may be true by the time that it is read."""
    before = compiler.num_hits
    compiler.submit(source, 60)
    return compiler.num_hits == before


def test_a_grammar_that_takes_too_long_is_given_up_and_the_next_one_compiles(compiler) -> None:
    job = finish(compiler, compiler.submit(GrammarSource("ebnf", endless()), 1.0))
    assert job.error.code == "grammar_timeout" and "after 1 s" in job.error.message
    assert finish(compiler, compiler.submit(regex("[a-c]+"), 30)).grammar is not None
    again = compiler.submit(GrammarSource("ebnf", endless()), 0.5)
    assert again.is_done and again.error is job.error  # nobody spends that second again
    longer = compiler.submit(GrammarSource("ebnf", endless()), 60)
    assert not longer.is_done
    compiler.cancel(longer)


def test_requests_for_one_grammar_share_it(compiler) -> None:
    before = compiler.num_compiled, compiler.num_hits
    jobs = [compiler.submit(regex("[a-d]+"), 30) for _ in range(3)]
    assert jobs[0] is jobs[1] is jobs[2]
    finish(compiler, jobs[0])
    later = compiler.submit(regex("[a-d]+"), 30)
    assert later.grammar is jobs[0].grammar
    assert (compiler.num_compiled, compiler.num_hits) == (before[0] + 1, before[1] + 3)


def test_a_grammar_nobody_waits_for_is_stopped_and_holds_nobody_up(compiler) -> None:
    finish(compiler, compiler.submit(regex("a"), 30))  # the worker is there
    hostile = compiler.submit(GrammarSource("ebnf", endless("y")), 600)
    both = compiler.submit(GrammarSource("ebnf", endless("y")), 600)
    queued = compiler.submit(regex("b+"), 30)
    while hostile.process is None:
        time.sleep(0.01)
    compiler.wait([hostile], 0.5)
    compiler.cancel(hostile)
    compiler.wait([queued], 0.3)
    assert not queued.is_done  # another request still wants it
    compiler.cancel(both)
    assert finish(compiler, queued).grammar is not None
    assert hostile.error.code == "grammar_failed"


def test_a_queued_grammar_can_be_cancelled(compiler) -> None:
    first = compiler.submit(GrammarSource("ebnf", endless("z")), 600)
    second = compiler.submit(regex("c+"), 30)
    compiler.cancel(second)
    compiler.cancel(first)
    third = compiler.submit(regex("c+"), 30)
    assert third is not second and finish(compiler, third).grammar is not None


def test_the_cache_is_bounded(vocabulary, compiler) -> None:
    size = finish(compiler, compiler.submit(regex("[a-c]+"), 60)).grammar.num_bytes
    small = GrammarCompiler(vocabulary, num_workers=1, cache_bytes=int(2.5 * size))
    try:
        for letter in "defg":
            finish(small, small.submit(regex(f"[a-{letter}]+"), 60))
        assert 0 < small.num_cached_bytes <= 2.5 * size
        assert small.submit(regex("[a-g]+"), 60).is_done
        assert is_unknown(small, regex("[a-d]+"))
    finally:
        small.close()


def test_what_is_remembered_of_grammars_that_cannot_be_had_is_bounded_in_bytes(vocabulary) -> None:
    wrong = [regex(f"({letter * 5000}") for letter in "abcd"]
    made = GrammarCompiler(vocabulary, num_workers=1, cache_bytes=0, failure_bytes=12_000)
    try:
        errors = [finish(made, made.submit(source, 60)).error for source in wrong[:2]]
        assert made.submit(wrong[0], 60).error is errors[0]  # it was used last, so the other one goes
        finish(made, made.submit(wrong[2], 60))
        assert 10_000 < made.num_failure_bytes <= 12_000
        assert made.submit(wrong[0], 60).error is errors[0]
        assert made.submit(wrong[2], 60).is_done and is_unknown(made, wrong[1])
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GrammarSource("ebnf", 'root ::= "a" nope'), 'Rule "nope" is not defined'),
        (GrammarSource("ebnf", 'start ::= "a"'), 'The root rule with name "root" is not found'),
        (regex("(a"), "parenthesis is not closed"),
        (regex("a(?=b)"), "Lookahead is not supported"),
    ],
)
def test_a_wrong_grammar_says_what_is_wrong(compiler, source, said) -> None:
    error = finish(compiler, compiler.submit(source, 60)).error
    assert error.code == "invalid_grammar"
    assert said in error.message and ".cc:" not in error.message


def test_a_worker_that_dies_takes_one_grammar_with_it(compiler) -> None:
    finish(compiler, compiler.submit(regex("a"), 60))
    job = compiler.submit(GrammarSource("ebnf", endless("w")), 600)
    while job.process is None:
        time.sleep(0.01)
    os.kill(job.process.pid, signal.SIGSEGV)
    assert finish(compiler, job).error.code == "grammar_failed"
    assert f"code {-signal.SIGSEGV}" in job.error.message
    assert finish(compiler, compiler.submit(regex("b"), 60)).grammar is not None


def has_ended(pid):
    """Whether a process is gone, or waits to be reaped by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_worker_that_died_idle_is_replaced(compiler) -> None:
    finish(compiler, compiler.submit(regex("w"), 60))
    (process,) = compiler._processes
    os.kill(process.pid, signal.SIGKILL)
    while process.is_alive:
        time.sleep(0.01)
    assert finish(compiler, compiler.submit(regex("ww"), 60)).grammar is not None


@pytest.mark.parametrize("size", [1, 200_000])
def test_a_worker_that_stands_still_is_given_up(compiler, size) -> None:
    """It does not even take in a text that is longer than the pipe."""
    finish(compiler, compiler.submit(regex("u"), 60))
    (process,) = compiler._processes
    os.kill(process.pid, signal.SIGSTOP)
    job = finish(compiler, compiler.submit(regex("uu" * size), 0.5), 30)
    assert job.error.code == "grammar_timeout" and "after 0.5 s" in job.error.message
    assert finish(compiler, compiler.submit(regex("uv"), 60)).grammar is not None


def test_a_worker_that_does_not_start_in_time_is_no_fault_of_the_grammar(vocabulary, monkeypatch) -> None:
    made = GrammarCompiler(vocabulary, num_workers=1, cache_bytes=0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("deepinfer.core.grammar.compiler.START_SECONDS", 0.01)
            error = finish(made, made.submit(regex("a"), 60)).error
        assert error.code == "grammar_failed" and "starting up was not done after 0.01 s" in error.message
        assert finish(made, made.submit(regex("a"), 60)).grammar is not None
    finally:
        made.close()


def test_an_interrupt_from_the_terminal_reaches_no_worker(compiler) -> None:
    finish(compiler, compiler.submit(regex("i"), 60))
    (process,) = compiler._processes
    assert os.getpgid(process.pid) != os.getpgrp()


def test_the_longest_time_is_no_time_at_all_to_a_small_grammar(compiler) -> None:
    assert finish(compiler, compiler.submit(regex("[t-v]"), sys.float_info.max)).grammar is not None
    assert finish(compiler, compiler.submit(regex("[t-w]"), 60)).grammar is not None


def test_grammars_compile_in_a_program_with_many_files_open(compiler) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this system allows too few open files")
    finish(compiler, compiler.submit(regex("m"), 60))
    (process,) = compiler._processes
    process.kill()  # the next one gets files of high numbers
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert finish(compiler, compiler.submit(regex("mm"), 60)).grammar is not None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_ends_with_the_program_that_started_it() -> None:
    program = """
import os, signal, time
from deepinfer.core.grammar.compiler import _Process
process = _Process()
holder = os.fork()
if holder == 0:  # holds the pipes open, so that the worker does not see them closed
    os.close(1)
    time.sleep(300)
    os._exit(0)
print(process.pid, holder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    worker, holder = map(int, done.stdout.split())
    try:
        end = time.monotonic() + 60
        while not has_ended(worker) and time.monotonic() < end:
            time.sleep(0.05)
        assert has_ended(worker) and not has_ended(holder)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_close_ends_what_runs(vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, num_workers=2, cache_bytes=0)
    jobs = [compiler.submit(GrammarSource("ebnf", endless(name)), 600) for name in ("p", "q", "r")]
    compiler.close()
    assert all(job.error.code == "grammar_unavailable" for job in jobs)


@pytest.fixture
def engine(tokenizer, grammars):
    config = EngineConfig(block_size=4, window_page=2, num_kv_blocks=64, max_num_seqs=8)
    engine = Engine(HashModel(VOCAB, eos_token_ids=(EOS,)), config, cpu_ops(), tokenizer, grammars=grammars)
    yield engine
    engine.close()
    assert engine.blocks.num_free_blocks == engine.blocks.pool.num_blocks


def constrained(**options):
    return SamplingParams(max_tokens=8, seed=3, structured_output=StructuredOutput(**options))


def test_plain_requests_go_on_while_a_grammar_compiles_sx_5(engine) -> None:
    """The compile has a deadline of its own, after which that request ends with a typed error."""
    engine.add_request("slow", [5, 6], constrained(grammar=endless("u"), timeout=2.0))
    engine.add_request("plain", [5, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    order, stats = [], None
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                order.append(output)
                stats = stats or (engine.stats().num_compiling, engine.stats().num_waiting)
    assert [output.request_id for output in order] == ["plain", "slow"]
    assert stats == (1, 0)
    assert len(order[0].outputs[0].token_ids) == 30
    assert order[1].error.code == "grammar_timeout" and order[1].outputs[0].finish_reason == "error"


def test_a_request_waits_for_a_worker_for_a_bounded_time(engine, monkeypatch) -> None:
    """Requests for the grammar under way do wait for it, and so does who asks once the worker is free."""
    monkeypatch.setattr(engine._intake._grammars, "queue_timeout", 0.5)
    engine.add_request("slow", [5, 6], constrained(grammar=endless("s"), timeout=600))
    while engine._intake._compiling["slow"].job.is_queued:
        time.sleep(0.01)
    late = constrained(regex="[q-s]+"), constrained(regex="[q-s]+")
    engine.add_request("behind", [5, 6], late[0])
    time.sleep(0.3)
    began, ended = time.monotonic(), {}
    engine.add_request("later", [5, 6], late[1])  # shares the grammar, but has its own time
    engine.add_request("same", [5, 7], constrained(grammar=endless("s"), timeout=600))
    while len(ended) < 2:
        for output in engine.step():
            ended[output.request_id] = time.monotonic() - began, output
    assert list(ended) == ["behind", "later"] and ended["later"][0] >= 0.49
    for _, output in ended.values():
        assert output.error.code == "grammar_queue_timeout" and output.outputs[0].finish_reason == "error"
        assert "within 0.5 s" in output.error.message and "grammar_queue_timeout" in output.error.message
    assert engine.stats().num_compiling == 2  # the others are none the worse for it
    assert engine.abort("slow") and engine.abort("same")
    monkeypatch.undo()
    engine.add_request("next", [5, 6], constrained(regex="[q-s]{3}"))
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert done[-1].request_id == "next" and done[-1].error is None


def test_a_request_can_be_aborted_while_its_grammar_compiles(engine) -> None:
    params = constrained(grammar=endless("v"), timeout=600)
    engine.add_request("slow", [5, 6], params)
    engine.step()
    assert engine.has_unfinished() and engine.abort("slow") and not engine.abort("slow")
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished()
    engine.add_request("next", [5, 6], constrained(choice=["b", "c"]))
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert done[-1].outputs[0].text in ("b", "c")


def test_without_the_package_the_request_is_refused_at_submit(engine, monkeypatch) -> None:
    monkeypatch.setattr(matching, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install xgrammar") as caught:
        engine.add_request("x", [5], constrained(regex="a"))
    assert caught.value.code == "grammar_unavailable"
    assert not engine.has_unfinished()


def test_an_engine_owns_its_grammars_and_closes_them(tokenizer) -> None:
    config = EngineConfig(block_size=4, window_page=2, num_kv_blocks=64, max_num_seqs=8, grammar_timeout=30.0)
    engine = Engine(HashModel(VOCAB, eos_token_ids=(EOS,)), config, cpu_ops(), tokenizer)
    engine.add_request("x", [5], constrained(regex="a"))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("y", [5], constrained(regex="a"))


def test_the_deadline_is_the_engines_where_the_request_names_none(tokenizer) -> None:
    service = GrammarService(tokenizer, VOCAB, (EOS,), timeout=7.5)
    spec = StructuredOutput(choice=["a"])
    assert service.submit(spec, service.source(spec)).timeout == 7.5
    spec = StructuredOutput(choice=["b"], timeout=2.0)
    assert service.submit(spec, service.source(spec)).timeout == 2.0
    service.close()


def test_a_form_that_was_refused_is_not_read_again(tokenizer, monkeypatch) -> None:
    """`AsyncLLM` has it refused before the engine's thread is asked, which is to lose no time."""
    read = []
    source_of = service_module.source_of
    monkeypatch.setattr(service_module, "source_of", lambda *args: (read.append(1), source_of(*args))[1])
    service = GrammarService(tokenizer, VOCAB, (EOS,))
    errors = []
    for _ in range(2):
        with pytest.raises(StructuredOutputError, match="'root' can never match") as caught:
            service.source(StructuredOutput(grammar="root ::= root"))
        errors.append(caught.value)
    service.close()
    assert len(read) == 1 and errors[0] is not errors[1]
