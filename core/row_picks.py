"""Which rows of a step draw, verify drafts, or have their logits kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepinfer.core.request import Request
from deepinfer.core.request_table import RequestTable
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.step_buffers import Int32Array


@dataclass
class RowPicks:
    """Rows whose logits a step needs: those of the requests that draw, then prompt positions to keep.

    Attributes:
        logits_rows: [n] int32.
        draws: requests that draw.
        places: [R] int32, their places in the plan.
        slots: [R] int32, their handles.
        num_drafts: [R] int32, drafts each verifies; it has one row more.
        starts: [R] int32, first of its rows among the logits.
        scored: (request, first position, count, place among the logits).
    """

    logits_rows: Int32Array
    draws: list[Request]
    places: Int32Array
    slots: Int32Array
    num_drafts: Int32Array
    starts: Int32Array
    scored: list[tuple[Request, int, int, int]]

    @cached_property
    def widths(self) -> Int32Array:
        """[R] int32, rows of each request that draws."""
        return self.num_drafts + 1

    @cached_property
    def num_drawn_from(self) -> int:
        """Rows that are drawn from; those to keep come behind them."""
        return len(self.logits_rows) - sum(count for _, _, count, _ in self.scored)

    @property
    def has_drafts(self) -> bool:
        """Whether anybody verifies a draft."""
        return self.num_drawn_from > len(self.draws)


def pick_rows(plan: StepPlan, table: RequestTable) -> RowPicks:
    """The rows of a plan whose logits are needed; notes prompt positions as planned to be kept."""
    drafts = plan.starts + plan.query_lens - table.planned_tokens[plan.seqs]  # behind the last known token
    if plan.num_rows == len(drafts) and not drafts.any() and table.are_plain(plan.seqs):
        numbers = np.arange(len(drafts), dtype=np.int32)  # every row draws, the usual decode step
        return RowPicks(numbers, plan.requests, numbers, plan.seqs, drafts, numbers, [])
    may_draw = (drafts >= 0) & table.may_generate[plan.seqs]
    ends = np.cumsum(plan.query_lens, dtype=np.int32)
    places = np.flatnonzero(may_draw).astype(np.int32)
    draws = plan.requests
    if len(places) < len(draws):
        draws = [plan.requests[place] for place in places.tolist()]
    num_drafts = drafts[places]
    widths = num_drafts + 1
    draw_rows = np.repeat(ends[places] - widths, widths) + places_within(widths)
    rows = [draw_rows]
    scored = []
    first_logits = len(draw_rows)
    for place in np.flatnonzero(table.scores_prompt[plan.seqs]).tolist():
        request, start, count = plan.requests[place], int(plan.starts[place]), int(plan.query_lens[place])
        first = max(request.num_prompt_rows_planned, start)
        end = min(request.num_prompt_rows_wanted, start + count)
        if first < end:
            row = int(ends[place]) - count - start + first
            rows.append(np.arange(row, row + end - first, dtype=np.int32))
            scored.append((request, first, end - first, first_logits))
            first_logits += end - first
            request.num_prompt_rows_planned = end
    starts = np.cumsum(widths, dtype=np.int32) - widths
    return RowPicks(np.concatenate(rows), draws, places, plan.seqs[places], num_drafts, starts, scored)


def places_within(widths: Int32Array) -> Int32Array:
    """[sum of widths] int32: 0, 1, ... within each of several runs of these widths."""
    ends = np.cumsum(widths, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - widths, widths)
