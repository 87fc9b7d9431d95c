"""Attention of one layer: window KV of its own, compressed KV of its source, one softmax over both."""

from __future__ import annotations

from torch import Tensor

from deepinfer.models.deepseek_v41_flash.caches import kv_name, window_name
from deepinfer.models.deepseek_v41_flash.compressor import Compressor
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.indexer import Indexer
from deepinfer.models.deepseek_v41_flash.linear import (
    Linear,
    Norm,
    Numerics,
    Rows,
    place,
    place_weight,
    wants_quantised,
)
from deepinfer.models.deepseek_v41_flash.step import StepContext
from deepinfer.models.deepseek_v41_flash.weights import LayerWeights
from deepinfer.ops.attention import sparse_attn
from deepinfer.ops.kv import kv_norm_rope_store
from deepinfer.ops.linear import linear_grouped_o
from deepinfer.ops.registry import OpTable
from deepinfer.ops.rope import o_rope, q_norm_rope


class Attention:
    """Queries, window KV, and (for a source layer) compressor and indexer, around one sparse attention."""

    def __init__(
        self, ops: OpTable, config: TextConfig, layer: int, weights: LayerWeights, cos_sin: Tensor, numerics: Numerics
    ) -> None:
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self.source = config.kv_source_of(layer) if self.ratio else None
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self._cos_sin = cos_sin
        attn, indexer = weights.attn, weights.indexer
        self._wq_a = Linear(ops, attn.wq_a, numerics)
        behind = [attn.wq_b] + ([indexer.wq_b] if indexer is not None else [])
        self._q_norm = Norm(ops, attn.q_norm, self.eps, quantised=wants_quantised(numerics, *behind))
        self._wq_b = Linear(ops, attn.wq_b, numerics)
        self._wkv = Linear(ops, attn.wkv, numerics)
        self._kv_norm = place(ops, attn.kv_norm.float())
        self._wo_a = place_weight(ops, attn.wo_a)
        self._wo_b = Linear(ops, attn.wo_b, numerics)
        self._sink = place(ops, attn.attn_sink.float())
        kind = "fp8" if numerics.kv_rounding else "f32"
        self._rotate_q = ops.bind(q_norm_rope, heads=self.heads, dim=self.dim)
        self._store = ops.bind(kv_norm_rope_store, dim=self.dim, kind=kind)
        kinds = "none" if not self.ratio else ("fp4" if numerics.kv_rounding else "f32")
        self._attend = ops.bind(sparse_attn, heads=self.heads, dim=self.dim, window_kind=kind, kv_kind=kinds)
        self._rotate_o = ops.bind(o_rope, heads=self.heads, dim=self.dim, groups=self.groups)
        self._project_o = ops.bind(linear_grouped_o, groups=self.groups, n=attn.wo_a.shape[-2], k=attn.wo_a.shape[-1])
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if weights.compressor is not None and weights.index_keys is not None:
            self.compressor = Compressor(
                ops, config, layer, weights.compressor, weights.index_keys, cos_sin, numerics
            )
        if indexer is not None:
            self.indexer = Indexer(ops, config, layer, indexer, cos_sin, numerics)

    def __call__(self, x: Rows, step: StepContext) -> Tensor:
        """[T, H] collapsed, normed rows to [T, H]; stores this layer's records on the way."""
        batch, caches = step.batch, step.caches
        latent = self._q_norm(self._wq_a(x))
        q = self._wq_b(latent).unflatten(-1, (self.heads, self.dim))
        q = self._rotate_q(q, batch.positions, self._cos_sin)
        window = caches.records(window_name(self.layer))
        self._store(
            self._wkv(x), self._kv_norm, self.eps, batch.positions, self._cos_sin, window, batch.window_slots
        )
        if self.compressor is not None:
            self.compressor(x, step)
        if self.indexer is not None:
            self.indexer(x, latent, step)
        if self.source is None:
            o, _ = self._attend(q, window, step.window_index, None, None, self.scale, self._sink)
        else:
            compressed = caches.records(kv_name(self.source))
            o, _ = self._attend(q, window, step.window_index, compressed, step.selection, self.scale, self._sink)
        o = self._rotate_o(o, batch.positions, self._cos_sin, self.groups)
        return self._wo_b(Rows(self._project_o(o, self._wo_a).flatten(1)))
