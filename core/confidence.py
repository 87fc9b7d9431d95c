"""What a draft's confidences are worth, and those that the host knows of each running request.

A draft says of every token that it proposes how likely it is to be kept. Whether that is true shows when drafts are
verified, so a forecast is what confidences say, corrected by what became of earlier ones. With steps in flight the
newest confidences are those of the block before the one in question; how much they say of the next block is learned in
the same way, and if it is nothing the forecast is the plain rate at which drafts were kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.core._native import add_verified, enter_block, forecast_drafts
from deepinfer.core.step_buffers import Int32Array

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_DECAY = 0.99  # of old evidence, per step
_TRUST = 8.0  # drafts whose fate outweighs the belief that confidences are right
_USUAL = 0.7  # confidence of a draft of which none is known, before any has been seen
_HABIT = 0.2  # weight of the newest block in what a request's blocks are like
_CROWD = 0.05  # weight of a step in what blocks are like at all


class Calibration:
    """How likely drafts are kept up to each place, given a signal: `a + b * signal`, fitted to what was kept.

    The signal of a place is the product of the block's confidences up to it. Where it must not depend on the place's
    own confidence, another one stands in for that. Without evidence the signal is believed (a = 0, b = 1). Memory of
    old evidence fades.

    Args:
        num_drafts: places, D.
    """

    def __init__(self, num_drafts: int) -> None:
        # per place: drafts seen, sums of signal, of its square, of (kept - signal), and of that times the signal
        self._sums: Float64Array = np.zeros((5, num_drafts))

    def observe(
        self,
        confidences: Float32Array,
        seqs: Int32Array,
        verified: Int32Array,
        accepted: Int32Array,
        stand_in: Float32Array | None = None,
    ) -> None:
        """Add the drafts that one step verified.

        Args:
            confidences: [S, D], a row for each handle.
            seqs: [R] int32, rows of it.
            verified: [R] int32, drafts that were verified.
            accepted: [R] int32, how many of them were kept.
            stand_in: [S, D], what stands in for the confidence of a place in the place's own signal.
        """
        self._sums *= _DECAY
        add_verified(confidences, seqs, verified, accepted, self._sums, stand_in)

    def predict(
        self, confidences: Float32Array, seqs: Int32Array, stand_in: Float32Array | None = None
    ) -> Float32Array:
        """[R, D] probabilities that drafts are kept up to each place; they never rise along a row.

        A place is judged by the signals up to it alone; arguments are as in `observe`.
        """
        count, first, square, missed, cross = self._sums
        determinant = (count + _TRUST) * (square + _TRUST) - first * first
        constant = (missed * (square + _TRUST) - cross * first) / determinant
        slope = 1 + (cross * (count + _TRUST) - missed * first) / determinant
        return forecast_drafts(confidences, seqs, np.array([constant, slope]), stand_in)


class ConfidenceBook:
    """Confidences by sequence handle, [num_slots + 1, D] float32 each.

    Of a request without a block they are what blocks are usually like.

    Attributes:
        newest: of the newest block that the host has seen.
        recent: what the block behind it may be like: the same, or once a step has drafted nothing, the request's habit.
        older: what was recent when the newest block arrived.

    Args:
        num_slots: handles run from 1 to `num_slots`.
        num_drafts: drafts of a block, D.
    """

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        shape = num_slots + 1, num_drafts
        self.newest: Float32Array = np.full(shape, _USUAL, np.float32)
        self.recent: Float32Array = self.newest.copy()
        self.older: Float32Array = self.newest.copy()
        self._habit: Float32Array = self.newest.copy()
        self._usual: Float32Array = np.full(num_drafts, _USUAL, np.float32)
        self._owner = np.full(num_slots + 1, -1, np.int64)
        self._on_way = np.zeros(num_slots + 1, np.int32)

    def claim(self, seqs: Int32Array, owners: NDArray[np.int64]) -> None:
        """Make sure that what is noted for `seqs` [R] is of these owners; that of others is forgotten."""
        is_new = self._owner[seqs] != owners
        if is_new.any():
            new = seqs[is_new]
            for noted in (self.newest, self.recent, self.older, self._habit):
                noted[new] = self._usual
            self._on_way[new] = 0
            self._owner[new] = owners[is_new]

    def drafted(self, seqs: Int32Array) -> None:
        """Note that a block is on its way for each of `seqs` [R]."""
        self._on_way[seqs] += 1

    def skipped(self, seqs: Int32Array) -> None:
        """Note that nothing was drafted for each of `seqs` [R]; one timid block must not silence a request for good."""
        self.recent[seqs] = self._habit[seqs]

    def arrived(self, seqs: Int32Array, confidences: Float32Array) -> None:
        """Note the confidences [R, D] of the oldest block on its way of each of `seqs` [R].

        What is not a number says nothing good about a draft: it counts as 0.
        """
        enter_block(
            self.newest,
            self.recent,
            self.older,
            self._habit,
            self._usual,
            seqs,
            np.ascontiguousarray(confidences, np.float32),
            habit_weight=_HABIT,
            usual_weight=_CROWD,
        )
        self._on_way[seqs] -= 1

    def are_current(self, seqs: Int32Array) -> BoolArray:
        """[R] whether the newest block that was seen is the newest that was drafted."""
        current: BoolArray = self._on_way[seqs] == 0
        return current


@dataclass(frozen=True)
class Forecast:
    """How likely the drafts of R requests are kept up to each place, [R, D] float32 each, never rising along a row.

    Attributes:
        share: what drafts are chosen by. Under the rejection rule its entry at a place depends on confidences before
            that place alone.
        budget: what the number of drafts is chosen by. Under the rejection rule it depends on earlier blocks alone: a
            number that followed from the last confidence of a row would decide on the first draft of that row.
    """

    share: Float32Array
    budget: Float32Array


class Forecaster:
    """Forecasts from the confidences that the host knows.

    Args:
        num_slots: sequence handles run from 1 to `num_slots`.
        num_drafts: most drafts of a request, D.
        rejection: the rejection rule holds.
    """

    def __init__(self, num_slots: int, num_drafts: int, *, rejection: bool) -> None:
        self.book = ConfidenceBook(num_slots, num_drafts)
        self._own = Calibration(num_drafts)
        self._earlier = Calibration(num_drafts)
        self._rejection = rejection

    def of_drafted(self, seqs: Int32Array) -> Forecast:
        """Of the newest block that was drafted for each of `seqs` [R], whether its confidences are known or not."""
        current = self.book.are_current(seqs)
        if not current.any():
            forecast = self.of_next(seqs)
            return Forecast(forecast, forecast)
        share = self._own.predict(self.book.newest, seqs, self._stand_in())
        all_current = bool(current.all())
        if not all_current:
            share = np.where(current[:, None], share, self.of_next(seqs))
        if not self._rejection:
            return Forecast(share, share)
        budget = self._earlier.predict(self.book.older, seqs)
        if not all_current:
            budget = np.where(current[:, None], budget, self.of_next(seqs))
        return Forecast(share, budget)

    def of_next(self, seqs: Int32Array) -> Float32Array:
        """[R, D], of a block behind the newest that the host has seen."""
        return self._earlier.predict(self.book.recent, seqs)

    def observe(self, seqs: Int32Array, verified: Int32Array, accepted: Int32Array) -> None:
        """Learn from a verification of the newest blocks in the book.

        Args:
            seqs: [R] int32.
            verified: [R] int32, drafts that were verified.
            accepted: [R] int32, how many of them were kept.
        """
        self._own.observe(self.book.newest, seqs, verified, accepted, self._stand_in())
        self._earlier.observe(self.book.older, seqs, verified, accepted)

    def _stand_in(self) -> Float32Array | None:
        """Under the rejection rule a place's own confidence, which may tell its draft, is guessed from before."""
        return self.book.older if self._rejection else None
