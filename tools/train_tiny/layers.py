"""What backbone and draft are made of: projections, streams, experts and Engram, on rows [T, ...].

Formulas are the specification's. Where a reference op is differentiable and does no more than is needed it is called;
where it works row by row for the sake of its bits, the same formula is written for many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.ops.engram import engram_gate, engram_hash, engram_ngrams
from deepinfer.ops.moe import moe_gate
from deepinfer.ops.norm import rms_norm
from tools.train_tiny.store import WeightStore


@dataclass
class Balance:
    """How experts were used in a pass.

    Attributes:
        loss: sum over layers of the balance loss: 1 each when all experts are used alike.
        loads: by layer name, [E] share of choices.
    """

    loss: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)


class Weights:
    """The weights of one pass by name, each made once, in the dtype of activations where it is multiplied.

    Args:
        store: where they come from.
        dtype: of activations.
    """

    def __init__(self, store: WeightStore, dtype: torch.dtype) -> None:
        self._store = store
        self._dtype = dtype
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The float32 weight."""
        if name not in self._made:
            self._made[name] = self._store.get(name)
        return self._made[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x W^T` in the dtype of activations."""
        return F.linear(x, self[f"{name}.weight"].to(self._dtype))

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm over the last axis."""
        return rms_norm(x, self[f"{name}.weight"], eps)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[T, M, M] logits to nearly doubly stochastic matrices; `iters` counts the softmax and its column step as one."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


class Streams:
    """Hyper-connections of a pass.

    Args:
        config: of the model.
        weights: of the pass.
        normalise: `sinkhorn`, or a compiled form of it.
    """

    def __init__(
        self, config: TextConfig, weights: Weights, normalise: Callable[[Tensor, int, float], Tensor] = sinkhorn
    ) -> None:
        self._config = config
        self._weights = weights
        self._normalise = normalise

    def mix(self, h: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [T, M, H] to pre [T, M], post [T, M], comb [T, M, M]; float32."""
        config, count = self._config, self._config.hc_mult
        scale, base = self._weights[f"{name}_scale"], self._weights[f"{name}_base"]
        s = h.float().flatten(1)
        m = F.linear(s, self._weights[f"{name}_fn"]) * (s.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        first, second, third = m.split((count, count, count * count), 1)
        base_pre, base_post, base_comb = base.split((count, count, count * count))
        pre = torch.sigmoid(first * scale[0] + base_pre) + config.hc_eps
        post = 2 * torch.sigmoid(second * scale[1] + base_post)
        logits = (third * scale[2] + base_comb).unflatten(1, (count, count))
        return pre, post, self._normalise(logits, config.hc_sinkhorn_iters, config.hc_eps)

    def read(self, h: Tensor, pre: Tensor) -> Tensor:
        """`sum_i pre_i h_i`: [T, H]."""
        return torch.bmm(pre[:, None], h.float())[:, 0].to(h.dtype)

    def write(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """`post_j y + sum_i comb_ij h_i`: [T, M, H]."""
        kept = torch.bmm(comb.transpose(1, 2), h.float())
        return torch.addcmul(kept, post[..., None], y.float()[:, None]).to(h.dtype)


class Block:
    """One layer's sublayers around an attention that the caller supplies.

    Args:
        config: of the model.
        weights: of the pass.
        streams: of the pass.
        name: of the layer's tensors.
        per_token: routed experts of a row.
        balance: notes how experts are used.
    """

    def __init__(
        self, config: TextConfig, weights: Weights, streams: Streams, name: str, per_token: int, balance: Balance
    ) -> None:
        self._config = config
        self._weights = weights
        self._streams = streams
        self._name = name
        self._per_token = per_token
        self._balance = balance

    def __call__(self, h: Tensor, pre: Tensor, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Streams [T, M, H] and read weights [T, M] to the next layer's; `attend` maps [T, H] rows to rows."""
        streams, weights, name, eps = self._streams, self._weights, self._name, self._config.rms_norm_eps
        next_pre, post, comb = streams.mix(h, f"{name}.hc_attn")
        y = attend(weights.norm(streams.read(h, pre), f"{name}.attn_norm", eps))
        h = streams.write(y, h, post, comb)
        last_pre, post, comb = streams.mix(h, f"{name}.hc_ffn")
        y = self._experts(weights.norm(streams.read(h, next_pre), f"{name}.ffn_norm", eps))
        return streams.write(y, h, post, comb), last_pre

    def _experts(self, x: Tensor) -> Tensor:
        """All experts on all rows, with weight 0 where they were not chosen.

        Two plain products instead of grouped ones: with 16 experts of 64 columns the arithmetic that is wasted costs
        less than sorting rows would, and shapes stay the same in every step.
        """
        config, weights, ffn = self._config, self._weights, f"{self._name}.ffn"
        logits = F.linear(x.float(), weights[f"{ffn}.gate.weight"])
        chosen, shares = moe_gate(
            logits, weights[f"{ffn}.gate.bias"], None, None, self._per_token, config.routed_scaling_factor
        )
        routed = torch.zeros_like(logits).scatter(1, chosen, shares)
        self._note(logits, routed)
        w1, w3 = (weights[f"{ffn}.experts.{w}.weight"].to(x.dtype) for w in ("w1", "w3"))
        gate, up = F.linear(x, w1.flatten(0, 1)), F.linear(x, w3.flatten(0, 1))
        hidden = self._swiglu(gate, up).unflatten(1, (logits.shape[1], -1)) * routed[..., None]
        w2 = weights[f"{ffn}.experts.w2.weight"].to(x.dtype).transpose(1, 2).flatten(0, 1)
        y: Tensor = (hidden.to(x.dtype).flatten(1) @ w2).float()
        shared = f"{ffn}.shared_experts"
        hidden = self._swiglu(weights.linear(x, f"{shared}.w1"), weights.linear(x, f"{shared}.w3")).to(x.dtype)
        return (y + weights.linear(hidden, f"{shared}.w2").float()).to(x.dtype)

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self._config.swiglu_limit
        return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)

    def _note(self, logits: Tensor, routed: Tensor) -> None:
        loads = (routed > 0).float().mean(0) / self._per_token
        affinity = F.softplus(logits).sqrt()
        shares = (affinity / affinity.sum(1, keepdim=True)).mean(0)
        self._balance.loss = self._balance.loss + logits.shape[1] * (loads * shares).sum()
        self._balance.loads[self._name] = loads.detach()


class Engram:
    """Hashed n-gram rows of a batch, and their injection.

    Args:
        config: of the model.
        constants: of the hash.
    """

    def __init__(self, config: TextConfig, constants: EngramConstants) -> None:
        self._config = config
        self._constants = constants

    def rows(self, ids: Tensor, positions: Tensor) -> dict[int, Tensor]:
        """Layer to [T, columns] table rows, of packed documents: `ids` and `positions` are [T]."""
        config, constants = self._config, self._constants
        place = torch.arange(ids.shape[0], device=ids.device)
        # Every row is taken for a sequence of its own that began `positions` rows before it.
        starts = torch.nn.functional.pad(place - positions, (0, 1))
        history = ids.new_full((ids.shape[0], config.engram_max_ngram_size - 1), -1)
        ngrams = engram_ngrams(ids, place, starts, history, constants.token_map, config.engram_pad_token_id, None, None)
        rows = engram_hash(ngrams, constants.multipliers, constants.primes, constants.offsets)
        return {layer: rows[i].long() for i, layer in enumerate(config.engram_layer_ids)}

    def inject(self, h: Tensor, rows: Tensor, weights: Weights, name: str) -> Tensor:
        """Streams [T, M, H] with the gated value of `rows` added."""
        table = weights[f"{name}.engram.embed.weight"]
        e = F.embedding(rows, table).flatten(1).to(h.dtype)
        kv = weights.linear(e, f"{name}.engram.wkv")
        q_weight, k_weight = weights[f"{name}.engram.q_weight"], weights[f"{name}.engram.k_weight"]
        return engram_gate(h, kv, q_weight, k_weight, self._config.rms_norm_eps)
