"""The shapers that `SamplingParams` ask for: who forbids, favours, penalises or forces which token, and when.

All of them look at tokens alone, so they are plain host code without a device; `core.shaping` says what they produce.
A feature that shapes rows is one class here, one entry in `make_shaper`, and one in `core.features`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from deepinfer.core.logits_processors import RowProcessor, find_processor
from deepinfer.core.sampling_params import InvalidParameterError, SamplingParams
from deepinfer.core.shaping import PLAIN, Penalties, RowShape, RowShaper, Shapers, pack_mask
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ShapingContext:
    """What shapers may know about the engine.

    Attributes:
        vocab_size: ids run from 0 to `vocab_size` - 1.
        eos_token_ids: the model's own ends.
        tokenizer: None for ids only.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None


def make_shaper(
    params: SamplingParams, prompt_token_ids: Sequence[int], context: ShapingContext, *others: RowShaper
) -> RowShaper | None:
    """The shaper of one answer; None when nothing about its logits changes.

    Args:
        params: validated, and checked by `core.features`.
        prompt_token_ids: the prompt.
        context: the engine.
        others: shapers made elsewhere, such as a grammar's; they come first.

    Raises:
        RequestError: tokens that are forced are forbidden as well, or a processor is unknown or refuses.
    """
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(context.eos_token_ids))
    bad_words = bad_word_ids(params.bad_words, context.tokenizer) if context.tokenizer is not None else []
    parts: list[RowShaper] = list(others)
    if params.golden_token_ids:
        _check_golden(params, ends, bad_words)
        parts.append(GoldenTokens(params.golden_token_ids))
    if params.thinking_budget is not None:
        parts.append(_thinking(params, prompt_token_ids, context))
    if params.allowed_token_ids is not None or params.logit_bias:
        parts.append(FixedShape(params, context.vocab_size))
    if bad_words:
        parts.append(BadWords(bad_words))
    if params.min_tokens and ends and params.structured_output is None:  # a grammar knows when it leaves nothing else
        parts.append(MinTokens(params.min_tokens, ends))
    if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0):
        parts.append(SeenTokens(params, prompt_token_ids))
    for name, argument in (params.logits_processors or {}).items():
        made = find_processor(name)(argument, list(prompt_token_ids), context.vocab_size)
        parts.append(made if isinstance(made, RowShaper) else LogitsFunction(made))
    return Shapers(parts) if len(parts) > 1 else parts[0] if parts else None


class FixedShape:
    """Allowed ids and logit bias: the same in every row, so a request with nothing else waits for no tokens."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        ids = sorted(bias)
        self._shape = RowShape(
            mask=None if allowed is None else pack_mask(allowed, vocab_size),
            bias_ids=np.array(ids, np.int32),
            bias=np.array([bias[i] for i in ids], np.float32),
        )

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        return [self._shape] * (len(drafts) + 1)

    def accept(self, tokens: Sequence[int]) -> None:
        """Nothing to remember."""


@dataclass
class _History:
    """A shaper that looks at the tokens emitted so far, and at drafts as if they had been."""

    outputs: list[int] = field(default_factory=list)

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        tokens = self.outputs + list(drafts)
        return [self.shape_behind(tokens, size) for size in range(len(self.outputs), len(tokens) + 1)]

    def accept(self, tokens: Sequence[int]) -> None:
        """See `RowShaper`."""
        self.outputs.extend(tokens)

    def shape_behind(self, tokens: list[int], size: int) -> RowShape:
        """The shape of the row behind `tokens[:size]`."""
        raise NotImplementedError


class BadWords(_History):
    """Forbids the token that would complete a sequence; a sequence of one is never allowed."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._always = np.array(sorted({word[0] for word in words if len(word) == 1}), np.int32)
        self._longer = [tuple(word) for word in words if len(word) > 1]

    def shape_behind(self, tokens: list[int], size: int) -> RowShape:
        """See `_History`."""
        last = [
            word[-1]
            for word in self._longer
            if size >= len(word) - 1 and tuple(tokens[size - len(word) + 1 : size]) == word[:-1]
        ]
        return RowShape(forbidden=np.union1d(self._always, last).astype(np.int32) if last else self._always)


class MinTokens(_History):
    """Forbids every token that would end the answer before it has so many tokens."""

    def __init__(self, min_tokens: int, ends: frozenset[int]) -> None:
        super().__init__()
        self._min_tokens = min_tokens
        self._shape = RowShape(forbidden=np.array(sorted(ends), np.int32))

    def shape_behind(self, tokens: list[int], size: int) -> RowShape:
        """See `_History`."""
        return self._shape if size < self._min_tokens else PLAIN


