"""Collecting a step: waits for what it drew, records it, and says what is known now.

The counterpart of `core.runner`, which launches without waiting. Between the two a request's plan is an upper bound;
here it becomes what really was.

Most rows of a step bring ids and nothing else: no id that may end a request, no limit reached, nothing wanted but the
ids. Those are found by a few comparisons over all rows, and their ids go to the block manager in one call; results take
them from there when they are read. `OutputRecorder` sees all others token by token, and it alone decides what ends an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer.core.confidence import Float32Array
from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.grammar.shaper import accept_each
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.launched_step import LaunchedStep
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.core.request_table import BoolArray, RequestTable
from deepinfer.core.sampler import Sampler, TokenLogprobs
from deepinfer.core.speculation import Drafting
from deepinfer.core.stats import EngineStats
from deepinfer.core.step_buffers import Int32Array
from deepinfer.ops.runtime import Runtime


@dataclass
class Collected:
    """What a step brought.

    Attributes:
        outputs: results that changed, each once.
        ended: requests that ended, and still hold what they held.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


@dataclass
class _Draws:
    """The requests that drew, on the host.

    Attributes:
        slots: [R] int32 their handles.
        current: [R] bool, whether they still run as they did.
        starts: [R] int32, the first entry of each in `tokens`.
        widths: [R] int32, entries of each.
        emitted: [R] int32, how many of them are tokens.
        tokens: [T] int32, -1 behind the last of each.
        logprobs: of those of them who want any.
        logprob_rows: by place, where its logprobs start.
        confidences: [R, D] float32, of the drafts made behind the step; None where there are none.
    """

    slots: Int32Array
    current: BoolArray
    starts: Int32Array
    widths: Int32Array
    emitted: Int32Array
    tokens: Int32Array
    logprobs: TokenLogprobs | None
    logprob_rows: dict[int, int]
    confidences: Float32Array | None


@dataclass
class _PlainRun:
    """Steps of the same plain requests, without drafts.

    Attributes:
        slots: [R] int32 their handles.
        version: of the table.
        num_left: tokens that each may draw at least before one of them reaches its limit.
        ones: [R] int32.
        outputs: their results.
    """

    slots: Int32Array
    version: int
    num_left: int
    ones: Int32Array
    outputs: list[RequestOutput]


