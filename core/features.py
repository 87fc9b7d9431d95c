"""Features of a request: which parameters ask for them, what they cost, and which cannot be had together, or not here.

The engine asks this file; `docs/features.md` is printed from it. A new feature is an entry in `FEATURES`, and what it
cannot be combined with an entry in `CONFLICTS`, with the reason that users are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final, get_args

from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.replay import ReplayMode
from deepinfer.core.sampling_params import InvalidParameterError, SamplingParams, UnsupportedParameterError
from deepinfer.ops.show import shown

REPLAY_MODES: Final[tuple[str, ...]] = get_args(ReplayMode)


@dataclass(frozen=True)
class Feature:
    """Something that a request may ask for.

    Attributes:
        name: of the parameter, or parameters.
        is_asked: whether parameters ask for it.
        example: parameters that do.
        shapes_rows: it changes logits by what the host knows (`core.shaping`).
        waits: for that it looks at tokens: the request waits for each of its steps, its drafts are brought to the host.
        scores_prompt: it keeps logits of prompt positions, so the request starts from no stored KV.
        needs_tokenizer: it is about text.
    """

    name: str
    is_asked: Callable[[SamplingParams], bool]
    example: Mapping[str, Any] = field(default_factory=dict)
    shapes_rows: bool = False
    waits: bool = False
    scores_prompt: bool = False
    needs_tokenizer: bool = False


@dataclass(frozen=True)
class Conflict:
    """Two features that cannot be combined, by name, and why."""

    first: str
    second: str
    reason: str


FEATURES: Final = (
    Feature("temperature, top_p, top_k, min_p", lambda p: not p.greedy, {"temperature": 0.7, "top_p": 0.9}),
    Feature("seed", lambda p: p.seed is not None, {"seed": 1}),
    Feature(
        "presence, frequency, repetition penalty",
        lambda p: (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0.0, 0.0, 1.0),
        {"frequency_penalty": 1.0},
        shapes_rows=True,
        waits=True,
    ),
    Feature("logit_bias", lambda p: bool(p.logit_bias), {"logit_bias": {3: 1.0}}, shapes_rows=True),
    Feature(
        "allowed_token_ids", lambda p: p.allowed_token_ids is not None, {"allowed_token_ids": [3]}, shapes_rows=True
    ),
    Feature(
        "bad_words",
        lambda p: bool(p.bad_words),
        {"bad_words": ["a"]},
        shapes_rows=True,
        waits=True,
        needs_tokenizer=True,
    ),
    Feature("min_tokens", lambda p: p.min_tokens > 0, {"min_tokens": 1}, shapes_rows=True, waits=True),
    Feature(
        "golden_token_ids", lambda p: bool(p.golden_token_ids), {"golden_token_ids": [3]}, shapes_rows=True, waits=True
    ),
    Feature(
        "thinking_budget",
        lambda p: p.thinking_budget is not None,
        {"thinking_budget": 4},
        shapes_rows=True,
        waits=True,
        needs_tokenizer=True,
    ),
    Feature(
        "logits_processors",
        lambda p: bool(p.logits_processors),
        {"logits_processors": {"x": None}},
        shapes_rows=True,
        waits=True,
    ),
    Feature(
        "structured_output, so_args",
        lambda p: p.structured_output is not None,
        {"structured_output": StructuredOutput(choice=["a"])},
        shapes_rows=True,
        waits=True,
        needs_tokenizer=True,
    ),
    Feature("stop", lambda p: bool(p.stop), {"stop": ["a"]}, needs_tokenizer=True),
    Feature("stop_token_ids", lambda p: bool(p.stop_token_ids), {"stop_token_ids": [3]}),
    Feature("ignore_eos", lambda p: p.ignore_eos, {"ignore_eos": True}),
    Feature("n > 1", lambda p: p.n > 1, {"n": 2}),
    Feature("logprobs, logprob_token_ids", lambda p: p.wants_logprobs, {"logprobs": 1, "logprob_token_ids": [3]}),
    Feature(
        "processed_logprobs",
        lambda p: p.wants_logprobs and p.logprobs_mode == "processed_logprobs",
        {"logprobs": 1, "logprobs_mode": "processed_logprobs"},
    ),
    Feature("prompt_logprobs", lambda p: p.prompt_logprobs is not None, {"prompt_logprobs": 1}, scores_prompt=True),
    Feature("detokenize=False", lambda p: not p.detokenize, {"detokenize": False}),
)

CONFLICTS: Final = (
    Conflict("stop", "detokenize=False", "stop strings are looked for in text, and none is made"),
    Conflict(
        "structured_output, so_args",
        "ignore_eos",
        "a form that is complete allows nothing but an end, and ignore_eos goes on behind it",
    ),
)

_WITHOUT_TOKENIZER: Final = "it is about text, and this engine has no tokenizer"


def asked(params: SamplingParams) -> list[Feature]:
    """The features that a request asks for."""
    return [feature for feature in FEATURES if feature.is_asked(params)]


def refusal(params: SamplingParams, *, has_tokenizer: bool = True) -> str | None:
    """Why a request cannot be served; None when it can.

    Args:
        params: validated.
        has_tokenizer: whether the engine makes text.
    """
    features = {feature.name: feature for feature in asked(params)}
    for conflict in CONFLICTS:
        if conflict.first in features and conflict.second in features:
            return f"{conflict.first} cannot be combined with {conflict.second}: {conflict.reason}"
    for feature in features.values():
        if feature.needs_tokenizer and not has_tokenizer:
            return f"{feature.name} cannot be had: {_WITHOUT_TOKENIZER}"
    return None


def check_features(params: SamplingParams, *, has_tokenizer: bool) -> None:
    """Refuse what cannot be combined, or not by this engine.

    Raises:
        UnsupportedParameterError: names the parameters and the reason.
    """
    reason = refusal(params, has_tokenizer=has_tokenizer)
    if reason is not None:
        raise UnsupportedParameterError("unsupported_parameter", reason)


def check_prompt_options(*, replay: str | None, **numbers: int | None) -> None:
    """Refuse ways to run a prompt that are no such ways; None leaves one to the engine.

    Raises:
        InvalidParameterError: names the option, its value and what would be right.
    """
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise InvalidParameterError(
                "invalid_parameter", f"{name} is {shown(value)}; it must be an integer, at least 1"
            )
    if replay is not None and (not isinstance(replay, str) or replay not in REPLAY_MODES):
        names = ", ".join(map(repr, REPLAY_MODES))
        raise InvalidParameterError("invalid_parameter", f"replay is {shown(replay)}; it must be one of {names}")


def feature_tables() -> tuple[str, str]:
    """Tables in Markdown: features with the engine's modes, and with each other."""
    return _engine_table(), _pair_table()


