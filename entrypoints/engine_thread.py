"""The thread that owns a session's engine: it takes commands between steps, runs steps, and wakes who has news.

Whoever calls from another thread never waits for a step. A consumer that is gone, or whose event loop is closed, has
its request aborted; what a request does wrong ends that request alone. When steps fail and the engine cannot even
say so, everybody is told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.mailbox import Mailbox
from deepinfer.entrypoints.prompts import PreparedPrompt
from deepinfer.entrypoints.session import Session, SessionClosedError

if TYPE_CHECKING:
    from deepinfer.core.engine import Engine

_Result = TypeVar("_Result")
_LOG = logging.getLogger(__name__)


class EngineDeadError(SessionClosedError):
    """The engine failed and could not go on; the cause is attached. Remedy: make a new one."""

    def __init__(self, cause: BaseException) -> None:
        what = f"{type(cause).__name__}: {cause}"
        RuntimeError.__init__(self, f"the engine has failed, and what was running has ended; make a new one ({what})")
        self.__cause__ = cause


class _Command(NamedTuple):
    """What the thread is asked to do, and what to do instead once it has ended."""

    run: Callable[[], None]
    refuse: Callable[[Exception], None]


class EngineThread:
    """Runs an engine until `stop`.

    Args:
        session: used by nobody else from now on.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._live: dict[Mailbox, str | None] = {}  # without an id once it was aborted and its result is on the way
        self._woken: list[Mailbox] = []
        self._lock = threading.Lock()
        self._is_stopping = False
        self._has_ended = False
        self._cause: BaseException | None = None
        # A daemon, so that a program that forgot to shut down can end; the owner's finalizer stops it in order.
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are still taken."""
        return not self._has_ended

    def add(
        self,
        mailbox: Mailbox,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        ordinal: int,
        request_id: str | None = None,
        **options: Any,
    ) -> None:
        """Queue a request; what becomes of it, a refusal too, arrives in its mailbox.

        Args:
            mailbox: new.
            prompt: from a `PromptReader`.
            params: how to sample.
            ordinal: names the request where it has no seed, and no id.
            request_id: None for one that is free.
            options: passed to `Session.submit`.

        Raises:
            SessionClosedError: the thread has ended.
        """
        run = partial(self._add, mailbox, prompt, params, ordinal, request_id, options)
        self._post(_Command(run, partial(self._fail, mailbox)))

    def cancel(self, mailbox: Mailbox) -> None:
        """Abort a mailbox's request, if it is still live: nobody will take its result."""
        with suppress(SessionClosedError):  # then everything has ended already
            self._post(_Command(partial(self._drop, mailbox), lambda error: None))

    def abort(self, request_ids: Collection[str]) -> Future[int]:
        """End requests; their mailboxes get what they have produced.

        Returns:
            How many of them were live.
        """
        return self.call(lambda session: sum(self._abort(request_id) for request_id in request_ids))

    def call(self, function: Callable[[Session], _Result]) -> Future[_Result]:
        """Let the thread call `function` between steps.

        Raises:
            SessionClosedError: the thread has ended; if it ends before the call, the future raises it.
        """
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self._session)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def refuse(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._post(_Command(run, refuse))
        return future

    def stop(self) -> None:
        """End the thread and the engine after the step that runs; requests that are live fail. May be repeated."""
        with suppress(SessionClosedError):  # it has ended, or is about to
            self._post(_Command(self._begin_to_stop, lambda error: None))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: _Command) -> None:
        with self._lock:  # so that none is put behind the last one that `_end` refuses
            if self._has_ended:
                raise self._closed()
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._obey()
                if not self._is_stopping and self._engine.has_unfinished():
                    self._step()
                self._wake()
        except BaseException as error:
            _LOG.exception("the engine has failed")
            self._cause = error
        self._end()

    def _obey(self) -> None:
        """Run the commands that are there; with no work to do, wait for one."""
        waits = not self._engine.has_unfinished()
        for _ in range(max(1, self._commands.qsize())):  # those that come meanwhile do not hold up the step
            try:
                command = self._commands.get(block=waits)
            except Empty:
                return
            command.run()
            waits = False

    def _step(self) -> None:
        try:
            self._session.step()
        except Exception:
            # Its requests have ended with `engine_error`, which the next call hands out; that it works is the proof
            # that the engine can go on. The results name the error, the log has its traceback.
            _LOG.exception("a step failed, and all live requests with it")
            self._session.step()

    def _add(
        self,
        mailbox: Mailbox,
        prompt: PreparedPrompt,
        params: SamplingParams,
        ordinal: int,
        request_id: str | None,
        options: dict[str, Any],
    ) -> None:
        sink = partial(self._deliver, mailbox)
        try:
            self._live[mailbox] = self._session.submit(
                prompt, params, sink, request_id=request_id, seed_key=ordinal, **options
            )
        except RequestError as error:
            name = str(ordinal) if request_id is None else request_id
            self._deliver(mailbox, RequestOutput(name, prompt.text, prompt.token_ids, finished=True, error=error))
        except Exception as error:  # the caller's, such as a parameter of an unknown kind: not this thread's end
            self._fail(mailbox, error)

    def _deliver(self, mailbox: Mailbox, output: RequestOutput) -> None:
        if output.finished:
            self._live.pop(mailbox, None)
        if mailbox.loop.is_closed():
            self._drop(mailbox)
            return
        if mailbox.put(output):
            self._woken.append(mailbox)

    def _fail(self, mailbox: Mailbox, error: Exception) -> None:
        self._live.pop(mailbox, None)
        mailbox.fail(error)
        self._woken.append(mailbox)

    def _abort(self, request_id: str) -> bool:
        for mailbox, live_id in self._live.items():
            if live_id == request_id:
                self._live[mailbox] = None
                return self._session.abort(request_id, deliver=True)
        return False

    def _drop(self, mailbox: Mailbox) -> None:
        request_id = self._live.pop(mailbox, None)
        if request_id is not None:
            self._session.abort(request_id)

    def _wake(self) -> None:
        """Wake who has news, with one call per event loop."""
        woken, self._woken = self._woken, []
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Mailbox]] = defaultdict(list)
        for mailbox in woken:
            by_loop[mailbox.loop].append(mailbox)
        for loop, mailboxes in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, mailboxes)
            except RuntimeError:  # it was closed, so nobody will ever take what is in them
                for mailbox in mailboxes:
                    self._drop(mailbox)

    def _begin_to_stop(self) -> None:
        self._is_stopping = True

    def _closed(self) -> SessionClosedError:
        """Why nothing goes on; a new error for each who is told."""
        return SessionClosedError() if self._cause is None else EngineDeadError(self._cause)

    def _end(self) -> None:
        """Refuse what is left, fail what is live, free the engine."""
        with self._lock:
            self._has_ended = True
        while not self._commands.empty():
            self._commands.get().refuse(self._closed())
        for mailbox in list(self._live):
            self._fail(mailbox, self._closed())
        self._wake()
        try:
            self._session.close()
        except Exception:  # of an engine that has failed: everybody knows by now
            _LOG.exception("the engine could not be closed in order")

    @property
    def _engine(self) -> Engine:
        return self._session.engine


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
