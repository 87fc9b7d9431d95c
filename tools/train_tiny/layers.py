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
from tools.train_tiny.functions import Functions
from tools.train_tiny.settings import Phase
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
        phase: what is rounded.
        functions: as they are or compiled.
    """

    def __init__(self, store: WeightStore, dtype: torch.dtype, phase: Phase, functions: Functions) -> None:
        self._store = store
        self._dtype = dtype
        self._phase = phase
        self._changes = store.changes() if phase.weights else {}
        self._made: dict[str, Tensor] = {}
        self._cast: dict[str, Tensor] = {}
        self.functions = functions

    def __getitem__(self, name: str) -> Tensor:
        """The float32 weight, as it will be stored where the phase rounds weights."""
        if name not in self._made:
            weight, change = self._store.raw(name), self._changes.get(name)
            self._made[name] = weight if change is None else weight + change
        return self._made[name]

    def cast(self, name: str) -> Tensor:
        """The weight in the dtype of activations."""
        if name not in self._cast:
            self._cast[name] = self[name].to(self._dtype)
        return self._cast[name]

    def factor(self, x: Tensor, name: str) -> Tensor:
        """`x` as the product with weight `name` reads it: rounded where the phase does that and the weight has codes.

        The grouped half of the output projection is the exception, as in the model.
        """
        has_codes = self._store.storage[name] in ("fp8_blocks", "fp4") and not name.endswith("wo_a.weight")
        return self.functions.through(x, "mxfp8") if self._phase.activations and has_codes else x

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x W^T` in the dtype of activations."""
        return F.linear(self.factor(x, f"{name}.weight"), self.cast(f"{name}.weight"))

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm over the last axis."""
        return rms_norm(x, self[f"{name}.weight"], eps)


class Streams:
    """Hyper-connections of a pass.

    Args:
        config: of the model.
        weights: of the pass.
    """

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    def mix(self, h: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [T, M, H] to pre [T, M], post [T, M], comb [T, M, M]; float32."""
        config, weights = self._config, self._weights
        s = h.float().flatten(1)
        scale = (s.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        m = F.linear(s, weights[f"{name}_fn"]) * scale
        # Scales and bases stay outside of what is compiled: sums over all rows for their gradients take long there.
        count, kinds = config.hc_mult, weights[f"{name}_scale"].split(1)
        scales = torch.cat([kind.expand(size) for kind, size in zip(kinds, (count, count, count**2), strict=True)])
        logits = m * scales + weights[f"{name}_base"]
        return weights.functions.mixing(logits, config.hc_sinkhorn_iters, config.hc_eps)

    def read(self, h: Tensor, pre: Tensor, norm: str) -> Tensor:
        """`sum_i pre_i h_i`, normed: [T, H]."""
        weight, eps = self._weights[f"{norm}.weight"], self._config.rms_norm_eps
        return self._weights.functions.read_normed(h, pre, weight, eps)


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
        streams, name, written = self._streams, self._name, self._weights.functions.written
        next_pre, post, comb = streams.mix(h, f"{name}.hc_attn")
        h = written(attend(streams.read(h, pre, f"{name}.attn_norm")), h, post, comb)
        last_pre, post, comb = streams.mix(h, f"{name}.hc_ffn")
        h = written(self._experts(streams.read(h, next_pre, f"{name}.ffn_norm")), h, post, comb)
        return h, last_pre

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
        functions, limit = weights.functions, config.swiglu_limit
        coded = weights.factor(x, f"{ffn}.experts.w1.weight")
        gate, up = (F.linear(coded, weights.cast(f"{ffn}.experts.{w}.weight").flatten(0, 1)) for w in ("w1", "w3"))
        hidden = weights.factor(functions.routed_rows(gate, up, routed, limit), f"{ffn}.experts.w2.weight")
        y: Tensor = (hidden @ weights.cast(f"{ffn}.experts.w2.weight").transpose(1, 2).flatten(0, 1)).float()
        shared = f"{ffn}.shared_experts"
        own = functions.gated(weights.linear(x, f"{shared}.w1"), weights.linear(x, f"{shared}.w3"), limit).to(x.dtype)
        return (y + weights.linear(own, f"{shared}.w2").float()).to(x.dtype)

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