def _engine_table() -> str:
    columns = ("request", "speculation `coupled`", "speculation `rejection`", "async scheduling", "prefix reuse")
    lines = ["| " + " | ".join((*columns, "no tokenizer")) + " |", "|---" * 6 + "|"]
    for feature in FEATURES:
        params = SamplingParams(temperature=0.0, **_without_temperature(feature.example))
        alone = refusal(params, has_tokenizer=False)
        cells = (
            "yes, drafts by way of the host" if feature.waits else "yes",
            "without drafts" if feature.waits else "yes",
            "waits for its step" if feature.waits else "yes",
            "never starts from stored KV" if feature.scores_prompt else "yes",
            "refused" if alone is not None else "yes",
        )
        lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pair_table() -> str:
    reasons: list[str] = []
    numbers = " | ".join(str(number) for number in range(1, len(FEATURES) + 1))
    lines = [f"| | {numbers} |", "|---" * (len(FEATURES) + 1) + "|"]
    for number, first in enumerate(FEATURES, 1):
        cells = []
        for second in FEATURES[:number]:
            why = refusal(SamplingParams(**{**first.example, **second.example}))
            if why is not None and why not in reasons:
                reasons.append(why)
            cells.append("+" if why is None else _letter(reasons.index(why)))
        cells += [""] * (len(FEATURES) - number)
        lines.append(f"| {number} {first.name} | " + " | ".join(cells) + " |")
    notes = [f"- {_letter(place)}: refused; {why}." for place, why in enumerate(reasons)]
    return "\n".join([*lines, "", *notes])


def _letter(place: int) -> str:
    return chr(ord("a") + place)


def _without_temperature(example: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in example.items() if name != "temperature"}
