"""The element-wise work of the model as functions of tensors: each may be compiled into a few passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.formats import QuantFormat
from deepinfer.ops.norm import rms_norm
from tools.train_tiny.rounding import through


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[T, M, M] logits to nearly doubly stochastic matrices; `iters` counts the softmax and its column step as one."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def mixing(m: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[T, 2M + M * M] products to pre [T, M], post [T, M] and comb [T, M, M]."""
    count = int((m.shape[1] + 1) ** 0.5) - 1
    first, second, third = m.split((count, count, count * count), 1)
    base_pre, base_post, base_comb = base.split((count, count, count * count))
    pre = torch.sigmoid(first * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(second * scale[1] + base_post)
    logits = (third * scale[2] + base_comb).unflatten(1, (count, count))
    return pre, post, sinkhorn(logits, iters, eps)


def read_normed(h: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `sum_i pre_i h_i`: streams [T, M, H] to [T, H]."""
    return rms_norm((pre[..., None] * h.float()).sum(1).to(h.dtype), weight, eps)


def written(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`post_j y + sum_i comb_ij h_i`: [T, M, H]."""
    kept = (comb[..., None] * h.float()[:, :, None]).sum(1)
    return (kept + post[..., None] * y.float()[:, None]).to(h.dtype)


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The product of silu(gate) and up, both clamped; float32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def routed_rows(gate: Tensor, up: Tensor, shares: Tensor, limit: float) -> Tensor:
    """[T, E * I] hidden rows of all experts, weighed by [T, E] shares; dtype of `gate`."""
    hidden = gated(gate, up, limit).unflatten(1, (shares.shape[1], -1)) * shares[..., None]
    return hidden.to(gate.dtype).flatten(1)


def probabilities(scores: Tensor, seen: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax over [..., heads, W, K] scores where `seen` [..., 1, W, K], with a sink [heads] in the denominator."""
    wide = (scores.float() * scale).masked_fill(~seen, -torch.inf)
    column = sink.float()[:, None, None]
    top = torch.maximum(wide.amax(-1, keepdim=True), column).detach()  # cancels, so it has no gradient
    powers = (wide - top).exp()
    return (powers / (powers.sum(-1, keepdim=True) + (column - top).exp())).to(scores.dtype)


@dataclass(frozen=True)
class Functions:
    """The functions that a pass calls, as they are or compiled."""

    mixing: Callable[..., tuple[Tensor, Tensor, Tensor]] = mixing
    read_normed: Callable[..., Tensor] = read_normed
    written: Callable[..., Tensor] = written
    gated: Callable[..., Tensor] = gated
    routed_rows: Callable[..., Tensor] = routed_rows
    probabilities: Callable[..., Tensor] = probabilities
    through: Callable[[Tensor, QuantFormat], Tensor] = through


def compiled_functions(device: torch.device) -> Functions:
    """All functions compiled, or as they are where the machine cannot: said once, before any time goes to training."""
    # Several widths, formats and phases go through each function; beyond this many forms it would silently run as it is.
    torch._dynamo.config.recompile_limit = 128
    found = {name: torch.compile(function, dynamic=True) for name, function in vars(Functions()).items()}
    try:
        found["written"](*_sample(device)).sum().backward()
    except Exception as error:  # compilers raise whatever their parts do
        first_line = (str(error).splitlines() or [""])[0]
        print(f"running without compilation, slower: {type(error).__name__}: {first_line}", flush=True)
        return Functions()
    return Functions(**found)


def _sample(device: torch.device) -> tuple[Any, ...]:
    shapes = ((8, 4), (8, 2, 4), (8, 2), (8, 2, 2))
    return tuple(torch.zeros(shape, device=device, requires_grad=True) for shape in shapes)
