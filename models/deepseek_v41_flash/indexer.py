"""The indexer: which compressed positions each row attends to.

A pool source also chooses candidate blocks; index sources after it score those alone.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.models.deepseek_v41_flash.caches import index_name
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.linear import Linear, Numerics, Rows
from deepinfer.models.deepseek_v41_flash.step import StepContext, row_slices
from deepinfer.models.deepseek_v41_flash.weights import IndexerWeights
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.index import (
    block_max,
    blocks_to_positions,
    concat_rows,
    index_logits_blocks,
    index_logits_paged,
    index_q_quant,
    logical_to_slot,
    topk_select,
    uniform_lens,
)
from deepinfer.ops.registry import OpTable


class Indexer:
    """Index queries of one index source layer, and the selection they make."""

    def __init__(
        self, ops: OpTable, config: TextConfig, layer: int, weights: IndexerWeights, cos_sin: Tensor, numerics: Numerics
    ) -> None:
        self.layer = layer
        source = config.kv_source_of(layer)
        assert source is not None, "an index source reads compressed KV; the configuration was checked"
        self.source = source
        self.ratio = config.compress_ratios[layer]
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.pool_blocks, self.pool_block = config.candidate_topk_blocks, config.candidate_block_size
        self.makes_pool = layer == config.candidate_source_layer_id
        self.reads_pool = 0 <= config.candidate_source_layer_id < layer
        self._cos_sin = cos_sin
        self._fmt: QuantFormat | None = "mxfp4" if numerics.kv_rounding else None
        scale = self.dim**-0.5 * self.heads**-0.5
        self._wq_b = Linear(ops, weights.wq_b, numerics)
        self._head_weights = Linear(ops, weights.weights_proj, numerics, out_scale=scale)
        dims = {"heads": self.heads, "dim": self.dim, "fmt": self._fmt or "f32"}
        self._quantise = ops.bind(index_q_quant, **dims)
        self._paged = ops.bind(index_logits_paged, **dims)
        self._blocks = ops.bind(index_logits_blocks, block=self.pool_block, **dims)
        self._block_max = ops.bind(block_max, block=self.pool_block)
        self._topk = ops.bind(topk_select, k=self.topk)
        self._topk_pool = ops.bind(topk_select, k=self.pool_blocks)
        self._to_positions = ops.bind(blocks_to_positions, block=self.pool_block)
        self._to_slots = ops.bind(logical_to_slot)
        self._concat = ops.bind(concat_rows)
        self._uniform = ops.bind(uniform_lens)

    def __call__(self, x: Rows, latent: Rows, step: StepContext) -> None:
        """Choose positions for every row and leave their slots in `step.selection` (and the pool in `step.pool`)."""
        batch = step.batch
        num_rows = x.plain.shape[0]
        q = self._wq_b(latent).unflatten(-1, (self.heads, self.dim))
        q_rows = self._quantise(q, batch.positions, self._cos_sin, self._fmt)
        weights = self._head_weights(x)
        columns = batch.max_seq_len // self.ratio
        picks, pools = [], []
        for rows in row_slices(num_rows, columns):
            part = q_rows[rows]
            if self.reads_pool:
                picks.append(self._select_in_pool(part, weights[rows], rows, step))
            else:
                chosen, pool = self._select(part, weights[rows], rows, columns, step)
                picks.append(chosen)
                pools.append(pool)
        step.selection = picks[0] if len(picks) == 1 else self._concat(tuple(picks))
        if self.makes_pool:
            step.pool = pools[0] if len(pools) == 1 else self._concat(tuple(pools))
            step.observe(f"layers.{self.layer}.candidate_blocks", step.pool)
        step.observe(f"layers.{self.layer}.topk_indices", step.selection)
        records = step.caches.records(index_name(self.source)).records
        self._to_slots(step.selection, records, batch.block_tables, batch.row_to_seq)

    def _select(
        self, q: Tensor | QTensor, weights: Tensor, rows: slice, columns: int, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        batch, visible = step.batch, step.visible[self.ratio][rows]
        cache = step.caches.records(index_name(self.source))
        logits = self._paged(q, cache, weights, visible, batch.block_tables, batch.row_to_seq[rows], columns)
        chosen = self._topk(logits, self.topk, visible)
        if not self.makes_pool:
            return chosen, chosen
        scores, num_blocks = self._block_max(logits, visible, self.pool_block)
        return chosen, self._topk_pool(scores, min(self.pool_blocks, max(scores.shape[1], 1)), num_blocks)

    def _select_in_pool(self, q: Tensor | QTensor, weights: Tensor, rows: slice, step: StepContext) -> Tensor:
        assert step.pool is not None, "an index source behind the pool source ran before it"
        batch, pool = step.batch, step.pool[rows]
        logits = self._blocks(
            q,
            step.caches.records(index_name(self.source)),
            weights,
            step.visible[self.ratio][rows],
            pool,
            self.pool_block,
            batch.block_tables,
            batch.row_to_seq[rows],
        )
        chosen = self._topk(logits, self.topk, self._uniform(logits, logits.shape[1]))
        return self._to_positions(chosen, pool, self.pool_block)
