"""Compiles grammars beside the steps of an engine, each within a time, in processes that can be killed.

A schema of a few lines can take hours to compile, and native code in a thread cannot be interrupted. So each worker is
a process of its own; one that passes its time, or that nobody waits for any more, is killed, and the next grammar gets
a new one. Results are kept, up to a number of bytes; so is the knowledge that a grammar took too long. Whoever waits
for a worker can see that by `GrammarJob.is_queued`, and gives up with `cancel`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar import worker
from deepinfer.core.grammar.kept import Kept
from deepinfer.core.grammar.matching import CompiledGrammar, Loader
from deepinfer.core.grammar.source import GrammarSource
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.ops.show import shown

START_SECONDS: Final = 120
"""A worker that is not ready by then never will be."""
_LONGEST_SECONDS: Final = 1 << 20
"""Twelve days: whoever waits longer waits for ever, and the system's timers take no number of seconds."""
FAILURE_BYTES: Final = 16 << 20
"""What is remembered of grammars that cannot be had: their texts and errors."""
_PLACE_IN_LIBRARY: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")


@dataclass(eq=False)
class GrammarJob:
    """A grammar on its way.

    Attributes:
        source: what is compiled.
        timeout: seconds that it may take, not counting its time in the queue.
        grammar: the result, once there is one.
        error: why there will be none.
        num_waiting: requests that want it.
        is_queued: no worker was free for it yet.
    """

    source: GrammarSource
    timeout: float
    grammar: CompiledGrammar | None = None
    error: RequestError | None = None
    num_waiting: int = 1
    is_queued: bool = False
    process: _Process | None = field(default=None, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether there is a result or an error."""
        return self.grammar is not None or self.error is not None


class GrammarCompiler:
    """Workers and what they made. Threads and processes start with the first grammar.

    Args:
        vocabulary: of the model.
        num_workers: grammars that compile at a time.
        cache_bytes: most bytes of grammars to keep that nobody uses now; 0 keeps none.
        failure_bytes: most bytes of grammars that cannot be had to remember.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        num_workers: int,
        cache_bytes: int,
        failure_bytes: int = FAILURE_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._num_workers = num_workers
        self._lock = threading.Condition()
        self._queue: deque[GrammarJob] = deque()
        self._jobs: dict[GrammarSource, GrammarJob] = {}
        self._cache: Kept[GrammarSource, CompiledGrammar] = Kept(cache_bytes)
        self._failures: Kept[GrammarSource, tuple[float, RequestError]] = Kept(failure_bytes)
        self._loader: Loader | None = None
        self._threads: list[threading.Thread] = []
        self._processes: set[_Process] = set()
        self._is_closed = False
        self.num_compiled = 0
        """Grammars that were compiled, whether it worked or not."""
        self.num_hits = 0
        """Requests whose grammar, or its error, was known."""

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of kept grammars."""
        with self._lock:
            return self._cache.num_bytes

    @property
    def num_failure_bytes(self) -> int:
        """Bytes of what is remembered of grammars that cannot be had."""
        with self._lock:
            return self._failures.num_bytes

    def submit(self, source: GrammarSource, timeout: float) -> GrammarJob:
        """Ask for a grammar. Requests that ask for the same one share the work.

        Args:
            source: the grammar.
            timeout: seconds that compiling may take; beyond twelve days it makes no difference.

        Returns:
            The job, done at once where the outcome is known.
        """
        timeout = min(timeout, _LONGEST_SECONDS)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the grammar compiler is closed")
            kept = self._cache.get(source)
            failed = self._failures.get(source)
            if kept is not None:
                self.num_hits += 1
                return GrammarJob(source, timeout, grammar=kept)
            if failed is not None and failed[0] >= timeout:
                self.num_hits += 1
                return GrammarJob(source, timeout, error=failed[1])
            job = self._jobs.get(source)
            if job is not None and job.timeout >= timeout:
                job.num_waiting += 1
                self.num_hits += 1
                return job
            job = GrammarJob(source, timeout, is_queued=True)
            self._jobs[source] = job
            self._queue.append(job)
            if len(self._threads) < min(self._num_workers, len(self._jobs)):
                name = f"deepinfer-grammar-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._lock.notify_all()
            return job

    def cancel(self, job: GrammarJob) -> None:
        """One request does not want a grammar any more; the last one stops the work."""
        with self._lock:
            job.num_waiting -= 1
            if job.num_waiting > 0 or job.is_done:
                return
            self._forget(job)  # whoever wants it from now on starts anew
            if job in self._queue:
                self._queue.remove(job)
            elif job.process is not None:
                job.process.kill()

    def wait(self, jobs: list[GrammarJob], seconds: float) -> None:
        """Block until one of the jobs is done, or so long."""
        with self._lock:
            self._lock.wait_for(lambda: any(job.is_done for job in jobs), seconds)

    def close(self) -> None:
        """Stop all work; whatever was not done gets an error."""
        with self._lock:
            self._is_closed = True
            for job in self._jobs.values():
                job.error = job.error or RequestError("grammar_unavailable", "the engine was closed")
            for process in self._processes:
                process.kill()
            self._queue.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """One thread: takes jobs, and keeps a process for them."""
        process: _Process | None = None
        try:
            while (job := self._next()) is not None:
                if process is not None and not process.is_alive:
                    self._drop(process)  # something else ended it since: no fault of this grammar
                    process = None
                try:
                    if process is None:
                        process = self._start()
                    grammar, error = self._compile(process, job), None
                except _ProcessDiedError as died:
                    if process is not None:
                        self._drop(process)
                    process, grammar = None, None
                    error = RequestError(died.code, str(died))
                except RequestError as refused:
                    grammar, error = None, refused
                except Exception as fault:  # whatever a library raises is this grammar's end, not this thread's
                    if process is not None:
                        self._drop(process)  # it may still owe an answer, which is not to be the next grammar's
                        process = None
                    grammar, error = None, RequestError("grammar_failed", f"{type(fault).__name__}: {fault}")
                self._finish(job, grammar, error)
        finally:
            if process is not None:
                self._drop(process)

    def _start(self) -> _Process:
        """A new process, ready for grammars.

        Raises:
            _ProcessDiedError: it is not, and never will be.
        """
        process = _Process()
        with self._lock:
            self._processes.add(process)
            if self._is_closed:
                process.kill()
        try:
            process.begin(self._vocabulary)
        except _ProcessDiedError:
            self._drop(process)
            raise
        return process

    def _drop(self, process: _Process) -> None:
        with self._lock:
            self._processes.discard(process)
        process.close()

    def _next(self) -> GrammarJob | None:
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            job = self._queue.popleft()
            job.is_queued = False
            return job

    def _compile(self, process: _Process, job: GrammarJob) -> CompiledGrammar:
        if self._loader is None:
            self._loader = Loader(self._vocabulary)  # two threads may both make one: either will do
        with self._lock:
            if job.num_waiting <= 0 or self._is_closed:
                raise RequestError("grammar_cancelled", "nobody waits for this grammar")
            job.process = process
        try:
            text = process.compile(job.source, job.timeout)
        finally:
            with self._lock:
                job.process = None
        return self._loader.load(text)

    def _finish(self, job: GrammarJob, grammar: CompiledGrammar | None, error: RequestError | None) -> None:
        with self._lock:
            job.grammar, job.error = grammar, job.error or error
            self._forget(job)
            self.num_compiled += 1
            if grammar is not None:
                self._cache.put(job.source, grammar, grammar.num_bytes + sys.getsizeof(job.source.text))
            elif error is not None and error.code in ("grammar_timeout", "invalid_grammar"):
                known = float("inf") if error.code == "invalid_grammar" else job.timeout
                size = sys.getsizeof(job.source.text) + sys.getsizeof(error.message)
                self._failures.put(job.source, (known, error), size)
            self._lock.notify_all()

    def _forget(self, job: GrammarJob) -> None:
        if self._jobs.get(job.source) is job:
            del self._jobs[job.source]


class _ProcessDiedError(Exception):
    """The process is gone."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Process:
    """One worker process."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,  # what a terminal's Ctrl-C ends is the program's business
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
        self._is_killed = False
        self._is_late = False

    def begin(self, vocabulary: GrammarVocabulary) -> None:
        """Give it the vocabulary and wait until it is ready.

        Raises:
            _ProcessDiedError: it did not start.
        """
        try:
            self._ask((vocabulary.token_bytes(), list(vocabulary.eos_token_ids)), START_SECONDS, "starting up")
        except _ProcessDiedError as died:  # even where it was late: the grammar it was to compile took no time
            raise _ProcessDiedError("grammar_failed", str(died)) from died

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it may still be asked."""
        return not self._is_killed and self._popen.poll() is None

    def kill(self) -> None:
        """End it from another thread; whoever waits for an answer gets an error."""
        self._is_killed = True
        self._popen.kill()

    def compile(self, source: GrammarSource, seconds: float) -> str:
        """The compiled grammar, as text for a `Loader`.

        Raises:
            RequestError: the grammar is wrong.
            _ProcessDiedError: it took too long, or too much; the process is gone.
        """
        kind, text = self._ask((source.kind, source.text, seconds), seconds, f"the grammar {shown(source.text)}")
        if kind == "error":
            why = _PLACE_IN_LIBRARY.sub("", text).strip()
            raise RequestError("invalid_grammar", f"the {source.kind} {shown(source.text)} cannot be used: {why}")
        return str(text)

    def close(self) -> None:
        """End the process and free what it holds."""
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdout, self._log):
            if stream is not None:
                stream.close()
        with contextlib.suppress(BrokenPipeError):  # what was not read any more
            assert self._popen.stdin is not None, "it is a pipe"
            self._popen.stdin.close()

    def _ask(self, message: Any, seconds: float, what: str) -> tuple[str, str]:
        source, sink = self._popen.stdout, self._popen.stdin
        assert source is not None and sink is not None, "both are pipes"
        # A clock of its own: writing a long text and reading a long answer may block just as waiting for one does.
        clock = threading.Timer(seconds, self._end_late)
        clock.daemon = True
        clock.start()
        try:
            worker.send(sink, message)
            kind, text = worker.receive(source)
        except (EOFError, OSError) as error:
            if self._is_late:
                raise _ProcessDiedError("grammar_timeout", f"{what} was not done after {seconds:g} s") from error
            self._log.seek(0)
            log = self._log.read()[-500:].decode(errors="replace").strip()
            code = self._popen.wait()
            why = f"ended with code {code}" + (f": {log}" if log else "")
            raise _ProcessDiedError("grammar_failed", f"{what}: the process that compiles grammars {why}") from error
        finally:
            clock.cancel()
        return kind, text

    def _end_late(self) -> None:
        self._is_late = True
        self.kill()
