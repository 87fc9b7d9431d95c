"""Launching one step after the other: what is planned of every request while steps are on their way."""

from __future__ import annotations

import time

import numpy as np

from deepinfer.core.engine_parts import EngineParts
from deepinfer.core.launched_step import Drawn, LaunchedStep
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.stats import EngineStats
from deepinfer.core.step_buffers import Int32Array
from deepinfer.ops.outputs import StepArenas
from deepinfer.ops.registry import OpTable


class StepLauncher:
    """Launches the steps of one engine.

    Args:
        parts: of the engine.
        ops: copies caches.
        arenas: where results of steps are put.
        stats: the engine's counters.
    """

    def __init__(self, parts: EngineParts, ops: OpTable, arenas: StepArenas, stats: EngineStats) -> None:
        self._scheduler, self._executor, self._runner = parts.scheduler, parts.executor, parts.runner
        self._drafting, self._sampler, self._table = parts.drafting, parts.sampler, parts.table
        self._ops = ops
        self._arenas = arenas
        self._stats = stats
        self._drawn: Drawn | None = None
        self._drew: Int32Array = np.zeros(0, np.int32)
        self._drew_version = -1
        self._begun: tuple[Int32Array, int] | None = None

    def forget(self) -> None:
        """Correct the next step by nothing: the newest one failed, or nobody will read it."""
        self._drawn = None

    def launch(self) -> LaunchedStep | None:
        """Plan a step and launch it; None when nothing is left to run."""
        if self._drafting is not None:
            self._drafting.allot(self._scheduler.running_seqs())
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._arenas.begin_step()
        for kind in ("block", "page", "state") if plan.copies else ():
            copies = [(copy.src, copy.dst) for copy in plan.copies if copy.kind == kind]
            if copies:
                self._executor.caches.copy(self._ops, kind, *zip(*copies, strict=True))
        self._begin(plan)
        launched = self._runner.launch(plan, self._drawn)
        table = self._table
        table.planned_computed[plan.seqs] += plan.query_lens
        before, slots = self._drew, launched.slots
        draws_on = self._drawn is not None and before is slots and self._drew_version == table.version
        if self._drawn is not None and not draws_on:
            table.draw[before] = -1
            table.num_drafts[before[~table.waits[before]]] = 0  # they were in the step that is forgotten now
        self._drawn, self._drew, self._drew_version = launched.drawn, slots, table.version
        table.planned_tokens[slots] += launched.num_drafts + 1
        if draws_on and self._drafting is None and table.are_plain(slots):
            return launched  # their places among the draws are what they were
        waits = table.waits[slots]
        # Who waits is planned again when this step is collected, with drafts that the host has seen.
        next_drafts = min(launched.num_drafted, self._drafting.num_drafts) if self._drafting is not None else 0
        table.draw[slots] = np.where(waits, -1, np.arange(len(slots), dtype=np.int32))
        table.num_drafts[slots] = np.where(waits, 0, next_drafts)
        return launched

    def _begin(self, plan: StepPlan) -> None:
        """Prepare the requests whose first step this is, since they were admitted."""
        seqs, version = plan.seqs, self._table.version
        if self._begun is not None and self._begun[0] is seqs and self._begun[1] == version:
            return  # the same requests as in the step before
        self._begun = seqs, version
        new = np.flatnonzero(self._table.is_new[seqs])
        for place in new.tolist():
            request = plan.requests[place]
            self._sampler.set_slot(request.seq, request.params, request.seed, request.choice)
            if request.output.timings.scheduled is None:
                request.output.timings.scheduled = time.monotonic()
                self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        self._table.is_new[seqs[new]] = False
