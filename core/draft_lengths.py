"""How many drafts of each request a step verifies, and whether drafting pays at all.

Every draft that is verified is a row more, and brings a token more if it and all drafts before it are kept. So drafts
are taken in the order of what they bring for what they cost, as many as give the most tokens per second. What may be
known of a draft when it is chosen is the business of `core.confidence`.
"""

from __future__ import annotations

import numpy as np

from deepinfer.core._native import best_count, rank_drafts
from deepinfer.core.confidence import Float32Array, Forecast
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_cost import CycleCost

_PROBE_FIRST, _PROBE_LAST = 64, 1024
"""Steps after which all drafts are verified again though that does not seem to pay; the interval doubles as long as it
does not."""


class DraftLengths:
    """Spends rows on drafts.

    Args:
        num_drafts: most drafts of a request, D.
        max_rows: rows of the largest step.
        cost: of steps; whoever runs them feeds it.
    """

    def __init__(self, num_drafts: int, max_rows: int, cost: CycleCost) -> None:
        self._num_drafts = num_drafts
        self._max_rows = max_rows
        self._cost = cost
        self._idle, self._short = _Probe(), _Probe()
        self._verifies_all = False
        self._num_first = 0

    def pays(self, forecast: Float32Array, contexts: Int32Array, other_rows: int) -> bool:
        """Whether the next step should have drafts to verify.

        Args:
            forecast: [R, D], of the blocks that would be drafted.
            contexts: [R] int32, tokens before the drafts of each.
            other_rows: rows of the step that are neither the R newest tokens nor their drafts.
        """
        if not self._cost.step.is_known:
            return True
        count, context = len(contexts), float(contexts.sum())
        rate_without = count / max(float(self._cost.seconds(count + other_rows, context, 0)), 1e-12)
        best, rate = self._best(forecast, contexts, other_rows, self._most(len(contexts), other_rows))[1:]
        if best > 0 and rate > rate_without:
            self._idle.reset()
            return True
        self._verifies_all = self._idle.is_due()
        return self._verifies_all

    def choose(self, forecast: Forecast, available: Int32Array, contexts: Int32Array, other_rows: int) -> Int32Array:
        """[R] int32, how many drafts of each request the next step verifies.

        Args:
            forecast: of the blocks that were drafted.
            available: [R] int32, drafts that there are.
            contexts: [R] int32, tokens before the drafts of each.
            other_rows: rows of the step that are neither the R newest tokens nor their drafts.
        """
        most = min(int(available.sum()), self._most(len(available), other_rows))
        if (available < self._num_drafts).any():
            forecast = self._without(forecast, available)
        order, budget, _ = self._best(forecast.budget, contexts, other_rows, most)
        if not self._cost.step.is_known:
            # The first steps show what rows cost: all drafts, none, half of them.
            budget = (most, 0, most // 2)[self._num_first % 3]
            self._num_first += 1
        elif self._verifies_all or (budget < most and self._short.is_due()):
            budget, self._verifies_all = most, False
        elif budget == most:
            self._short.reset()
        if forecast.share is not forecast.budget:
            order = self._rank(forecast.share, contexts, other_rows)
        lengths = np.bincount(order[:budget] // self._num_drafts, minlength=len(available))
        return np.minimum(lengths, available).astype(np.int32)

    def _without(self, forecast: Forecast, available: Int32Array) -> Forecast:
        """A forecast that expects nothing of drafts that there are not."""
        there = np.arange(self._num_drafts) < available[:, None]
        budget = np.where(there, forecast.budget, np.float32(0))
        same = forecast.share is forecast.budget
        return Forecast(budget if same else np.where(there, forecast.share, np.float32(0)), budget)

    def _most(self, num_requests: int, other_rows: int) -> int:
        return max(min(num_requests * self._num_drafts, self._max_rows - other_rows - num_requests), 0)

    def _rank(self, gains: Float32Array, contexts: Int32Array, other_rows: int) -> Int32Array:
        """Flat indices of drafts by gain for price; a row's gains never rise, so a draft is behind those before it."""
        row_price, context_price = self._cost.step.prices(len(contexts) + other_rows, gains.size)
        return rank_drafts(gains, contexts, row_price, context_price)

    def _best(
        self, gains: Float32Array, contexts: Int32Array, other_rows: int, most: int
    ) -> tuple[Int32Array, int, float]:
        """Drafts in order, how many of them, up to `most`, give most tokens per second, and that rate."""
        order = self._rank(gains, contexts, other_rows)
        return order, *best_count(gains, contexts, order, most, other_rows, **self._cost.curve(len(contexts)))


class _Probe:
    """Says now and then that something which does not seem to pay should be tried."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """It pays again."""
        self._interval, self._count = _PROBE_FIRST, 0

    def is_due(self) -> bool:
        """Count a step without; True when it is time to try."""
        self._count += 1
        if self._count < self._interval:
            return False
        self._interval, self._count = min(2 * self._interval, _PROBE_LAST), 0
        return True
