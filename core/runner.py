"""From a plan to drawn tokens: corrects the step on the device, runs the model, samples or verifies, drafts ahead.

Nothing here waits for the device. What the host does not know yet, because the step before is still running, is filled
in by ops from that step's results (`Drawn`), so the next step can be launched before this one's tokens are seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.executor import Executor
from deepinfer.core.logprobs import LogprobTaker
from deepinfer.core.replay import Replay
from deepinfer.core.request import Request
from deepinfer.core.row_shaping import RowShaping
from deepinfer.core.sampler import DeviceLogprobs, RowParams, Sampler
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.shaping import RowShape
from deepinfer.core.speculation import Drafting
from deepinfer.core.step_buffers import Int32Array
from deepinfer.models.interface import StepBatch, Tap
from deepinfer.ops.heads import gather_rows, known_ids
from deepinfer.ops.registry import OpTable
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
        is_collected: the host has seen its tokens.
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
    draft_logits: Tensor | None = None
    confidences: Tensor | None = None
    is_collected: bool = False

    @property
    def tells_more(self) -> bool:
        """Whether it holds anything that the host did not know when it planned the step behind it."""
        return not self.is_collected or self.drafts.shape[1] > 0


@dataclass
class LaunchedStep:
    """A step on its way: who runs in it, and where its results will be.

    Attributes:
        plan: its rows.
        epochs: per planned request, its epoch at launch.
        draws: requests that draw, in the order of `drawn`.
        draw_epochs: their epochs at launch.
        num_drafts: drafts each of them verifies.
        drawn: None when nobody draws.
        faults: errors of those whose rows could not be shaped, by index into `draws`.
        logprob_of: indices into `draws` of those who want logprobs.
        logprobs: of all their emitted tokens, packed as `drawn.tokens` restricted to them.
        scored: prompt positions whose logits are kept, as (request, epoch, first position, count, logits).
    """

    plan: StepPlan
    epochs: list[int]
    draws: list[Request]
    draw_epochs: list[int]
    num_drafts: list[int]
    drawn: Drawn | None
    logprob_of: list[int]
    logprobs: DeviceLogprobs | None
    scored: list[tuple[Request, int, int, int, Tensor]]
    faults: dict[int, RequestError] = field(default_factory=dict)


class StepRunner:
    """Launches steps on one device.

    Args:
        executor: runs the model.
        sampler: parameters by slot, and the sampling ops.
        ops: binds the ops that correct a step.
        drafting: proposes tokens; None without speculation.
        replay: which rows run in all layers.
    """

    def __init__(
        self, executor: Executor, sampler: Sampler, ops: OpTable, drafting: Drafting | None, replay: Replay
    ) -> None:
        self._executor = executor
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

    def launch(self, plan: StepPlan, previous: Drawn | None, tap: Tap | None = None) -> LaunchedStep:
        """Launch a step.

        Args:
            plan: from the scheduler.
            previous: draws of the step launched just before, to which `Request.draw` refers; None when it had none.
            tap: observer of intermediates, for tests.
        """
        meta = self._executor.plan(plan.seqs, plan.query_lens, plan.starts)
        picks = _pick_rows(plan)
        _write_known_drafts(meta.input_ids, picks)
        batch = self._executor.batch(meta, picks.logits_rows, self._replay.cut(plan))
        links = np.fromiter((r.draw for r in plan.requests), dtype=np.int32, count=len(plan.requests))
        if previous is not None and previous.tells_more and (links >= 0).any():
            self._correct(batch, previous, self._executor.send(links))
        else:
            previous = None
        logits = self._executor.forward(batch, tap)
        launched = LaunchedStep(
            plan=plan,
            epochs=[r.epoch for r in plan.requests],
            draws=picks.draws,
            draw_epochs=[r.epoch for r in picks.draws],
            num_drafts=picks.num_drafts,
            drawn=None,
            logprob_of=[],
            logprobs=None,
            scored=[
                (request, request.epoch, first, count, logits[at : at + count])
                for request, first, count, at in picks.scored
            ],
        )
        if picks.draws:
            self._draw(launched, picks, batch, logits, previous)
        return launched

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
        self, launched: LaunchedStep, picks: _Picks, batch: StepBatch, logits: Tensor, previous: Drawn | None
    ) -> None:
        send = self._executor.send
        requests = picks.draws
        for request in requests:
            if request.sampling_slot != request.seq:  # admitted, for the first time or again
                self._sampler.set_slot(request.seq, request.params, request.seed, request.choice)
                request.sampling_slot = request.seq
        slots = np.fromiter((r.seq for r in requests), dtype=np.int32, count=len(requests))
        params = self._sampler.gather(slots)
        links = np.fromiter((r.draw for r in requests), dtype=np.int32, count=len(requests))
        outputs = np.fromiter((r.num_planned_outputs for r in requests), dtype=np.int32, count=len(requests))
        output_index, linked = send(outputs.copy()), None  # rewound in place, and read again below
        if previous is not None and (links >= 0).any():
            linked = send(links)
            self._rewind(output_index, linked, previous.planned, previous.num_emitted)
        widths = np.array(picks.num_drafts, dtype=np.int32) + 1
        starts = (np.cumsum(widths) - widths).astype(np.int32)
        num_rows = int(widths.sum())
        rows = logits[:num_rows]
        first_rows = picks.logits_rows[starts]
        shaped, launched.faults = _shape_rows(requests, picks.num_drafts, starts)
        kept = self._logprobs.keep(requests, widths, starts, rows, shaped)
        if shaped:
            for row, error in self.shaping.apply(rows, shaped).items():
                place = int(np.searchsorted(starts, row, side="right")) - 1
                launched.faults.setdefault(place, as_request_error("logits_processor_failed", error))
            self.shaping.force(rows, shaped)
        if num_rows == len(requests):
            tokens = self._sampler.draw(rows, params, output_index)
            num_emitted = send(widths)
        else:
            judged = picks.logits_rows[:num_rows] + 1
            judged[starts + widths - 1] = -1
            drafts = self._gather_ids(batch.input_ids, send(judged))
            judged_logits = None
            if self._drafting is not None and previous is not None and previous.draft_logits is not None:
                judged_logits = self._judged_logits(previous, links, widths)
            bounds = send(np.append(starts, num_rows).astype(np.int32))
            num_emitted, tokens = self._sampler.verify(rows, bounds, drafts, params, output_index, judged_logits)
        starts_there = send(starts)
        drawn = Drawn(
            count=len(requests),
            tokens=tokens,
            starts=starts_there,
            num_emitted=num_emitted,
            planned=send(widths),
            newest=self._known(self._last(tokens, starts_there, num_emitted), 0),
            rows=send(first_rows),
            seqs=send(picks.seqs),
            batch=batch,
            drafts=self._executor.no_drafts(len(requests)),
        )
        launched.drawn = drawn
        if kept is not None:
            launched.logprob_of, launched.logprobs = kept.requests, self._logprobs.take(kept, tokens)
        if self._drafting is not None:
            wanted = self._drafting.wanted(requests)
            if wanted:
                anchors = np.fromiter((r.planned_tokens for r in requests), dtype=np.int32, count=len(requests))
                self._draft(drawn, anchors + widths - 1, outputs + widths, params, linked, previous)

    def _draft(
        self,
        drawn: Drawn,
        anchors: Int32Array,
        outputs: Int32Array,
        params: RowParams,
        linked: Tensor | None,
        previous: Drawn | None,
    ) -> None:
        """Propose tokens behind each request's newest one; positions and output indices start as upper bounds."""
        assert self._drafting is not None, "only called with speculation"
        send = self._executor.send
        positions, output_index = send(anchors), send(outputs)
        own = send(np.arange(drawn.count, dtype=np.int32))
        for values in (positions, output_index):
            if linked is not None and previous is not None:
                self._rewind(values, linked, previous.planned, previous.num_emitted)
            self._rewind(values, own, drawn.planned, drawn.num_emitted)
        output = self._drafting.propose(drawn.newest, positions, drawn.seqs, drawn.batch, params, output_index)
        drawn.drafts, drawn.draft_logits, drawn.confidences = output.tokens, output.logits, output.confidences

    def _judged_logits(self, previous: Drawn, links: Int32Array, widths: Int32Array) -> Tensor:
        """[T, V]: what the draft that each row judges was drawn from."""
        assert previous.draft_logits is not None, "rejection keeps the draft's logits"
        depth = previous.draft_logits.shape[1]
        index = [
            max(link, 0) * depth + min(place, depth - 1)
            for link, width in zip(links.tolist(), widths.tolist(), strict=True)
            for place in range(width)
        ]
        return self._gather_rows(
            previous.draft_logits.flatten(0, 1), self._executor.send(np.array(index, dtype=np.int32))
        )


