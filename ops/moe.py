"""Mixture of experts: router, dispatch, grouped products, activation, combine.

Rows travel expanded: one row per (token, chosen expert), grouped by expert. On one rank dispatch is a permutation; with
several it is an exchange (`deepinfer.ops.expert_ranks`), and nothing else changes.

Source: MoE of DeepSeek-V4.1-Flash (model specification, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import products
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.linear import PRODUCT
from deepinfer.ops.numeric import accumulate, plain, rounded, row_products
from deepinfer.ops.quant import quantize
from deepinfer.ops.results import New, plain_or_codes, rows_like
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_rows


@dataclass(frozen=True)
class Exchange:
    """What several ranks did with rows between the dispatch of one and the experts of another.

    Attributes:
        order: [R, 1] int32, in the order in which rows came: the row that each became; -1 for one of no expert here.
        sent: rows to each rank.
        received: rows from each rank.
    """

    order: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class DispatchHandle:
    """Where the expanded rows came from; `ep_combine` takes it back.

    Attributes:
        slot_to_row: [T, k] int32, expanded row of each token's choice, -1 for none; with an exchange, the row among
            those that come back.
        exchange: how rows went to other ranks; None on one.
    """

    slot_to_row: Tensor
    exchange: Exchange | None = None


def _choices(new: New, a: Any) -> tuple[Tensor, Tensor]:
    shape = a.logits.shape[0], min(a.k, a.logits.shape[1])
    return new(shape, torch.int64), new(shape, torch.float32)


@define_op(
    tolerance=Tolerance(1e-6, 1e-9, why="fp32 softplus, square root and sum; choices must be equal"),
    determinism="D2",
    cases=products.moe_gate_cases,
    dims={"experts": "logits:1", "k": "k"},
    results=_choices,
)
def moe_gate(
    logits: Tensor, bias: Tensor, image_bias: Tensor | None, image_mask: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased affinity, weigh them by the unbiased one.

    Args:
        logits: [T, E] float32.
        bias: [E] float32, used for the choice only.
        image_bias: [E] float32, takes its place in rows of an image; None without images.
        image_mask: [T] bool, or None.
        k: experts per token.
        scale: multiplies the normalised weights.

    Returns:
        expert_ids [T, k] int64 by biased score down, ties to the smaller id; weights [T, k] float32.
    """
    z = accumulate(logits)
    s = (z.clamp(min=0) + rounded(lambda x: x.abs().neg().exp().log1p(), z)).sqrt()  # softplus that cannot overflow
    chosen_bias = bias.to(s.dtype).expand_as(s)
    if image_bias is not None and image_mask is not None:
        chosen_bias = torch.where(image_mask[:, None], image_bias.to(s.dtype), chosen_bias)
    expert_ids = torch.sort(s + chosen_bias, dim=1, descending=True, stable=True).indices[:, :k]
    weights = s.gather(1, expert_ids)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * scale
    return expert_ids, weights.to(logits.dtype)


def _expanded(new: New, a: Any) -> Any:
    tokens, k = a.expert_ids.shape
    handle = DispatchHandle(new((tokens, k), torch.int32))
    weights, psum = new((tokens * k,), torch.float32), new((a.num_experts,), torch.int32)
    return rows_like(new, a.x, tokens * k), weights, psum, handle


@define_op(
    tolerance=EXACT,
    determinism="D1",
    cases=products.ep_dispatch_cases,
    dims={"experts": "num_experts", "k": "expert_ids:1"},
    results=_expanded,
)
def ep_dispatch(
    x: Tensor | QTensor, expert_ids: Tensor, weights: Tensor, num_experts: int
) -> tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]:
    """Send each row to its experts.

    Args:
        x: [T, H] plain or quantised.
        expert_ids: [T, k] int64, -1 for none.
        weights: [T, k] float32.
        num_experts: experts over all ranks.

    Returns:
        rows [T * k, H] grouped by expert, within an expert by token; row weights [T * k] float32; psum [E] int32, the
        running end of each expert's rows (rows behind the last end are undefined); and a handle for `ep_combine`.
    """
    num_tokens, k = expert_ids.shape
    flat = expert_ids.flatten()
    key = torch.where(flat >= 0, flat, num_experts)
    order = torch.sort(key, stable=True).indices
    token = order // max(k, 1)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    psum = counts.cumsum(0).int()
    slot_to_row = torch.empty_like(order)
    slot_to_row[order] = torch.arange(len(order), device=order.device)
    slot_to_row = torch.where(flat >= 0, slot_to_row, -1).reshape(num_tokens, k).int()
    rows: Tensor | QTensor = x[token] if isinstance(x, Tensor) else QTensor(x.data[token], x.scale[token], x.fmt)
    return rows, weights.flatten()[order].float(), psum, DispatchHandle(slot_to_row)


