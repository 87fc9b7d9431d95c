"""A target and a draft that take no notice of the context: for tests of distributions, and of what depends on them.

Both cost next to nothing, so that a thousand requests draw a hundred thousand tokens in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from deepinfer.models.interface import (
    Caches,
    CacheSpec,
    Choose,
    Draft,
    DraftBatch,
    DraftOutput,
    ModelInfo,
    StepBatch,
    Tap,
)
from deepinfer.ops.formats import CacheFormat, PagedCache

Confidence = Callable[[int, Tensor, Tensor], Tensor]
"""Called with a place, the tokens before it and those drafted there, [S] int32 each; gives confidences [S]."""


def always(confidence: float) -> Confidence:
    """The same confidence everywhere."""
    return lambda place, before, drafted: torch.full(drafted.shape, confidence)


def odd_before(place: int, before: Tensor, drafted: Tensor) -> Tensor:
    """High behind odd tokens and low behind even ones: what is said of a draft tells what the one before it was."""
    return torch.where(before % 2 == 1, 0.95, 0.05)


def odd_itself(place: int, before: Tensor, drafted: Tensor) -> Tensor:
    """High for odd tokens and low for even ones: who judges a draft by it prefers one kind."""
    return torch.where(drafted % 2 == 1, 0.95, 0.05)


class FlatDraft:
    """Draws every place from the same logits; implements `models.interface.Draft`.

    Args:
        logits: [V].
        num_tokens: tokens of a draft, D.
        confidence: what it says of them.
    """

    def __init__(self, logits: ArrayLike, num_tokens: int, confidence: Confidence) -> None:
        self._row = _row(logits)
        self._num_tokens = num_tokens
        self._confidence = confidence

    @property
    def num_tokens(self) -> int:
        """Tokens of a draft, D."""
        return self._num_tokens

    def new_scratch(self, num_seqs: int) -> PagedCache:
        """A record per sequence that nobody uses."""
        return PagedCache(torch.zeros((num_seqs, 4), dtype=torch.uint8), CacheFormat("f32", 1), 1)

    def draft(
        self,
        batch: DraftBatch,
        caches: Caches,
        choose: Choose | None = None,
        *,
        temperatures: Sequence[float] = (),
        with_logits: bool = False,
        tap: Tap | None = None,
    ) -> DraftOutput:
        """Draw one place after the other, by the best logit without `choose`; temperatures are not applied."""
        num_seqs = len(batch.anchor_ids)
        best = self._row.argmax(1).int().expand(num_seqs)
        before, tokens, confidences = batch.anchor_ids, [], []
        for place in range(self._num_tokens):
            drafted = choose(place, self._row.repeat(num_seqs, 1)) if choose is not None else best
            tokens.append(drafted)
            confidences.append(self._confidence(place, before, drafted))
            before = drafted
        logits = self._row[None].repeat(num_seqs, self._num_tokens, 1) if with_logits else None
        return DraftOutput(torch.stack(tokens, 1), torch.stack(confidences, 1).float(), logits)


class FlatModel:
    """Gives every row the same logits.

    Args:
        logits: [V].
        draft: speculates for it.
    """

    def __init__(self, logits: ArrayLike, draft: Draft | None = None) -> None:
        self._row = _row(logits)
        self.info = ModelInfo("flat", self._row.shape[1], 1 << 20)
        self.cache_spec = CacheSpec()
        self.draft = draft

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """The row, as often as it is asked for."""
        return self._row.repeat(len(batch.logits_rows), 1)


def _row(logits: ArrayLike) -> Tensor:
    return torch.from_numpy(np.asarray(logits, np.float32)[None])