@dataclass
class _Picks:
    """Rows whose logits a step needs: those of the requests that draw, then prompt positions to keep.

    Attributes:
        logits_rows: [n] int32.
        draws: requests that draw.
        seqs: [R] int32, their places in the plan.
        num_drafts: drafts each verifies; it has one row more.
        scored: (request, first position, count, place among the logits).
    """

    logits_rows: Int32Array
    draws: list[Request]
    seqs: Int32Array
    num_drafts: list[int]
    scored: list[tuple[Request, int, int, int]]


def _pick_rows(plan: StepPlan) -> _Picks:
    ends = np.cumsum(plan.query_lens)
    row_ends, counts, starts = ends.tolist(), plan.query_lens.tolist(), plan.starts.tolist()
    draws: list[Request] = []
    seqs: list[int] = []
    num_drafts: list[int] = []
    draw_rows: list[int] = []
    wanted: list[tuple[Request, int, int, int]] = []
    for i, (request, count, start) in enumerate(zip(plan.requests, counts, starts, strict=True)):
        drafts = start + count - request.planned_tokens  # rows behind the last known token hold drafts
        if drafts >= 0 and request.may_generate:
            draws.append(request)
            seqs.append(i)
            num_drafts.append(drafts)
            draw_rows.extend(range(row_ends[i] - 1 - drafts, row_ends[i]))
        kept = request.num_prompt_rows_wanted
        if kept > start:
            first = max(request.num_prompt_rows_planned, start)
            end = min(kept, start + count)
            if first < end:
                wanted.append((request, first, end - first, row_ends[i] - count - start + first))
                request.num_prompt_rows_planned = end
    rows = [np.array(draw_rows, dtype=np.int32)]
    scored = []
    place = len(draw_rows)
    for request, first, count, row in wanted:
        rows.append(np.arange(row, row + count, dtype=np.int32))
        scored.append((request, first, count, place))
        place += count
    return _Picks(np.concatenate(rows), draws, np.array(seqs, dtype=np.int32), num_drafts, scored)


