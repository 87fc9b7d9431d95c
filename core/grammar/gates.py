"""When a form begins to hold: at once, behind the reasoning, or behind a trigger.

A gate is a function of the tokens alone: a state, and the state behind one token more. States are small integers, so
that trying drafts changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from deepinfer.core.grammar.spec import StructuredOutput, StructuredOutputError
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.shaping import PLAIN, RowShape

OPEN: Final = -1
"""The state in which the form holds; a gate never closes again."""

THINK, END_THINK = "<think>", "</think>"


class Gate(Protocol):
    """What stands in front of a form."""

    start: int
    """The state before the first generated token."""

    def after(self, state: int, token: int) -> int:
        """The state behind one token more; not called with `OPEN`."""
        ...

    def shape(self, state: int) -> RowShape:
        """What changes the row drawn in a state; not called with `OPEN`."""
        ...


class ThinkingGate:
    """Opens behind the end of the reasoning, and keeps the answer from ending before.

    Args:
        end_think: id of `</think>`.
        thinking: whether the prompt ends inside the reasoning.
        stop_token_ids: ids that end an answer.
    """

    def __init__(self, end_think: int, thinking: bool, stop_token_ids: Sequence[int]) -> None:
        self.start = 0 if thinking else OPEN
        self._end_think = end_think
        self._shape = RowShape(forbidden=np.array(sorted(stop_token_ids), np.int32))

    def after(self, state: int, token: int) -> int:
        """See `Gate`."""
        return OPEN if token == self._end_think else state

    def shape(self, state: int) -> RowShape:
        """See `Gate`."""
        return self._shape


class TriggerGate:
    """Opens behind a sequence of generated ids; a bound id makes the rest of it be generated.

    States 0 to n - 1 are matched ids of the trigger, n to 2n - 1 are forced ones.

    Args:
        trigger: n ids.
        bound: the bound id, None for none.
    """

    def __init__(self, trigger: Sequence[int], bound: int | None) -> None:
        self.start = 0
        self._trigger = tuple(trigger)
        self._bound = bound
        self._fallback = _fallbacks(self._trigger)

    def after(self, state: int, token: int) -> int:
        """See `Gate`."""
        size = len(self._trigger)
        if state >= size:
            return state + 1 if state + 1 < 2 * size else OPEN
        matched = state
        while matched and self._trigger[matched] != token:
            matched = self._fallback[matched - 1]
        matched += self._trigger[matched] == token
        if matched == size:
            return OPEN
        return size if token == self._bound else matched

    def shape(self, state: int) -> RowShape:
        """See `Gate`."""
        size = len(self._trigger)
        return RowShape(forced=self._trigger[state - size]) if state >= size else PLAIN


def gate_of(
    spec: StructuredOutput,
    prompt_token_ids: Sequence[int],
    vocabulary: GrammarVocabulary,
    stop_token_ids: Sequence[int],
) -> Gate | None:
    """The gate that a request asks for; None where its form holds from the first token.

    Args:
        spec: validated.
        prompt_token_ids: the prompt.
        vocabulary: the model's.
        stop_token_ids: ids that end the answer.

    Raises:
        StructuredOutputError: an id is outside the vocabulary.
    """
    for token_id in spec.token_ids():
        if token_id >= vocabulary.vocab_size:
            raise StructuredOutputError(
                f"trigger_token_ids or bound_token_id has id {token_id}; ids of this model run from 0 to "
                f"{vocabulary.vocab_size - 1}"
            )
    if spec.trigger_token_ids:
        return TriggerGate(spec.trigger_token_ids, spec.bound_token_id)
    begin, end = vocabulary.token_id(THINK), vocabulary.token_id(END_THINK)
    if not spec.only_after_thinking or begin is None or end is None:
        return None
    markers = [token for token in prompt_token_ids if token in (begin, end)]
    thinking = bool(markers) and markers[-1] == begin
    return ThinkingGate(end, thinking, stop_token_ids) if thinking else None


def _fallbacks(pattern: Sequence[int]) -> list[int]:
    """For each place the longest proper prefix of the pattern that ends there.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977).
    """
    lengths = [0] * len(pattern)
    size = 0
    for place in range(1, len(pattern)):
        while size and pattern[place] != pattern[size]:
            size = lengths[size - 1]
        size += pattern[place] == pattern[size]
        lengths[place] = size
    return lengths
