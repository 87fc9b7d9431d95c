"""Models without weights: logits come from a function of the token ids, or from nowhere.

A puppet follows the model protocol with token ids for records, so schedulers, samplers and output code run as
they do with a real model, in microseconds. It computes on the host and suits any device whose runtime can take the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deepinfer.models.interface import (
    Caches,
    CacheSpec,
    Choose,
    Draft,
    DraftBatch,
    DraftOutput,
    ModelInfo,
    RecordSpec,
    StepBatch,
    Tap,
)
from deepinfer.ops.formats import CacheFormat, PagedCache

LogitsFn = Callable[[Sequence[int]], ArrayLike]


class TokenRecords:
    """Token ids kept as records of a model, read back through block tables: the sequences as the engine sees them.

    Shared prefixes, rollbacks and preemption change nothing for whoever reads here.

    Args:
        name: of the record, unique within the model.
    """

    def __init__(self, name: str) -> None:
        self.spec = RecordSpec(name, CacheFormat("f32", 1))  # the bits of an int32

    def store(self, batch: StepBatch, caches: Caches) -> None:
        """Store the ids of a step's rows."""
        cache = caches.records(self.spec.name)
        slots = batch.ratio_slots[1].numpy()
        kept = slots >= 0
        block, offset = np.divmod(slots[kept], cache.records)
        self._words(cache)[block, offset] = batch.input_ids.numpy()[: len(slots)][kept]

    def read(self, batch: StepBatch, caches: Caches, seq: int, length: int) -> list[int]:
        """The first `length` token ids of sequence `seq` of a step."""
        cache = caches.records(self.spec.name)
        block = batch.block_tables[seq].numpy()[: -(-length // cache.records)]
        ids: list[int] = self._words(cache)[block].reshape(-1)[:length].tolist()
        return ids

    def _words(self, cache: PagedCache) -> NDArray[np.int32]:
        return cache.data.numpy().view(np.int32)


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
        self._tokens = TokenRecords("puppet.token")
        self.info = ModelInfo("puppet", vocab_size, max_position, eos_token_ids)
        self.cache_spec = CacheSpec(block_records=(self._tokens.spec,))
        self.draft: Draft | None = None
        self._logits_fn = logits_fn

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Record the step's tokens and ask the function for the wanted rows."""
        self._tokens.store(batch, caches)
        rows = batch.logits_rows.tolist()
        out = np.empty((len(rows), self.info.vocab_size), dtype=np.float32)
        for place, row in enumerate(rows):
            ids = self._tokens.read(batch, caches, int(batch.row_to_seq[row]), int(batch.positions[row]) + 1)
            out[place] = np.asarray(self._logits_fn(ids), dtype=np.float32)
        return torch.from_numpy(out)


class NullDraft:
    """A draft that costs nothing: token 0 with confidence 1 in every place; `NullModel`, greedy, accepts all of it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

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
        """Zeros and ones."""
        shape = (len(batch.anchor_ids), self.num_tokens)
        return DraftOutput(torch.zeros(shape, dtype=torch.int32), torch.ones(shape))


class NullModel:
    """A model that costs nothing: equal logits in every row. For measuring the host's own time.

    Args:
        vocab_size: ids run from 0 to `vocab_size` - 1.
        cache_spec: what to pretend to keep; metadata is written for its ratios.
        max_position: longest sequence.
        num_drafts: give it a `NullDraft` of so many tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        cache_spec: CacheSpec | None = None,
        max_position: int = 1 << 20,
        num_drafts: int = 0,
    ) -> None:
        self.info = ModelInfo("null", vocab_size, max_position)
        self.cache_spec = cache_spec or CacheSpec()
        self.draft: Draft | None = NullDraft(num_drafts) if num_drafts else None
        self._logits = torch.zeros(0, vocab_size)

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Zeros, in memory that the next step uses again."""
        count = len(batch.logits_rows)
        if count > len(self._logits):
            self._logits = torch.zeros(count, self.info.vocab_size)
        return self._logits[:count].zero_()
