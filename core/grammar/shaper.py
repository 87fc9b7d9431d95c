"""Holds one answer to its form: where it stands, and what its next rows may hold.

The state is what `accept` was told, so it survives preemption. Rows are shaped for all answers of a step at once
(`core.grammar.masks`); asked alone, a shaper does the same for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar import matching
from deepinfer.core.grammar.gates import OPEN, Gate
from deepinfer.core.grammar.masks import GrammarMasks, bits_of
from deepinfer.core.grammar.matching import CompiledGrammar, Matcher, MatcherBatch
from deepinfer.core.shaping import RowShape


class GrammarShaper:
    """A `RowShaper` for one answer.

    Args:
        masks: shapes the rows of a step.
        stop_token_ids: ids that may come once the grammar is complete, and never before.
        ends: all ids that end the answer; text among them is left to the grammar.
        min_tokens: no end before so many tokens, unless the grammar leaves nothing else.
        gate: what the form waits for; None for nothing.
    """

    def __init__(
        self,
        masks: GrammarMasks,
        *,
        stop_token_ids: Sequence[int],
        ends: Sequence[int] = (),
        min_tokens: int = 0,
        gate: Gate | None = None,
    ) -> None:
        self._masks = masks
        self._stops = tuple(stop_token_ids)
        self.ends = bits_of(ends)
        self.min_tokens = min_tokens
        self.gate = gate
        self.state = gate.start if gate is not None else OPEN
        self.num_outputs = 0
        self._is_over = False
        self._matcher: Matcher | None = None
        self._rows: list[RowShape] | None = None

    def start(self, grammar: CompiledGrammar) -> None:
        """Begin with the grammar, which was not there when the request was queued."""
        self._matcher = grammar.matcher(self._stops)

    @property
    def matcher(self) -> Matcher:
        """Where the answer stands in the grammar."""
        assert self._matcher is not None, "requests are scheduled only once their grammar is there"
        return self._matcher

    @property
    def is_open(self) -> bool:
        """Whether the form holds already."""
        return self.state == OPEN

    def is_stop(self, token: int) -> bool:
        """Whether a token ends the answer once the grammar is complete."""
        return token in self._stops

    def prepare(self, rows: list[RowShape]) -> None:
        """Remember the shapes of the step that is planned; the next `shape` gives them."""
        self._rows = rows

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        rows, self._rows = self._rows, None
        return self._masks.shapes_of(self, drafts) if rows is None else rows

    def accept(self, tokens: Sequence[int]) -> None:
        """See `RowShaper`.

        Raises:
            RequestError: a token that was forced is none that the grammar allows, or the grammar takes too long.
        """
        for token in tokens:
            place, self.num_outputs = self.num_outputs, self.num_outputs + 1
            if self.state != OPEN:
                assert self.gate is not None, "only a gate has other states"
                self.state = self.gate.after(self.state, token)
            elif not self._is_over:
                if not self.matcher.accept(token):
                    raise _violation(place, token)
                if self.matcher.is_too_slow:
                    raise _slowness(place)
                self._is_over = token in self._stops


def accept_each(shapers: Sequence[GrammarShaper], tokens: Sequence[int]) -> dict[int, RequestError]:
    """Let answers whose forms hold already go on by one token each, none of which is an end.

    Args:
        shapers: R, each once.
        tokens: R ids.

    Returns:
        The errors that `GrammarShaper.accept` would have raised, by index.
    """
    for shaper in shapers:
        shaper.num_outputs += 1
    matchers = [shaper.matcher for shaper in shapers]
    faults: dict[int, RequestError] = {}
    for index, is_allowed in enumerate(MatcherBatch.accept(matchers, tokens)):
        if not is_allowed:
            faults[index] = _violation(shapers[index].num_outputs - 1, tokens[index])
        elif matchers[index].is_too_slow:
            faults[index] = _slowness(shapers[index].num_outputs - 1)
    return faults


def _slowness(place: int) -> RequestError:
    return RequestError(
        "grammar_too_slow",
        f"the structured output is so ambiguous that matching took more than {matching.MAX_SLOW_SECONDS:g} s of "
        f"processor time by output token {place}; write each text in one way only",
    )


def _violation(place: int, token: int) -> RequestError:
    return RequestError(
        "grammar_violated",
        f"output token {place} was forced to be id {token}, which the structured output does not allow there",
    )
