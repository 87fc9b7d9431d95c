"""What a request should get, written a second time: slowly, token by token, from the whole sequence, in plain Python.

It shares no code with the engine but the model's own logits, the tokenizer and the reference of the op `sample`.
Nothing is incremental: every rule looks at all tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.ops.sampling import process_logits, sample

NextLogits = Callable[[list[int]], NDArray[np.float32]]
"""Called with all token ids so far; gives the logits of the next token."""


class SlowForm(Protocol):
    """What a structured output says about the next token, given all tokens of the answer so far."""

    def allowed(self, out: list[int]) -> Set[int] | None:
        """The ids that may come; None for all."""
        ...

    def forced(self, out: list[int]) -> int | None:
        """The id that must come; None for none."""
        ...


@dataclass
class SlowAnswer:
    """One answer.

    Attributes:
        token_ids: generated.
        text: of it.
        finish_reason: "stop" or "length".
        stop_reason: the stop id or string.
        logprobs: per token, id to logprob, of the token and of every id asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)


def slow_answer(
    next_logits: NextLogits,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    choice: int = 0,
    eos: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    max_len: int = 1 << 20,
    form: SlowForm | None = None,
) -> SlowAnswer:
    """Generate one answer by the book; `form` is what a structured output allows and forces."""
    answer = SlowAnswer()
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while not answer.finish_reason:
        out = answer.token_ids
        raw = np.asarray(next_logits([*prompt, *out]), np.float32)
        allowed = form.allowed(out) if form is not None else None
        scores = _shaped(raw.copy(), list(prompt), out, params, ends, tokenizer, allowed)
        forced = form.forced(out) if form is not None else None
        if forced is None:
            forced = _forced(list(prompt), out, params, tokenizer)
        token = _draw(scores, params, seed, len(out), choice) if forced is None else forced
        if params.wants_logprobs:
            answer.logprobs.append(_logprobs(raw, scores, token, params))
        out.append(token)
        _stop(answer, params, ends, tokenizer, len(prompt), max_len)
    return answer


def _shaped(
    x: NDArray[np.float32],
    prompt: list[int],
    out: list[int],
    params: SamplingParams,
    ends: set[int],
    tokenizer: Tokenizer | None,
    allowed: Set[int] | None,
) -> NDArray[np.float32]:
    for token in range(len(x)):
        if allowed is not None and token not in allowed:
            x[token] = -np.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            assert tokenizer is not None
            ids = tokenizer.encode(text)
            if ([*out, ids[-1]])[-len(ids) :] == ids:
                x[ids[-1]] = -np.inf
    if len(out) < params.min_tokens and not (allowed is not None and allowed <= ends):
        for token in ends:
            x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] = x[token] + np.float32(bias)
    for token in range(len(x)):
        count = np.float32(out.count(token))
        if count or token in prompt:
            factor = np.float32(params.repetition_penalty)
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] = x[token] - np.float32(params.frequency_penalty) * count
        if count:
            x[token] = x[token] - np.float32(params.presence_penalty)
    return x


def _forced(prompt: list[int], out: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> int | None:
    golden = params.golden_token_ids or ()
    if len(out) < len(golden) and golden[len(out)] >= 0:
        return golden[len(out)]
    if params.thinking_budget is None:
        return None
    assert tokenizer is not None
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    assert begin is not None and end is not None
    everything = prompt + out
    closed = max((place for place, token in enumerate(everything) if token == end), default=-1)
    opened = [place for place in range(closed + 1, len(everything)) if everything[place] == begin]
    if not opened:
        return None
    reasoning = everything[max(opened[0] + 1, len(prompt)) :]  # a second <think> inside it is no token of it
    return end if len(reasoning) - reasoning.count(begin) >= params.thinking_budget else None


def _filters(params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([0.0 if params.greedy else params.temperature], dtype=torch.float32),
        torch.tensor([max(params.top_k, 0)], dtype=torch.int32),
        torch.tensor([params.top_p], dtype=torch.float32),
        torch.tensor([params.min_p], dtype=torch.float32),
    )


def _draw(scores: NDArray[np.float32], params: SamplingParams, seed: int, k: int, choice: int) -> int:
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    key = torch.tensor([signed]), torch.tensor([k], dtype=torch.int32), torch.tensor([choice], dtype=torch.int32)
    return int(sample(torch.from_numpy(scores)[None], *_filters(params), *key)[0])


def _logprobs(
    raw: NDArray[np.float32], scores: NDArray[np.float32], token: int, params: SamplingParams
) -> dict[int, float]:
    x = raw
    if params.logprobs_mode == "processed_logprobs":
        x = process_logits(torch.from_numpy(scores)[None], *_filters(params))[0].numpy()
    wide = x.astype(np.float64)
    total = math.log(float(np.exp(wide - wide.max()).sum())) + float(wide.max())
    best = sorted(range(len(x)), key=lambda i: (-x[i], i))[: params.logprobs or 0]
    return {i: float(wide[i]) - total for i in (token, *best, *(params.logprob_token_ids or ()))}


def _stop(
    answer: SlowAnswer,
    params: SamplingParams,
    ends: set[int],
    tokenizer: Tokenizer | None,
    num_prompt: int,
    max_len: int,
) -> None:
    out = answer.token_ids
    ended = out[-1] in ends
    shown = out[:-1] if ended and not params.include_stop_str_in_output else out
    if tokenizer is not None and params.detokenize:
        answer.text = _settled(tokenizer, shown, params)
    if ended:
        answer.finish_reason = "stop"
        answer.stop_reason = out[-1] if out[-1] in params.stop_token_ids else None
        answer.text = tokenizer.decode(shown, params.skip_special_tokens) if tokenizer and params.detokenize else ""
        return
    if tokenizer is not None and len(out) >= params.min_tokens:
        before = len(_settled(tokenizer, out[:-1], params))
        found = [
            (start + len(stop), start, stop)
            for stop in params.stop
            for start in range(len(answer.text) - len(stop) + 1)
            if answer.text.startswith(stop, start) and start + len(stop) > before
        ]
        if found:
            end, start, answer.stop_reason = min(found)
            answer.text = answer.text[: end if params.include_stop_str_in_output else start]
            answer.finish_reason = "stop"
            return
    if len(out) >= params.max_tokens or num_prompt + len(out) >= max_len:
        answer.finish_reason = "length"
        answer.text = tokenizer.decode(out, params.skip_special_tokens) if tokenizer and params.detokenize else ""


def _settled(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> str:
    """The text without a character that more tokens may still complete."""
    hidden = tokenizer.hidden_ids(params.skip_special_tokens)
    data = b"".join(tokenizer.id_to_bytes(i) for i in ids if i not in hidden)
    for size in range(1, 4):
        tail = data[-size:]
        if len(data) >= size and tail[0] >= 0xC0:
            need = 2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4
            if size < need and all(0x80 <= b < 0xC0 for b in tail[1:]):
                text = data[:-size].decode("utf-8", "replace")
                # bytes that can begin no character are replaced at once
                return text if _can_grow(tail) else data.decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _can_grow(tail: bytes) -> bool:
    for more in (b"\x80", b"\x90", b"\xa0", b"\xbf"):
        for rest in (b"", b"\x80", b"\x80\x80"):
            try:
                (tail + more + rest).decode()
            except UnicodeDecodeError:
                continue
            return True
    return False
