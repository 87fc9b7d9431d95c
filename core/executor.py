"""Runs one planned step on the device: metadata in, logits out.

The executor owns the host buffers of a step and the caches; it knows the model by its protocol and the device by its
runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.caches import CacheStore
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import Int32Array, StepBuffers, StepMetadata
from deepinfer.models.interface import Model, StepBatch, Tap
from deepinfer.ops.runtime import Runtime


@dataclass(frozen=True)
class StepLimits:
    """The largest step: rows, sequences, and tokens of one sequence."""

    max_rows: int
    max_seqs: int
    max_seq_len: int


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
        self._buffers = StepBuffers(
            max_rows=limits.max_rows,
            max_seqs=limits.max_seqs,
            max_blocks=blocks.blocks_for(limits.max_seq_len),
            max_window_pages=blocks.max_window_pages(limits.max_rows),
            ratios=self._ratios,
            ngram=model.cache_spec.ngram,
        )

    def plan(self, seqs: Int32Array, query_lens: Int32Array) -> StepMetadata:
        """Write the metadata of a step into the host buffers; valid until the next call."""
        return self._buffers.write(self._blocks.pool, seqs, query_lens)

    def run(self, step: StepMetadata, logits_rows: Int32Array, tap: Tap | None = None) -> Tensor:
        """Run a planned step.

        Args:
            step: from `plan`.
            logits_rows: [n] int32 rows whose logits are wanted.
            tap: observer of intermediates, for tests.

        Returns:
            [n, vocab] float32 on the device.
        """
        send = self._send
        max_seq_len = int(step.seq_lens.max()) if step.num_seqs else 0
        columns = max(self._blocks.blocks_for(max_seq_len), 1)
        pages = max(int(step.window_table_lens.max()) if step.num_seqs else 0, 1)
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
            ratio_slots={ratio: send(slots) for ratio, slots in step.slots.items()},
            state_slots=send(step.state_slots),
            history=send(step.history),
            logits_rows=send(logits_rows),
            max_seq_len=max_seq_len,
        )
        with torch.inference_mode():
            return self.model.forward(batch, self.caches, tap)

    def _send(self, array: Int32Array) -> Tensor:
        return self._runtime.to_device(torch.from_numpy(np.ascontiguousarray(array)))