class GoldenTokens(_History):
    """Forces the output tokens by their index; -1 leaves one free."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self._forced = tuple(token_ids)

    def shape_behind(self, tokens: list[int], size: int) -> RowShape:
        """See `_History`."""
        forced = self._forced[size] if size < len(self._forced) else -1
        return RowShape(forced=forced) if forced >= 0 else PLAIN


class ThinkingBudget:
    """Forces the end of the reasoning once it has so many tokens.

    Args:
        budget: tokens between the begin and end markers.
        begin: id of `<think>`.
        end: id of `</think>`.
        thinking: whether the prompt ends inside the reasoning.
    """

    def __init__(self, budget: int, begin: int, end: int, thinking: bool) -> None:
        self._budget, self._begin, self._end = budget, begin, end
        self._spent = 0 if thinking else -1  # -1 outside of the reasoning

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        spent = self._spent
        shapes = [self._shape(spent)]
        for token in drafts:
            spent = self._after(spent, token)
            shapes.append(self._shape(spent))
        return shapes

    def accept(self, tokens: Sequence[int]) -> None:
        """See `RowShaper`."""
        for token in tokens:
            self._spent = self._after(self._spent, token)

    def _shape(self, spent: int) -> RowShape:
        return RowShape(forced=self._end) if spent >= self._budget else PLAIN

    def _after(self, spent: int, token: int) -> int:
        if token == self._end:
            return -1
        if token == self._begin:
            return max(spent, 0)
        return spent + 1 if spent >= 0 else -1


class SeenTokens:
    """Penalties: counts of output tokens, and the prompt's ids where repetition is penalised."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        prompt = list(dict.fromkeys(prompt_token_ids)) if params.repetition_penalty != 1.0 else []
        self._place = {token: place for place, token in enumerate(prompt)}
        self._size = len(prompt)
        self._ids = np.array(prompt + [0] * 16, np.int32)  # longer than what is used, so that growing is cheap
        self._counts = np.zeros_like(self._ids)

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        # Copies: what is known grows while a step may still read its own shapes.
        ids, counts = self._ids[: self._size].copy(), self._counts[: self._size].copy()
        shapes = [self._shape(ids, counts)]
        new: dict[int, int] = {}
        for token in drafts:
            place = self._place.get(token, new.get(token, -1))
            if place < 0:
                new[token] = len(ids)
                ids, counts = np.append(ids, np.int32(token)), np.append(counts, np.int32(1))
            else:
                counts = counts.copy()
                counts[place] += 1
            shapes.append(self._shape(ids, counts))
        return shapes

    def accept(self, tokens: Sequence[int]) -> None:
        """See `RowShaper`."""
        for token in tokens:
            place = self._place.setdefault(token, self._size)
            if place == self._size:
                if place == len(self._ids):
                    self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
                self._ids[place], self._counts[place] = token, 0
                self._size += 1
            self._counts[place] += 1

    def _shape(self, ids: Int32Array, counts: Int32Array) -> RowShape:
        p = self._params
        return RowShape(penalties=Penalties(ids, counts, p.repetition_penalty, p.frequency_penalty, p.presence_penalty))


class LogitsFunction(_History):
    """A user's function of output ids and logits."""

    def __init__(self, function: RowProcessor) -> None:
        super().__init__()
        self._function = function

    def shape_behind(self, tokens: list[int], size: int) -> RowShape:
        """See `_History`."""
        return RowShape(functions=(partial(self._function, tokens[:size]),))


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of words, each at the begin of a text and behind a space."""
    spelled = {tuple(tokenizer.encode(prefix + word.lstrip())) for word in words for prefix in ("", " ")}
    return sorted(ids for ids in spelled if ids)


def _thinking(params: SamplingParams, prompt: Sequence[int], context: ShapingContext) -> ThinkingBudget:
    assert params.thinking_budget is not None and context.tokenizer is not None, "checked by core.features"
    begin, end = context.tokenizer.token_to_id(THINK), context.tokenizer.token_to_id(END_THINK)
    if begin is None or end is None:
        raise InvalidParameterError(
            "unsupported_parameter", f"thinking_budget needs {THINK} and {END_THINK}, which this vocabulary lacks"
        )
    if params.allowed_token_ids is not None and end not in params.allowed_token_ids:
        raise InvalidParameterError(
            "invalid_parameter", f"thinking_budget forces {END_THINK} (id {end}), which allowed_token_ids leaves out"
        )
    markers = [token for token in prompt if token in (begin, end)]
    return ThinkingBudget(params.thinking_budget, begin, end, thinking=bool(markers) and markers[-1] == begin)


def _check_golden(params: SamplingParams, ends: frozenset[int], bad_words: Sequence[tuple[int, ...]]) -> None:
    """Refuse forced tokens that something else forbids: both cannot be had."""
    golden = tuple(params.golden_token_ids or ())

    def refuse(place: int, why: str) -> InvalidParameterError:
        return InvalidParameterError(
            "invalid_parameter", f"golden_token_ids[{place}] forces id {golden[place]}, which {why}"
        )

    for place, token in enumerate(golden):
        if token < 0:
            continue
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            raise refuse(place, "allowed_token_ids leaves out")
        if place < params.min_tokens and token in ends:
            raise refuse(place, f"ends the answer before min_tokens, {params.min_tokens}")
        if any(place + 1 >= len(word) and golden[place + 1 - len(word) : place + 1] == word for word in bad_words):
            raise refuse(place, "completes one of bad_words")