def _experts_with_rows(a: Any) -> Tensor:
    counts: Tensor = a.psum.diff(prepend=a.psum.new_zeros(1))
    return (counts > 0).nonzero()


@define_op(
    tolerance=PRODUCT,
    determinism="D2",
    cases=products.moe_grouped_gemm_cases,
    dims={"experts": "weight:0", "n": "weight:1", "k": "weight:2", "weight": "weight|plain"},
    rules=Rules(nan="rows behind the last end may hold NaN; their results are undefined"),
    touches={"weight": at_rows(_experts_with_rows)},
    results=lambda new, a: new((a.x.shape[0], a.weight.shape[-2]), a.out_dtype),
)
def moe_grouped_gemm(x: Tensor | QTensor, weight: Tensor | QTensor, psum: Tensor, out_dtype: torch.dtype) -> Tensor:
    """One product per expert over its own rows.

    Args:
        x: [R, K] plain or quantised, rows grouped by expert.
        weight: [E, N, K] plain or quantised along K.
        psum: [E] int32: rows of expert e are [psum[e - 1], psum[e]); an expert may have none.
        out_dtype: bfloat16 or float32.

    Returns:
        [R, N] of `out_dtype`; rows behind the last end are undefined (zero here).
    """
    wide = torch.float64 if isinstance(x, Tensor) and x.dtype == torch.float64 else torch.float32
    rows = plain(x, wide)
    out = rows.new_zeros(rows.shape[0], weight.shape[-2])
    start = 0
    for expert, end in enumerate(psum.tolist()):
        if end > start:
            out[start:end] = row_products(rows[start:end], plain(weight[expert], wide))
        start = end
    return out.to(out_dtype)


@define_op(
    tolerance=Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), off_by_one=1e-3, why="fp32 inside, one rounding or one code"),
    determinism="D2",
    cases=products.swiglu_quant_cases,
    dims={"width": "gate:1", "fmt": "fmt|plain"},
    results=plain_or_codes("gate"),
)
def swiglu_quant(
    gate: Tensor, up: Tensor, limit: float, row_weight: Tensor | None, fmt: QuantFormat | None
) -> Tensor | QTensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight` in fp32, then cast or quantise.

    Args:
        gate: [R, I] bfloat16 or float32; clamped from above only, before silu.
        up: [R, I].
        limit: the clamp.
        row_weight: [R] float32 routing weights, or None.
        fmt: quantised format, or None for a plain result like `gate`.

    Returns:
        [R, I], quantised without a rounding to bfloat16 in between, or plain.
    """
    g, u = accumulate(gate).clamp(max=limit), accumulate(up).clamp(-limit, limit)
    y = g * rounded(torch.sigmoid, g) * u
    if row_weight is not None:
        y = y * row_weight.to(y.dtype)[:, None]
    return y.to(gate.dtype) if fmt is None else quantize(y, fmt)


@define_op(
    tolerance=Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="fp32 sum in choice order, one bf16 rounding"),
    determinism="D1",
    cases=products.ep_combine_cases,
    dims={"hidden": "y:1"},
    rules=Rules(nan="rows that no choice names are not read"),
    results=lambda new, a: new((a.handle.slot_to_row.shape[0], a.y.shape[1]), a.out_dtype),
)
def ep_combine(y: Tensor, handle: DispatchHandle, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Bring the experts' results back and sum them per token.

    Args:
        y: [R, H]; rows as `ep_dispatch` gave them; routing weights are already applied.
        handle: from `ep_dispatch`.
        bias: [T, H] added last in fp32 (the shared expert), or None.
        out_dtype: dtype of the result.

    Returns:
        [T, H]: fp32 sum in the order of the token's choices, then `bias`, one rounding.
    """
    wide = accumulate(y)
    slots = handle.slot_to_row
    total = wide.new_zeros(slots.shape[0], y.shape[1])
    for choice in range(slots.shape[1]):
        row = slots[:, choice].long()
        total = total + torch.where((row >= 0)[:, None], wide[row.clamp(min=0)], 0.0)
    if bias is not None:
        total = total + bias.to(total.dtype)
    return total.to(out_dtype)


@define_op(
    tolerance=EXACT,
    determinism="D0",
    cases=products.expert_shuffle_cases,
    rules=Rules(zero_rows="no sources give no experts"),
    touches={"weight": at_rows("source")},
    results=lambda new, a: rows_like(new, a.weight, a.source.shape[0]),
)
def expert_shuffle(weight: Tensor | QTensor, source: Tensor) -> Tensor | QTensor:
    """Lay experts out anew: slot e of the result is expert `source[e]`, codes and scales together.

    Args:
        weight: [E, N, K] plain or quantised.
        source: [E'] int64; an expert may stand several times (a replica).

    Returns:
        [E', N, K].
    """
    if isinstance(weight, QTensor):
        return QTensor(weight.data[source], weight.scale[source], weight.fmt, weight.layout)
    return weight[source]
