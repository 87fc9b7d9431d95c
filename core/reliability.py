"""Whether a draft's confidences mean what they say: kept drafts against promised ones, by how sure the draft was.

A confidence is the chance that its draft is kept once all drafts before it are. So only drafts count whose
predecessors were all kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 10


@dataclass
class Reliability:
    """Sums by confidence, in `NUM_BINS` bins of equal width from 0 to 1.

    Attributes:
        tried: drafts that were verified and whose predecessors were kept.
        kept: those that were kept.
        promised: sum of their confidences.
    """

    tried: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    kept: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    promised: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)

    def add(self, confidences: NDArray[np.float32], verified: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Add the drafts of one step.

        Args:
            confidences: [R, D] of each draft on its own.
            verified: [R] int32, drafts that were verified.
            accepted: [R] int32, how many of them were kept.
        """
        place = np.arange(confidences.shape[1])
        counts = place < np.minimum(verified, accepted + 1)[:, None]
        kept = (place < accepted[:, None])[counts]
        values = confidences[counts].astype(np.float64)
        bins = np.clip((values * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
        self.tried = _added(self.tried, bins, None)
        self.kept = _added(self.kept, bins, kept.astype(np.float64))
        sums = np.bincount(bins, values, NUM_BINS)
        self.promised = [a + float(b) for a, b in zip(self.promised, sums, strict=True)]

    def expected_calibration_error(self) -> float:
        """Mean distance between confidence and share kept, weighted by drafts; NaN without any."""
        total = sum(self.tried)
        rows = zip(self.kept, self.promised, strict=True)
        return sum(abs(kept - promised) for kept, promised in rows) / total if total else float("nan")


def _added(old: Sequence[int], bins: NDArray[np.int64], weights: NDArray[np.float64] | None) -> list[int]:
    new = np.bincount(bins, weights, NUM_BINS)
    return [a + int(b) for a, b in zip(old, new, strict=True)]
