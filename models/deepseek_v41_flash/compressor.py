"""The compressor of a KV source layer: compressed KV entries and the index keys made from them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41_flash.caches import index_name, kv_name, state_name
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.linear import Linear, Numerics, Rows, place
from deepinfer.models.deepseek_v41_flash.step import StepContext
from deepinfer.models.deepseek_v41_flash.weights import CompressorWeights, IndexKeyWeights
from deepinfer.ops.compress import kv_compress
from deepinfer.ops.kv import index_k_store, kv_norm_rope_store
from deepinfer.ops.registry import OpTable


class Compressor:
    """Writes one compressed entry and one index key per complete group of tokens."""

    def __init__(
        self,
        ops: OpTable,
        config: TextConfig,
        layer: int,
        weights: CompressorWeights,
        keys: IndexKeyWeights,
        cos_sin: Tensor,
        numerics: Numerics,
    ) -> None:
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self.eps = config.rms_norm_eps
        self._cos_sin = cos_sin
        self._dtype = numerics.dtype
        # At ratio 2 the pool is a softmax in float32, so its inputs stay float32; at ratio 1 there is nothing to pool.
        out = torch.float32 if self.ratio > 1 else numerics.dtype
        self._value = Linear(ops, weights.wkv, numerics, out_dtype=out)
        self._gate = Linear(ops, weights.wgate, numerics, out_dtype=out) if weights.wgate is not None else None
        self._norm = place(ops, weights.norm.float())
        self._key = Linear(ops, keys.wk, numerics)
        self._key_norm = place(ops, keys.k_norm.float())
        kind = "fp4" if numerics.kv_rounding else "f32"
        self._pool = ops.bind(kv_compress, ratio=self.ratio, dim=config.head_dim)
        self._store = ops.bind(kv_norm_rope_store, dim=config.head_dim, kind=kind)
        self._store_key = ops.bind(index_k_store, dim=config.index_head_dim, kind="index" if kind == "fp4" else kind)

    def __call__(self, x: Rows, step: StepContext) -> None:
        """Store the entries that the rows `x` [T, H] complete."""
        batch, slots = step.batch, step.batch.ratio_slots[self.ratio]
        value = self._value(x)
        if self._gate is not None:
            value = self._pool(
                self._gate(x),
                value,
                step.caches.state(state_name(self.layer)),
                batch.state_slots,
                batch.positions,
                batch.row_to_seq,
                batch.cu_seqlens_q,
                self.ratio,
                self._dtype,
            )
        latent = self._store(
            value,
            self._norm,
            self.eps,
            batch.positions,
            self._cos_sin,
            step.caches.records(kv_name(self.layer)),
            slots,
            self.ratio,
        )
        self._store_key(
            self._key(Rows(latent)),
            self._key_norm,
            self.eps,
            batch.positions,
            self._cos_sin,
            step.caches.records(index_name(self.layer)),
            slots,
            self.ratio,
        )
