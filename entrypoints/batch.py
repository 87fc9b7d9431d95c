"""The main job: a file of requests in, a file of results out, in one pass and with flat memory.

The input is read as it is needed; a bounded number of requests is in flight, and each result is written the moment it
is there. What is wrong with an item becomes its error line. A run that was stopped, in whatever way, is resumed by
starting it again: items that have a line in the output are skipped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.speculation import SpeculationStats
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.openai_batch import (
    BatchItem,
    error_record,
    parse_line,
    prepare,
    response_record,
)
from deepinfer.entrypoints.prompts import PreparedPrompt
from deepinfer.entrypoints.result_file import ResultFile
from deepinfer.entrypoints.session import SessionClosedError
from deepinfer.ops.show import shown

_IN_FLIGHT_PER_SEQ = 2


@dataclass
class BatchSummary:
    """What a run did.

    Attributes:
        num_items: items of the input that were looked at.
        num_answered: answered in this run.
        num_skipped: had a line in the output before.
        num_failed_before: of these, items whose line is an error.
        errors: items that failed in this run, by code.
        num_prompt_tokens: of the items answered.
        num_generated_tokens: generated in this run.
        seconds: wall time.
        stopped_by: the signal that ended the run early, None if it came to its end.
        speculation: what became of the engine's drafts so far; None without speculation.
    """

    num_items: int = 0
    num_answered: int = 0
    num_skipped: int = 0
    num_failed_before: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0
    stopped_by: int | None = None
    speculation: SpeculationStats | None = None

    @property
    def num_failed(self) -> int:
        """Items that failed in this run."""
        return self.errors.total()

    @property
    def num_done(self) -> int:
        """Items that have a line in the output."""
        return self.num_answered + self.num_failed + self.num_skipped

    @property
    def exit_status(self) -> int:
        """0 when every item has an answer, 1 when some failed, 128 + signal when the run was stopped."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 1 if self.num_failed or self.num_failed_before else 0


class BatchRunner:
    """One run over an input file.

    Args:
        llm: answers.
        source: lines of requests, in OpenAI's batch format.
        results: where lines go.
        max_tokens: for requests that do not say; see `openai_batch.prepare`.
        limit: look at so many items only.
        max_in_flight: requests in the engine at once; by default twice `max_num_seqs`.
        on_progress: called with the summary so far, after every step.
    """

    def __init__(
        self,
        llm: LLM,
        source: str | Path,
        results: ResultFile,
        *,
        max_tokens: int | None = None,
        limit: int | None = None,
        max_in_flight: int | None = None,
        on_progress: Callable[[BatchSummary], None] | None = None,
    ) -> None:
        self._llm = llm
        self._source = Path(source)
        self._results = results
        self._max_tokens = max_tokens
        self._limit = limit
        self._max_in_flight = max_in_flight or _IN_FLIGHT_PER_SEQ * llm.config.max_num_seqs
        self._on_progress = on_progress
        self._seen: set[str] = set()
        self._live: set[str] = set()
        self.summary = BatchSummary()

    def run(self) -> BatchSummary:
        """Answer what is not answered yet.

        SIGINT and SIGTERM end the run after the step that is under way; what is unfinished is answered next time. A
        second signal ends it at once.

        Raises:
            ResultFileError: a result cannot be written.
            OSError: the input cannot be read.
        """
        summary = self.summary
        started = time.monotonic()
        before = self._llm.stats.num_generated_tokens
        try:
            self._results.begin()
            with open(self._source, "rb") as file, self._stop_on_signals(), self._llm.session.live() as self._live:
                lines = _numbered_lines(file, self._limit)
                more = True
                while summary.stopped_by is None:
                    while more and len(self._live) < self._max_in_flight and summary.stopped_by is None:
                        line = next(lines, None)
                        if line is None:
                            more = False
                        else:
                            self._take(*line)
                    if not self._live:
                        break
                    self._llm.session.step()
                    self._report(started, before)
        finally:
            self._report(started, before)
            self._results.sync()
        return summary

    def _take(self, number: int, data: bytes) -> None:
        """Start one item, skip it, or write its error."""
        summary = self.summary
        summary.num_items += 1
        custom_id, item = parse_line(number, data)
        if custom_id is not None and custom_id in self._seen:
            item = RequestError("duplicate_custom_id", f"custom_id {shown(custom_id)} was used by an earlier line")
            key: int | str = number
        else:
            key = number if custom_id is None else custom_id
        if custom_id is not None:
            self._seen.add(custom_id)
        if key in self._results.answered:
            summary.num_skipped += 1
            summary.num_failed_before += key in self._results.failed
        elif isinstance(item, RequestError):
            self._fail(number, custom_id, item)
        else:
            self._start(item)

    def _start(self, item: BatchItem) -> None:
        llm = self._llm
        try:
            prompt, params = prepare(
                item, llm.prompts, max_len=llm.session.engine.max_len, default_max_tokens=self._max_tokens
            )
            self._submit(item, prompt, params)
        except SessionClosedError:
            raise
        except Exception as error:
            self._fail(item.line, item.custom_id, as_request_error("internal_error", error))

    def _submit(self, item: BatchItem, prompt: PreparedPrompt, params: SamplingParams) -> None:
        def sink(output: RequestOutput) -> None:
            if output.finished:
                self._live.discard(output.request_id)
                self._finish(item, prompt, output)

        self._live.add(self._llm.session.submit(prompt, params, sink, seed_key=item.custom_id))

    def _finish(self, item: BatchItem, prompt: PreparedPrompt, output: RequestOutput) -> None:
        if output.error is not None:
            self._fail(item.line, item.custom_id, output.error)
            return
        try:
            record = response_record(item, prompt, output, self._llm.prompts, self._llm.config.model)
        except Exception as error:
            self._fail(item.line, item.custom_id, as_request_error("internal_error", error))
            return
        self._results.append(record)
        self.summary.num_answered += 1
        self.summary.num_prompt_tokens += len(output.prompt_token_ids)

    def _fail(self, number: int, custom_id: str | None, error: RequestError) -> None:
        self._results.append(error_record(number, custom_id, error))
        self.summary.errors[error.code] += 1

    def _report(self, started: float, before: int) -> None:
        self.summary.seconds = time.monotonic() - started
        stats = self._llm.stats
        self.summary.num_generated_tokens = stats.num_generated_tokens - before
        self.summary.speculation = stats.speculation
        if self._on_progress is not None:
            self._on_progress(self.summary)

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into a request to stop, the next one into what it was before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.getsignal(kind) for kind in kinds}

        def stop(kind: int, frame: FrameType | None) -> None:
            self.summary.stopped_by = kind
            for other in kinds:
                signal.signal(other, before[other])

        for kind in kinds:
            signal.signal(kind, stop)
        try:
            yield
        finally:
            for kind in kinds:
                signal.signal(kind, before[kind])


def count_items(source: str | Path) -> int:
    """Lines of a file that are not blank; reads it once, keeping nothing."""
    with open(source, "rb") as file:
        return sum(1 for line in file if line.strip())


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths are one existing file."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _numbered_lines(file: Iterator[bytes], limit: int | None) -> Iterator[tuple[int, bytes]]:
    taken = 0
    for number, line in enumerate(file, 1):
        if limit is not None and taken >= limit:
            return
        if line.strip():
            taken += 1
            yield number, line
