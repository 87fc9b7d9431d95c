"""What a request gives back: results, logprobs, timings and typed errors, one object per prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

from torch import Tensor

from deepinfer.core.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One token's log probability, under the distribution that `SamplingParams.logprobs_mode` names.

    Attributes:
        logprob: natural log.
        rank: 1 for the most likely token; equal values rank by id.
        decoded_token: its text alone; None without a tokenizer, or with `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TextSource(Protocol):
    """Makes an answer's text, when it is asked to."""

    @property
    def is_finished(self) -> bool:
        """The next `read` returns all that is left."""
        ...

    def read(self) -> str:
        """What has become of the text since the call before."""
        ...


IdSource = Callable[[int], list[int]]
"""Gives an answer's token ids behind the first so many."""


class _GrowingText:
    """`CompletionOutput.text`: made when it is read, because most of an answer's states are never looked at."""

    @overload
    def __get__(self, completion: None, owner: type[CompletionOutput]) -> str: ...
    @overload
    def __get__(self, completion: CompletionOutput, owner: type[CompletionOutput]) -> str: ...
    def __get__(self, completion: CompletionOutput | None, owner: type[CompletionOutput]) -> str:
        if completion is None:
            return ""  # the field's default
        kept: dict[str, Any] = completion.__dict__
        source = completion._text_source
        if source is not None:
            if source.is_finished:
                completion._text_source = None
            kept["_text"] += source.read()
        return str(kept["_text"])

    def __set__(self, completion: CompletionOutput, text: str) -> None:
        completion.__dict__["_text"] = text


class _GrowingIds:
    """`CompletionOutput.token_ids`: a list that is brought up to date when it is read."""

    @overload
    def __get__(self, completion: None, owner: type[CompletionOutput]) -> tuple[int, ...]: ...
    @overload
    def __get__(self, completion: CompletionOutput, owner: type[CompletionOutput]) -> list[int]: ...
    def __get__(self, completion: CompletionOutput | None, owner: type[CompletionOutput]) -> Sequence[int]:
        if completion is None:
            return ()  # the field's default
        ids = completion._token_ids
        if completion._id_source is not None:
            ids.extend(completion._id_source(len(ids)))
        return ids

    def __set__(self, completion: CompletionOutput, token_ids: list[int] | tuple[int, ...]) -> None:
        completion._token_ids = token_ids if isinstance(token_ids, list) else list(token_ids)


@dataclass
class CompletionOutput:
    """One generated answer.

    Attributes:
        index: which choice of the request.
        text: detokenised so far; special tokens left out unless asked for, and what may become a stop string held back.
        token_ids: generated ids, the stop token included.
        finish_reason: "stop" at EOS, a stop id or a stop string, "length" at `max_tokens` or the model's length,
            "abort", "error"; None while it runs.
        stop_reason: the stop id or the stop string that ended it, None for EOS and for other reasons.
        logprobs: per generated token, id to `Logprob`: the sampled one and the best n; None when not asked for.
        cumulative_logprob: sum over generated tokens; None when not asked for.
    """

    index: int = 0
    text: _GrowingText = _GrowingText()
    token_ids: _GrowingIds = _GrowingIds()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def __post_init__(self) -> None:
        """No sources yet."""
        self._text_source: TextSource | None = None
        self._id_source: IdSource | None = None

    def take_text_from(self, source: TextSource) -> None:
        """Let `text` grow by what a source makes, whenever it is read."""
        self._text_source = source

    def take_ids_from(self, source: IdSource | None) -> None:
        """Let `token_ids` grow by what a source has, whenever it is read; None takes what there is, and no more."""
        self._token_ids = self.token_ids
        self._id_source = source

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold ids and text as they are now; they do not grow."""
        now = {"_token_ids": self.token_ids, "_text": self.text, "_text_source": None, "_id_source": None}
        return self.__dict__ | now


@dataclass
class RequestTimings:
    """Wall-clock marks of a request, in seconds of `time.monotonic()`; None until reached."""

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """The state of one request: partial while it runs, whole when `finished`.

    Attributes:
        request_id: as given to the engine.
        prompt: the prompt's text, if it came as text.
        prompt_token_ids: ids the model saw.
        outputs: one per choice; empty only when `error` refused the request before it ran.
        prompt_logprobs: per prompt token, id to `Logprob`; the first is None. None when not asked for.
        prompt_logits: [len, vocab] float32, only for `LLM.logits`; of the last rows alone where others were cut.
        finished: nothing more will come.
        error: why the request, or the first of its choices that did, failed; None otherwise.
        seed: the 64-bit seed its draws came from.
        approximate: bounded replay (`EngineConfig.replay`) changed what was computed.
        num_cached_tokens: prompt tokens that were stored already when it first ran; None before that.
        timings: when things happened.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_logits: Tensor | None = None
    finished: bool = False
    error: RequestError | None = None
    seed: int | None = None
    approximate: bool = False
    num_cached_tokens: int | None = None
    timings: RequestTimings = field(default_factory=RequestTimings)

    @property
    def text(self) -> str:
        """The first choice's text, "" if there is none."""
        return self.outputs[0].text if self.outputs else ""
