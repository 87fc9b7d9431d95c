"""`AsyncLLM`: the engine for programs that live in an event loop.

The same prompts, parameters and results as `LLM`, bit for bit, as async generators. The engine runs on a thread of its
own (`engine_thread.py`) and no call waits for a step. Ending a generator in any way (`break`, `aclose`, a cancelled
task, an exception in its body) aborts the request and frees what it held.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from deepinfer.core.config import EngineConfig, EngineSettings
from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.build import DraftBinder, open_engine
from deepinfer.entrypoints.chat_protocol import ChatFormat
from deepinfer.entrypoints.chat_stream import ChatStream
from deepinfer.entrypoints.engine_thread import EngineThread
from deepinfer.entrypoints.mailbox import Mailbox
from deepinfer.entrypoints.prompts import ChatOutput, PreparedPrompt, PromptLike, PromptReader
from deepinfer.entrypoints.session import Session
from deepinfer.entrypoints.stream_output import StreamOutput, extend, snapshot
from deepinfer.ops.show import shown

if TYPE_CHECKING:
    from deepinfer.core.engine import Engine
    from deepinfer.core.stats import EngineStats
    from deepinfer.models.interface import Model

OutputKind = Literal["cumulative", "delta", "final"]
"""What each output of a generator holds: all so far; what is new since the last; or there is one output, the whole."""


class AsyncLLM:
    """A model, loaded and ready, for any number of coroutines.

    Calls may come from several event loops and threads. A slow consumer holds up nobody: what it has not taken yet is
    one piece that grows. As with `LLM`, a fault of a request is the `error` of its last output, and touches no other.

    Args:
        model: as for `LLM`, like all others.
        tokenizer: a folder or a `Tokenizer`.
        draft: proposes tokens.
        config: a file of settings, or an `EngineConfig`.
        on_load: called with (tensors done, tensors in all) while weights load.
        settings: fields of `EngineConfig`.

    Raises:
        ConfigError: settings that cannot be used, all of them named; nothing was loaded.
        ValueError: the checkpoint cannot be used; every fault is named before memory is taken.
        BackendUnavailableError: the backend is not installed or cannot run here.
    """

    def __init__(
        self,
        model: str | Path | Model = "",
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        draft: DraftBinder | None = None,
        config: str | Path | EngineConfig | None = None,
        on_load: Callable[[int, int], None] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._attach(*open_engine(model, tokenizer, draft, config, on_load, settings))

    @classmethod
    def from_engine(
        cls, engine: Engine, *, tokenizer: Tokenizer | None = None, chat: ChatFormat | None = None
    ) -> AsyncLLM:
        """An `AsyncLLM` around an engine that exists already, and that nobody else uses."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer, chat)
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer | None, chat: ChatFormat | None) -> None:
        self.config = engine.config
        self.tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, chat)
        self._ordinals = count()
        self._prepare_form = engine.prepare_form
        self._thread = EngineThread(Session(engine))
        weakref.finalize(self, self._thread.stop)  # also at the end of the program

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        cache_salt: str | None = None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Continue a prompt and watch it grow.

        Nothing is queued before the first output is asked for. A request without a seed gets one from the order of
        calls, as the prompts of `LLM.generate` do from theirs.

        Args:
            prompt: a text, token ids, or a dict, as for `LLM.generate`.
            sampling_params: how to sample; by default `SamplingParams()`.
            request_id: for `abort`; no other live request may have it. By default a number.
            output_kind: "cumulative" outputs hold everything so far; "delta" outputs the text, ids and logprobs that
                are new, of the choices that have some (a choice's last one has its `finish_reason`), and the
                prompt's logprobs once, when all are there; "final" gives one output, the result. Outputs are the
                caller's own: the engine has no part in them, and of one request they share the prompt's ids alone.
            cache_salt: only requests of equal salt share KV.

        Returns:
            A generator; its last output is `finished`. Steps that end before an output is asked for are one output.

        Raises:
            TypeError: an argument is of an unknown kind; nothing was queued.
            ValueError: there is no such `output_kind`.
            SessionClosedError: raised by the generator when the engine is shut down before the request has finished;
                `EngineDeadError` when it failed for good.
        """
        read = partial(self.prompts.read, prompt)
        return self._generate(self._ask(read, sampling_params, request_id, output_kind, cache_salt))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        thinking: bool | Mapping[str, Any] | None = None,
        reasoning_effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[ChatOutput, None]:
        """Answer one conversation.

        Args:
            messages: a list of messages with `role` and `content`.
            sampling_params: as for `generate`.
            request_id: as for `generate`.
            output_kind: as for `generate`. With "delta" a message holds the reasoning, the content and the calls that
                are new; calls come when they are complete, and note and token count with a choice's last one.
            thinking: False answers at once; by default the model thinks first.
            reasoning_effort: "low", "high", "xhigh", "max" or 1 to 100.
            tools: functions that may be called, as OpenAI writes them.
            tool_choice: as for `LLM.chat`.
            parallel_tool_calls: as for `LLM.chat`.
            response_format: as for `LLM.chat`.
            add_generation_prompt: begin a new assistant message; by default, unless the final message is continued.
            continue_final_message: go on with the last message, which must be the assistant's.
            cache_salt: only requests of equal salt share KV.

        Returns:
            A generator of outputs whose `messages[i]` is what `outputs[i]` says.

        Raises:
            Exception: as `generate`.
        """
        read = partial(
            self.prompts.read_messages,
            messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._chat(self._ask(read, sampling_params, request_id, output_kind, cache_salt))

    async def abort(self, request_id: str | Collection[str]) -> int:
        """End requests after the step that runs; their generators give what there is, with finish reason "abort".

        Args:
            request_id: one id, or several.

        Returns:
            How many of them were live.

        Raises:
            SessionClosedError: the engine was shut down.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        return await asyncio.wrap_future(self._thread.abort(ids))

    async def stats(self) -> EngineStats:
        """The engine's counters between two steps, as a copy.

        Raises:
            SessionClosedError: the engine was shut down.
        """
        return await asyncio.wrap_future(self._thread.call(lambda session: replace(session.engine.stats())))

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: not shut down, and not failed for good."""
        return self._thread.is_running

    def shutdown(self) -> None:
        """Abort what runs and free the engine; a second call does nothing. Waits for the step that runs."""
        self._thread.stop()

    async def aclose(self) -> None:
        """`shutdown`, without holding up the event loop."""
        await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _ask(
        self,
        read: Callable[[], PreparedPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
        cache_salt: str | None,
    ) -> _Ask:
        params = SamplingParams() if params is None else params
        return _Ask(read, params, request_id, output_kind, cache_salt, next(self._ordinals))

    async def _generate(self, ask: _Ask) -> AsyncGenerator[StreamOutput, None]:
        whole: StreamOutput | None = None
        async with aclosing(self._run(ask)) as pieces:
            async for _, news in pieces:
                if ask.output_kind != "cumulative":
                    yield news
                    continue
                if whole is None:
                    whole = news
                else:
                    extend(whole, news)
                yield snapshot(whole, 0, news.delta)

    async def _chat(self, ask: _Ask) -> AsyncGenerator[ChatOutput, None]:
        stream: ChatStream | None = None
        async with aclosing(self._run(ask)) as pieces:
            async for prompt, news in pieces:
                if stream is None:
                    stream = ChatStream(self.prompts, prompt, ask.params, ask.output_kind == "delta")
                yield stream.feed(news)

    def _read(self, ask: _Ask) -> PreparedPrompt:
        """What takes a while for a long text or a large schema, and need hold up neither the loop nor a step."""
        prompt = ask.read()
        form = prompt.structured_output or ask.params.structured_output
        if form is not None:
            with suppress(RequestError):  # the engine refuses it again, and the request's result says so
                self._prepare_form(form)
        return prompt

    async def _run(self, ask: _Ask) -> AsyncGenerator[tuple[PreparedPrompt, StreamOutput], None]:
        """The prompt, and piece by piece what is new about its request; however this ends, nothing is left behind."""
        try:
            prompt = await asyncio.to_thread(self._read, ask)
        except RequestError as error:
            name = str(ask.ordinal) if ask.request_id is None else ask.request_id
            yield PreparedPrompt([]), StreamOutput(name, finished=True, error=error)
            return
        mailbox = Mailbox(only_whole=ask.output_kind == "final")
        self._thread.add(
            mailbox,
            prompt,
            ask.params,
            ordinal=ask.ordinal,
            request_id=ask.request_id,
            cache_salt=ask.cache_salt,
        )
        is_live = True
        try:
            while is_live:
                news = await mailbox.take()
                is_live = not news.finished
                yield prompt, news
        finally:
            if is_live:
                self._thread.cancel(mailbox)


@dataclass(frozen=True)
class _Ask:
    """One call: how its prompt is read, and the rest of its arguments, checked."""

    read: Callable[[], PreparedPrompt]
    params: SamplingParams
    request_id: str | None
    output_kind: OutputKind
    cache_salt: str | None
    ordinal: int

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(self.params).__name__}")
        if not isinstance(self.request_id, str | None):
            raise TypeError(f"request_id must be a string, got {type(self.request_id).__name__}")
        if self.output_kind not in get_args(OutputKind):
            kinds = ", ".join(map(repr, get_args(OutputKind)))
            raise ValueError(f"output_kind must be one of {kinds}, got {shown(self.output_kind)}")
