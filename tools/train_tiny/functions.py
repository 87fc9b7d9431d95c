"""The element-wise work of the model as functions of tensors: each may be compiled into a few passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.formats import GROUP, QuantFormat
from deepinfer.ops.norm import rms_norm
from tools.train_tiny.rounding import through_groups


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[T, M, M] logits to nearly doubly stochastic matrices; `iters` counts the softmax and its column step as one."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def mixing(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[T, 2M + M * M] scaled and shifted products to pre [T, M], post [T, M] and comb [T, M, M]."""
    count = int((logits.shape[1] + 1) ** 0.5) - 1
    first, second, third = logits.split((count, count, count * count), 1)
    pre, post = torch.sigmoid(first) + eps, 2 * torch.sigmoid(second)
    return pre, post, sinkhorn(third.unflatten(1, (count, count)), iters, eps)


def read(h: Tensor, pre: Tensor) -> Tensor:
    """`sum_i pre_i h_i`: streams [T, M, H] to [T, H]."""
    return (pre[..., None] * h.float()).sum(1).to(h.dtype)


def read_normed(h: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `sum_i pre_i h_i`: streams [T, M, H] to [T, H]."""
    return rms_norm(read(h, pre), weight, eps)


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
    through_groups: Callable[[Tensor, QuantFormat], Tensor] = through_groups

    def through(self, x: Tensor, fmt: QuantFormat) -> Tensor:
        """`rounding.through`."""
        return self.through_groups(x.unflatten(-1, (-1, GROUP[fmt])).flatten(0, -2), fmt).view(x.shape)


def compiled_functions(device: torch.device) -> Functions:
    """All functions compiled, each as it is where the machine cannot: said once, before any time goes to training."""
    # Only the first axis, rows, changes from call to call; a width of its own is a form of its own. Beyond the limit,
    # and where a later form cannot be compiled, a function runs as it is.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 128
    torch._dynamo.config.suppress_errors = True
    found = {}
    for name, arguments in samples(device).items():
        function = getattr(Functions(), name)
        compiled = _compiled(function)
        try:
            results = compiled(*arguments)
            sum(y.float().sum() for y in (results if isinstance(results, tuple) else (results,))).backward()
            found[name] = compiled
        except Exception as error:  # compilers raise whatever their parts do
            first_line = (str(error).splitlines() or [""])[0]
            print(f"{name} runs without compilation, slower: {type(error).__name__}: {first_line}", flush=True)
    return Functions(**found)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call


def samples(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of every function."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)

    def wide(*shape: int) -> Tensor:
        return new(*shape, dtype=torch.float32)

    return {
        "mixing": (wide(7, 24), 20, 1e-6),
        "read_normed": (new(7, 4, 32), wide(7, 4), wide(32), 1e-20),
        "written": (new(7, 32), new(7, 4, 32), wide(7, 4), wide(7, 4, 4)),
        "gated": (new(7, 32), new(7, 32), 1.0),
        "routed_rows": (new(7, 32), new(7, 32), wide(7, 4), 1.0),
        "probabilities": (new(3, 3, 5, 8), torch.ones(3, 1, 5, 8, dtype=torch.bool, device=device), wide(3), 0.5),
        "through_groups": (new(7, 16), "nvfp4"),
    }
