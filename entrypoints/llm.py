"""`LLM`: a model and its engine behind a few calls, for people who write Python.

Every call gives one result per prompt, in order; what is wrong with one prompt is that result's `error`. Steps run
inside the calling thread; several threads may share an `LLM`, and calls may be interleaved.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from deepinfer.core.config import EngineConfig, EngineSettings
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.prompts import (
    ChatFormat,
    ChatOutput,
    PreparedPrompt,
    PromptLike,
    PromptReader,
    is_token_ids,
)
from torch import Tensor
from typing_extensions import Unpack

if TYPE_CHECKING:
    from deepinfer.core.engine import Engine, EngineStats
    from deepinfer.models.interface import Model

Prompts = PromptLike | Sequence[PromptLike]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Sink = Callable[[RequestOutput], None]
T = TypeVar("T")


@dataclass
class StreamOutput(RequestOutput):
    """A snapshot of a running request; later steps do not change it.

    Attributes:
        prompt_index: which of the prompts it answers.
        delta: text of the first choice that is new since the snapshot before.
    """

    prompt_index: int = 0
    delta: str = ""


class LLM:
    """A model, loaded and ready.

    Args:
        model: a checkpoint folder, or an object that satisfies `deepinfer.models.interface.Model`.
        tokenizer: replaces the checkpoint's own: a folder with `tokenizer.json`, or a `Tokenizer`.
        draft: a draft model for speculation; not supported yet.
        config: a TOML or JSON file of settings, or an `EngineConfig`.
        settings: fields of `EngineConfig`, such as `backend`, `dtype`, `max_model_len`, `num_kv_blocks`, `seed`.

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
        draft: object | None = None,
        config: str | Path | EngineConfig | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        if draft is not None:
            raise ConfigError("draft: speculation is not supported yet; leave it out")
        folder = str(model) if isinstance(model, str | Path) else ""
        self.config = _load_config(folder, config, settings)
        if not isinstance(tokenizer, Tokenizer | None):
            tokenizer = Tokenizer.from_dir(tokenizer)
        puppet = None if isinstance(model, str | Path) else model
        engine, tokenizer, chat = _build(puppet, self.config, tokenizer)
        self._attach(engine, tokenizer, chat)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, tokenizer: Tokenizer | None = None, chat: ChatFormat | None = None
    ) -> LLM:
        """An `LLM` around an engine that exists already."""
        llm = cls.__new__(cls)
        llm.config = engine.config
        llm._attach(engine, tokenizer, chat)
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer | None, chat: ChatFormat | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, chat)
        self._lock = threading.RLock()
        self._sinks: dict[str, Sink] = {}
        self._ordinal = 0
        self._is_closed = False

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, progress: bool = False, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: a text, a list of token ids, a dict (`{"prompt": ...}` or `{"prompt_token_ids": ...}`), or a list
                of these. Text begins with the beginning-of-sentence token; control tokens spelled in it stay ordinary
                text.
            sampling_params: one for all prompts, or one for each; by default `SamplingParams()`.
            progress: show a progress bar.
            use_tqdm: the same, under the name that vLLM's users know.

        Returns:
            One result per prompt, in order. A prompt that cannot be served carries its `error`.

        Raises:
            ValueError: as many parameters as prompts are needed; nothing was queued.
        """
        several = _as_list(prompts)
        params = _spread(sampling_params, len(several))
        work = [(self._prepare(self.prompts.read, prompt), p) for prompt, p in zip(several, params, strict=True)]
        return self._finish_all(work, progress or use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        thinking: bool | Mapping[str, Any] | None = None,
        reasoning_effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[ChatOutput]:
        """Answer conversations.

        Args:
            messages: one conversation, a list of messages with `role` and `content`; or a list of conversations.
            sampling_params: one for all conversations, or one for each.
            thinking: False answers at once; by default the model thinks first.
            reasoning_effort: "low", "high", "xhigh", "max" or 1 to 100.
            tools: functions that may be called, as OpenAI writes them.
            response_format: shown to the model; the answer is not forced into it.
            add_generation_prompt: begin a new assistant message; by default, unless the final message is continued.
            continue_final_message: go on with the last message, which must be the assistant's.
            progress: show a progress bar.
            use_tqdm: the same.

        Returns:
            One `ChatOutput` per conversation, in order: reasoning, content and calls taken apart, and a `note` where
            the reasoning used up all tokens.

        Raises:
            ValueError: as many parameters as conversations are needed; nothing was queued.
        """
        several = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        params = _spread(sampling_params, len(several))
        if isinstance(thinking, bool):
            thinking = {"type": "enabled" if thinking else "disabled"}
        options = {
            "thinking": thinking,
            "reasoning_effort": reasoning_effort,
            "tools": tools,
            "response_format": response_format,
        }

        def read(conversation: object) -> PreparedPrompt:
            return self.prompts.read_chat(
                {"messages": conversation, **options},
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )

        prepared = [self._prepare(read, conversation) for conversation in several]
        results = self._finish_all(list(zip(prepared, params, strict=True)), progress or use_tqdm)
        return [
            self.prompts.chat_output(PreparedPrompt([]) if isinstance(prompt, RequestError) else prompt, result)
            for prompt, result in zip(prepared, results, strict=True)
        ]

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[StreamOutput]:
        """Continue prompts and watch them grow.

        Nothing is queued before the first result is asked for. Closing the iterator aborts what is unfinished.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.

        Returns:
            An iterator of snapshots as requests advance; the last one of a prompt is `finished`.

        Raises:
            ValueError: as many parameters as prompts are needed.
        """
        several = _as_list(prompts)
        params = _spread(sampling_params, len(several))
        return self._stream(several, params)

    def logits(
        self, token_ids: Sequence[int], chunk_size: int | None = None, decode_from: int | None = None
    ) -> Tensor:
        """Logits at every position of a prompt, through the engine's own prefill and caches.

        Args:
            token_ids: the prompt.
            chunk_size: most rows of one step; by default the engine's budget.
            decode_from: position from which tokens run one at a time.

        Returns:
            [len, vocab] float32 on the CPU; row i is the distribution after token i.

        Raises:
            RequestError: the prompt cannot be served, or the model gave no finite number.
        """
        prompt = self.prompts.read(token_ids)
        done: list[RequestOutput] = []

        def sink(output: RequestOutput) -> None:
            if output.finished:
                done.append(output)

        request_id = self.submit(
            prompt,
            SamplingParams(max_tokens=0),
            sink,
            chunk_size=chunk_size,
            decode_from=decode_from,
            return_logits=True,
        )
        self._run_until(lambda: bool(done), [request_id])
        if done[0].error is not None:
            raise done[0].error
        assert done[0].prompt_logits is not None, "the engine keeps logits when asked to"
        return done[0].prompt_logits

    def submit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        sink: Sink,
        *,
        seed_key: int | str | None = None,
        **options: Any,
    ) -> str:
        """Queue a prompt; for loops of one's own, with `step`.

        Args:
            prompt: from `self.prompts`.
            params: how to sample.
            sink: called by `step` with the request's live result whenever it advances, last when it is `finished`.
            seed_key: names the request where it has no seed; by default its ordinal in this `LLM`.
            options: passed to `Engine.add_request`.

        Returns:
            The request's id, for `abort`.

        Raises:
            RequestError: it cannot be served; nothing was queued.
        """
        with self._lock:
            if self._is_closed:
                raise RequestError("closed", "this LLM is closed; make a new one")
            ordinal = self._ordinal
            self._ordinal += 1
            request_id = str(ordinal)
            self.engine.add_request(
                request_id,
                prompt.token_ids,
                params,
                prompt=prompt.text,
                seed_key=ordinal if seed_key is None else seed_key,
                **options,
            )
            self._sinks[request_id] = sink
            return request_id

    def step(self) -> None:
        """Run one step of the engine and hand its results to their sinks."""
        with self._lock:
            for output in self.engine.step():
                sink = self._sinks.get(output.request_id)
                if output.finished:
                    self._sinks.pop(output.request_id, None)
                if sink is not None:
                    sink(output)

    def abort(self, request_id: str) -> bool:
        """End a request; its sink is not called any more. False when it is not live."""
        with self._lock:
            self._sinks.pop(request_id, None)
            return self.engine.abort(request_id)

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

    def close(self) -> None:
        """Abort what runs and free the engine; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sinks.clear()
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, read: Callable[[object], PreparedPrompt], prompt: object) -> PreparedPrompt | RequestError:
        try:
            return read(prompt)
        except RequestError as error:
            return error

    def _finish_all(
        self, work: list[tuple[PreparedPrompt | RequestError, SamplingParams]], progress: bool
    ) -> list[RequestOutput]:
        from deepinfer.entrypoints.progress import ProgressView

        results: dict[int, RequestOutput] = {}
        live: list[str] = []
        with ProgressView(len(work)) if progress else nullcontext() as view:

            def sink_for(place: int) -> Sink:
                def sink(output: RequestOutput) -> None:
                    if output.finished:
                        results[place] = output

                return sink

            for place, (prompt, params) in enumerate(work):
                outcome = self._submit(prompt, params, sink_for(place))
                if isinstance(outcome, str):
                    live.append(outcome)
                else:
                    results[place] = outcome
            before = self.stats.num_generated_tokens

            def all_done() -> bool:
                if view is not None:
                    view.update(len(results), self.stats.num_generated_tokens - before)
                return len(results) == len(work)

            self._run_until(all_done, live)
        return [results[place] for place in range(len(work))]

    def _submit(
        self, prompt: PreparedPrompt | RequestError, params: SamplingParams, sink: Sink
    ) -> str | RequestOutput:
        """The request's id, or the result of a request that was refused."""
        if isinstance(prompt, RequestError):
            with self._lock:
                request_id = str(self._ordinal)
                self._ordinal += 1  # others keep the seed they would have had
            return RequestOutput(request_id, finished=True, error=prompt)
        try:
            return self.submit(prompt, params, sink)
        except RequestError as error:
            return RequestOutput(str(self._ordinal - 1), prompt.text, prompt.token_ids, finished=True, error=error)

    def _run_until(self, is_done: Callable[[], bool], request_ids: list[str]) -> None:
        """Step until done; what is unfinished when an exception comes through is aborted."""
        try:
            while not is_done():
                with self._lock:
                    if not self.engine.has_unfinished() and not is_done():
                        raise RuntimeError("the engine has no work left, and requests have no result")
                    self.step()
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            raise

    def _stream(self, prompts: list[Any], params: list[SamplingParams]) -> Iterator[StreamOutput]:
        snapshots: deque[StreamOutput] = deque()
        lengths = [0] * len(prompts)
        live: dict[str, None] = {}

        def snapshot(place: int, output: RequestOutput) -> None:
            text = output.outputs[0].text if output.outputs else ""
            snapshots.append(_snapshot(output, place, text[lengths[place] :]))
            lengths[place] = len(text)
            if output.finished:
                live.pop(output.request_id, None)

        def sink_for(place: int) -> Sink:
            return lambda output: snapshot(place, output)

        try:
            for place, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                outcome = self._submit(self._prepare(self.prompts.read, prompt), p, sink_for(place))
                if isinstance(outcome, str):
                    live[outcome] = None
                else:
                    snapshot(place, outcome)
            while live or snapshots:
                while snapshots:
                    yield snapshots.popleft()
                if live:
                    self._run_until(lambda: bool(snapshots), [])
        finally:
            for request_id in list(live):
                self.abort(request_id)


