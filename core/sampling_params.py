"""What a request may ask of sampling, in vLLM's shape, checked by name and value.

Values are checked when the object is made, ids when it is submitted; what cannot be combined, or not by this engine, is
refused there by `core.features`, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.spec import StructuredOutput, read_so_args
from deepinfer.ops.show import shown

MAX_SEED: Final = 2**64 - 1
GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by less would only amplify rounding."""

MAX_BIAS: Final = 1e30
"""Far above any logit, and far below where sums of float32 overflow."""
MAX_TEMPERATURE: Final = 1e30
"""Every draw is uniform long before; float32 ends at 3.4e38."""
MIN_TOP_P: Final = 2.0**-126
"""Below it float32 has no exact numbers, and soon none but 0."""
MAX_REPETITION_PENALTY: Final = 1e3
"""Of a factor and its inverse: a logit of `MAX_BIAS` under it and `GREEDY_BELOW` is still a float32."""
MAX_CHOICES: Final = 16384

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class InvalidParameterError(RequestError, ValueError):
    """A sampling parameter has a value it cannot have. Remedy: the message says what would be right."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)


class UnsupportedParameterError(RequestError, ValueError):
    """A sampling parameter asks for something that cannot be had here. Remedy: the message says what is in the way."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Immutable; `dataclasses.replace` makes a changed one.

    Lists become tuples; None in place of a list is an empty one.

    Attributes:
        n: answers to the prompt. They share its KV, and draw from random streams of their own.
        temperature: divides the logits, at most 1e30; 0, and anything below 1e-5, takes the best token, ties to the
            lowest id.
        top_p: keep the shortest list of best tokens with this much probability, in (0, 1]; 1 is off.
        top_k: keep this many best tokens; -1 and 0 are off.
        min_p: keep tokens with at least this fraction of the best one's probability, in [0, 1]; 0 is off.
        seed: of this request's draws, 0 to 2^64 - 1. None: one is derived, and the result names it.
        max_tokens: most tokens to generate; 0 scores the prompt only.
        min_tokens: no end before this many: ids that would end the answer cannot be drawn, stop strings are not heeded.
        stop: strings that end the answer; one or a list. Text ends before the string, ids and logprobs with the token
            that completes it.
        stop_token_ids: ids that end the answer, beside the model's own.
        include_stop_str_in_output: leave the stop string, or the stop id's text, in the text.
        ignore_eos: do not end at the model's own end tokens.
        logprobs: record the logprob of every generated token, and of this many best ones (at most the vocabulary);
            None records nothing.
        prompt_logprobs: the same for prompt tokens.
        logprob_token_ids: ids whose logprobs to record with those of every generated token, also without `logprobs`.
        logprobs_mode: of generated tokens under the model's own distribution ("raw_logprobs"), or under what was drawn
            from ("processed_logprobs": after masks, bias, penalties, temperature and filters; ids that these remove
            have -inf). Prompt logprobs are always raw.
        presence_penalty: subtracted from the logits of generated tokens, in [-2, 2].
        frequency_penalty: the same, times their count.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens; in [0.001, 1000].
        logit_bias: id to a number that is added to its logit.
        allowed_token_ids: only these may be generated.
        bad_words: strings that may not be generated, as the tokens they have at the begin of a text and behind a space.
        golden_token_ids: generate these, whatever the model says, and report their logprobs; -1 leaves a place free.
        thinking_budget: tokens of reasoning after which `</think>` is generated.
        logits_processors: name of an installed processor to its argument (`core.logits_processors`).
        structured_output: the form that the answer must have (`core.grammar.spec`).
        so_args: the same as DeepInfer writes it; `structured_output` is made of it.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text.

    Raises:
        InvalidParameterError: a value is impossible; names field and value. It is a `RequestError` and a `ValueError`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    golden_token_ids: Sequence[int] | None = None
    thinking_budget: int | None = None
    logits_processors: Mapping[str, Any] | None = None
    structured_output: StructuredOutput | None = None
    so_args: Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_CHOICES, what=f"an integer, at least 1 and at most {MAX_CHOICES}")
        self._number("temperature", 0.0, MAX_TEMPERATURE, "0 (greedy) or a positive number up to 1e30")
        self._number("top_p", MIN_TOP_P, 1.0, "above 0 and at most 1 (float32 has nothing between 0 and 1.2e-38)")
        self._integer("top_k", -1, what="a positive integer, or -1 or 0 for off")
        self._number("min_p", 0.0, 1.0, "from 0 to 1")
        self._integer("seed", 0, MAX_SEED, what="from 0 to 2^64 - 1, or None", optional=True)
        self._integer("max_tokens", 0, what="an integer, at least 0 (0 scores the prompt only)")
        self._integer("min_tokens", 0, self.max_tokens, what=f"from 0 to max_tokens, which is {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs", "thinking_budget"):
            self._integer(name, 0, what="an integer, at least 0, or None", optional=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -2.0, 2.0, "from -2 to 2")
        high = MAX_REPETITION_PENALTY
        self._number("repetition_penalty", 1 / high, high, "above 0: from 0.001 to 1000")
        if _is_sequence(self.allowed_token_ids) and not self.allowed_token_ids:
            raise self._invalid("allowed_token_ids", "None, or a list of at least one token id")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "golden_token_ids"):
            self._token_ids(name, optional=name != "stop_token_ids")
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise self._invalid("logprobs_mode", " or ".join(map(repr, get_args(LogprobsMode))))
        self._processors()
        self._structure()
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name in ("stop", "bad_words"):
            self._strings(name)
        self._bias()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise self._invalid(name, "True or False")

    @property
    def greedy(self) -> bool:
        """Whether every token is the best one, and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of generated tokens are recorded."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def validate(self, vocab_size: int) -> None:
        """Check ids against a model's vocabulary.

        `logprobs` above the vocabulary is fine: the vocabulary is what there is.

        Args:
            vocab_size: ids run from 0 to `vocab_size` - 1.

        Raises:
            InvalidParameterError: an id is outside the vocabulary.
        """
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "golden_token_ids", "logit_bias"):
            ids: Collection[int] = getattr(self, name) or ()
            lowest = -1 if name == "golden_token_ids" else 0
            for place, token_id in enumerate(ids):
                if not lowest <= token_id < vocab_size:
                    where = f"[{place}]" if name != "logit_bias" else ""
                    raise InvalidParameterError(
                        "invalid_parameter",
                        f"{name}{where} has id {token_id}; ids of this model run from 0 to {vocab_size - 1}",
                    )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _invalid(self, name: str, wanted: str) -> InvalidParameterError:
        return InvalidParameterError("invalid_parameter", f"{name} must be {wanted}, got {shown(getattr(self, name))}")

    def _integer(
        self, name: str, low: int, high: int | None = None, *, what: str | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_integer(value) or value < low or (high is not None and value > high):
            raise self._invalid(name, what or f"an integer, at least {low}")
        self._set(name, int(value))

    def _number(self, name: str, low: float, high: float, what: str) -> None:
        value = getattr(self, name)
        if not (_is_number(value) and low <= value <= high):  # NaN is in no range, and no integer is too large for one
            raise self._invalid(name, what)
        self._set(name, float(value))

    def _token_ids(self, name: str, *, optional: bool) -> None:
        value = getattr(self, name)
        if value is None:
            self._set(name, None if optional else ())
            return
        if not _is_sequence(value) or not all(_is_integer(v) for v in value):
            raise self._invalid(name, "a list of token ids")
        self._set(name, tuple(int(v) for v in value))

    def _strings(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            value = ()
        if not _is_sequence(value) or not all(isinstance(v, str) and v for v in value):
            raise self._invalid(name, "a list of non-empty strings")
        self._set(name, tuple(value))

    def _bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise self._invalid("logit_bias", "a mapping of token id to number")
        bias = {}
        for key, value in self.logit_bias.items():
            # JSON has no integer keys
            token_id = int(key) if isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key) else key
            if not _is_integer(token_id) or not _is_number(value) or not abs(value) <= MAX_BIAS:
                raise InvalidParameterError(
                    "invalid_parameter",
                    f"logit_bias must map token ids to finite numbers, got {shown(key)}: {shown(value)}",
                )
            bias[int(token_id)] = float(value)
        self._set("logit_bias", bias)

    def _structure(self) -> None:
        if self.so_args is not None:
            made = read_so_args(self.so_args)
            if self.structured_output not in (None, made):
                raise InvalidParameterError("invalid_parameter", "give structured_output or so_args, not both")
            self._set("structured_output", made)
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise self._invalid("structured_output", "a StructuredOutput, or None")

    def _processors(self) -> None:
        value = self.logits_processors
        if value is None:
            return
        if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
            raise self._invalid("logits_processors", "a mapping of a processor's name to its argument")
        self._set("logits_processors", dict(value))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
