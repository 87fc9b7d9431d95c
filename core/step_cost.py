"""What a step costs, learned from steps that ran: rows, context, drafting, and the host's own share.

Device time comes from events, so that nobody waits to learn it. It is a curve over the number of rows, straight between
powers of two, plus a price per row and token of context; both are fitted to the newest steps with a memory that fades.
The first steps give the first curve, and every later one moves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.ops.runtime import Event, Runtime

Float64Array = NDArray[np.float64]

_DECAY = 0.98  # of old evidence, per step
_WARM_UP = 2  # first steps, which may compile or allocate
_TRUSTED = 8  # steps after which a time can be told to be an outlier
_OUTLIER = 4.0  # times what was expected; what lies above counts as this much
_OFTEN = 16  # steps up to which each one changes the curve; later one in so many does
_CONTEXT_UNIT = float(1 << 20)
_STRAIGHT, _FLAT, _FREE = 1e-2, 1e-6, 1e-3
"""Weights of what is believed without evidence, against 1 for a step: the curve does not bend, rows cost nothing,
context costs nothing."""


class StepCost:
    """Device seconds of a step with so many rows over so much context.

    Where rows were not seen the curve goes on straight; with a single number of rows it is flat, so that more rows are
    tried rather than feared.

    Args:
        max_rows: the largest step.
    """

    def __init__(self, max_rows: int) -> None:
        self.num_steps = 0
        self._knots = np.append(2.0 ** np.arange(max(max_rows - 1, 1).bit_length()), float(max(max_rows, 2)))
        size = len(self._knots) + 1
        self._normal: Float64Array = np.zeros((size, size))
        self._moment: Float64Array = np.zeros(size)
        self._belief = _belief(self._knots)
        self._curve: Float64Array | None = None
        self._context_price = 0.0
        self._is_assumed = False

    def observe(self, rows: int, row_context: float, seconds: float) -> None:
        """Add a finished step.

        Args:
            rows: of it.
            row_context: tokens before each row, summed over rows.
            seconds: on the device.
        """
        self.num_steps += 1
        if self.num_steps <= _WARM_UP or self._is_assumed:
            return
        expected = float(self.seconds(rows, row_context)) if self.num_steps > _WARM_UP + _TRUSTED else 0.0
        if expected > 0:  # a clock too coarse for the first steps has told nothing that a later one could contradict
            seconds = min(seconds, _OUTLIER * expected)
        places, x = self._features(rows, row_context)
        self._normal *= _DECAY
        self._normal[np.ix_(places, places)] += np.outer(x, x)
        self._moment *= _DECAY
        self._moment[places] += x * seconds
        if self.num_steps < _OFTEN or self.num_steps % _OFTEN == 0:
            self._curve = None

    def assume(self, base: float, per_row: float = 0.0) -> None:
        """Take it for granted that a step costs `base + per_row * rows` seconds; no step changes that."""
        self._is_assumed = True
        self._curve, self._context_price = base + per_row * self._knots, 0.0

    @property
    def is_known(self) -> bool:
        """Whether steps enough were seen to decide by."""
        return self._is_assumed or self.num_steps >= _WARM_UP + _TRUSTED

    def seconds(self, rows: ArrayLike, row_context: ArrayLike = 0.0) -> Float64Array:
        """Expected seconds of steps with so many rows, of any shape; 0 before the first evidence."""
        curve = self._fit()
        context = np.asarray(row_context, np.float64) * (self._context_price / _CONTEXT_UNIT)
        return np.asarray(np.interp(np.asarray(rows, np.float64), self._knots, curve) + context, np.float64)

    def prices(self, rows: int, more: int) -> tuple[float, float]:
        """Seconds per row, in a step of `rows` that may get `more`, and per token of context before a row."""
        without, with_all = self.seconds(np.array([rows, rows + more]))
        return float(with_all - without) / max(more, 1), self._context_price / _CONTEXT_UNIT

    def curve(self) -> tuple[Float64Array, Float64Array, float]:
        """Row counts, the seconds of steps with so many rows, straight between them, and the price of context."""
        return self._knots, self._fit(), self._context_price / _CONTEXT_UNIT

    def _features(self, rows: int, row_context: float) -> tuple[list[int], Float64Array]:
        """What a step says something about, and how much: the knots beside its rows, and context."""
        size = len(self._knots)
        at = float(min(max(rows, 1), self._knots[-1]))
        above = min(max(int(np.searchsorted(self._knots, at)), 1), size - 1)
        low, high = float(self._knots[above - 1]), float(self._knots[above])
        share = (at - low) / (high - low)
        return [above - 1, above, size], np.array([1 - share, share, row_context / _CONTEXT_UNIT])

    def _fit(self) -> Float64Array:
        if self._curve is None:
            normal, size = self._normal + self._belief, len(self._knots)
            normal[size, size] += _FREE * self._normal[size, size] + 1e-12
            found = np.linalg.solve(normal, self._moment)
            self._context_price = float(found[size])
            if self._context_price < 0:  # more context does not make a step faster: what looked so was chance
                self._context_price = 0.0
                found = np.linalg.solve(normal[:size, :size], self._moment[:size])
            self._curve = np.maximum.accumulate(np.maximum(found[:size], 0.0))
        return self._curve


@dataclass
class StepMarks:
    """Where the device is in a step: where it began, where its tokens were drawn, and where drafts were made.

    Marks are events in the device's stream; they are read when the host has waited for the step anyway.
    """

    begun: Event
    drawn: Event
    drafted: Event | None = None

    @classmethod
    def begin(cls, runtime: Runtime) -> StepMarks:
        """Mark where a step begins, in the current stream."""
        begun = runtime.event()
        begun.record()
        return cls(begun, runtime.event())

    def note_drafts(self, runtime: Runtime) -> None:
        """Mark where drafts were made."""
        self.drafted = runtime.event()
        self.drafted.record()

    def seconds(self) -> tuple[float, float]:
        """Device time of the step up to its tokens, and of drafting behind it."""
        step = self.drawn.elapsed_ms(self.begun) * 1e-3
        return step, self.drafted.elapsed_ms(self.drawn) * 1e-3 if self.drafted is not None else 0.0


class CurveArguments(TypedDict):
    """Keyword arguments of `core._native.best_count`."""

    knots: Float64Array
    seconds: Float64Array
    context_price: float
    draft_seconds: float
    host_seconds: float
    overlaps: bool


class CycleCost:
    """Seconds from one step to the next, the drafting behind it and the host's work included.

    Attributes:
        step: device time up to the drawn tokens, over rows.
        draft: device time of drafting, over requests.
        host_seconds: of the host's own work.
        overlaps: the host works while the device does, so that the slower of both counts; otherwise they add up.

    Args:
        max_rows: rows of the largest step.
        max_seqs: sequences of the largest step.
    """

    def __init__(self, max_rows: int, max_seqs: int) -> None:
        self.step = StepCost(max_rows)
        self.draft = StepCost(max_seqs)
        self.host_seconds = 0.0
        self.overlaps = False
        self._is_assumed = False

    def assume(self, base: float, per_row: float, draft: float = 0.0) -> None:
        """Take costs for granted, those of the host as none, so that decisions repeat whatever the machine does."""
        self.step.assume(base, per_row)
        self.draft.assume(draft)
        self.host_seconds, self._is_assumed = 0.0, True

    def observe_host(self, cycle: float, waited: float, device: float) -> None:
        """Add what the host spent on a step.

        Args:
            cycle: seconds that the step took on the host's clock, in all.
            waited: those of them in which it waited for the device.
            device: seconds that the device worked on it.
        """
        if self._is_assumed:
            return
        busy = max(cycle - (waited if self.overlaps else device), 0.0)
        self.host_seconds += (busy - self.host_seconds) * (1 - _DECAY if self.host_seconds else 1.0)

    def curve(self, num_drafting: int) -> CurveArguments:
        """What `seconds` computes with, for the native module."""
        knots, seconds, context_price = self.step.curve()
        return CurveArguments(
            knots=knots,
            seconds=seconds,
            context_price=context_price,
            draft_seconds=float(self.draft.seconds(num_drafting)) if num_drafting else 0.0,
            host_seconds=self.host_seconds,
            overlaps=self.overlaps,
        )

    def seconds(self, rows: ArrayLike, row_context: ArrayLike, num_drafting: int) -> Float64Array:
        """Expected seconds of a step with so many rows and context, behind which so many sequences draft."""
        device = self.step.seconds(rows, row_context)
        if num_drafting:
            device = np.asarray(device + self.draft.seconds(num_drafting), np.float64)
        if self.overlaps:
            return np.maximum(device, self.host_seconds)
        return np.asarray(device + self.host_seconds, np.float64)


def _belief(knots: Float64Array) -> Float64Array:
    """What is believed without evidence, as a part of the normal equations; the last row is that of context."""
    size = len(knots)
    slopes = (np.eye(size)[1:] - np.eye(size)[:-1]) / np.diff(knots)[:, None]
    bends = (slopes[1:] - slopes[:-1]) * knots[1:-1, None]
    steps = np.eye(size)[1:] - np.eye(size)[:-1]
    belief = np.zeros((size + 1, size + 1))
    belief[:size, :size] = _STRAIGHT * bends.T @ bends + _FLAT * steps.T @ steps + 1e-12 * np.eye(size)
    return belief
