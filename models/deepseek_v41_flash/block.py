"""One transformer block: Engram, attention and experts, each read from and written to the residual streams."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from deepinfer.models.deepseek_v41_flash.attention import Attention, C
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.engram import Engram
from deepinfer.models.deepseek_v41_flash.experts import Experts
from deepinfer.models.deepseek_v41_flash.linear import Norm, Numerics, Rows, place, wants_quantised
from deepinfer.models.deepseek_v41_flash.weights import HyperConnection, LayerWeights
from deepinfer.ops.mhc import mhc_apply, mhc_post, mhc_prenorm_mix, mhc_split_sinkhorn
from deepinfer.ops.registry import OpTable


class StreamMixer:
    """Mixing of one sublayer: weights to read with next, and to write this sublayer's output with."""

    def __init__(self, ops: OpTable, config: TextConfig, weights: HyperConnection) -> None:
        self._fn, self._base = place(ops, weights.fn.float()), place(ops, weights.base.float())
        self._scale = place(ops, weights.scale.float())
        self._iters, self._hc_eps, self._eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        dims = {"streams": config.hc_mult, "hidden": config.hidden_size}
        self._mix = ops.bind(mhc_prenorm_mix, **dims)
        self._split = ops.bind(mhc_split_sinkhorn, streams=config.hc_mult)
        self._post = ops.bind(mhc_post, **dims)

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, M, H] to pre [T, M], post [T, M], comb [T, M, M]."""
        return self._split(self._mix(h, self._fn, self._eps), self._scale, self._base, self._iters, self._hc_eps)

    def write(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Spread a sublayer's output [T, H] over the streams."""
        return self._post(y, h, post, comb)


class Block(Generic[C]):
    """A layer of the backbone or the draft. The weights it reads with come from the sublayer before it (`pre`).

    Args:
        ops: resolves every op once, here.
        config: of the model.
        name: what the layer's tensors are called.
        weights: of the layer.
        attention: its attention, made of the same weights.
        numerics: activation dtype and rounding switches.
        per_token: routed experts of a row.
    """

    def __init__(
        self,
        ops: OpTable,
        config: TextConfig,
        name: str,
        weights: LayerWeights,
        attention: Attention[C],
        numerics: Numerics,
        *,
        per_token: int,
    ) -> None:
        self.name = name
        eps = config.rms_norm_eps
        attn, ffn = weights.attn, weights.ffn
        behind_attn = wants_quantised(numerics, attn.wq_a, attn.wkv)
        behind_ffn = wants_quantised(numerics, ffn.w13, ffn.shared_w13)
        self._attn_norm = Norm(ops, weights.attn_norm, eps, quantised=behind_attn)
        self._ffn_norm = Norm(ops, weights.ffn_norm, eps, quantised=behind_ffn)
        self._attn_mixer = StreamMixer(ops, config, weights.hc_attn)
        self._ffn_mixer = StreamMixer(ops, config, weights.hc_ffn)
        self._read = ops.bind(mhc_apply, streams=config.hc_mult, hidden=config.hidden_size)
        self.attention = attention
        self.experts = Experts(
            ops,
            name,
            ffn,
            numerics,
            per_token=per_token,
            scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
        )
        self.engram = Engram(ops, config, weights.engram, numerics) if weights.engram is not None else None

    def inject(self, h: Tensor, engram_rows: Tensor | None, step: C, fetched: Tensor | None = None) -> Tensor:
        """Streams [T, M, H] as they enter the layer to what its sublayers read: Engram's values added, if it has any.

        Args:
            h: the streams.
            engram_rows: [T, columns] int32 of its table; None for a layer without, or where they are fetched already.
            step: of the rows.
            fetched: what stands in those rows.
        """
        step.observe(f"{self.name}.streams_in", h)
        if self.engram is None:
            return h
        if fetched is None and engram_rows is not None:
            fetched = self.engram.fetch(engram_rows)
        return h if fetched is None else self.engram(h, fetched)

    def attention_input(self, h: Tensor, pre: Tensor) -> Rows:
        """What the attention reads of streams [T, M, H] and read weights [T, M]: [T, H] normed rows."""
        return self._normed(self._attn_norm, h, pre)

    def __call__(self, h: Tensor, pre: Tensor, step: C) -> tuple[Tensor, Tensor]:
        """Streams [T, M, H] and read weights [T, M] to the next layer's."""
        step.observe(f"{self.name}.pre_mix_in", pre)
        next_pre, post, comb = self._attn_mixer.mix(h)
        y = self.attention(self.attention_input(h, pre), step)
        step.observe(f"{self.name}.attn_out", y)
        h = self._attn_mixer.write(y, h, post, comb)
        last_pre, post, comb = self._ffn_mixer.mix(h)
        y = self.experts(self._normed(self._ffn_norm, h, next_pre), step)
        step.observe(f"{self.name}.ffn_out", y)
        return self._ffn_mixer.write(y, h, post, comb), last_pre

    def _normed(self, norm: Norm, h: Tensor, pre: Tensor) -> Rows:
        return norm(self._read(h, pre))
