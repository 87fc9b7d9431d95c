"""Which requests run in a step, with how many rows, and who gives way when memory runs out.

Policy only: bookkeeping of blocks is `core.kv_blocks`, arrays are `core.step_buffers`. One step mixes decode rows and
prefill chunks under a budget of rows. Running requests come first, oldest first, so that the oldest always advances;
when it cannot grow, the younger request that is cheapest to compute again gives its memory back and waits at the front.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from deepinfer.core.errors import OutOfBlocksError
from deepinfer.core.kv_blocks import NO_MATCH, KVBlockManager, KVCopy
from deepinfer.core.request import Request
from deepinfer.core.step_buffers import Int32Array


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step.

    Attributes:
        requests: in row order.
        seqs: [n] int32 handles.
        starts: [n] int32 positions of the first rows; upper bounds where steps with drafts are in flight.
        query_lens: [n] int32 rows of each.
        copies: device memory to copy before the step, for choices that start from another one's KV.
    """

    requests: list[Request]
    seqs: Int32Array
    starts: Int32Array
    query_lens: Int32Array
    copies: list[KVCopy] = field(default_factory=list)


@dataclass
class Scheduler:
    """Queues of one engine.

    Args:
        blocks: KV memory.
        max_num_seqs: most running requests.
        max_rows: rows of a step.
        max_rows_with_logits: most rows of one request in a step when logits of all of them are kept.
    """

    blocks: KVBlockManager
    max_num_seqs: int
    max_rows: int
    max_rows_with_logits: int = 512
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    num_preemptions: int = 0
    _refused: tuple[Request, int] | None = None
    _copies: list[KVCopy] = field(default_factory=list)

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
        preemptions = self.num_preemptions
        self._start_siblings()
        chosen: list[Request] = []
        rows: list[int] = []
        budget = self.max_rows
        for request in self.running:
            if budget == 0:
                break
            count = self._rows(request, budget)
            if count < 1:
                continue
            chosen.append(request)
            rows.append(count)
            budget -= count
        chosen, rows = self._hold_memory(chosen, rows)
        if self.num_preemptions == preemptions:  # whoever gave way comes back before anybody new
            self._admit(chosen, rows, self.max_rows - sum(rows))
        if not chosen:
            return None
        seqs = np.fromiter((r.seq for r in chosen), dtype=np.int32, count=len(chosen))
        starts = np.fromiter((r.planned_computed for r in chosen), dtype=np.int32, count=len(chosen))
        copies, self._copies = self._copies, []
        return StepPlan(chosen, seqs, starts, np.array(rows, dtype=np.int32), copies)

    def finish(self, request: Request) -> None:
        """Drop a request wherever it is and free what it holds."""
        if request.seq:
            self.blocks.free(request.seq)
            request.seq = 0
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _start_siblings(self) -> None:
        """Start the other choices of requests whose prompts are stored up to the last token, as forks of the first."""
        for parent in [r for r in self.running if r.siblings]:
            stored = parent.num_computed
            if stored < len(parent.prompt_token_ids) - 1 or stored < parent.replay_end:
                continue
            siblings, parent.siblings = parent.siblings, []
            place = self.running.index(parent)
            for number, sibling in enumerate(siblings, 1):
                try:
                    if len(self.running) >= self.max_num_seqs:
                        raise OutOfBlocksError("no place among the running")
                    sibling.seq, copies = self.blocks.fork(parent.seq)
                except OutOfBlocksError:  # the rest wait, and compute the prompt again or find it stored
                    self.waiting.extendleft(reversed(siblings[number - 1 :]))
                    break
                sibling.start_from(stored)
                self.running.insert(place + number, sibling)
                self._copies.extend(copies)

    def _rows(self, request: Request, budget: int) -> int:
        rows = request.next_rows(budget)
        if request.num_prompt_rows_wanted > request.planned_computed:
            rows = min(rows, self.max_rows_with_logits)
        return rows

    def _hold_memory(self, chosen: list[Request], rows: list[int]) -> tuple[list[Request], list[int]]:
        """Reserve memory oldest first, preempting younger requests; returns those that keep their rows."""
        held = 0
        while held < len(chosen):
            seqs = np.fromiter((r.seq for r in chosen[held:]), dtype=np.int32, count=len(chosen) - held)
            ends = np.fromiter(
                (r.planned_computed + n for r, n in zip(chosen[held:], rows[held:], strict=True)),
                dtype=np.int32,
                count=len(chosen) - held,
            )
            held += self.blocks.reserve_many(seqs, ends)
            if held == len(chosen):
                break
            victim = self._victim(chosen[held])
            self._preempt(victim)
            keep = [i for i, r in enumerate(chosen) if r is not victim]
            chosen, rows = [chosen[i] for i in keep], [rows[i] for i in keep]
        return chosen, rows

    def _victim(self, needy: Request) -> Request:
        """Whom to preempt for `needy`: of the younger ones the cheapest to compute again, else itself."""
        younger = self.running[self.running.index(needy) + 1 :]
        return min(younger, key=lambda r: r.num_computed, default=needy)

    def _preempt(self, request: Request) -> None:
        self.blocks.free(request.seq)
        request.seq = 0
        request.forget_plans()
        request.output.timings.num_preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(self, chosen: list[Request], rows: list[int], budget: int) -> None:
        """Start waiting requests while rows, places and memory last, in order of arrival."""
        reserved = 0
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            free = self.blocks.num_free_blocks - reserved
            if self._is_still_refused(request, free):
                return
            tokens = np.array(request.prompt_token_ids + request.completion.token_ids, dtype=np.int32)
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
                return
            self._refused = None
            self.waiting.popleft()
            request.seq = self.blocks.open(
                tokens,
                request.prefix_salt,
                use_prefix=request.use_prefix,
                max_stored=request.max_stored,
                replay=request.replay_tokens,
            )
            request.start_from(stored.num_tokens, self.blocks.pool.num_replayed(request.seq))
            self.running.append(request)
            if request.siblings and request.planned_computed >= len(request.prompt_token_ids) - 1:
                # Nothing is left to share but what is stored, and that they find by themselves.
                self.waiting.extendleft(reversed(request.siblings))
                request.siblings = []
            count = self._rows(request, budget)
            end = request.planned_computed + count
            self.blocks.reserve(request.seq, end)
            reserved += most - self.blocks.blocks_for(max(end, stored.num_tokens))
            chosen.append(request)
            rows.append(count)
            budget -= count

    def _is_still_refused(self, request: Request, free: int) -> bool:
        """Whether `request` did not fit with as many blocks free: a long prompt is not looked up in every step."""
        if self._refused is None or self._refused[0] is not request or not self.running or free > self._refused[1]:
            return False
        self._refused = request, free
        return True
