"""Which shapes of decode steps are captured: rows, sequences and context are rounded up to few sizes.

A graph has fixed shapes, so a step runs in the smallest graph that holds it, with rows of padding. Few sizes mean few
graphs, close ones little padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

CONTEXT_STEP: Final = 4096
"""Tokens of context that the first graphs hold; each further size is twice as long."""


class GraphKey(NamedTuple):
    """What one set of graphs is captured for.

    Attributes:
        rows: of the step, padding included.
        seqs: sequences of the step, padding included.
        context: tokens of the longest sequence, this step's included, at most.
        verifies: some sequence has more than one row, so that drafts are judged.
    """

    rows: int
    seqs: int
    context: int
    verifies: bool


def default_sizes(most: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256, then every 16, and `most` itself."""
    return sorted({size for size in (1, 2, 4, *range(8, 257, 8), *range(272, most, 16)) if size < most} | {most})


@dataclass(frozen=True)
class GraphSizes:
    """Sizes of one engine, ascending.

    Attributes:
        rows: row counts; empty where no step is captured.
        seqs: sequence counts.
        contexts: tokens.
    """

    rows: tuple[int, ...]
    seqs: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def of(
        cls, given: Sequence[int], *, max_graph_rows: int, max_rows: int, max_seqs: int, num_drafts: int, max_len: int
    ) -> GraphSizes:
        """Settle the sizes.

        Args:
            given: row counts that the settings name; the field's usual ones where they name none.
            max_graph_rows: the most rows of a captured step.
            max_rows: the most rows of any step; ops have scratch for no more, padding included.
            max_seqs: the most sequences of a step.
            num_drafts: the most drafts of a sequence.
            max_len: tokens of the longest sequence while steps are in flight.
        """
        sizes = [size for size in given if size <= max_graph_rows] if given else default_sizes(max_graph_rows)
        contexts = [CONTEXT_STEP]
        while contexts[-1] < max_len:
            contexts.append(2 * contexts[-1])
        return cls(
            rows=_up_to(sizes, min(max_rows, max_seqs * (1 + num_drafts))),
            seqs=_up_to(sizes, min(max_rows, max_seqs)),
            contexts=_up_to(contexts, max_len),
        )

    def key(self, rows: int, seqs: int, context: int) -> GraphKey | None:
        """The graph that holds such a step; None where none does."""
        held_seqs, held_context = _at_least(self.seqs, seqs), _at_least(self.contexts, context)
        held_rows = _at_least(self.rows, rows) if rows > seqs else held_seqs
        if not (held_rows and held_seqs and held_context):
            return None
        return GraphKey(held_rows, held_seqs, held_context, verifies=rows > seqs)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Sizes, none above `most`: a step that large needs no padding, and padding may not exceed it either."""
    return tuple(sorted({min(size, most) for size in sizes}))


def _at_least(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds `count`; 0 where none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else 0