def _write_known_drafts(input_ids: Int32Array, picks: _Picks) -> None:
    """Put drafts that the host knows into the rows behind their requests' newest tokens."""
    at = 0
    for request, count in zip(picks.draws, picks.num_drafts, strict=True):
        if count and request.waits:
            first = int(picks.logits_rows[at]) + 1
            input_ids[first : first + count] = request.drafts[:count]
        at += count + 1


def _shape_rows(
    requests: list[Request], num_drafts: list[int], starts: Int32Array
) -> tuple[list[tuple[int, RowShape]], dict[int, RequestError]]:
    """What changes the rows of requests that have a shaper, and the errors of shapers, by place."""
    shaped: list[tuple[int, RowShape]] = []
    faults: dict[int, RequestError] = {}
    for place, (request, count) in enumerate(zip(requests, num_drafts, strict=True)):
        if request.shaper is None:
            continue
        try:
            shapes = request.shaper.shape(request.drafts[:count] if request.waits else [-1] * count)
        except Exception as error:  # a user's code may raise anything, and it is this request's own fault
            faults[place] = as_request_error("shaping_failed", error)
            continue
        first = int(starts[place])
        shaped.extend((first + i, shape) for i, shape in enumerate(shapes) if not shape.is_plain)
    return shaped, faults
