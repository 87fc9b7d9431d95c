"""What a request gives back: results, logprobs, timings and typed errors, one object per prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


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
