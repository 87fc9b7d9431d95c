"""Which requests run in a step, with how many rows, and who gives way when memory runs out.

Policy only: bookkeeping of blocks is `core.kv_blocks`, arrays are `core.step_buffers`, and what is known of running
requests is `core.request_table`. One step mixes decode rows and prefill chunks under a budget of rows. Running requests
come first, oldest first, so that the oldest always advances; when it cannot grow, the younger request that is cheapest
to compute again gives its memory back and waits at the front.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from deepinfer.core.errors import OutOfBlocksError
from deepinfer.core.kv_blocks import NO_MATCH, KVBlockManager, KVCopy
from deepinfer.core.request import Request
from deepinfer.core.request_table import RequestTable
from deepinfer.core.step_buffers import Int32Array


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step.

    Attributes:
        requests: in row order; not to be changed, as the next plan may share the list.
        seqs: [n] int32 handles, in an array that the next plan may share.
        starts: [n] int32 positions of the first rows; upper bounds where steps with drafts are in flight.
        query_lens: [n] int32 rows of each.
        num_rows: rows in all.
        copies: device memory to copy before the step, for choices that start from another one's KV.
    """

    requests: list[Request]
    seqs: Int32Array
    starts: Int32Array
    query_lens: Int32Array
    num_rows: int
    copies: list[KVCopy] = field(default_factory=list)


@dataclass
class _SteadyRun:
    """Steps of the same plain requests, one row each.

    Attributes:
        requests: they.
        seqs: [n] int32 their handles.
        version: of the table.
        num_left: steps before one of them may reach its limit.
        ones: [n] int32.
    """

    requests: list[Request]
    seqs: Int32Array
    version: int
    num_left: int
    ones: Int32Array


