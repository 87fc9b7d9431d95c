"""The DSpark draft for training: blocks of places behind sampled anchors, with its Markov and confidence heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.ops.mhc import mhc_expand
from deepinfer.ops.rope import rope
from tools.train_tiny.attention import Softmax
from tools.train_tiny.functions import read
from tools.train_tiny.layers import Balance, Block, Streams
from tools.train_tiny.model import Backbone, Passed, project_output, project_queries, window_keys
from tools.train_tiny.settings import Phase


@dataclass(frozen=True)
class Anchors:
    """Where drafts begin, N of them.

    Attributes:
        rows: [N] row of the batch.
        places: [N] place in it, of the newest token.
        tokens: [N, D + 1] that token and those that follow it in the text.
    """

    rows: Tensor
    places: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Drafted:
    """Drafts behind N anchors, each place given the text's own tokens before it.

    Attributes:
        base: [N, D, V] logits without the Markov head.
        logits: [N, D, V] with it.
        confidence: [N, D] logits of the confidence.
        balance: how the draft's experts were used.
    """

    base: Tensor
    logits: Tensor
    confidence: Tensor
    balance: Balance


def draft(
    backbone: Backbone, passed: Passed, positions: Tensor, documents: Tensor, anchors: Anchors, phase: Phase
) -> Drafted:
    """Draft behind anchors; of its gradient the backbone gets the phase's share.

    Args:
        backbone: the model.
        passed: its pass over the batch.
        positions: [B, S] of the batch.
        documents: [B, S].
        anchors: where.
        phase: what is rounded.
    """
    config, weights = backbone.config, passed.weights
    count, places = config.dspark_block_size, config.num_nextn_predict_layers
    streams, balance = Streams(config, weights), Balance(passed.balance.loss.new_zeros(()))
    taught = phase.draft_gradient
    features = passed.features.detach()
    if taught:
        features = features + taught * (passed.features - features)  # same values, a share of the gradient
    features = weights.linear(features, "mtp.0.main_proj")
    features = weights.norm(features, "mtp.0.main_norm", config.rms_norm_eps)
    sight = _Sight(config, positions, documents, anchors, weights.functions.probabilities)
    ids = torch.full_like(anchors.tokens[:, :count], config.dspark_noise_token_id)
    ids[:, 0] = anchors.tokens[:, 0]
    embedded = F.embedding(ids.flatten(), weights["embed.weight"].detach()).to(backbone.dtype)
    h, pre = mhc_expand(embedded, config.hc_mult)
    table = backbone.rotary.plain
    for number in range(places):
        name = f"mtp.{number}"
        context = window_keys(features, positions.flatten(), table, weights, f"{name}.attn", config, phase)

        def attend(x: Tensor, name: str = f"{name}.attn", context: Tensor = context) -> Tensor:
            _, q = project_queries(x, weights, name, config)
            own = window_keys(x, sight.positions, table, weights, name, config, phase)
            o = sight.attend(rope(q, sight.positions, table), own, context, weights[f"{name}.attn_sink"])
            return project_output(o, sight.positions, table, weights, name, config.o_groups)

        block = Block(config, weights, streams, name, config.dspark_num_experts_per_tok, balance)
        h, pre = block(h, pre, attend)
    last = f"mtp.{places - 1}"
    collapsed = read(h, pre)
    normed = weights.norm(collapsed, f"{last}.norm", config.rms_norm_eps)
    base = F.linear(normed, weights["head.weight"].detach().to(normed.dtype)).float().unflatten(0, (-1, count))
    before = F.embedding(anchors.tokens[:, :count], weights[f"{last}.markov_head.embed.weight"])
    logits = base + F.linear(before, weights[f"{last}.markov_head.head.weight"])
    state = torch.cat((collapsed.float().unflatten(0, (-1, count)), before), -1)
    confidence = F.linear(state, weights[f"{last}.confidence_head.proj.weight"])[..., 0]
    return Drafted(base, logits, confidence, balance)


class _Sight:
    """What the places of a draft block see: the window before the anchor, and the whole block."""

    def __init__(
        self, config: TextConfig, positions: Tensor, documents: Tensor, anchors: Anchors, softmax: Softmax
    ) -> None:
        window, count = config.sliding_window, config.dspark_block_size
        length = documents.shape[1]
        before = anchors.places[:, None] - window + torch.arange(window, device=positions.device)
        inside = before.clamp(min=0)
        self._index = anchors.rows[:, None] * length + inside
        own = documents[anchors.rows, anchors.places][:, None]
        self._seen = (before >= 0) & (documents[anchors.rows[:, None], inside] == own)
        first = positions[anchors.rows, anchors.places][:, None]
        self.positions = (first + torch.arange(count, device=positions.device)).flatten()
        self._count = count
        self._softmax = softmax

    def attend(self, q: Tensor, own: Tensor, context: Tensor, sink: Tensor) -> Tensor:
        """Queries [N * D, heads, dim] over context [T, dim] and the block's own keys [N * D, dim]."""
        keys = torch.cat((context[self._index], own.unflatten(0, (-1, self._count))), 1)
        queries = q.unflatten(0, (-1, self._count))
        scores = torch.einsum("nphd,nkd->nhpk", queries, keys)
        seen = F.pad(self._seen, (0, self._count), value=True)[:, None, None]
        p = self._softmax(scores, seen, sink, q.shape[-1] ** -0.5)
        return torch.einsum("nhpk,nkd->nphd", p, keys).flatten(0, 1)
