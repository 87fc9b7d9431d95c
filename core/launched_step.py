"""A step on its way: what it drew, what it brings to the host, and who runs in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from deepinfer.core.confidence import Float32Array
from deepinfer.core.errors import RequestError
from deepinfer.core.request import Request
from deepinfer.core.request_table import Int64Array
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_cost import StepMarks
from deepinfer.models.interface import StepBatch
from deepinfer.ops.runtime import HostCopy


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
        slots: [R] int32, their handles; the plan's own array where all of it draws.
        num_drafts: [R] int32, drafts each of them verifies.
        version: `RequestTable.version` at launch.
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
    slots: Int32Array
    num_drafts: Int32Array
    version: int
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
