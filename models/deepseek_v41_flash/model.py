"""DeepSeek-V4.1-Flash as the engine sees it: caches by name, and a forward pass over packed rows.

The pass follows the specification's section 4 line by line. All arithmetic is ops; this file takes views and decides
the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41_flash.attention import BackboneAttention
from deepinfer.models.deepseek_v41_flash.block import Block
from deepinfer.models.deepseek_v41_flash.caches import cache_spec
from deepinfer.models.deepseek_v41_flash.compressor import Compressor
from deepinfer.models.deepseek_v41_flash.config import ModelConfig, TextConfig
from deepinfer.models.deepseek_v41_flash.draft import DSparkDraft
from deepinfer.models.deepseek_v41_flash.engram import EngramFetch, EngramHash
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.linear import Linear, Norm, Numerics, place
from deepinfer.models.deepseek_v41_flash.step import StepBuilder, StepContext
from deepinfer.models.deepseek_v41_flash.weights import ModelWeights
from deepinfer.models.interface import Caches, ModelInfo, StepBatch, Tap
from deepinfer.ops.heads import embedding, gather_rows, stream_mean
from deepinfer.ops.mhc import mhc_apply, mhc_expand
from deepinfer.ops.registry import OpTable
from deepinfer.ops.rope import plain_frequencies, rope_table, yarn_frequencies


class DeepseekV41Flash:
    """The model, bound to ops and weights: the backbone, and the draft when its weights are there.

    Args:
        config: validated configuration.
        weights: tensors on the device of `ops`.
        ops: resolves every op once, here.
        numerics: activation dtype and rounding switches.
        max_model_len: positions that rotary tables must cover.
        engram: constants of the hash, None when the model has no Engram layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        numerics: Numerics,
        *,
        max_model_len: int,
        engram: EngramConstants | None,
    ) -> None:
        text = config.text
        self.info = ModelInfo(
            name="DeepseekV41ForCausalLM",
            vocab_size=text.vocab_size,
            max_position=text.max_position_embeddings,
            eos_token_ids=config.eos_token_ids,
        )
        self.cache_spec = cache_spec(text, numerics.kv_rounding, draft=weights.draft is not None)
        self.ops = ops
        self._dtype = numerics.dtype
        self._streams = text.hc_mult
        plain, scaled = _rope_tables(text, max_model_len)
        tables = {False: place(ops, plain), True: place(ops, scaled)}
        self._embed = place(ops, weights.embed)
        self.layers = []
        self._first_decoder = text.first_decoder_layer
        self._shared_entries: Compressor | None = None
        for i, layer in enumerate(weights.layers):
            attention = BackboneAttention(ops, text, i, layer, tables[text.compress_ratios[i] > 0], numerics)
            if i == self._first_decoder:
                self._shared_entries = attention.compressor
            per_token = text.num_experts_per_tok
            self.layers.append(Block(ops, text, f"layers.{i}", layer, attention, numerics, per_token=per_token))
        self._engram = EngramHash(ops, text, engram) if engram is not None else None
        self._norm = Norm(ops, weights.norm, text.rms_norm_eps, quantised=False)
        self._head = Linear(ops, weights.head, numerics, out_dtype=torch.float32)
        self._build_step = StepBuilder(ops, text.sliding_window, self.cache_spec.ratios)
        self._lookup = ops.bind(embedding, hidden=text.hidden_size)
        self._expand = ops.bind(mhc_expand, streams=text.hc_mult, hidden=text.hidden_size)
        self._gather = ops.bind(gather_rows)
        self._read = ops.bind(mhc_apply, streams=text.hc_mult, hidden=text.hidden_size)
        self.draft: DSparkDraft | None = None
        self._targets = frozenset(text.dspark_target_layer_ids if weights.draft is not None else ())
        self._mean = ops.bind(stream_mean, streams=text.hc_mult, hidden=text.hidden_size)
        if weights.draft is not None:
            self.draft = DSparkDraft(ops, text, weights.draft, self._embed, self._head, tables[False], numerics)

    @property
    def host_fetch(self) -> EngramFetch | None:
        """Reads Engram tables that are in the host's memory; None when none is."""
        engrams = {i: layer.engram for i, layer in enumerate(self.layers) if layer.engram is not None}
        if self._engram is None or not any(engram.is_on_host for engram in engrams.values()):
            return None
        return EngramFetch(self._engram, engrams)

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Run one step; see `models.interface.Model.forward`."""
        step = self._build_step(batch, caches, tap)
        h, pre = self._expand(self._lookup(self._embed, batch.input_ids, self._dtype), self._streams)
        fetched = batch.fetched or {}
        engram_rows = self._engram(step) if self._engram is not None and batch.fetched is None else {}
        features = []
        for i, layer in enumerate(self.layers):
            h = layer.inject(h, engram_rows.get(i), step, fetched.get(i))
            if i in self._targets:
                features.append(self._mean(h))
            if i == self._first_decoder:
                step, whole = self._build_step.decoder(step), step
                if step.is_cut and batch.decoder_rows is not None and self._shared_entries is not None:
                    self._shared_entries(layer.attention_input(h, pre), whole)
                    if step.positions.shape[0] == 0:
                        return self._logits(h, pre, batch.logits_rows, step)
                    h, pre, *features = (self._gather(x, batch.decoder_rows) for x in (h, pre, *features))
            h, pre = layer(h, pre, step)
        if self.draft is not None:
            self.draft.store_context(features, step)
        return self._logits(h, pre, batch.logits_rows, step)

    def _logits(self, h: Tensor, pre: Tensor, rows: Tensor, step: StepContext) -> Tensor:
        final = self._norm(self._read(self._gather(h, rows), self._gather(pre, rows)))
        step.observe("final_norm", final.plain)
        return self._head(final)


def _rope_tables(text: TextConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Tables of window-only layers, draft blocks past the last position included, and of layers with compressed KV."""
    dim, scaling = text.qk_rope_head_dim, text.rope_scaling
    plain = rope_table(num_positions + text.dspark_block_size, plain_frequencies(dim, text.rope_theta))
    scaled = yarn_frequencies(
        dim,
        text.compress_rope_theta,
        scaling.factor,
        scaling.original_max_position_embeddings,
        scaling.beta_fast,
        scaling.beta_slow,
    )
    return plain, rope_table(num_positions, scaled)
