"""Models without weights: logits come from a function of the token ids, or from nowhere.

A puppet follows the model protocol with its own record of each sequence, so schedulers, samplers and output code run as
they do with a real model, in microseconds. It computes on the host and suits any device whose runtime can take the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from deepinfer.models.interface import Caches, CacheSpec, Draft, ModelInfo, StepBatch, Tap

LogitsFn = Callable[[Sequence[int]], ArrayLike]


class PuppetModel:
    """A model whose next-token logits are `logits_fn(token_ids)`.

    Args:
        vocab_size: ids run from 0 to `vocab_size` - 1.
        logits_fn: called with all token ids up to and including the row's own; returns [vocab_size] numbers. NaN and
            infinities are passed on as they are.
        eos_token_ids: where generation stops.
        max_position: longest sequence.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_fn: LogitsFn,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_position: int = 1 << 20,
    ) -> None:
        self.info = ModelInfo("puppet", vocab_size, max_position, eos_token_ids)
        self.cache_spec = CacheSpec()
        self.draft: Draft | None = None
        self._logits_fn = logits_fn
        self._tokens: dict[int, list[int]] = {}

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Record the step's tokens and ask the function for the wanted rows."""
        ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
        ends, slots = batch.cu_seqlens_q.tolist(), batch.state_slots.tolist()
        prefix: dict[int, tuple[int, int]] = {}
        for seq, slot in enumerate(slots):
            start, end = ends[seq], ends[seq + 1]
            if start == end:
                continue
            known = self._tokens.setdefault(slot, [])
            if positions[start] > len(known):
                raise AssertionError(f"slot {slot} continues at position {positions[start]}, {len(known)} tokens known")
            del known[positions[start] :]
            known.extend(ids[start:end])
            prefix.update((row, (slot, positions[row] + 1)) for row in range(start, end))
        out = np.empty((len(batch.logits_rows), self.info.vocab_size), dtype=np.float32)
        for place, row in enumerate(batch.logits_rows.tolist()):
            slot, length = prefix[row]
            out[place] = np.asarray(self._logits_fn(self._tokens[slot][:length]), dtype=np.float32)
        return torch.from_numpy(out)


class NullModel:
    """A model that costs nothing: equal logits in every row. For measuring the host's own time.

    Args:
        vocab_size: ids run from 0 to `vocab_size` - 1.
        cache_spec: what to pretend to keep; metadata is written for its ratios.
        max_position: longest sequence.
    """

    def __init__(self, vocab_size: int, *, cache_spec: CacheSpec | None = None, max_position: int = 1 << 20) -> None:
        self.info = ModelInfo("null", vocab_size, max_position)
        self.cache_spec = cache_spec or CacheSpec()
        self.draft: Draft | None = None
        self._row = torch.zeros(1, vocab_size)

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Zeros."""
        return self._row.expand(len(batch.logits_rows), -1)
