"""Runs one planned step on the device: metadata in, logits out.

The executor owns the host buffers of a step and the caches; it knows the model by its protocol and the device by its
runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core._native import KVPool
from deepinfer.core.caches import CacheStore
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.replay import RowCut
from deepinfer.core.step_buffers import Int32Array, StepBuffers, StepMetadata
from deepinfer.core.transfer import send
from deepinfer.models.interface import Model, StepBatch, Tap
from deepinfer.ops.runtime import Runtime


@dataclass(frozen=True)
class StepLimits:
    """The largest step: rows, sequences, tokens of one sequence, and planned ones beyond those while steps fly."""

    max_rows: int
    max_seqs: int
    max_seq_len: int
    lookahead: int = 0


class Executor:
    """One model on one device.

    Args:
        model: bound to ops and weights.
        caches: where records live.
        blocks: who holds which block.
        runtime: the device.
        limits: the largest step.
    """

    def __init__(
        self, model: Model, caches: CacheStore, blocks: KVBlockManager, runtime: Runtime, limits: StepLimits
    ) -> None:
        self.model = model
        self.caches = caches
        self._blocks = blocks
        self._runtime = runtime
        self._ratios = model.cache_spec.ratios
        self.max_window_pages = blocks.max_window_pages(2 * limits.max_rows)  # with a step in flight
        """Most columns of a step's window tables."""
        # Two sets: the next step is planned while copies of the one before may still be read.
        self._buffers = [
            StepBuffers(
                max_rows=limits.max_rows,
                max_seqs=limits.max_seqs,
                max_blocks=blocks.blocks_for(limits.max_seq_len + limits.lookahead),
                max_window_pages=self.max_window_pages,
                ratios=self._ratios,
                ngram=model.cache_spec.ngram,
                zeros=self._pinned,
            )
            for _ in range(2)
        ]
        self._sent = [runtime.event() for _ in self._buffers]
        self._turn = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._blocks.pool.block_size

    @property
    def pool(self) -> KVPool:
        """Who holds which block; writes the metadata of steps."""
        return self._blocks.pool

    def plan(self, seqs: Int32Array, query_lens: Int32Array, starts: Int32Array | None = None) -> StepMetadata:
        """Write the metadata of a step into host buffers, valid until the call after the next.

        Args:
            seqs: [S] int32 handles.
            query_lens: [S] int32 rows of each.
            starts: [S] int32 positions of the first rows, upper bounds where steps are in flight; by default what is
                computed.
        """
        self._turn = 1 - self._turn
        sent = self._sent[self._turn]
        if not sent.query():  # a step that drew nothing was never waited for
            with self._runtime.sync_guard.permit("a step's buffers are still being copied"):
                sent.synchronize()
        return self._buffers[self._turn].write(self._blocks.pool, seqs, query_lens, starts=starts)

    def batch(self, step: StepMetadata, logits_rows: Int32Array, cut: RowCut | None = None) -> StepBatch:
        """A planned step on the device.

        Args:
            step: from `plan`.
            logits_rows: [n] int32 rows whose logits are wanted; they go on into the decoder.
            cut: which rows do; all by default.
        """
        send = self.send
        rows = cut.rows if cut is not None else None
        max_seq_len = int(step.seq_lens.max()) if step.num_seqs else 0
        columns = max(self._blocks.blocks_for(max_seq_len), 1)
        pages = max(int(step.window_table_lens.max()) if step.num_seqs else 0, 1)
        packed = send(np.stack([step.slots[ratio] for ratio in self._ratios]))
        batch = StepBatch(
            input_ids=send(step.input_ids),
            positions=send(step.positions),
            row_to_seq=send(step.row_to_seq),
            cu_seqlens_q=send(step.cu_seqlens_q),
            seq_lens=send(step.seq_lens),
            block_tables=send(step.block_tables[:, :columns]),
            window_tables=send(step.window_tables[:, :pages]),
            window_first_page=send(step.window_first_page),
            window_page=self._blocks.pool.window_page,
            window_slots=send(step.window_slots),
            ratio_slots={ratio: packed[i] for i, ratio in enumerate(self._ratios)},
            packed_ratio_slots=packed,
            state_slots=send(step.state_slots),
            history=send(step.history),
            logits_rows=send(logits_rows if rows is None else np.searchsorted(rows, logits_rows).astype(np.int32)),
            max_seq_len=max_seq_len,
            decoder_starts=send(cut.starts) if cut is not None else None,
            decoder_rows=send(rows) if rows is not None else None,
        )
        self._sent[self._turn].record()
        return batch

    def forward(self, batch: StepBatch, tap: Tap | None = None) -> Tensor:
        """Run a step: [n, vocab] float32 logits of its `logits_rows`, on the device."""
        with torch.inference_mode():
            return self.model.forward(batch, self.caches, tap)

    def send(self, array: Int32Array) -> Tensor:
        """A host array on the device."""
        return send(self._runtime, array)

    def _pinned(self, shape: tuple[int, ...]) -> Int32Array:
        array: Int32Array = self._runtime.pinned(shape, torch.int32).numpy()
        return array

    def no_drafts(self, count: int) -> Tensor:
        """[count, 0] int32."""
        return self._runtime.empty((count, 0), torch.int32)
