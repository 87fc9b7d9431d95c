"""From a plan to drawn tokens: corrects the step on the device, runs the model, samples or verifies, drafts ahead.

Nothing here waits for the device. What the host does not know yet, because the step before is still running, is filled
in by ops from that step's results (`Drawn`), so the next step can be launched before this one's tokens are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.draft_launch import DraftLauncher, DrawInputs
from deepinfer.core.errors import as_request_error
from deepinfer.core.executor import Executor
from deepinfer.core.launched_step import Arrivals, Drawn, KnownCopy, LaunchedStep
from deepinfer.core.logprobs import LogprobTaker
from deepinfer.core.replay import Replay
from deepinfer.core.request_table import Int64Array, RequestTable
from deepinfer.core.row_picks import RowPicks, pick_rows
from deepinfer.core.row_shaping import RowShaping, StepShapes
from deepinfer.core.sampler import Sampler
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.speculation import Drafting
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_graphs import GraphedStep, StepGraphs
from deepinfer.core.step_shapes import shape_rows
from deepinfer.models.interface import StepBatch, Tap
from deepinfer.ops.heads import known_ids
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import advance_history, advance_step, gather_ids, last_emitted, rewind

_NO_LINKS: Final = np.array([-1], np.int32)
"""For sequences of any number."""

__all__ = ["Arrivals", "Drawn", "KnownCopy", "LaunchedStep", "StepRunner"]


@dataclass(frozen=True)
class _SameRows:
    """What steps of the same requests with one row each have in common.

    Attributes:
        seqs: [n] int32 handles, in the array of the plan.
        query_lens: [n] int32, in the array of the plan, which another plan shares only if it is about the same.
        version: of the table.
        picks: rows.
        generations: [n] int64.
    """

    seqs: Int32Array
    query_lens: Int32Array
    version: int
    picks: RowPicks
    generations: Int64Array


class StepRunner:
    """Launches steps on one device.

    Args:
        executor: runs the model.
        sampler: parameters by slot, and the sampling ops.
        ops: binds the ops that correct a step.
        drafting: proposes tokens; None without speculation.
        replay: which rows run in all layers.
        table: the running requests.

    Attributes:
        graphs: captured decode steps; None where nothing is captured.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        ops: OpTable,
        drafting: Drafting | None,
        replay: Replay,
        table: RequestTable,
    ) -> None:
        self.graphs: StepGraphs | None = None
        self._executor = executor
        self._table = table
        self._replay = replay
        self._sampler = sampler
        self._drafting = drafting
        self._drafts = DraftLauncher(drafting, executor, ops, table) if drafting is not None else None
        self._advance = ops.bind(advance_step)
        self._advance_history = ops.bind(advance_history)
        self._rewind = ops.bind(rewind)
        self._last = ops.bind(last_emitted)
        self._known = ops.bind(known_ids)
        self._gather_ids = ops.bind(gather_ids)
        self.shaping = RowShaping(ops, executor.model.info.vocab_size)
        self._logprobs = LogprobTaker(sampler, self.shaping, ops)
        self._runtime = ops.context.runtime
        self._same: _SameRows | None = None

    def launch(self, plan: StepPlan, previous: Drawn | None, tap: Tap | None = None) -> LaunchedStep:
        """Launch a step.

        Args:
            plan: from the scheduler.
            previous: draws of the step launched just before, which `RequestTable.draw` refers to; None without any.
            tap: observer of intermediates, for tests.
        """
        same, table = self._same, self._table
        if (
            same is not None
            and same.query_lens is plan.query_lens
            and same.seqs is plan.seqs
            and same.version == table.version
        ):
            picks, generations, cut = same.picks, same.generations, None
            links = picks.starts  # all of them drew in the step before, in this order
            if previous is not None and not previous.tells_more:
                previous = None
        else:
            picks, generations = pick_rows(plan, table), table.generation[plan.seqs]
            links = table.draw[plan.seqs]
            if previous is not None and not (previous.tells_more and (links >= 0).any()):
                previous = None
            cut = self._replay.cut(plan)
            self._same = self._begin_same(plan, picks, generations)
        graphed = self._write_graphed(plan, picks, links, previous, is_plain=cut is None and tap is None)
        if graphed is not None:
            batch = self._send_graphed(graphed, picks, links, previous)
        else:
            meta = self._executor.plan(plan.seqs, plan.query_lens, plan.starts)
            self._write_known_drafts(meta.input_ids, picks)
            batch = self._executor.batch(meta, picks.logits_rows, cut)
            if previous is not None:
                self._correct(batch, previous, self._executor.send(links))
        marks = self._drafting.begin_marks() if self._drafting is not None and picks.draws else None
        if graphed is not None:
            logits = graphed.forward(and_draw=marks is None and table.are_plain(plan.seqs))
        else:
            logits = self._executor.forward(batch, tap)
        launched = LaunchedStep(
            plan=plan,
            generations=generations,
            draws=picks.draws,
            places=picks.places,
            slots=picks.slots,
            num_drafts=picks.num_drafts,
            version=table.version,
            drawn=None,
            logprob_of=[],
            scored=[
                (request, int(table.generation[request.seq]), first, count, logits[at : at + count])
                for request, first, count, at in picks.scored
            ],
            marks=marks,
        )
        if picks.draws:
            self._draw(launched, picks, batch, logits, previous, graphed)
        return launched

    def _begin_same(self, plan: StepPlan, picks: RowPicks, generations: Int64Array) -> _SameRows | None:
        """What the steps behind this one may use again; None where each needs its own answers."""
        if picks.slots is not plan.seqs or picks.has_drafts or self._drafting is not None:
            return None
        if not self._table.are_plain(plan.seqs) or any(request.decoder_start for request in plan.requests):
            return None
        return _SameRows(plan.seqs, plan.query_lens, self._table.version, picks, generations)

    def _write_graphed(
        self, plan: StepPlan, picks: RowPicks, links: Int32Array, previous: Drawn | None, *, is_plain: bool
    ) -> GraphedStep | None:
        """Write a step that graphs may run to where they read it; None for any other step."""
        if self.graphs is None:
            return None
        if not is_plain:
            self.graphs.note_eager("a prompt is cut short, or somebody looks at intermediates")
            return None
        if picks.scored or len(picks.logits_rows) < plan.num_rows:
            self.graphs.note_eager("prompt rows")
            return None
        if previous is not None and previous.is_graphed:
            return self.graphs.write(plan, links, previous.host_planned)
        return self.graphs.write(plan, _NO_LINKS, None)

    def _send_graphed(
        self, graphed: GraphedStep, picks: RowPicks, links: Int32Array, previous: Drawn | None
    ) -> StepBatch:
        """Send what was written, corrected here where the step before is not one that graphs know."""
        self._write_known_drafts(graphed.input_ids, picks)
        graphed.send()
        if previous is not None and not previous.is_graphed:
            padded = np.full(graphed.key.seqs, -1, np.int32)
            padded[: len(links)] = links
            there = self._executor.send(padded)
            self._correct(graphed.batch, previous, there)
            for values in graphed.rewound:
                self._rewind(values, there, previous.planned, previous.num_emitted)
        return graphed.batch

    def _correct(self, batch: StepBatch, previous: Drawn, links: Tensor) -> None:
        """Replace the host's upper bounds by what the step before really emitted."""
        ratios = tuple(batch.ratio_slots)
        self._advance_history(
            batch.history,
            links,
            previous.tokens,
            previous.starts,
            previous.num_emitted,
            previous.rows,
            previous.seqs,
            previous.batch.input_ids,
            previous.batch.cu_seqlens_q,
            previous.batch.history,
        )
        self._advance(
            batch.input_ids,
            batch.positions,
            batch.seq_lens,
            batch.window_slots,
            batch.packed_ratio_slots,
            batch.cu_seqlens_q,
            batch.row_to_seq,
            links,
            previous.planned,
            previous.num_emitted,
            previous.newest,
            previous.drafts,
            batch.block_tables,
            self._executor.block_size,
            batch.window_tables,
            batch.window_first_page,
            batch.window_page,
            ratios,
        )

    def _draw(
        self,
        launched: LaunchedStep,
        picks: RowPicks,
        batch: StepBatch,
        logits: Tensor,
        previous: Drawn | None,
        graphed: GraphedStep | None,
    ) -> None:
        table, requests, slots = self._table, picks.draws, picks.slots
        widths, starts, num_rows = picks.widths, picks.starts, picks.num_drawn_from
        rows = logits[:num_rows]
        shapes, kept = StepShapes(), None
        if not table.are_plain(launched.plan.seqs):
            shapes, launched.faults = shape_rows(picks, self._table, self.shaping)
            kept = self._logprobs.keep(
                requests, np.flatnonzero(table.wants_logprobs[slots]).tolist(), widths, starts, rows, shapes
            )
        if shapes:
            for row, error in self.shaping.apply(rows, shapes.rows, shapes.form_rows).items():
                place = int(np.searchsorted(starts, row, side="right")) - 1
                launched.faults.setdefault(place, as_request_error("logits_processor_failed", error))
            self.shaping.force(rows, shapes.rows)
        if graphed is not None:
            drawn, inputs = _drawn_by_graph(graphed, widths, num_rows), None
        else:
            inputs = self._draw_inputs(slots, previous)
            drawn = self._draw_rows(rows, picks, widths, batch, previous, inputs)
        launched.drawn = drawn
        tokens = drawn.tokens
        if launched.marks is not None:
            launched.marks.drawn.record()  # in front of the copies, so that whoever waits for them knows the time
        later = self._runtime.to_host_later
        there = later(tokens) if graphed is None else graphed.bring(tokens)
        num_emitted = later(drawn.num_emitted) if num_rows > len(requests) else KnownCopy(torch.from_numpy(widths))
        launched.arrivals = arrivals = Arrivals(there, num_emitted)
        if kept is not None:
            parts = self._logprobs.take(kept, tokens)
            launched.logprob_of = kept.requests
            arrivals.logprobs = tuple(later(part) for part in parts if part is not None)
        if self._drafts is not None:
            self._drafts.draft_behind(launched, drawn, arrivals, slots, widths, previous, graphed, inputs)
        if graphed is not None and self.graphs is not None:
            self.graphs.note_run(graphed)

    def _draw_inputs(self, slots: Int32Array, previous: Drawn | None) -> DrawInputs:
        """What drawing needs of requests, sent; output indices rewound."""
        send, table = self._executor.send, self._table
        links = table.draw[slots]
        outputs = table.planned_tokens[slots] - table.num_prompt[slots]
        inputs = DrawInputs(self._sampler.gather(slots), outputs, send(outputs.copy()), links)
        if previous is not None and (links >= 0).any():
            inputs.linked = send(links)
            self._rewind(inputs.output_index, inputs.linked, previous.planned, previous.num_emitted)
        return inputs

    def _draw_rows(
        self,
        rows: Tensor,
        picks: RowPicks,
        widths: Int32Array,
        batch: StepBatch,
        previous: Drawn | None,
        inputs: DrawInputs,
    ) -> Drawn:
        """Sample, or judge drafts."""
        send, starts, num_rows = self._executor.send, picks.starts, rows.shape[0]
        if num_rows == len(widths):
            tokens = self._sampler.draw(rows, inputs.params, inputs.output_index)
            num_emitted = send(widths)
        else:
            judged = picks.logits_rows[:num_rows] + 1
            judged[starts + widths - 1] = -1
            drafts = self._gather_ids(batch.input_ids, send(judged))
            judged_logits = None
            if self._drafts is not None and previous is not None and previous.draft_logits is not None:
                judged_logits = self._drafts.judged_logits(previous, inputs.links, widths)
            bounds = send(np.append(starts, num_rows).astype(np.int32))
            num_emitted, tokens = self._sampler.verify(
                rows, bounds, drafts, inputs.params, inputs.output_index, judged_logits
            )
        starts_there = send(starts)
        return Drawn(
            count=len(widths),
            tokens=tokens,
            starts=starts_there,
            num_emitted=num_emitted,
            planned=send(widths),
            newest=self._known(self._last(tokens, starts_there, num_emitted), 0),
            rows=send(picks.logits_rows[starts]),
            seqs=send(picks.places),
            batch=batch,
            drafts=self._executor.no_drafts(len(widths)),
            host_planned=widths,
        )

    def _write_known_drafts(self, input_ids: Int32Array, picks: RowPicks) -> None:
        """Put drafts that the host knows into the rows behind their requests' newest tokens."""
        if not picks.has_drafts:
            return
        for place in np.flatnonzero(self._table.waits[picks.slots] & (picks.num_drafts > 0)).tolist():
            count = int(picks.num_drafts[place])
            first = int(picks.logits_rows[picks.starts[place]]) + 1
            input_ids[first : first + count] = picks.draws[place].drafts[:count]


def _drawn_by_graph(graphed: GraphedStep, widths: Int32Array, num_rows: int) -> Drawn:
    """Run the graph that draws; what is seen of it is without padding."""
    graphed.draw()
    part = graphed.without_padding(num_rows, len(widths))
    return Drawn(
        count=len(widths),
        tokens=part.tokens,
        starts=part.starts,
        num_emitted=part.num_emitted,
        planned=part.widths,
        newest=part.newest,
        rows=part.starts,
        seqs=part.numbers,
        batch=graphed.batch,
        drafts=part.no_drafts,
        host_planned=widths,
        is_graphed=True,
    )