class StepCollector:
    """Records the steps of one engine.

    Args:
        runtime: the device.
        sampler: brings logprobs to the host.
        recorder: stop rules and text.
        blocks: is told what is stored.
        drafting: counts what was accepted; None without speculation.
        table: the running requests.
        stats: the engine's counters.
        vocab_size: ids run from 0 to `vocab_size` - 1.
    """

    def __init__(
        self,
        runtime: Runtime,
        sampler: Sampler,
        recorder: OutputRecorder,
        blocks: KVBlockManager,
        drafting: Drafting | None,
        table: RequestTable,
        stats: EngineStats,
        vocab_size: int,
    ) -> None:
        self._runtime = runtime
        self._sampler = sampler
        self._recorder = recorder
        self._blocks = blocks
        self._drafting = drafting
        self._table = table
        self._stats = stats
        self._vocab_size = vocab_size
        self._outputs_of: list[Request] = []
        self._outputs: list[RequestOutput] = []
        self._plain_run: _PlainRun | None = None
        self.num_draft_waits = 0
        """Steps whose drafts were brought to the host."""

    def collect(self, launched: LaunchedStep, fail_all: Callable[[Request, RequestError], None]) -> Collected:
        """Wait for a launched step and record what it brought; requests preempted or ended since then are skipped.

        Args:
            launched: the step.
            fail_all: ends all answers to a prompt that cannot be scored.
        """
        plan, table = launched.plan, self._table
        for request, generation, first, count, logits in launched.scored:
            if table.is_current(request, generation):
                fault = self._score_prompt(request, first, count, logits)
                if fault is not None:
                    fail_all(request, fault)
        collected = Collected()
        self._stats.num_steps += 1
        if self._record_plain(launched, collected):
            return collected
        advanced = plan.query_lens.copy()
        draws = self._fetch(launched)
        if draws is not None:
            self._settle(launched, draws, advanced)
            self._record_all(launched, draws, collected)
            self._bring_drafts(launched, draws)
        self._advance(launched, advanced, collected)
        if table.shares_output[plan.seqs].any():
            collected.outputs = list({id(output): output for output in collected.outputs}.values())
        return collected

    def _record_plain(self, launched: LaunchedStep, collected: Collected) -> bool:
        """Record a step in which the same plain requests as in the step before drew one token each, and none ends.

        By far most steps are like that. Returns False, with nothing done, for any other step.
        """
        slots, table, run = launched.slots, self._table, self._plain_run
        drawn, arrivals = launched.drawn, launched.arrivals
        if (
            run is None
            or run.slots is not slots
            or not run.version == table.version == launched.version
            or run.num_left < 2
            or launched.faults
            or drawn is None
            or arrivals is None
        ):
            self._plain_run = self._begin_plain_run(launched)
            return False
        start = time.perf_counter()
        tokens: Int32Array = arrivals.tokens.wait().numpy()
        launched.waited = time.perf_counter() - start
        if int(tokens.min()) < 0 or table.stop_counts[tokens].any():
            self._plain_run = self._begin_plain_run(launched)
            return False
        drawn.note_collected(run.ones)
        run.num_left -= 1
        self._stats.num_generated_tokens += len(slots)
        table.num_tokens[slots] += 1
        self._blocks.pool.append(slots, run.ones, tokens)
        computed = table.num_computed[slots] + 1
        table.num_computed[slots] = computed
        self._blocks.commit(slots, computed)
        collected.outputs = run.outputs.copy()
        return True

    def _begin_plain_run(self, launched: LaunchedStep) -> _PlainRun | None:
        """What steps of these requests will have in common, if all steps behind this one may be plain."""
        slots, table = launched.slots, self._table
        if slots is not launched.plan.seqs or self._drafting is not None or not table.are_plain(slots):
            return None
        if launched.version != table.version or table.awaits_first_token[slots].any():
            return None
        left = int((table.max_tokens[slots] - table.num_tokens[slots]).min())
        outputs = [request.output for request in launched.draws]
        return _PlainRun(slots, table.version, left - 1, np.ones(len(slots), np.int32), outputs)

    def _fetch(self, launched: LaunchedStep) -> _Draws | None:
        """Wait for what was drawn; None when nothing was."""
        drawn, arrivals = launched.drawn, launched.arrivals
        if drawn is None or arrivals is None:
            return None
        start = time.perf_counter()
        tokens, emitted = arrivals.tokens.wait().numpy(), arrivals.num_emitted.wait().numpy()
        confidences = arrivals.confidences.wait().numpy() if arrivals.confidences is not None else None
        launched.waited = time.perf_counter() - start
        logprobs = None
        if arrivals.logprobs is not None:
            logprobs = TokenLogprobs(*(part.wait().numpy() for part in arrivals.logprobs))
        drawn.note_collected(emitted)
        widths = launched.num_drafts + 1
        starts = np.cumsum(widths, dtype=np.int32) - widths
        own = widths[launched.logprob_of]
        rows = dict(zip(launched.logprob_of, (np.cumsum(own) - own).tolist(), strict=True))
        slots = launched.slots
        current = self._table.generation[slots] == launched.generations[launched.places]
        return _Draws(slots, current, starts, widths, emitted, tokens, logprobs, rows, confidences)

    def _settle(self, launched: LaunchedStep, draws: _Draws, advanced: Int32Array) -> None:
        """Take back what was planned beyond what was emitted, from plans and from the rows in `advanced`."""
        taken_back = np.where(draws.current, draws.widths - draws.emitted, 0)
        slots = draws.slots[draws.current]
        self._table.planned_computed[slots] -= taken_back[draws.current]
        self._table.planned_tokens[slots] -= taken_back[draws.current]
        advanced[launched.places] -= taken_back
        if self._drafting is not None:
            some = draws.current
            self._drafting.collect(
                slots,
                launched.num_drafts[some],
                draws.emitted[some] - 1,
                launched.expected[some] if launched.expected is not None else None,
                draws.confidences[some] if draws.confidences is not None else None,
            )

    def _record_all(self, launched: LaunchedStep, draws: _Draws, collected: Collected) -> None:
        """Record what was emitted, tell the block manager of it, and note whose result changed."""
        table, requests = self._table, launched.draws
        alone = self._needs_recorder(draws)
        alone[list(launched.faults)] = True
        alone &= draws.current
        kept = np.where(draws.current, draws.emitted, 0)
        first = draws.current & table.awaits_first_token[draws.slots] & ~alone
        for place in np.flatnonzero(first).tolist():
            self._recorder.note_first_token(requests[place])
        table.awaits_first_token[draws.slots[first]] = False
        for place in np.flatnonzero(alone).tolist():
            request, start = requests[place], int(draws.starts[place])
            fault = launched.faults.get(place)
            if fault is not None:
                self._recorder.fail(request, fault)
                kept[place] = 0
            else:
                emitted = draws.tokens[start : start + int(draws.emitted[place])].tolist()
                rows = draws.logprobs if place in draws.logprob_rows else None
                kept[place] = self._record(request, emitted, rows, draws.logprob_rows.get(place, -1))
            if request.completion.finish_reason is not None:
                collected.ended.append(request)
        self._accept_by_forms(requests, draws, draws.current & ~alone, kept, collected)
        self._stats.num_generated_tokens += int(kept.sum())
        table.num_tokens[draws.slots] += kept
        entries = np.arange(len(draws.tokens), dtype=np.int32)
        is_kept = entries < np.repeat(draws.starts + kept, draws.widths)
        self._blocks.pool.append(draws.slots[draws.current], kept[draws.current], draws.tokens[is_kept])
        if not draws.current.all():
            collected.outputs = [requests[place].output for place in np.flatnonzero(draws.current).tolist()]
            return
        if requests is not self._outputs_of:  # in most steps the same requests draw
            self._outputs_of, self._outputs = requests, [request.output for request in requests]
        collected.outputs = self._outputs.copy()
        if collected.ended:
            self._outputs_of, self._outputs = [], []  # nothing is held of who has ended

    def _accept_by_forms(
        self, requests: list[Request], draws: _Draws, together: BoolArray, kept: Int32Array, collected: Collected
    ) -> None:
        """Tell forms of the tokens of those requests that nobody else has told of theirs, one token each at a time."""
        places = np.flatnonzero(self._table.follows_form[draws.slots] & together)
        for count in range(int(draws.emitted[places].max(initial=0))):
            places = places[draws.emitted[places] > count]
            some = places.tolist()
            forms = [form for place in some if (form := requests[place].grammar) is not None]
            faults = accept_each(forms, draws.tokens[draws.starts[places] + count].tolist())
            for index, fault in faults.items():
                self._recorder.fail(requests[some[index]], fault)
                kept[some[index]] = count + 1
                collected.ended.append(requests[some[index]])
            places = np.delete(places, list(faults))

    def _needs_recorder(self, draws: _Draws) -> BoolArray:
        """[R]: whether a request wants more than ids, or something that it emitted may end it."""
        table, slots = self._table, draws.slots
        reaches_limit = table.num_tokens[slots] + draws.emitted >= table.max_tokens[slots]
        may_stop = np.maximum.reduceat(table.stop_counts[draws.tokens], draws.starts) > 0
        has_no_token = draws.tokens[draws.starts + draws.emitted - 1] < 0
        needs: BoolArray = table.is_recorded_by_token[slots] | reaches_limit | may_stop | has_no_token
        return needs

    def _bring_drafts(self, launched: LaunchedStep, draws: _Draws) -> None:
        """Show the drafts of a step to those of its requests that need to know them."""
        arriving = launched.arrivals.drafts if launched.arrivals is not None else None
        waiting = np.flatnonzero(self._table.waits[draws.slots] & draws.current)
        if arriving is None or self._drafting is None or not waiting.size:
            return
        self.num_draft_waits += 1
        drafts = arriving.wait()[:, : self._drafting.num_drafts].numpy()
        self._table.num_drafts[draws.slots[waiting]] = drafts.shape[1]
        for place, ids in zip(waiting.tolist(), drafts[waiting].tolist(), strict=True):
            launched.draws[place].drafts = ids

    def _advance(self, launched: LaunchedStep, advanced: Int32Array, collected: Collected) -> None:
        """Note what is computed, and store for others what may serve them."""
        table, seqs = self._table, launched.plan.seqs
        current = table.generation[seqs] == launched.generations
        slots = seqs[current]
        table.num_computed[slots] += advanced[current]
        computed, known = table.num_computed[seqs], table.num_tokens[seqs]
        for place in np.flatnonzero(current & ~table.may_generate[seqs] & (computed == known)).tolist():
            request = launched.plan.requests[place]
            if request.completion.finish_reason is None:
                self._recorder.finish(request, "length")  # nothing to sample
                collected.ended.append(request)
                collected.outputs.append(request.output)
        # What a request computed up to its end may serve another; drafts behind a stop token are not its text.
        stored = current & (computed >= table.replay_end[seqs])
        for request in collected.ended:
            if request.completion.finish_reason == "error":
                stored &= seqs != request.seq
        if stored.any():
            self._blocks.commit(seqs[stored], np.minimum(computed, known)[stored])

    def _record(self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, first_row: int) -> int:
        """Record emitted tokens up to a stop; returns how many were tokens."""
        before = len(request.completion.token_ids)
        for place, token in enumerate(tokens):
            if token < 0 and request.shaper is not None:
                self._recorder.fail_if_nothing_is_allowed(request, self._vocab_size)
                if request.completion.finish_reason is not None:
                    break
            self._recorder.add_token(request, token)
            if token >= 0:
                if request.shaper is not None:
                    self._accept(request, token)
                if logprobs is not None:
                    self._recorder.add_logprobs(request, token, logprobs, first_row + place)
            else:
                self._blocks.quarantine(request.seq)
            if request.completion.finish_reason is not None:
                break
        form = request.grammar
        if form is not None and form.is_open and not self._table.follows_form[request.seq]:  # it may hold since now
            self._table.note_form(request)
            if not self._table.is_recorded_by_token[request.seq]:
                request.take_ids_from(self._blocks)
        return len(request.completion.token_ids) - before

    def _accept(self, request: Request, token: int) -> None:
        """Tell a request's shaper of a token; what it raises ends that request."""
        assert request.shaper is not None, "only called with one"
        try:
            request.shaper.accept((token,))
        except Exception as error:  # a user's code may raise anything
            if request.completion.finish_reason is None:
                self._recorder.fail(request, as_request_error("shaping_failed", error))

    def _score_prompt(self, request: Request, first: int, count: int, logits: torch.Tensor) -> RequestError | None:
        """Keep logits or logprobs of prompt positions, up to one that has none: then say what is wrong with it."""
        if request.return_logits:
            kept = self._runtime.to_host(logits).clone()
            request.prompt_logits.append(kept)
            bad = (~torch.isfinite(kept.amax(1))).nonzero()[:, 0].tolist()
        else:
            targets = request.prompt_token_ids[first + 1 : first + 1 + count]
            logprobs = self._sampler.logprobs(logits, targets, request.params.prompt_logprobs or 0)
            bad = np.isnan(logprobs.logprob).nonzero()[0].tolist()
            self._recorder.add_prompt_logprobs(request, targets[: bad[0]] if bad else targets, logprobs)
        if not bad:
            return None
        return RequestError(
            "numerical_error",
            f"the logits behind prompt position {first + bad[0]} are not finite (NaN or Inf), so the prompt cannot be "
            "scored; logprobs before it are kept",
        )
