"""What requests got, in a form that compares bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True)
class ChoiceFacts:
    """One answer, floats as exact texts.

    Attributes:
        token_ids: generated tokens.
        text: what they say.
        finish_reason: how it ended.
        stop_reason: the stop id or string.
        logprobs: an entry per generated token.
        cumulative_logprob: their sum.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[object, ...] | None = None
    cumulative_logprob: str | None = None

    @classmethod
    def of(cls, choice: CompletionOutput) -> ChoiceFacts:
        """The facts of a finished answer."""
        total = choice.cumulative_logprob
        return cls(
            tuple(choice.token_ids),
            choice.text,
            choice.finish_reason,
            choice.stop_reason,
            None if choice.logprobs is None else tuple(map(_entry, choice.logprobs)),
            None if total is None else total.hex(),
        )

    def difference(self, whole: ChoiceFacts) -> str | None:
        """What differs from the oracle's facts; those of a cancelled answer are a prefix of them. None for nothing."""
        cut = self.finish_reason == "abort"
        for name in ("token_ids", "logprobs"):
            found = _difference(name, getattr(self, name), getattr(whole, name), cut)
            if found is not None:
                return found
        for name in () if cut else ("finish_reason", "stop_reason", "text", "cumulative_logprob"):
            if getattr(self, name) != getattr(whole, name):
                return f"{name} is {getattr(self, name)!r}, alone it is {getattr(whole, name)!r}"
        return None


@dataclass(frozen=True)
class RequestFacts:
    """Everything that a request got.

    Attributes:
        choices: its answers; none when it was refused.
        error: code of its error.
        prompt_logprobs: an entry per prompt token.
        seed: of its draws.
    """

    choices: tuple[ChoiceFacts, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[object, ...] | None = None
    seed: int | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> RequestFacts:
        """The facts of a finished result."""
        return cls(
            tuple(map(ChoiceFacts.of, output.outputs)),
            output.error.code if output.error is not None else None,
            None if output.prompt_logprobs is None else tuple(map(_entry, output.prompt_logprobs)),
            output.seed,
        )

    @property
    def was_cancelled(self) -> bool:
        """Some of its answers are not whole."""
        return any(choice.finish_reason == "abort" for choice in self.choices)

    def difference(self, whole: RequestFacts) -> str | None:
        """What differs from the oracle's facts; those of a cancelled request are a prefix of them. None for nothing."""
        if len(self.choices) != len(whole.choices):
            return f"has {len(self.choices)} answers and error {self.error}, alone {len(whole.choices)}, {whole.error}"
        for index, (mine, other) in enumerate(zip(self.choices, whole.choices, strict=True)):
            found = mine.difference(other)
            if found is not None:
                return f"answer {index}: {found}"
        if self.seed != whole.seed or (self.error != whole.error and not self.was_cancelled):
            return f"seed and error are {self.seed}, {self.error}, alone {whole.seed}, {whole.error}"
        return _difference("prompt_logprobs", self.prompt_logprobs, whole.prompt_logprobs, self.was_cancelled)


@dataclass(frozen=True)
class Facts:
    """What a workload did.

    Attributes:
        requests: in order of their ids.
        num_steps: steps of the engine.
        num_preemptions: requests that gave way.
        num_stored_tokens: tokens that were not computed again.
        num_accepted_drafts: drafted tokens that became part of an answer.
        leaks: what the pool did not get back; empty when all is well.
        num_graph_steps: steps that ran as captured graphs.
    """

    requests: tuple[RequestFacts, ...]
    num_steps: int
    num_preemptions: int
    num_stored_tokens: int = 0
    num_accepted_drafts: int = 0
    leaks: tuple[str, ...] = ()
    num_graph_steps: int = 0


def _entry(entry: Mapping[int, Logprob] | None) -> object:
    return entry and tuple((token, p.logprob.hex(), p.rank) for token, p in entry.items())


def _difference(name: str, mine: Any, other: Any, cut: bool) -> str | None:
    if mine is None or other is None:
        return None if mine == other else f"{name} are {mine!r}, alone {other!r}"
    if cut:
        other = other[: len(mine)]
    if mine == other:
        return None
    place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    here, there = mine[place : place + 3], other[place : place + 3]
    return f"{name} differ at {place}: {here!r} of {len(mine)}, alone {there!r}"
