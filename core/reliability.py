"""Whether a draft's confidences mean what they say: kept drafts against promised ones, by how sure the draft was.

A confidence is the chance that its draft is kept once all drafts before it are. So only drafts count whose
predecessors were all kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.core._native import add_reliability

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
        sums = np.zeros((3, NUM_BINS))
        add_reliability(confidences, verified, accepted, sums)
        tried, kept, promised = sums.tolist()
        self.tried = [a + int(b) for a, b in zip(self.tried, tried, strict=True)]
        self.kept = [a + int(b) for a, b in zip(self.kept, kept, strict=True)]
        self.promised = [a + b for a, b in zip(self.promised, promised, strict=True)]

    def expected_calibration_error(self) -> float:
        """Mean distance between confidence and share kept, weighted by drafts; NaN without any."""
        total = sum(self.tried)
        rows = zip(self.kept, self.promised, strict=True)
        return sum(abs(kept - promised) for kept, promised in rows) / total if total else float("nan")
