"""The backbone for training: all layers over packed rows, in the order of the specification's section 4.

Dense or sparse, rounded or not is the phase's choice. In the phase `settings.EXPORTED` and float32 the logits are the
engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.ops.mhc import mhc_expand
from deepinfer.ops.rope import o_rope, plain_frequencies, rope, rope_table, yarn_frequencies
from tools.train_tiny.attention import (
    Entries,
    View,
    attend,
    candidates,
    distillation,
    index_scores,
    select,
)
from tools.train_tiny.data import Batch
from tools.train_tiny.functions import Functions
from tools.train_tiny.layers import Balance, Block, Engram, Streams, Weights
from tools.train_tiny.settings import Phase
from tools.train_tiny.store import WeightStore


@dataclass
class Passed:
    """What a pass of the backbone gives.

    Attributes:
        hidden: [T, H] normed rows that the head multiplies.
        features: [T, F * H] what the draft reads: the mean streams of its target layers.
        balance: how experts were used.
        index_loss: sum over index sources of their distillation; 0 where the phase does not train them.
        weights: of this pass, for head and draft.
    """

    hidden: Tensor
    features: Tensor
    balance: Balance
    index_loss: Tensor
    weights: Weights


@dataclass
class _Choice:
    """What an index source leaves to the layers that reuse it.

    Attributes:
        scores: its scores, for distillation; None where the phase does not train it.
        selected: [B, S, k]; None where attention is dense.
        seen: [B, S, C] bool of `selected`.
        shares: attention's probabilities so far, summed.
    """

    scores: Tensor | None = None
    selected: Tensor | None = None
    seen: Tensor | None = None
    shares: Tensor | None = None


class Rotary:
    """Tables of both kinds of layers on a device, long enough for what was asked of them."""

    def __init__(self, config: TextConfig, num_positions: int, device: torch.device) -> None:
        scaling, dim = config.rope_scaling, config.qk_rope_head_dim
        scaled = yarn_frequencies(
            dim,
            config.compress_rope_theta,
            scaling.factor,
            scaling.original_max_position_embeddings,
            scaling.beta_fast,
            scaling.beta_slow,
        )
        self.plain = rope_table(num_positions, plain_frequencies(dim, config.rope_theta)).to(device)
        self.scaled = rope_table(num_positions, scaled).to(device)


class Backbone:
    """The backbone over a store of weights.

    Args:
        store: the weights.
        constants: Engram's, on the device of the weights.
        dtype: of activations.
        exact_choice: break ties between entries as the engine does.
        functions: as they are or compiled.
    """

    def __init__(
        self,
        store: WeightStore,
        constants: EngramConstants,
        dtype: torch.dtype,
        *,
        exact_choice: bool = False,
        functions: Functions | None = None,
    ) -> None:
        self.config = store.config.text
        self.store = store
        self.dtype = dtype
        self.functions = functions or Functions()
        self._exact = exact_choice
        self._engram = Engram(self.config, constants)
        device = store.raw("embed.weight").device
        longest = self.config.max_position_embeddings + self.config.dspark_block_size
        self.rotary = Rotary(self.config, longest, device)

    def __call__(self, batch: Batch, phase: Phase) -> Passed:
        """Run all layers on a batch."""
        config = self.config
        weights = Weights(self.store, self.dtype, phase, self.functions)
        streams = Streams(config, weights)
        balance = Balance(torch.zeros((), device=batch.ids.device))
        ids, positions = batch.ids.flatten(), batch.positions.flatten()
        h, pre = mhc_expand(F.embedding(ids, weights["embed.weight"]).to(self.dtype), config.hc_mult)
        rows = self._engram.rows(ids, positions)
        run = _Run(config, weights, batch, phase, self.rotary, self._exact)
        features = []
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            if layer in rows:
                h = self._engram.inject(h, rows[layer], weights, name)
            if layer in config.dspark_target_layer_ids:
                features.append(h.float().mean(1).to(h.dtype))
            block = Block(config, weights, streams, name, config.num_experts_per_tok, balance)
            h, pre = block(h, pre, partial(run.attention, layer=layer))
        hidden = streams.read(h, pre, "norm")
        return Passed(hidden, torch.cat(features, 1), balance, run.finish(), weights)

    def logits(self, passed: Passed) -> Tensor:
        """[T, V] float32."""
        return passed.weights.linear(passed.hidden, "head").float()


def project_queries(x: Tensor, weights: Weights, name: str, config: TextConfig) -> tuple[Tensor, Tensor]:
    """Query latent [T, R] and queries [T, heads, D] before rotation."""
    latent = weights.norm(weights.linear(x, f"{name}.wq_a"), f"{name}.q_norm", config.rms_norm_eps)
    return latent, weights.linear(latent, f"{name}.wq_b").unflatten(1, (-1, config.head_dim))


def window_keys(
    x: Tensor, positions: Tensor, table: Tensor, weights: Weights, name: str, config: TextConfig, phase: Phase
) -> Tensor:
    """[T, D] window KV of rows, as the cache keeps it."""
    keys = rope(
        weights.norm(weights.linear(x, f"{name}.wkv"), f"{name}.kv_norm", config.rms_norm_eps), positions, table
    )
    return weights.functions.through(keys, "mxfp8") if phase.caches else keys


def project_output(o: Tensor, positions: Tensor, table: Tensor, weights: Weights, name: str, groups: int) -> Tensor:
    """[T, heads, D] to [T, H]: rotated back, then both halves of the output projection."""
    grouped = o_rope(o, positions, table, groups)
    first = weights.cast(f"{name}.wo_a.weight").unflatten(0, (groups, -1))
    return weights.linear(torch.einsum("tgk,gnk->tgn", grouped, first).flatten(1), f"{name}.wo_b")


class _Run:
    """Attention of one pass: what layers share while it lasts."""

    def __init__(
        self, config: TextConfig, weights: Weights, batch: Batch, phase: Phase, rotary: Rotary, exact: bool
    ) -> None:
        self._config = config
        self._weights = weights
        self._batch = batch
        self._phase = phase
        self._rotary = rotary
        self._exact = exact
        self._shape = batch.ids.shape
        self._positions = batch.positions.flatten()
        self._values: Tensor | None = None
        self._index_keys: Tensor | None = None
        self._choice = _Choice()
        self._pool: Tensor | None = None
        self._index_loss = torch.zeros((), device=batch.ids.device)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        """[T, H] rows to rows."""
        config, name, ratio = self._config, f"layers.{layer}.attn", self._config.compress_ratios[layer]
        table = self._rotary.scaled if ratio else self._rotary.plain
        latent, q = project_queries(x, self._weights, name, config)
        q = rope(q, self._positions, table).unflatten(0, self._shape)
        keys = window_keys(x, self._positions, table, self._weights, name, config, self._phase).unflatten(
            0, self._shape
        )
        if config.is_kv_source(layer):
            self._compress(x, name, ratio)
        if config.is_index_source(layer):
            self._index(x, latent, layer, ratio)
        entries = None
        if ratio:
            assert self._values is not None, "the configuration was checked: a source runs first"
            entries = Entries(self._values, ratio, self._choice.selected)
        sink = self._weights[f"{name}.attn_sink"]
        view = View(self._batch.documents, sink, config.sliding_window, self._choice.scores is not None)
        o, shares = attend(q, keys, view, entries, self._weights.functions.probabilities)
        if shares is not None:
            self._choice.shares = shares if self._choice.shares is None else self._choice.shares + shares
        return project_output(o.flatten(0, 1), self._positions, table, self._weights, name, config.o_groups)

    def finish(self) -> Tensor:
        """The distillation loss of all index sources."""
        self._close()
        return self._index_loss

    def _close(self) -> None:
        """Add the loss of the newest choice: all layers that use it have run."""
        choice = self._choice
        if choice.scores is not None and choice.shares is not None:
            self._index_loss = self._index_loss + distillation(choice.scores, choice.shares, choice.seen)
        self._choice = _Choice()

    def _compress(self, x: Tensor, name: str, ratio: int) -> None:
        weights, eps = self._weights, self._config.rms_norm_eps
        value = weights.linear(x, f"{name}.compressor.wkv")
        if ratio > 1:
            # The pool is a softmax in float32 and so are its inputs, in every dtype of activations.
            wide = F.linear(x.float(), weights[f"{name}.compressor.wkv.weight"]).unflatten(0, (-1, ratio))
            gate = F.linear(x.float(), weights[f"{name}.compressor.wgate.weight"]).unflatten(0, (-1, ratio))
            value = (gate.softmax(1) * wide).sum(1).to(x.dtype)
        latent = weights.norm(value, f"{name}.compressor.norm", eps)
        positions = self._positions[::ratio]
        values = rope(latent, positions, self._rotary.scaled)
        # The indexer learns from its own loss alone: nothing flows back into what it reads.
        key = weights.norm(weights.linear(latent.detach(), f"{name}.indexer.wk"), f"{name}.indexer.k_norm", eps)
        key = rope(key, positions, self._rotary.scaled)
        if self._phase.caches:
            through = weights.functions.through
            values, key = through(values, "nvfp4"), through(key, "mxfp4")
        rows = self._shape[0]
        self._values, self._index_keys = values.unflatten(0, (rows, -1)), key.unflatten(0, (rows, -1))

    def _index(self, x: Tensor, latent: Tensor, layer: int, ratio: int) -> None:
        self._close()
        phase, config = self._phase, self._config
        if not (phase.index or phase.sparse):
            return
        with torch.set_grad_enabled(phase.index and torch.is_grad_enabled()):
            scores = self._scores(x.detach(), latent.detach(), layer, ratio)
        choice = self._choice = _Choice(scores=scores if phase.index else None)
        if not phase.sparse:
            return
        reachable = scores.detach()
        if config.uses_candidates(layer):
            assert self._pool is not None, "the configuration was checked: the pool source runs first"
            reachable = reachable.masked_fill(~self._pool, -torch.inf)
        choice.selected = select(reachable, config.index_topk, ratio, exact=self._exact)
        if layer == config.candidate_source_layer_id:
            self._pool = candidates(reachable, config.candidate_topk_blocks, config.candidate_block_size, ratio)
        if phase.index:
            seen = torch.zeros((*scores.shape[:2], scores.shape[2] + 1), dtype=torch.bool, device=scores.device)
            choice.seen = seen.scatter_(2, choice.selected, True)[..., :-1]

    def _scores(self, x: Tensor, latent: Tensor, layer: int, ratio: int) -> Tensor:
        config, weights, name = self._config, self._weights, f"layers.{layer}.attn.indexer"
        q = weights.linear(latent, f"{name}.wq_b").unflatten(1, (-1, config.index_head_dim))
        q = rope(q, self._positions, self._rotary.scaled)
        if self._phase.caches:
            q = weights.functions.through(q, "mxfp4")
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        head_weights = weights.linear(x, f"{name}.weights_proj") * scale
        assert self._index_keys is not None, "the configuration was checked: a source runs first"
        shape = self._shape
        documents = self._batch.documents
        return index_scores(q.unflatten(0, shape), self._index_keys, head_weights.unflatten(0, shape), documents, ratio)
