"""The DSpark draft: a few blocks that guess the next tokens from the target's features, all places at once.

Two entries. `store_context` belongs to the forward pass: it turns the features of every row into one key per draft
block. `draft` runs a block of places behind each sequence's newest token against these keys and against itself, then
walks the Markov chain, whose every place depends on the token chosen before.

Which token is chosen, and how many are verified, is the engine's business.

Source: DeepSeek-V4.1-Flash (model specification, sections 13 and 17.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41_flash.attention import Attention, Keys
from deepinfer.models.deepseek_v41_flash.block import Block
from deepinfer.models.deepseek_v41_flash.caches import draft_window_name
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.linear import Linear, Norm, Numerics, Rows, place, wants_quantised
from deepinfer.models.deepseek_v41_flash.step import RowContext, StepContext
from deepinfer.models.deepseek_v41_flash.weights import DraftWeights, LayerWeights
from deepinfer.models.interface import Caches, Choose, DraftBatch, DraftOutput, Tap
from deepinfer.ops.formats import CacheFormat, CacheKind, PagedCache
from deepinfer.ops.heads import concat_columns, draft_confidence, draft_rows, embedding, known_ids, markov_logits
from deepinfer.ops.index import build_swa_index, topk_select, uniform_lens
from deepinfer.ops.mhc import mhc_apply, mhc_expand
from deepinfer.ops.registry import OpTable


@dataclass(kw_only=True)
class DraftStep(RowContext):
    """State of one draft: D rows per sequence.

    Attributes:
        caches: context records by name.
        context_index: [T, window] int32 slots of the positions before the block; equal for all draft blocks.
        scratch: the block's own records; a draft block overwrites those of the one before.
        slots: [T] int32, where each row's record goes in it.
        block_slots: [T, D] int32, the records of all rows of the same sequence.
    """

    caches: Caches
    context_index: Tensor
    scratch: PagedCache
    slots: Tensor
    block_slots: Tensor


class DraftAttention(Attention[DraftStep]):
    """Every row sees the context before its block and the whole block, also what lies behind it."""

    def __init__(
        self, ops: OpTable, config: TextConfig, block: int, weights: LayerWeights, cos_sin: Tensor, numerics: Numerics
    ) -> None:
        kind: CacheKind = "fp8" if numerics.kv_rounding else "f32"
        super().__init__(ops, config, weights, cos_sin, numerics, other_kind=kind)
        self._context = draft_window_name(block)

    def store_context(self, features: Rows, step: StepContext) -> None:
        """Store the context keys of the backbone's rows."""
        context = step.caches.records(self._context)
        self.window_kv.store(features, step.positions, context, step.batch.window_slots)

    def _keys(self, x: Rows, latent: Rows, step: DraftStep) -> Keys:
        self.window_kv.store(x, step.positions, step.scratch, step.slots)
        return Keys(step.caches.records(self._context), step.context_index, step.scratch, step.block_slots)


