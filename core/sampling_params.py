"""What a request may ask of sampling, in vLLM's shape, checked by name and value.

Values are checked when the object is made, ids and features when it is submitted. What this release does not run yet is
refused there, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from deepinfer.core.errors import RequestError

MAX_SEED: Final = 2**64 - 1
GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by less would only amplify rounding."""

UNSUPPORTED_YET: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "min_tokens": (0,),
    "stop": ((),),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "logprob_token_ids": (None, ()),
}
"""Fields that this release does not run, and the values that ask for nothing."""


class InvalidParameterError(RequestError, ValueError):
    """A sampling parameter has a value it cannot have. Remedy: the message says what would be right."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)


class UnsupportedParameterError(RequestError, ValueError):
    """A sampling parameter asks for something this release does not do. Remedy: leave it out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Immutable; `dataclasses.replace` makes a changed one.

    Lists become tuples; None in place of a list is an empty one.

    Attributes:
        n: answers to the prompt.
        temperature: divides the logits; 0, and anything below 1e-5, takes the best token, ties to the lowest id.
        top_p: keep the shortest list of best tokens with this much probability, in (0, 1]; 1 is off.
        top_k: keep this many best tokens; -1 and 0 are off.
        min_p: keep tokens with at least this fraction of the best one's probability, in [0, 1]; 0 is off.
        seed: of this request's draws, 0 to 2^64 - 1. None: one is derived, and the result names it.
        max_tokens: most tokens to generate; 0 scores the prompt only.
        min_tokens: no end before this many.
        stop: strings that end the answer; one or a list.
        stop_token_ids: ids that end the answer, beside the model's own.
        include_stop_str_in_output: leave the stop string in the text.
        ignore_eos: do not end at the model's own end tokens.
        logprobs: record the logprob of every generated token, and of this many best ones (at most the vocabulary);
            None records nothing.
        prompt_logprobs: the same for prompt tokens.
        logprob_token_ids: ids whose logprobs to record at every place.
        presence_penalty: subtracted from the logits of generated tokens, in [-2, 2].
        frequency_penalty: the same, times their count.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens; above 0.
        logit_bias: id to a number that is added to its logit.
        allowed_token_ids: only these may be generated.
        bad_words: strings that may not be generated.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._integer("n", 1)
        self._number("temperature", 0.0, math.inf, "0 (greedy) or a positive number")
        self._number("top_p", 0.0, 1.0, "above 0 and at most 1", open_low=True)
        self._integer("top_k", -1, what="a positive integer, or -1 or 0 for off")
        self._number("min_p", 0.0, 1.0, "from 0 to 1")
        self._integer("seed", 0, MAX_SEED, what="from 0 to 2^64 - 1, or None", optional=True)
        self._integer("max_tokens", 0, what="an integer, at least 0 (0 scores the prompt only)")
        self._integer("min_tokens", 0, self.max_tokens, what=f"from 0 to max_tokens, which is {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            self._integer(name, 0, what="an integer, at least 0, or None", optional=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -2.0, 2.0, "from -2 to 2")
        self._number("repetition_penalty", 0.0, math.inf, "above 0", open_low=True)
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            self._token_ids(name, optional=name != "stop_token_ids")
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

    def validate(self, vocab_size: int) -> None:
        """Check what only a model can: ids against its vocabulary; then refuse what this release does not run.

        `logprobs` above the vocabulary is fine: the vocabulary is what there is.

        Args:
            vocab_size: ids run from 0 to `vocab_size` - 1.

        Raises:
            InvalidParameterError: an id is outside the vocabulary.
            UnsupportedParameterError: a field of `UNSUPPORTED_YET` asks for something.
        """
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            ids: Collection[int] = getattr(self, name) or ()
            for place, token_id in enumerate(ids):
                if not 0 <= token_id < vocab_size:
                    where = f"[{place}]" if name != "logit_bias" else ""
                    raise InvalidParameterError(
                        "invalid_parameter",
                        f"{name}{where} has id {token_id}; ids of this model run from 0 to {vocab_size - 1}",
                    )
        for name, neutral in UNSUPPORTED_YET.items():
            value = getattr(self, name)
            if value not in neutral:
                raise UnsupportedParameterError(
                    "unsupported_parameter",
                    f"{name}={value!r} is not supported yet; leave it out or give {neutral[0]!r}",
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _invalid(self, name: str, wanted: str) -> InvalidParameterError:
        return InvalidParameterError("invalid_parameter", f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def _integer(
        self, name: str, low: int, high: int | None = None, *, what: str | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_integer(value) or value < low or (high is not None and value > high):
            raise self._invalid(name, what or f"an integer, at least {low}")
        self._set(name, int(value))

    def _number(self, name: str, low: float, high: float, what: str, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        fits = _is_number(value) and math.isfinite(value) and low <= value <= high and not (open_low and value == low)
        if not fits:
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
            if not _is_integer(token_id) or not _is_number(value) or not math.isfinite(value):
                raise InvalidParameterError(
                    "invalid_parameter", f"logit_bias must map token ids to finite numbers, got {key!r}: {value!r}"
                )
            bias[int(token_id)] = float(value)
        self._set("logit_bias", bias)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
