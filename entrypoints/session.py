"""An engine shared by several callers: each gets the results of its own requests.

Steps run inside the calling thread. Whoever steps delivers everybody's results, so calls may be interleaved and come
from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.prompts import PreparedPrompt

if TYPE_CHECKING:
    from deepinfer.core.engine import Engine

Sink = Callable[[RequestOutput], None]


class SessionClosedError(RuntimeError):
    """The LLM was closed. Remedy: make a new one."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed, and what was running has ended; make a new one")


class Session:
    """Hands out request ids and seeds, and delivers results.

    Args:
        engine: not used by anybody else.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()
        self._outputs: dict[str, RequestOutput] = {}
        # By the result's identity: its id may be another request's by the time an abort is reported.
        self._sinks: dict[int, Sink] = {}
        self._ordinal = 0
        self._is_closed = False

    def submit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None = None,
        seed_key: int | str | None = None,
        **options: Any,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: from a `PromptReader`.
            params: how to sample.
            sink: called by `step` with the request's live result whenever it advances, last when it is `finished`.
            request_id: by default its ordinal here, or the next number that no live request has.
            seed_key: names the request where it has no seed; by default its ordinal here.
            options: passed to `Engine.add_request`; a prompt that has a `cache_salt` of its own keeps it.

        Returns:
            The request's id, for `abort`.

        Raises:
            RequestError: it cannot be served; nothing was queued.
            SessionClosedError: the session is closed.
        """
        with self._lock:
            if self._is_closed:
                raise SessionClosedError()
            ordinal = self._ordinal
            self._ordinal += 1
            if request_id is None:
                request_id = next(name for name in map(str, count(ordinal)) if name not in self._outputs)
            if prompt.cache_salt is not None:
                options["cache_salt"] = prompt.cache_salt
            output = self.engine.add_request(
                request_id,
                prompt.token_ids,
                prompt.constrain(params),
                prompt=prompt.text,
                seed_key=ordinal if seed_key is None else seed_key,
                **options,
            )
            self._outputs[request_id] = output
            self._sinks[id(output)] = sink
            return request_id

    def step(self) -> None:
        """Run one step of the engine and hand its results to their sinks.

        Raises:
            SessionClosedError: the session is closed.
        """
        with self._lock:
            if self._is_closed:
                raise SessionClosedError()
            for output in self.engine.step():
                sink = self._sinks.get(id(output))
                if output.finished:
                    self._sinks.pop(id(output), None)
                    if self._outputs.get(output.request_id) is output:
                        del self._outputs[output.request_id]
                if sink is not None:
                    sink(output)

    def abort(self, request_id: str, *, deliver: bool = False) -> bool:
        """End a request; False when it is not live.

        Args:
            request_id: from `submit`.
            deliver: its sink gets the result, with finish reason "abort", in the next step; else it is not called any
                more.
        """
        with self._lock:
            output = self._outputs.pop(request_id, None)
            if output is not None and not deliver:
                self._sinks.pop(id(output), None)
            return not self._is_closed and self.engine.abort(request_id)

    def submit_or_refuse(
        self, prompt: PreparedPrompt | RequestError, params: SamplingParams, sink: Sink, **options: Any
    ) -> str | RequestOutput:
        """The request's id, or the result of a request that was refused."""
        with self._lock:
            request_id = str(self._ordinal)
            if isinstance(prompt, RequestError):
                self._ordinal += 1  # later requests keep the seed they would have had
                return RequestOutput(request_id, finished=True, error=prompt)
            try:
                return self.submit(prompt, params, sink, **options)
            except RequestError as error:
                return RequestOutput(request_id, prompt.text, prompt.token_ids, finished=True, error=error)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Step until done.

        Raises:
            SessionClosedError: the session was closed before.
            RuntimeError: the engine has nothing left to do, so it never will be.
        """
        while not is_done():
            with self._lock:
                if not self._is_closed and not self.engine.has_unfinished() and not is_done():
                    raise RuntimeError("the engine has no work left, and requests have no result")
                self.step()

    @contextmanager
    def live(self) -> Iterator[set[str]]:
        """A set for request ids; whatever is in it and unfinished at the end of the block is aborted."""
        ids: set[str] = set()
        try:
            yield ids
        finally:
            for request_id in ids:
                self.abort(request_id)

    def close(self) -> None:
        """Abort what runs and free the engine; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._outputs.clear()
                self._sinks.clear()
                self.engine.close()
