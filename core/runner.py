"""From a plan to drawn tokens: corrects the step on the device, runs the model, samples or verifies, drafts ahead.

Nothing here waits for the device. What the host does not know yet, because the step before is still running, is filled
in by ops from that step's results (`Drawn`), so the next step can be launched before this one's tokens are seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.confidence import Float32Array
from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.executor import Executor
from deepinfer.core.logprobs import LogprobTaker
from deepinfer.core.replay import Replay
from deepinfer.core.request import Request
from deepinfer.core.request_table import Int64Array, RequestTable
from deepinfer.core.row_shaping import RowShaping
from deepinfer.core.sampler import RowParams, Sampler
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.shaping import RowShape
from deepinfer.core.speculation import Drafting
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_cost import StepMarks
from deepinfer.core.step_graphs import GraphedStep, StepGraphs
from deepinfer.models.interface import StepBatch, Tap
from deepinfer.ops.heads import gather_rows, known_ids
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import HostCopy
from deepinfer.ops.step import advance_history, advance_step, gather_ids, last_emitted, rewind


@dataclass
class Drawn:
    """What a step drew, on the device; the next step corrects itself with it.

    Attributes:
        count: requests that drew, R.
        tokens: [T] int32, emitted tokens packed: request r has `planned[r]` entries from `starts[r]` on, those behind
            its last emitted one hold -1.
        starts: [R] int32.
        num_emitted: [R] int32.
        planned: [R] int32, what the host assumed each would emit. Once the host knows better it is `num_emitted`.
        newest: [R] int32, the last emitted token of each, an id of the vocabulary in any case.
        rows: [R] int32, the row each drew its first token from.
        seqs: [R] int32, that row's sequence in the step.
        batch: the step, corrected.
        drafts: [R, D] int32; D is 0 when nothing was drafted.
        draft_logits: [R, D, V] float32, for rejection.
        confidences: [R, D] float32, None when nothing was drafted.
        host_planned: [R] int32, `planned` on the host.
        is_collected: the host has seen its tokens.
        is_graphed: it stands where the graphs of the next step look for it.
    """

    count: int
    tokens: Tensor
    starts: Tensor
    num_emitted: Tensor
    planned: Tensor
    newest: Tensor
    rows: Tensor
    seqs: Tensor
    batch: StepBatch
    drafts: Tensor
    host_planned: Int32Array
    draft_logits: Tensor | None = None
    confidences: Tensor | None = None
    is_collected: bool = False
    is_graphed: bool = False

    def note_collected(self, num_emitted: Int32Array) -> None:
        """Take in what the host knows now: what follows is planned from that."""
        self.planned, self.host_planned, self.is_collected = self.num_emitted, num_emitted, True

    @property
    def tells_more(self) -> bool:
        """Whether it holds anything that the host did not know when it planned the step behind it."""
        return not self.is_collected or self.drafts.shape[1] > 0


@dataclass
class Arrivals:
    """What a step brings to the host: copies that were begun when it was launched, so that none of them waits for more.

    Attributes:
        tokens: [T] int32, as `Drawn.tokens`.
        num_emitted: [R] int32.
        logprobs: parts of `TokenLogprobs`, of all emitted tokens of those who want some, packed; None when nobody does.
        drafts: [R, D] int32; None when nobody needs to know them.
        confidences: [R, D] float32; None when nothing was drafted.
    """

    tokens: HostCopy
    num_emitted: HostCopy
    logprobs: tuple[HostCopy, ...] | None = None
    drafts: HostCopy | None = None
    confidences: HostCopy | None = None


@dataclass
class LaunchedStep:
    """A step on its way: who runs in it, and where its results will be.

    Attributes:
        plan: its rows.
        generations: [n] int64, per planned request that of its row at launch.
        draws: requests that draw, in the order of `drawn`.
        places: [R] int32, their places in the plan.
        num_drafts: [R] int32, drafts each of them verifies.
        drawn: None when nobody draws.
        faults: errors of those whose rows could not be shaped, by index into `draws`.
        arrivals: its results on their way to the host; None when nobody draws.
        logprob_of: indices into `draws` of those who want logprobs.
        scored: prompt positions whose logits are kept, as (request, generation, first position, count, logits).
        expected: [R, D] how likely drafts were thought to be kept; None when nobody thought about it.
        marks: where the device is in it; None when nobody wants to know what it costs.
        waited: seconds that the host waited for it when it was collected.
    """

    plan: StepPlan
    generations: Int64Array
    draws: list[Request]
    places: Int32Array
    num_drafts: Int32Array
    drawn: Drawn | None
    logprob_of: list[int]
    scored: list[tuple[Request, int, int, int, Tensor]]
    arrivals: Arrivals | None = None
    faults: dict[int, RequestError] = field(default_factory=dict)
    expected: Float32Array | None = None
    marks: StepMarks | None = None
    waited: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Drafts of each block that was made behind it; 0 when none was."""
        return self.drawn.drafts.shape[1] if self.drawn is not None else 0


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
        self._advance = ops.bind(advance_step)
        self._advance_history = ops.bind(advance_history)
        self._rewind = ops.bind(rewind)
        self._last = ops.bind(last_emitted)
        self._known = ops.bind(known_ids)
        self._gather_ids = ops.bind(gather_ids)
        self._gather_rows = ops.bind(gather_rows)
        self.shaping = RowShaping(ops, executor.model.info.vocab_size)
        self._logprobs = LogprobTaker(sampler, self.shaping, ops)
        self._runtime = ops.context.runtime

    def launch(self, plan: StepPlan, previous: Drawn | None, tap: Tap | None = None) -> LaunchedStep:
        """Launch a step.

        Args:
            plan: from the scheduler.
            previous: draws of the step launched just before, which `RequestTable.draw` refers to; None without any.
            tap: observer of intermediates, for tests.
        """
        picks = _pick_rows(plan, self._table)
        links = self._table.draw[plan.seqs]
        if previous is not None and not (previous.tells_more and (links >= 0).any()):
            previous = None
        cut = self._replay.cut(plan)
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
        logits = graphed.forward() if graphed is not None else self._executor.forward(batch, tap)
        launched = LaunchedStep(
            plan=plan,
            generations=self._table.generation[plan.seqs],
            draws=picks.draws,
            places=picks.places,
            num_drafts=picks.num_drafts,
            drawn=None,
            logprob_of=[],
            scored=[
                (request, int(self._table.generation[request.seq]), first, count, logits[at : at + count])
                for request, first, count, at in picks.scored
            ],
            marks=marks,
        )
        if picks.draws:
            self._draw(launched, picks, batch, logits, previous, graphed)
        return launched

    def _write_graphed(
        self, plan: StepPlan, picks: _Picks, links: Int32Array, previous: Drawn | None, *, is_plain: bool
    ) -> GraphedStep | None:
        """Write a step that graphs may run to where they read it; None for any other step."""
        if self.graphs is None:
            return None
        widths = picks.num_drafts + 1
        if not is_plain:
            return self.graphs.note_eager("a prompt is cut short, or somebody looks at intermediates")
        if len(picks.draws) < len(plan.requests) or picks.scored or (widths != plan.query_lens).any():
            return self.graphs.note_eager("prompt rows")
        if previous is not None and previous.is_graphed:
            return self.graphs.write(plan.seqs, widths, plan.starts, links, previous.host_planned)
        return self.graphs.write(plan.seqs, widths, plan.starts, np.full_like(links, -1), None)

    def _send_graphed(
        self, graphed: GraphedStep, picks: _Picks, links: Int32Array, previous: Drawn | None
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
        picks: _Picks,
        batch: StepBatch,
        logits: Tensor,
        previous: Drawn | None,
        graphed: GraphedStep | None,
    ) -> None:
        table, requests, slots = self._table, picks.draws, picks.slots
        widths, starts = picks.num_drafts + 1, picks.starts
        num_rows = int(widths.sum())
        rows = logits[:num_rows]
        shaped, launched.faults = self._shape_rows(picks)
        kept = self._logprobs.keep(
            requests, np.flatnonzero(table.wants_logprobs[slots]).tolist(), widths, starts, rows, shaped
        )
        if shaped:
            for row, error in self.shaping.apply(rows, shaped).items():
                place = int(np.searchsorted(starts, row, side="right")) - 1
                launched.faults.setdefault(place, as_request_error("logits_processor_failed", error))
            self.shaping.force(rows, shaped)
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
        num_emitted = later(drawn.num_emitted) if num_rows > len(requests) else KnownCopy(torch.from_numpy(widths))
        launched.arrivals = arrivals = Arrivals(later(tokens), num_emitted)
        if kept is not None:
            parts = self._logprobs.take(kept, tokens)
            launched.logprob_of = kept.requests
            arrivals.logprobs = tuple(later(part) for part in parts if part is not None)
        if self._drafting is not None:
            self._draft_behind(launched, drawn, arrivals, slots, widths, previous, graphed, inputs)
        if graphed is not None and self.graphs is not None:
            self.graphs.note_run(graphed)

    def _draw_inputs(self, slots: Int32Array, previous: Drawn | None) -> _DrawInputs:
        """What drawing needs of requests, sent; output indices rewound."""
        send, table = self._executor.send, self._table
        links = table.draw[slots]
        outputs = table.planned_tokens[slots] - table.num_prompt[slots]
        inputs = _DrawInputs(self._sampler.gather(slots), outputs, send(outputs.copy()), links)
        if previous is not None and (links >= 0).any():
            inputs.linked = send(links)
            self._rewind(inputs.output_index, inputs.linked, previous.planned, previous.num_emitted)
        return inputs

    def _draw_rows(
        self,
        rows: Tensor,
        picks: _Picks,
        widths: Int32Array,
        batch: StepBatch,
        previous: Drawn | None,
        inputs: _DrawInputs,
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
            if self._drafting is not None and previous is not None and previous.draft_logits is not None:
                judged_logits = self._judged_logits(previous, inputs.links, widths)
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

    def _draft_behind(
        self,
        launched: LaunchedStep,
        drawn: Drawn,
        arrivals: Arrivals,
        slots: Int32Array,
        widths: Int32Array,
        previous: Drawn | None,
        graphed: GraphedStep | None,
        inputs: _DrawInputs | None,
    ) -> None:
        """Draft behind a step that has drawn, if that pays."""
        assert self._drafting is not None, "only called with speculation"
        table, later = self._table, self._runtime.to_host_later
        launched.expected = self._drafting.expected(slots)
        if self._drafting.wants_drafts(slots, int(launched.plan.query_lens.sum() - widths.sum())):
            if graphed is not None:
                output, count = graphed.draft(), drawn.count
                drawn.drafts, drawn.confidences = output.tokens[:count], output.confidences[:count]
            elif inputs is not None:
                anchors = table.planned_tokens[slots]
                self._draft(drawn, anchors + widths - 1, inputs, previous)
            if launched.marks is not None:
                launched.marks.note_drafts(self._runtime)
            assert drawn.confidences is not None, "a draft gives them"
            arrivals.confidences = later(drawn.confidences)
            # Rejection judges a draft by the logits it was drawn from, which are those of the step just before; who
            # waits for the host comes too late for that and verifies none.
            if drawn.draft_logits is None and table.waits[slots].any():
                arrivals.drafts = later(drawn.drafts)

    def _draft(
        self,
        drawn: Drawn,
        anchors: Int32Array,
        inputs: _DrawInputs,
        previous: Drawn | None,
    ) -> None:
        """Propose tokens behind each request's newest one; positions and output indices start as upper bounds."""
        assert self._drafting is not None, "only called with speculation"
        send = self._executor.send
        positions, output_index = send(anchors), send(inputs.outputs + drawn.host_planned)
        own = send(np.arange(drawn.count, dtype=np.int32))
        for values in (positions, output_index):
            if inputs.linked is not None and previous is not None:
                self._rewind(values, inputs.linked, previous.planned, previous.num_emitted)
            self._rewind(values, own, drawn.planned, drawn.num_emitted)
        output = self._drafting.propose(drawn.newest, positions, drawn.seqs, drawn.batch, inputs.params, output_index)
        drawn.drafts, drawn.draft_logits, drawn.confidences = output.tokens, output.logits, output.confidences

    def _judged_logits(self, previous: Drawn, links: Int32Array, widths: Int32Array) -> Tensor:
        """[T, V]: what the draft that each row judges was drawn from."""
        assert previous.draft_logits is not None, "rejection keeps the draft's logits"
        depth = previous.draft_logits.shape[1]
        index = np.repeat(np.maximum(links, 0) * depth, widths) + np.minimum(_places_within(widths), depth - 1)
        return self._gather_rows(previous.draft_logits.flatten(0, 1), self._executor.send(index))

    def _write_known_drafts(self, input_ids: Int32Array, picks: _Picks) -> None:
        """Put drafts that the host knows into the rows behind their requests' newest tokens."""
        for place in np.flatnonzero(self._table.waits[picks.slots] & (picks.num_drafts > 0)).tolist():
            count = int(picks.num_drafts[place])
            first = int(picks.logits_rows[picks.starts[place]]) + 1
            input_ids[first : first + count] = picks.draws[place].drafts[:count]

    def _shape_rows(self, picks: _Picks) -> tuple[list[tuple[int, RowShape]], dict[int, RequestError]]:
        """What changes the rows of requests that have a shaper, and the errors of shapers, by place."""
        shaped: list[tuple[int, RowShape]] = []
        faults: dict[int, RequestError] = {}
        places = np.flatnonzero(self._table.is_shaped[picks.slots]).tolist()
        constrained = [
            (request.grammar, request.drafts[: int(picks.num_drafts[place])])
            for place in places
            if (request := picks.draws[place]).grammar is not None
        ]
        if constrained:
            self.shaping.grammar.fill(constrained)
        for place in places:
            request, count = picks.draws[place], int(picks.num_drafts[place])
            assert request.shaper is not None, "the table says that it has one"
            try:
                shapes = request.shaper.shape(request.drafts[:count] if request.waits else [-1] * count)
            except Exception as error:  # a user's code may raise anything, and it is this request's own fault
                faults[place] = as_request_error("shaping_failed", error)
                continue
            first = int(picks.starts[place])
            shaped.extend((first + i, shape) for i, shape in enumerate(shapes) if not shape.is_plain)
        return shaped, faults


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


@dataclass(frozen=True)
class KnownCopy:
    """What the host knows anyway, as a copy that is done.

    Attributes:
        tensor: it.
    """

    tensor: Tensor

    def wait(self) -> Tensor:
        """The tensor."""
        return self.tensor


@dataclass
class _DrawInputs:
    """What drawing and drafting need of R requests.

    Attributes:
        params: how they sample.
        outputs: [R] int32, output tokens before the step's, upper bounds.
        output_index: the same on the device, corrected.
        links: [R] int32, their places in the step before.
        linked: the same on the device; None where that step tells nothing.
    """

    params: RowParams
    outputs: Int32Array
    output_index: Tensor
    links: Int32Array
    linked: Tensor | None = None


@dataclass
class _Picks:
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


def _pick_rows(plan: StepPlan, table: RequestTable) -> _Picks:
    ends = np.cumsum(plan.query_lens, dtype=np.int32)
    drafts = plan.starts + plan.query_lens - table.planned_tokens[plan.seqs]  # behind the last known token
    places = np.flatnonzero((drafts >= 0) & table.may_generate[plan.seqs]).astype(np.int32)
    draws = plan.requests
    if len(places) < len(draws):
        draws = [plan.requests[place] for place in places.tolist()]
    num_drafts = drafts[places]
    widths = num_drafts + 1
    draw_rows = np.repeat(ends[places] - widths, widths) + _places_within(widths)
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
    return _Picks(np.concatenate(rows), draws, places, plan.seqs[places], num_drafts, starts, scored)


def _places_within(widths: Int32Array) -> Int32Array:
    """[sum of widths] int32: 0, 1, ... within each of several runs of these widths."""
    ends = np.cumsum(widths, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - widths, widths)
