"""Speculation: who proposes tokens, how many of them a step verifies, and whether proposing pays at all.

With the `coupled` rule every emitted token is the target's own draw, so nothing decided here can change an answer. With
`rejection` a length may depend on confidences of drafts before the one in question, on other rows and on finished
steps, never on later drafts; the policy below looks at finished steps only, so both rules are served by it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.request import Request
from deepinfer.core.sampler import RowParams, Sampler
from deepinfer.models.interface import Caches, Draft, DraftBatch, DraftOutput, StepBatch
from deepinfer.ops.philox import Purpose
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import shift

_DECAY = 0.98  # of old evidence, per step
_PROBE_EVERY = 64  # steps without drafts after which one with drafts measures again


@dataclass
class SpeculationStats:
    """Counts by place in the draft block: how often a draft there was verified, and how often it was kept."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_steps_without_drafts: int = 0

    def acceptance(self) -> list[float]:
        """Share of verified drafts that were kept, by place; NaN where none was verified."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return [kept / tried if tried else float("nan") for kept, tried in pairs]


class StepCost:
    """A running model of step time: `base + per_row * rows + per_context * context`, from finished steps.

    Least squares with fading memory; times are the host's wall clock around a step, in seconds.
    """

    def __init__(self) -> None:
        self._normal: NDArray[np.float64] = np.eye(3) * 1e-9
        self._moment: NDArray[np.float64] = np.zeros(3)
        self.num_steps = 0

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Add a finished step: its rows, tokens of context over its sequences, and time."""
        x = np.array([1.0, rows, context / 1024])
        self._normal = self._normal * _DECAY + np.outer(x, x)
        self._moment = self._moment * _DECAY + x * seconds
        self.num_steps += 1

    def step(self, rows: int, context: int) -> float:
        """Expected seconds of a step."""
        return max(float(self._solve() @ np.array([1.0, rows, context / 1024])), 1e-9)

    def _solve(self) -> NDArray[np.float64]:
        return np.linalg.solve(self._normal + np.eye(3) * 1e-9, self._moment).astype(np.float64)


class LengthPolicy:
    """How many drafts of each request the next step verifies.

    All requests of a step verify the same number: the one that is expected to give most tokens per second, drafting
    included. Acceptance by place and the cost of rows, context and drafting come from finished steps of all requests;
    confidences of the drafts are handed on by the draft and not used yet.

    Args:
        num_drafts: most drafts of a block.
        adaptive: False verifies all of them always.
    """

    def __init__(self, num_drafts: int, adaptive: bool) -> None:
        self.num_drafts = num_drafts
        self._adaptive = adaptive
        self._kept = np.full(num_drafts, 0.5)
        self._tried = np.full(num_drafts, 1.0)
        self.cost = StepCost()
        self._draft_seconds = 0.0
        self._idle_steps = 0

    def observe(self, verified: int, accepted: int) -> None:
        """Add one request's finished verification."""
        self._tried[:verified] = self._tried[:verified] * _DECAY + 1
        self._kept[:verified] *= _DECAY
        self._kept[:accepted] += 1

    def observe_draft(self, seconds: float) -> None:
        """Add the time that one draft pass took."""
        self._draft_seconds += (seconds - self._draft_seconds) * 0.1

    def reach(self) -> NDArray[np.float64]:
        """Probability that a draft at each place is kept, those before it included."""
        # A place counts as tried whenever it was verified, and as kept only if all before it were: a cumulative rate.
        return np.minimum.accumulate(self._kept / self._tried)

    def length(self, num_requests: int, context: int) -> int:
        """Drafts per request of the next step; 0 when drafting does not pay.

        Args:
            num_requests: requests that decode.
            context: tokens of context over all of them.
        """
        if not self._adaptive or self.cost.num_steps < 8:
            return self.num_drafts
        reach = self.reach()
        best, best_rate = 0, num_requests / self.cost.step(num_requests, context)
        for drafts in range(1, self.num_drafts + 1):
            tokens = num_requests * (1 + float(reach[:drafts].sum()))
            seconds = self.cost.step(num_requests * (1 + drafts), context) + self._draft_seconds
            if tokens / seconds > best_rate:
                best, best_rate = drafts, tokens / seconds
        if best == 0:
            self._idle_steps += 1
            if self._idle_steps % _PROBE_EVERY == 0:
                return self.num_drafts
        return best


class Drafting:
    """Proposes tokens with a model's draft.

    Args:
        draft: the model's.
        caches: those of the model.
        sampler: draws the drafts with the requests' own parameters.
        ops: binds what is needed here.
        rejection: the rejection rule: drafts have a random stream of their own, and their logits are kept.
        policy: how many to verify.
        max_seqs: most requests of a step.
        temperatures: of the confidences, [D] or empty.
    """

    def __init__(
        self,
        draft: Draft,
        caches: Caches,
        sampler: Sampler,
        ops: OpTable,
        *,
        rejection: bool,
        policy: LengthPolicy,
        max_seqs: int,
        temperatures: Sequence[float] = (),
    ) -> None:
        self._draft = draft
        self._caches = caches
        self._sampler = sampler
        self._rejection = rejection
        self._temperatures = tuple(temperatures)
        self._scratch = draft.new_scratch(max_seqs)
        self._shift = ops.bind(shift)
        self.policy = policy
        self.stats = SpeculationStats([0] * draft.num_tokens, [0] * draft.num_tokens)
        self._length = policy.num_drafts
        self._seconds = 0.0

    @property
    def length(self) -> int:
        """Drafts per request that the next step verifies."""
        return self._length

    def wanted(self, requests: Sequence[Request]) -> bool:
        """Decide the next step's length; False when it is 0 and nothing needs to be drafted."""
        context = sum(r.num_tokens for r in requests)
        self._length = self.policy.length(len(requests), context)
        self.stats.num_steps += 1
        self.stats.num_steps_without_drafts += self._length == 0
        return self._length > 0

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

        def choose(place: int, logits: Tensor) -> Tensor:
            index = self._shift(output_index, place)
            if self._rejection:
                return self._sampler.draw(logits, params, index, purpose=Purpose.DRAFT, anchor=output_index)
            return self._sampler.draw(logits, params, index)

        start = time.perf_counter()
        output = self._draft.draft(
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
            temperatures=self._temperatures,
            with_logits=self._rejection,
        )
        self._seconds = time.perf_counter() - start
        self.policy.observe_draft(self._seconds)
        return output

    def take_seconds(self) -> float:
        """Seconds of the newest draft pass, once."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def record(self, verified: int, accepted: int) -> None:
        """Count one request's finished verification."""
        if verified:
            self.policy.observe(verified, accepted)
            for place in range(verified):
                self.stats.verified[place] += 1
                self.stats.accepted[place] += place < accepted
