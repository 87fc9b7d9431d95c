"""`LLM`: a model and its engine behind a few calls, for people who write Python.

Every call gives one result per prompt, in order; what is wrong with one prompt is that result's `error`. Steps run
inside the calling thread; several threads may share an `LLM`, and calls may be interleaved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import Tensor, nn

from deepinfer.core.config import EngineConfig, EngineSettings
from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.build import DraftBinder, open_engine
from deepinfer.entrypoints.chat_protocol import ChatFormat
from deepinfer.entrypoints.prompts import (
    ChatOutput,
    PreparedPrompt,
    PromptLike,
    PromptReader,
    is_token_ids,
)
from deepinfer.entrypoints.session import Session, Sink
from deepinfer.entrypoints.stream_output import StreamOutput, snapshot

if TYPE_CHECKING:
    from deepinfer.core.engine import Engine
    from deepinfer.core.stats import EngineStats
    from deepinfer.models.interface import Model

Prompts = PromptLike | Sequence[PromptLike]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded and ready.

    Args:
        model: a checkpoint folder, or an object that satisfies `deepinfer.models.interface.Model`.
        tokenizer: replaces the checkpoint's own: a folder with `tokenizer.json`, or a `Tokenizer`.
        draft: proposes tokens in place of the checkpoint's own draft blocks: an object whose `bind(model)` gives the
            model with that draft, such as `deepinfer.testing.ScriptedDraft`. Turns speculation on unless it is set.
        config: a TOML or JSON file of settings, or an `EngineConfig`.
        on_load: called with (tensors done, tensors in all) while weights load.
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
        draft: DraftBinder | None = None,
        config: str | Path | EngineConfig | None = None,
        on_load: Callable[[int, int], None] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._attach(*open_engine(model, tokenizer, draft, config, on_load, settings))

    @classmethod
    def from_engine(cls, engine: Engine, *, tokenizer: Tokenizer | None = None, chat: ChatFormat | None = None) -> LLM:
        """An `LLM` around an engine that exists already."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer, chat)
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer | None, chat: ChatFormat | None) -> None:
        self.config = engine.config
        self.tokenizer = tokenizer
        self.prompts = PromptReader(tokenizer, chat)
        self.session = Session(engine)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: a text, a list of token ids, a dict (`{"prompt": ...}` or `{"prompt_token_ids": ...}`), or a list
                of these. Text begins with the beginning-of-sentence token; control tokens spelled in it stay ordinary
                text.
            sampling_params: one for all prompts, or one for each; by default `SamplingParams()`.
            cache_salt: only requests of equal salt share KV; a dict's own `cache_salt` goes before this one.
            progress: show a progress bar.
            use_tqdm: the same, under the name that vLLM's users know.

        Returns:
            One result per prompt, in order. A prompt that cannot be served carries its `error`.

        Raises:
            TypeError: `prompts` is none of these.
            ValueError: as many parameters as prompts are needed; nothing was queued.
        """
        several = _as_list(prompts)
        params = _spread(sampling_params, len(several))
        work = [(self._prepare(self.prompts.read, prompt), p) for prompt, p in zip(several, params, strict=True)]
        return self._finish_all(work, progress or use_tqdm, cache_salt)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        thinking: bool | Mapping[str, Any] | None = None,
        reasoning_effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[ChatOutput]:
        """Answer conversations.

        Args:
            messages: one conversation, a list of messages with `role` and `content`; or a list of conversations.
            sampling_params: one for all conversations, or one for each.
            thinking: False answers at once; by default the model thinks first.
            reasoning_effort: "low", "high", "xhigh", "max" or 1 to 100.
            tools: functions that may be called, as OpenAI writes them; calls of a `strict` one have its schema's form.
            tool_choice: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`.
            parallel_tool_calls: False allows one call.
            response_format: a form of the answer, as OpenAI writes it: the model is told, and held to it.
            add_generation_prompt: begin a new assistant message; by default, unless the final message is continued.
            continue_final_message: go on with the last message, which must be the assistant's.
            cache_salt: only requests of equal salt share KV.
            progress: show a progress bar.
            use_tqdm: the same.

        Returns:
            One `ChatOutput` per conversation, in order: reasoning, content and calls taken apart, and a `note` where
            the reasoning used up all tokens.

        Raises:
            ValueError: as many parameters as conversations are needed; nothing was queued.
        """
        several = _as_conversations(messages)
        params = _spread(sampling_params, len(several))
        read = partial(
            self.prompts.read_messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prepared = [self._prepare(read, conversation) for conversation in several]
        results = self._finish_all(list(zip(prepared, params, strict=True)), progress or use_tqdm, cache_salt)
        return [
            self.prompts.chat_output(PreparedPrompt([]) if isinstance(prompt, RequestError) else prompt, result)
            for prompt, result in zip(prepared, results, strict=True)
        ]

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, *, cache_salt: str | None = None
    ) -> Iterator[StreamOutput]:
        """Continue prompts and watch them grow.

        Nothing is queued before the first result is asked for. Closing the iterator aborts what is unfinished.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            cache_salt: as for `generate`.

        Returns:
            An iterator of snapshots as requests advance; the last one of a prompt is `finished`.

        Raises:
            ValueError: as many parameters as prompts are needed.
        """
        several = _as_list(prompts)
        params = _spread(sampling_params, len(several))
        return self._stream(several, params, cache_salt)

    def logits(
        self,
        token_ids: PromptLike,
        chunk_size: int | None = None,
        decode_from: int | None = None,
        *,
        replay: Literal["off", "decoder"] = "off",
        keep_tokens: int | None = None,
    ) -> Tensor:
        """Logits at every position of a prompt, through the engine's own prefill and caches.

        Args:
            token_ids: the prompt, in any shape that `generate` takes; text is tokenised as there.
            chunk_size: most rows of one step; by default the engine's budget.
            decode_from: position from which tokens run one at a time.
            replay: "decoder" runs only the last `keep_tokens` rows in the decoder layers, as the setting `replay` does.
            keep_tokens: by default `replay_keep_tokens` of the engine; at least the model's window.

        Returns:
            [len, vocab] float32 on the CPU; row i is the distribution after token i, NaN where replay dropped it.

        Raises:
            RequestError: the prompt cannot be served, or the model gave no finite number.
        """
        prompt = self.prompts.read(token_ids)
        done: list[RequestOutput] = []

        def sink(output: RequestOutput) -> None:
            if output.finished:
                done.append(output)

        with self.session.live() as live:
            live.add(
                self.session.submit(
                    prompt,
                    SamplingParams(max_tokens=0),
                    sink,
                    chunk_size=chunk_size,
                    decode_from=decode_from,
                    return_logits=True,
                    replay=replay,
                    keep_tokens=keep_tokens,
                )
            )
            self.session.run_until(lambda: bool(done))
        if done[0].error is not None:
            raise done[0].error
        kept = done[0].prompt_logits
        assert kept is not None, "the engine keeps logits when asked to"
        return nn.functional.pad(kept, (0, 0, len(prompt.token_ids) - len(kept), 0), value=float("nan"))

    @property
    def engine(self) -> Engine:
        """The engine underneath, for tools and tests."""
        return self.session.engine

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.session.engine.stats()

    def close(self) -> None:
        """Abort what runs and free the engine; a second call does nothing."""
        self.session.close()

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
        self, work: list[tuple[PreparedPrompt | RequestError, SamplingParams]], progress: bool, cache_salt: str | None
    ) -> list[RequestOutput]:
        from deepinfer.entrypoints.progress import ProgressView

        results: dict[int, RequestOutput] = {}
        with self.session.live() as live, ProgressView(len(work)) if progress else nullcontext() as view:

            def sink_for(place: int) -> Sink:
                def sink(output: RequestOutput) -> None:
                    if output.finished:
                        results[place] = output

                return sink

            for place, (prompt, params) in enumerate(work):
                outcome = self.session.submit_or_refuse(prompt, params, sink_for(place), cache_salt=cache_salt)
                if isinstance(outcome, str):
                    live.add(outcome)
                else:
                    results[place] = outcome
            before = self.stats.num_generated_tokens if view is not None else 0

            def all_done() -> bool:
                if view is not None:
                    view.update(len(results), self.stats.num_generated_tokens - before)
                return len(results) == len(work)

            self.session.run_until(all_done)
        return [results[place] for place in range(len(work))]

    def _stream(
        self, prompts: list[Any], params: list[SamplingParams], cache_salt: str | None
    ) -> Iterator[StreamOutput]:
        snapshots: deque[StreamOutput] = deque()
        lengths = [0] * len(prompts)
        with self.session.live() as live:

            def add_snapshot(place: int, output: RequestOutput) -> None:
                text = output.outputs[0].text if output.outputs else ""
                snapshots.append(snapshot(output, place, text[lengths[place] :]))
                lengths[place] = len(text)
                if output.finished:
                    live.discard(output.request_id)

            def sink_for(place: int) -> Sink:
                return lambda output: add_snapshot(place, output)

            for place, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                prepared = self._prepare(self.prompts.read, prompt)
                outcome = self.session.submit_or_refuse(prepared, p, sink_for(place), cache_salt=cache_salt)
                if isinstance(outcome, str):
                    live.add(outcome)
                else:
                    add_snapshot(place, outcome)
            while live or snapshots:
                while snapshots:
                    yield snapshots.popleft()
                if live:
                    self.session.run_until(lambda: bool(snapshots))


def _as_list(prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str | Mapping) or is_token_ids(prompts):
        return [prompts]
    several = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(several, Iterable) or isinstance(several, bytes | bytearray):
        raise TypeError(
            "prompts must be a text, a list of token ids, a dict ('prompt' or 'prompt_token_ids'), or a list of these, "
            f"got {type(prompts).__name__}"
        )
    return list(several)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(
            "messages must be a list of messages (dicts with role and content), or a list of such lists, "
            f"got {type(messages).__name__}"
        )
    return [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)


def _spread(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
    several = list(params)
    if len(several) != count:
        raise ValueError(f"{len(several)} sampling parameters for {count} prompts; give one for all, or one for each")
    for place, item in enumerate(several):
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling_params[{place}] must be SamplingParams, got {type(item).__name__}")
    return several
