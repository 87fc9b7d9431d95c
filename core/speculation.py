"""Speculation: who proposes tokens, how many of them a step verifies, and what became of them.

Policy is elsewhere: `core.confidence` says what a draft is worth, `core.step_cost` what a step costs, and
`core.draft_lengths` spends the one on the other. This module runs the draft, and brings the parts together at the three
moments of a step: before it is planned (`allot`), when it is launched (`wants_drafts`, `propose`), when it is collected
(`collect`, `observe_times`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from deepinfer.core._native import add_verified
from deepinfer.core.confidence import Float32Array, Float64Array, Forecaster
from deepinfer.core.draft_lengths import DraftLengths
from deepinfer.core.reliability import Reliability
from deepinfer.core.request_table import RequestTable
from deepinfer.core.sampler import RowParams, Sampler
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_cost import CycleCost, StepMarks
from deepinfer.models.interface import Caches, Draft, DraftBatch, DraftOutput, StepBatch
from deepinfer.ops.philox import Purpose
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import shift


@dataclass
class SpeculationStats:
    """What became of drafts, by place in the draft block.

    Attributes:
        verified: how often a draft there was verified.
        accepted: how often it was kept, those before it included.
        promised: sum over verified drafts of the product of the draft's own confidences up to there. A draft that
            knows itself promises as many as are accepted.
        expected: sum over verified drafts of what the scheduler forecast when it chose them; zeros with
            `draft_schedule="fixed"`, which forecasts nothing.
        num_steps: steps that drew.
        num_steps_without_drafts: steps behind which nothing was drafted, since that would not have paid.
        reliability: confidences against what was kept, over all places.
    """

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_steps_without_drafts: int = 0
    reliability: Reliability = field(default_factory=Reliability)

    def acceptance(self) -> list[float]:
        """Share of verified drafts that were kept, by place; NaN where none was verified."""
        return self._per_verified(self.accepted)

    def confidence_error(self) -> list[float]:
        """Promised less accepted, per verified draft and by place: above 0 where a draft thinks too well of itself."""
        return self._per_verified([p - a for p, a in zip(self.promised, self.accepted, strict=True)])

    def forecast_error(self) -> list[float]:
        """Expected less accepted, per verified draft and by place; meaningless with a fixed schedule."""
        return self._per_verified([e - a for e, a in zip(self.expected, self.accepted, strict=True)])

    def lines(self) -> list[str]:
        """A table for people: a line per place that was verified."""
        if not any(self.verified):
            return []
        head = "place  verified  accepted  confidence  forecast"
        rows = zip(self.verified, self.accepted, self.promised, self.expected, strict=True)
        return [head] + [
            f"{place:5}  {tried:8}  {kept / tried:8.3f}  {promised / tried:10.3f}  {expected / tried:8.3f}"
            for place, (tried, kept, promised, expected) in enumerate(rows, 1)
            if tried
        ]

    def _per_verified(self, sums: Sequence[float]) -> list[float]:
        pairs = zip(sums, self.verified, strict=True)
        return [total / tried if tried else float("nan") for total, tried in pairs]


@dataclass(frozen=True)
class DraftSchedule:
    """How drafts are scheduled.

    Attributes:
        num_drafts: most drafts of a request that a step verifies, at most those of a block.
        adaptive: verify as many as pay, and draft only where that pays; otherwise verify all of them always.
        rejection: the rejection rule: drafts have a random stream of their own, their logits are kept, and whether one
            is verified does not depend on drafts behind it.
        temperatures: of the confidences, one per draft of a block; empty for 1.
    """

    num_drafts: int
    adaptive: bool = True
    rejection: bool = False
    temperatures: tuple[float, ...] = ()


class Drafting:
    """Proposes tokens with a model's draft, and decides how many of them are verified.

    Args:
        draft: the model's.
        caches: those of the model.
        sampler: draws the drafts with the requests' own parameters.
        ops: binds what is needed here.
        schedule: how many, and by which rule.
        table: the running requests.
        max_seqs: most requests of a step.
        max_rows: rows of the largest step.
    """

    def __init__(
        self,
        draft: Draft,
        caches: Caches,
        sampler: Sampler,
        ops: OpTable,
        *,
        schedule: DraftSchedule,
        table: RequestTable,
        max_seqs: int,
        max_rows: int,
    ) -> None:
        self._draft = draft
        self._caches = caches
        self._sampler = sampler
        self._schedule = schedule
        self._table = table
        self._max_rows = max_rows
        self._scratch = draft.new_scratch(max_seqs)
        self._shift = ops.bind(shift)
        self._runtime = ops.context.runtime
        count = schedule.num_drafts
        self.cost = CycleCost(max_rows, max_seqs)
        self._lengths = DraftLengths(count, max_rows, self.cost)
        self._forecaster = Forecaster(max_seqs, count, rejection=schedule.rejection)
        self._expected: Float32Array = np.zeros((max_seqs + 1, count), np.float32)
        self._promised: Float64Array = np.zeros((5, count))
        self.stats = SpeculationStats([0] * count, [0] * count, [0.0] * count, [0.0] * count)

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request that a step verifies."""
        return self._schedule.num_drafts

    def begin_marks(self) -> StepMarks | None:
        """Mark where the device begins a step; None where nobody wants to know what steps cost."""
        return StepMarks.begin(self._runtime) if self._schedule.adaptive else None

    def allot(self, seqs: Int32Array) -> None:
        """Say in the table how many drafts each running request verifies in the step that is planned next.

        Args:
            seqs: [n] int32 handles of all running requests.
        """
        table = self._table
        drafted = seqs[table.num_drafts[seqs] > 0]
        if not self._schedule.adaptive or len(drafted) == 0:
            return
        known = table.planned_tokens[drafted]
        room = np.maximum(table.max_tokens[drafted] - known - 1, 0)
        available = np.minimum(table.num_drafts[drafted], room)
        pending = np.maximum(table.planned_tokens[seqs] - table.planned_computed[seqs], 0).sum()
        other_rows = min(int(pending), self._max_rows) - len(drafted)
        forecast = self._forecaster.of_drafted(drafted)
        self._expected[drafted] = forecast.share
        table.num_drafts[drafted] = self._lengths.choose(forecast, available, known, max(other_rows, 0))

    def expected(self, seqs: Int32Array) -> Float32Array | None:
        """[R, D], what `allot` forecast for requests of the step that is launched; None with a fixed schedule."""
        return self._expected[seqs] if self._schedule.adaptive else None

    def wants_drafts(self, seqs: Int32Array, other_rows: int) -> bool:
        """Whether to draft behind the step that is launched.

        Args:
            seqs: [R] int32, handles of the requests that draw in it.
            other_rows: rows of other requests in it.
        """
        book = self._forecaster.book
        book.claim(seqs, self._table.generation[seqs])
        pays = not self._schedule.adaptive or self._lengths.pays(
            self._forecaster.of_next(seqs), self._table.planned_tokens[seqs], other_rows
        )
        self.stats.num_steps += 1
        self.stats.num_steps_without_drafts += not pays
        note = book.drafted if pays else book.skipped
        note(seqs)
        return pays

    def propose(
        self,
        newest: Tensor,
        positions: Tensor,
        seqs: Tensor,
        batch: StepBatch,
        params: RowParams,
        output_index: Tensor,
    ) -> DraftOutput:
        """Draft behind each request's newest token.

        Args:
            newest: [R] int32 anchors.
            positions: [R] int32 of them.
            seqs: [R] int32, their sequences in `batch`.
            batch: the step that stored everything before the anchors.
            params: of the R requests.
            output_index: [R] int32 of the first drafted token.
        """
        rejection = self._schedule.rejection

        def choose(place: int, logits: Tensor) -> Tensor:
            index = self._shift(output_index, place)
            if rejection:
                return self._sampler.draw(logits, params, index, purpose=Purpose.DRAFT, anchor=output_index)
            return self._sampler.draw(logits, params, index)

        return self._draft.draft(
            DraftBatch(
                anchor_ids=newest,
                anchor_positions=positions,
                seqs=seqs,
                window_tables=batch.window_tables,
                window_first_page=batch.window_first_page,
                window_page=batch.window_page,
                scratch=self._scratch,
            ),
            self._caches,
            choose,
            temperatures=self._schedule.temperatures,
            with_logits=rejection,
        )

    def collect(
        self,
        seqs: Int32Array,
        verified: Int32Array,
        accepted: Int32Array,
        expected: Float32Array | None,
        confidences: Float32Array | None,
    ) -> None:
        """Learn from a finished step; steps are collected in the order of their launch.

        Args:
            seqs: [R] int32, handles of requests that drew in it and still run as they did.
            verified: [R] int32, drafts that it verified.
            accepted: [R] int32, how many of them were kept.
            expected: [R, D], as `expected` gave it when the step was launched.
            confidences: [R, D], of the block drafted behind it; None where none was.
        """
        stats, book = self.stats, self._forecaster.book
        if verified.any():
            tried, kept = self._by_place(verified), self._by_place(accepted)
            stats.verified = [a + b for a, b in zip(stats.verified, tried, strict=True)]
            stats.accepted = [a + b for a, b in zip(stats.accepted, kept, strict=True)]
            add_verified(book.newest, seqs, verified, accepted, self._promised)
            stats.promised = self._promised[1].tolist()
            stats.reliability.add(book.newest[seqs], verified, accepted)
            if expected is not None:
                place = np.arange(self.num_drafts)
                sums = np.where(place < verified[:, None], expected, 0).sum(0, dtype=np.float64)
                stats.expected = (np.array(stats.expected) + sums).tolist()
                self._forecaster.observe(seqs, verified, accepted)
        if confidences is not None:
            book.arrived(seqs, confidences)

    def observe_times(
        self,
        marks: StepMarks,
        query_lens: Int32Array,
        starts: Int32Array,
        num_drafting: int,
        *,
        cycle: float,
        waited: float,
    ) -> None:
        """Learn what a finished step cost.

        Args:
            marks: of it; the host has waited for what is behind them.
            query_lens: [S] int32, rows of its sequences.
            starts: [S] int32, tokens before the first row of each.
            num_drafting: requests that it drafted for.
            cycle: seconds from step to step on the host's clock.
            waited: those of them in which the host waited for the device.
        """
        step, draft = marks.seconds()
        self.cost.step.observe(int(query_lens.sum()), float(np.dot(query_lens.astype(np.float64), starts)), step)
        if num_drafting:
            self.cost.draft.observe(num_drafting, 0, draft)
        self.cost.observe_host(cycle, waited, step + draft)

    def _by_place(self, lengths: Int32Array) -> list[int]:
        """By place in the draft block, how many lengths reach beyond it."""
        counts = np.bincount(lengths, minlength=self.num_drafts + 1)
        reached: list[int] = (len(lengths) - np.cumsum(counts)[: self.num_drafts]).tolist()
        return reached
