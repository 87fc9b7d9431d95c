"""What requests got, in a form that compares bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.core.outputs import Logprob, RequestOutput


@dataclass(frozen=True)
class RequestFacts:
    """Everything that a request got, floats as exact texts.

    Attributes:
        token_ids: generated tokens.
        finish_reason: how it ended, None when it was refused.
        stop_reason: the stop id.
        error: code of its error.
        logprobs: an entry per generated token.
        cumulative_logprob: their sum.
        prompt_logprobs: an entry per prompt token.
        seed: of its draws.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: tuple[object, ...] | None = None
    cumulative_logprob: str | None = None
    prompt_logprobs: tuple[object, ...] | None = None
    seed: int | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> RequestFacts:
        """The facts of a finished result."""
        choice = output.outputs[0]
        total = choice.cumulative_logprob
        return cls(
            tuple(choice.token_ids),
            choice.finish_reason,
            choice.stop_reason,
            output.error.code if output.error is not None else None,
            None if choice.logprobs is None else tuple(map(_entry, choice.logprobs)),
            None if total is None else total.hex(),
            None if output.prompt_logprobs is None else tuple(map(_entry, output.prompt_logprobs)),
            output.seed,
        )

    def difference(self, whole: RequestFacts) -> str | None:
        """What differs from the oracle's facts; those of a cancelled request are a prefix of them. None for nothing."""
        cut = self.finish_reason == "abort"
        for name in ("token_ids", "logprobs", "prompt_logprobs"):
            mine, other = getattr(self, name), getattr(whole, name)
            if cut and mine is not None and other is not None:
                other = other[: len(mine)]
            if mine != other:
                return f"{name} {_first_difference(mine, other)}"
        names = ("seed",) if cut else ("finish_reason", "stop_reason", "error", "cumulative_logprob", "seed")
        for name in names:
            if getattr(self, name) != getattr(whole, name):
                return f"{name} is {getattr(self, name)!r}, alone it is {getattr(whole, name)!r}"
        return None


@dataclass(frozen=True)
class Facts:
    """What a workload did.

    Attributes:
        requests: in order of their ids.
        num_steps: steps of the engine.
        num_preemptions: requests that gave way.
        leaks: what the pool did not get back; empty when all is well.
    """

    requests: tuple[RequestFacts, ...]
    num_steps: int
    num_preemptions: int
    leaks: tuple[str, ...] = ()


def _entry(entry: Mapping[int, Logprob] | None) -> object:
    return entry and tuple((token, p.logprob.hex(), p.rank) for token, p in entry.items())


def _first_difference(mine: Any, other: Any) -> str:
    if mine is None or other is None:
        return f"are {mine!r}, alone {other!r}"
    place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return f"differ at {place}: {mine[place : place + 3]!r} of {len(mine)}, alone {other[place : place + 3]!r}"
