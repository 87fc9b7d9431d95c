"""Attention of one layer: queries, one softmax over the records that the layer names, and the output projection.

What differs between layers is where keys come from. The backbone's read the window and, from the first KV source on,
compressed records; the draft's (`draft.py`) read the context of their block and the block itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

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
from deepinfer.models.deepseek_v41_flash.step import RowContext, StepContext
from deepinfer.models.deepseek_v41_flash.weights import AttentionWeights, LayerWeights
from deepinfer.ops.attention import sparse_attn
from deepinfer.ops.formats import CacheKind, PagedCache
from deepinfer.ops.kv import kv_norm_rope_store
from deepinfer.ops.linear import linear_grouped_o
from deepinfer.ops.registry import OpTable
from deepinfer.ops.rope import o_rope, q_norm_rope

C = TypeVar("C", bound=RowContext)
"""The pass that a block runs in."""


class Keys(NamedTuple):
    """The records that rows attend to: two caches and the slots [T, K] of each; the second may be absent."""

    cache: PagedCache
    slots: Tensor
    other: PagedCache | None = None
    other_slots: Tensor | None = None


class WindowKV:
    """A layer's own key and value, one vector per row."""

    def __init__(
        self, ops: OpTable, config: TextConfig, weights: AttentionWeights, cos_sin: Tensor, numerics: Numerics
    ) -> None:
        self.kind: CacheKind = "fp8" if numerics.kv_rounding else "f32"
        self._eps, self._cos_sin = config.rms_norm_eps, cos_sin
        self._wkv = Linear(ops, weights.wkv, numerics)
        self._norm = place(ops, weights.kv_norm.float())
        self._store = ops.bind(kv_norm_rope_store, dim=config.head_dim, kind=self.kind)

    def store(self, x: Rows, positions: Tensor, cache: PagedCache, slots: Tensor) -> None:
        """Store the vectors of rows `x` [T, H] at `slots` [T]."""
        self._store(self._wkv(x), self._norm, self._eps, positions, self._cos_sin, cache, slots)


class Attention(ABC, Generic[C]):
    """Queries, softmax and output projection; a subclass says what is attended to."""

    def __init__(
        self,
        ops: OpTable,
        config: TextConfig,
        weights: LayerWeights,
        cos_sin: Tensor,
        numerics: Numerics,
        *,
        other_kind: CacheKind | None,
    ) -> None:
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        self.scale = config.head_dim**-0.5
        self._cos_sin = cos_sin
        attn, indexer = weights.attn, weights.indexer
        self._wq_a = Linear(ops, attn.wq_a, numerics)
        behind = [attn.wq_b] + ([indexer.wq_b] if indexer is not None else [])
        self._q_norm = Norm(ops, attn.q_norm, config.rms_norm_eps, quantised=wants_quantised(numerics, *behind))
        self._wq_b = Linear(ops, attn.wq_b, numerics)
        self.window_kv = WindowKV(ops, config, attn, cos_sin, numerics)
        self._wo_b = Linear(ops, attn.wo_b, numerics)
        self._sink = place(ops, attn.attn_sink.float())
        self._rotate_q = ops.bind(q_norm_rope, heads=self.heads, dim=self.dim)
        kinds = {"window_kind": self.window_kv.kind, "kv_kind": other_kind or "none"}
        self._attend = ops.bind(sparse_attn, heads=self.heads, dim=self.dim, **kinds)
        self._rotate_o = ops.bind(o_rope, heads=self.heads, dim=self.dim, groups=self.groups)
        self._project_o = ops.bind(linear_grouped_o, groups=self.groups, n=attn.wo_a.shape[-2], k=attn.wo_a.shape[-1])
        self._wo_a = self._project_o.prepare("weight", place_weight(ops, attn.wo_a))

    def __call__(self, x: Rows, step: C) -> Tensor:
        """[T, H] collapsed, normed rows to [T, H]; stores this layer's records on the way."""
        latent = self._q_norm(self._wq_a(x))
        q = self._wq_b(latent).unflatten(-1, (self.heads, self.dim))
        q = self._rotate_q(q, step.positions, self._cos_sin)
        o, _ = self._attend(q, *self._keys(x, latent, step), self.scale, self._sink)
        o = self._rotate_o(o, step.positions, self._cos_sin, self.groups)
        return self._wo_b(Rows(self._project_o(o, self._wo_a).flatten(1)))

    @abstractmethod
    def _keys(self, x: Rows, latent: Rows, step: C) -> Keys:
        """Store what rows `x` [T, H] add to the caches; return what each of them sees."""


class BackboneAttention(Attention[StepContext]):
    """Window KV of its own, compressed KV of its source; a source layer also has compressor and indexer."""

    def __init__(
        self, ops: OpTable, config: TextConfig, layer: int, weights: LayerWeights, cos_sin: Tensor, numerics: Numerics
    ) -> None:
        compressed: CacheKind = "fp4" if numerics.kv_rounding else "f32"
        ratio = config.compress_ratios[layer]
        super().__init__(ops, config, weights, cos_sin, numerics, other_kind=compressed if ratio else None)
        self._window = window_name(layer)
        self._source = kv_name(config.kv_source_of(layer)) if ratio else None
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if weights.compressor is not None and weights.index_keys is not None:
            self.compressor = Compressor(ops, config, layer, weights.compressor, weights.index_keys, cos_sin, numerics)
        if weights.indexer is not None:
            self.indexer = Indexer(ops, config, layer, weights.indexer, cos_sin, numerics)

    def _keys(self, x: Rows, latent: Rows, step: StepContext) -> Keys:
        window = step.caches.records(self._window)
        self.window_kv.store(x, step.positions, window, step.batch.window_slots)
        if self.compressor is not None and not step.is_cut:
            self.compressor(x, step)
        if self.indexer is not None:
            self.indexer(x, latent, step)
        if self._source is None:
            return Keys(window, step.window_index)
        return Keys(window, step.window_index, step.caches.records(self._source), step.selection)