class DSparkDraft:
    """The draft blocks and their heads; implements `models.interface.Draft`.

    Args:
        ops: resolves every op once, here.
        config: of the model.
        weights: of the draft.
        embed: the model's embedding table, on the device.
        head: the model's head.
        cos_sin: plain rotary table that reaches one block past the model's last position.
        numerics: activation dtype and rounding switches.
    """

    def __init__(
        self,
        ops: OpTable,
        config: TextConfig,
        weights: DraftWeights,
        embed: Tensor,
        head: Linear,
        cos_sin: Tensor,
        numerics: Numerics,
    ) -> None:
        self._runtime = ops.context.runtime
        self._num_tokens, self._noise_id = config.dspark_block_size, config.dspark_noise_token_id
        self._window, self._streams, self._dtype = config.sliding_window, config.hc_mult, numerics.dtype
        self._format = CacheFormat("fp8" if numerics.kv_rounding else "f32", config.head_dim)
        self._main_proj = Linear(ops, weights.main_proj, numerics)
        behind = wants_quantised(numerics, *(layer.attn.wkv for layer in weights.layers))
        self._main_norm = Norm(ops, weights.main_norm, config.rms_norm_eps, quantised=behind)
        self._attentions = [
            DraftAttention(ops, config, i, layer, cos_sin, numerics) for i, layer in enumerate(weights.layers)
        ]
        self.layers = [
            Block(ops, config, f"mtp.{i}", layer, attention, numerics, per_token=config.dspark_num_experts_per_tok)
            for i, (layer, attention) in enumerate(zip(weights.layers, self._attentions, strict=True))
        ]
        self._embed, self._head = embed, head
        self._norm = Norm(ops, weights.norm, config.rms_norm_eps, quantised=False)
        self._markov_embed, self._markov_head = place(ops, weights.markov_embed), place(ops, weights.markov_head)
        self._confidence_proj = place(ops, weights.confidence_proj.float())
        dims = {"streams": config.hc_mult, "hidden": config.hidden_size}
        self._concat = ops.bind(concat_columns)
        self._rows = ops.bind(draft_rows, num_tokens=self._num_tokens)
        self._context_index = ops.bind(build_swa_index, window=self._window)
        self._lookup = ops.bind(embedding, hidden=config.hidden_size)
        self._expand = ops.bind(mhc_expand, **dims)
        self._read = ops.bind(mhc_apply, **dims)
        self._markov = ops.bind(markov_logits, rank=config.dspark_markov_rank)
        self._confidence = ops.bind(draft_confidence, hidden=config.hidden_size)
        self._known = ops.bind(known_ids)
        self._best, self._lens = ops.bind(topk_select, k=1), ops.bind(uniform_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens of a draft, D."""
        return self._num_tokens

    def new_scratch(self, num_seqs: int) -> PagedCache:
        """A page of D records for each of `num_seqs` sequences."""
        shape = (num_seqs, self._num_tokens * self._format.record_bytes)
        return PagedCache(self._runtime.zeros(shape, torch.uint8), self._format, self._num_tokens)

    def store_context(self, features: Sequence[Tensor], step: StepContext) -> None:
        """Store the context keys of a step's rows, in the slots of their window records.

        Args:
            features: [T, H] of each target layer, ascending: the mean of the streams that its sublayers read.
            step: the step of the backbone.
        """
        joined = self._concat(tuple(features))
        step.observe("draft.features", joined)
        rows = self._main_norm(self._main_proj(Rows(joined)))
        for attention in self._attentions:
            attention.store_context(rows, step)

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
        """Draft for each sequence; see `models.interface.Draft.draft`."""
        count = self._num_tokens
        if len(temperatures) not in (0, count):
            raise ValueError(f"{len(temperatures)} confidence temperatures for drafts of {count} tokens; give one each")
        ids, step = self._begin(batch, caches, tap)
        h, pre = self._expand(self._lookup(self._embed, ids, self._dtype), self._streams)
        for layer in self.layers:
            h, pre = layer(h, pre, step)
        collapsed = self._read(h, pre)
        base = self._head(self._norm(collapsed)).unflatten(0, (-1, count))
        step.observe("draft.base_logits", base)
        states = collapsed.unflatten(0, (-1, count))
        token = ids.unflatten(0, (-1, count))[:, 0]
        tokens, confidences, logits = [], [], []
        for i in range(count):
            temperature = temperatures[i] if temperatures else 1.0
            confidence = self._confidence(states[:, i], token, self._markov_embed, self._confidence_proj, temperature)
            scores = self._markov(base[:, i], token, self._markov_embed, self._markov_head)
            token = self._known((choose or self._greedy)(i, scores), self._noise_id)
            tokens.append(token[:, None])
            confidences.append(confidence[:, None])
            logits.append(scores)
        return DraftOutput(
            self._concat(tuple(tokens)),
            self._concat(tuple(confidences)),
            self._concat(tuple(logits)).unflatten(1, (count, -1)) if with_logits else None,
        )

    def _begin(self, batch: DraftBatch, caches: Caches, tap: Tap | None) -> tuple[Tensor, DraftStep]:
        """Input ids [S * D] of the block's rows, and their step."""
        ids, positions, context_end, row_to_seq, slots, block_slots = self._rows(
            batch.anchor_ids, batch.anchor_positions, batch.seqs, self._num_tokens, self._noise_id
        )
        index = self._context_index(
            context_end, row_to_seq, batch.window_tables, batch.window_first_page, batch.window_page, self._window
        )
        step = DraftStep(
            positions=positions,
            tap=tap,
            caches=caches,
            context_index=index,
            scratch=batch.scratch,
            slots=slots,
            block_slots=block_slots,
        )
        return ids, step

    def _greedy(self, index: int, logits: Tensor) -> Tensor:
        return self._best(logits, 1, self._lens(logits, logits.shape[1]))[:, 0]