@dataclass
class Scheduler:
    """Queues of one engine.

    Args:
        blocks: KV memory.
        table: gets a row for each request that runs.
        max_num_seqs: most running requests.
        max_rows: rows of a step.
        max_rows_with_logits: most rows of one request in a step when logits of all of them are kept.
        drafts: the table's `num_drafts` may be above 0.
    """

    blocks: KVBlockManager
    table: RequestTable
    max_num_seqs: int
    max_rows: int
    max_rows_with_logits: int = 512
    drafts: bool = True
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    num_preemptions: int = 0
    _refused: tuple[Request, int] | None = None
    _copies: list[KVCopy] = field(default_factory=list)
    _parents: list[Request] = field(default_factory=list)
    _seqs: Int32Array | None = None
    _snapshot: list[Request] | None = None
    _steady: _SteadyRun | None = None

    @property
    def has_work(self) -> bool:
        """Something runs or waits."""
        return bool(self.running or self.waiting)

    def drop_copies(self) -> None:
        """Forget copies that no step has made; whoever needed them has ended."""
        self._copies.clear()

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def plan(self) -> StepPlan | None:
        """Choose the next step's rows and hold memory for them; None when nothing is left to run."""
        steady = self._plan_as_before()
        if steady is not None:
            return steady
        preemptions = self.num_preemptions
        self._start_siblings()
        chosen, seqs, rows = self._continue_running()
        chosen, seqs, rows = self._hold_memory(chosen, seqs, rows)
        if self.num_preemptions == preemptions and self.waiting:  # whoever gave way comes back before anybody new
            chosen, seqs, rows = self._admit(chosen, seqs, rows)
        if not chosen:
            return None
        copies, self._copies = self._copies, []
        self._begin_steady(chosen, seqs, rows)
        return StepPlan(chosen, seqs, self.table.planned_computed[seqs], rows, int(rows.sum()), copies)

    def finish(self, request: Request) -> None:
        """Drop a request wherever it is and free what it holds."""
        if request.seq:
            seq = request.seq
            request.stop()
            self.blocks.free(seq)
            self._leave(request)
        else:
            self.waiting.remove(request)

    def _begin_steady(self, chosen: list[Request], seqs: Int32Array, rows: Int32Array) -> None:
        """Note what the plans behind this one will have in common, if they may all be like it."""
        self._steady = None
        table = self.table
        if self.drafts or seqs is not self._seqs or self.waiting or self._parents or not table.are_plain(seqs):
            return
        left = int((table.max_tokens[seqs] - table.planned_tokens[seqs]).min()) - 1
        if left > 0 and (rows == 1).all() and (table.planned_tokens[seqs] - table.planned_computed[seqs] == 1).all():
            self._steady = _SteadyRun(chosen, seqs, table.version, left, np.ones(len(seqs), np.int32))

    def _plan_as_before(self) -> StepPlan | None:
        """One row of each of the same plain requests again, as in by far most steps; None for any other plan."""
        run, table = self._steady, self.table
        if (
            run is None
            or run.seqs is not self._seqs
            or run.version != table.version
            or self.waiting
            or not run.num_left
        ):
            return None
        starts = table.planned_computed[run.seqs]
        if self.blocks.reserve_many(run.seqs, starts + 1) < len(run.seqs):
            return None
        run.num_left -= 1
        return StepPlan(run.requests, run.seqs, starts, run.ones, len(run.seqs))

    def _start_siblings(self) -> None:
        """Start the other choices of requests whose prompts are stored up to the last token, as forks of the first."""
        parents, self._parents = self._parents, []
        for parent in parents:
            if not parent.seq or not parent.siblings:  # preempted or ended; it comes back with its next admission
                continue
            stored = parent.num_computed
            if stored < len(parent.prompt_token_ids) - 1 or stored < self.table.replay_end[parent.seq]:
                self._parents.append(parent)
                continue
            siblings, parent.siblings = parent.siblings, []
            place = self.running.index(parent)
            for number, sibling in enumerate(siblings, 1):
                try:
                    if len(self.running) >= self.max_num_seqs:
                        raise OutOfBlocksError("no place among the running")
                    seq, copies = self.blocks.fork(parent.seq)
                except OutOfBlocksError:  # the rest wait, and compute the prompt again or find it stored
                    self.waiting.extendleft(reversed(siblings[number - 1 :]))
                    break
                sibling.run(self.table, self.blocks, seq, stored)
                self.running.insert(place + number, sibling)
                self._seqs = self._snapshot = None
                self._copies.extend(copies)

    def _continue_running(self) -> tuple[list[Request], Int32Array, Int32Array]:
        """Running requests that have rows to run under the budget, oldest first; their handles; and those rows."""
        seqs = self.running_seqs()
        table = self.table
        known = table.planned_tokens[seqs]
        rows = known - table.planned_computed[seqs]
        drafts = table.num_drafts[seqs]
        most = table.max_tokens[seqs]
        if drafts.any() or (known >= most).any():
            decodes = (rows == 1) & (known > table.num_prompt[seqs])
            rows = np.where(decodes, np.minimum(1 + drafts, most - known), rows)
        if not table.are_plain(seqs):
            rows = np.where(table.waits[seqs] & (known > table.num_tokens[seqs]), 0, rows)
            for place in np.flatnonzero(table.is_irregular[seqs]).tolist():
                rows[place] = self._rows(self.running[place], self.max_rows)
        least = int(rows.min(initial=1))
        if least < 0 or int(rows.sum()) > self.max_rows:
            # Whoever comes when little is left gets that much, and who comes after that gets none.
            rows = np.clip(rows, 0, np.maximum(self.max_rows - np.cumsum(rows, dtype=np.int32) + rows, 0))
            least = int(rows.min(initial=1))
        if least > 0:
            return self._running_now(), seqs, rows
        places = np.flatnonzero(rows)
        return [self.running[place] for place in places.tolist()], seqs[places], rows[places]

    def running_seqs(self) -> Int32Array:
        """[n] int32, handles of the running requests, oldest first."""
        if self._seqs is None:
            self._seqs = np.fromiter((r.seq for r in self.running), dtype=np.int32, count=len(self.running))
        return self._seqs

    def _running_now(self) -> list[Request]:
        """The running requests; the same list as long as they are the same."""
        if self._snapshot is None:
            self._snapshot = list(self.running)
        return self._snapshot

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._seqs = self._snapshot = None

    def _rows(self, request: Request, budget: int) -> int:
        rows = request.next_rows(budget)
        if request.num_prompt_rows_wanted > request.planned_computed:
            rows = min(rows, self.max_rows_with_logits)
        return rows

    def _hold_memory(
        self, chosen: list[Request], seqs: Int32Array, rows: Int32Array
    ) -> tuple[list[Request], Int32Array, Int32Array]:
        """Reserve memory oldest first, preempting younger requests; returns those that keep their rows."""
        held = 0
        while held < len(chosen):
            rest = seqs[held:]
            held += self.blocks.reserve_many(rest, self.table.planned_computed[rest] + rows[held:])
            if held == len(chosen):
                break
            victim = self._victim(chosen[held])
            self._preempt(victim)
            keep = [place for place, request in enumerate(chosen) if request is not victim]
            chosen, seqs, rows = [chosen[place] for place in keep], seqs[keep], rows[keep]
        return chosen, seqs, rows

    def _victim(self, needy: Request) -> Request:
        """Whom to preempt for `needy`: of the younger ones the cheapest to compute again, else itself."""
        younger = self.running[self.running.index(needy) + 1 :]
        return min(younger, key=lambda r: r.num_computed, default=needy)

    def _preempt(self, request: Request) -> None:
        seq = request.seq
        request.give_way()
        self.blocks.free(seq)
        self._leave(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(
        self, chosen: list[Request], seqs: Int32Array, rows: Int32Array
    ) -> tuple[list[Request], Int32Array, Int32Array]:
        """Start waiting requests while places, memory and rows last, in order of arrival; they join those given."""
        begun: list[Request] = []
        counts: list[int] = []
        budget = self.max_rows - int(rows.sum())
        reserved = 0
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            free = self.blocks.num_free_blocks - reserved
            if self._is_still_refused(request, free):
                break
            tokens = request.token_ids
            stored = NO_MATCH
            if request.use_prefix:
                stored = self.blocks.match(
                    tokens, request.prefix_salt, max_stored=request.max_stored, replay=request.replay_tokens
                )
            # All known tokens and the next one must fit, so that admission does not cause the next preemption.
            most = self.blocks.blocks_for(min(request.num_tokens + 1, request.max_len))
            need = most - self.blocks.blocks_for(stored.num_tokens)
            if need > free - stored.num_idle_blocks:
                self._refused = request, free
                break
            self._refused = None
            self.waiting.popleft()
            seq = self.blocks.open(
                tokens,
                request.prefix_salt,
                use_prefix=request.use_prefix,
                max_stored=request.max_stored,
                replay=request.replay_tokens,
            )
            request.run(self.table, self.blocks, seq, stored.num_tokens, self.blocks.pool.num_replayed(seq))
            self.running.append(request)
            self._seqs = self._snapshot = None
            if request.siblings and request.planned_computed >= len(request.prompt_token_ids) - 1:
                # Nothing is left to share but what is stored, and that they find by themselves.
                self.waiting.extendleft(reversed(request.siblings))
                request.siblings = []
            if request.siblings:
                self._parents.append(request)
            count = self._rows(request, budget)
            end = request.planned_computed + count
            self.blocks.reserve(request.seq, end)
            reserved += most - self.blocks.blocks_for(max(end, stored.num_tokens))
            begun.append(request)
            counts.append(count)
            budget -= count
        if not begun:
            return chosen, seqs, rows
        new = np.array([request.seq for request in begun], dtype=np.int32)
        return chosen + begun, np.concatenate([seqs, new]), np.concatenate([rows, np.array(counts, dtype=np.int32)])

    def _is_still_refused(self, request: Request, free: int) -> bool:
        """Whether `request` did not fit with as many blocks free: a long prompt is not looked up in every step."""
        if self._refused is None or self._refused[0] is not request or not self.running or free > self._refused[1]:
            return False
        self._refused = request, free
        return True