def _load_config(folder: str, config: str | Path | EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    if not isinstance(config, EngineConfig):
        return EngineConfig.load(folder, config=config, **settings)
    changes: dict[str, Any] = {**settings, **({"model": folder} if folder else {})}
    unknown = sorted(changes.keys() - {f.name for f in fields(config)})
    if unknown:
        raise ConfigError(f"unknown setting(s): {', '.join(unknown)}")
    return replace(config, **changes)


def _build(
    model: Model | None, config: EngineConfig, tokenizer: Tokenizer | None
) -> tuple[Engine, Tokenizer | None, ChatFormat | None]:
    """The engine of a model object, or of the checkpoint that `config` names."""
    from deepinfer.core.engine import Engine
    from deepinfer.models.registry import load_model
    from deepinfer.ops.backend import BindContext
    from deepinfer.ops.registry import OpTable, find_backend, parse_overrides

    if model is None and not config.model:
        raise ConfigError("model: name a checkpoint folder")
    backend = find_backend(config.backend)
    if backend.runtime is None:
        raise ConfigError(f"backend {backend.name!r} has no runtime, so no engine can run on it")
    runtime = backend.runtime()
    context = BindContext(runtime.device, runtime, config.batch_invariant, config.max_num_batched_tokens)
    ops = OpTable(backend, context, config.strict, parse_overrides(config.ops))
    chat = None
    if model is None:
        loaded = load_model(config, ops)
        model, tokenizer, chat = loaded.model, tokenizer or loaded.tokenizer, loaded.chat
    return Engine(model, config, ops, tokenizer), tokenizer, chat


def _as_list(prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str | Mapping) or is_token_ids(prompts):
        return [prompts]
    return list(prompts)


def _spread(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    several = list(params)
    if len(several) != count:
        raise ValueError(f"{len(several)} sampling parameters for {count} prompts; give one for all, or one for each")
    return several


def _snapshot(output: RequestOutput, place: int, delta: str) -> StreamOutput:
    values = {f.name: getattr(output, f.name) for f in fields(RequestOutput)}
    values["outputs"] = [
        replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
        for o in output.outputs
    ]
    values["timings"] = replace(output.timings)
    return StreamOutput(**values, prompt_index=place, delta=delta)
