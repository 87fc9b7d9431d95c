"""Sparse attention over two paged caches, and the merge of partial results.

One op serves prefill chunks, decode rows and verify rows: a row reads the records its slots name and nothing else.

Source: attention of DeepSeek-V4.1-Flash (model specification, section 6.3); merging by log-sum-exp as in
FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import caches
from deepinfer.ops.formats import PagedCache
from deepinfer.ops.kv import kv_gather
from deepinfer.ops.numeric import round_like, rounded
from deepinfer.ops.spec import Tolerance, define_op
from deepinfer.ops.touches import at_records

ATTENTION = Tolerance(
    3.01 / 128,
    2e-3,  # few keys with large probabilities: two roundings of each, up to four standard deviations
    sim=1e-5,
    single=(1e-4, 1e-4),
    why="fp32 sums in another order; probabilities may round to bf16 against another maximum",
)


@define_op(
    tolerance=ATTENTION,
    determinism="D2",
    cases=caches.sparse_attn_cases,
    dims={"heads": "q:1", "dim": "q:2", "window_kind": "window_cache", "kv_kind": "kv_cache|none"},
    touches={"window_cache": at_records("window_slots"), "kv_cache": at_records("kv_slots")},
    results=lambda new, a: (new(tuple(a.q.shape), a.q.dtype), new(tuple(a.q.shape[:2]), torch.float32)),
)
def sparse_attn(
    q: Tensor,
    window_cache: PagedCache,
    window_slots: Tensor,
    kv_cache: PagedCache | None,
    kv_slots: Tensor | None,
    softmax_scale: float,
    attn_sink: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention of each row over the window records and the compressed records its slots name; key equals value.

    One softmax over all valid slots, plus `exp(attn_sink[head])` in the denominator alone. Rows are summed in column
    order, window first, so a row's bits depend on its own slots only. Duplicate slots count twice.

    Args:
        q: [T, heads, D] bfloat16 or float32.
        window_cache: [window_slots, D] records of this layer's window KV.
        window_slots: [T, Kw] int32, -1 for none (anywhere in a row).
        kv_cache: [kv_slots, D] compressed records, or None for a window-only layer.
        kv_slots: [T, K] int32, -1 for none; None with `kv_cache`.
        softmax_scale: multiplies q.k.
        attn_sink: [heads] float32, not scaled.

    Returns:
        o [T, heads, D] like `q`, and lse [T, heads] float32: natural log of the sum without the sink. A row without
        valid slots gives o = 0 and lse = -inf. With bfloat16 activations the probabilities are rounded to bfloat16
        before they multiply values, and the denominator keeps the unrounded ones.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = kv_gather(window_cache, window_slots, wide)
    valid = window_slots >= 0
    if kv_cache is not None and kv_slots is not None:
        keys = torch.cat((keys, kv_gather(kv_cache, kv_slots, wide)), dim=1)
        valid = torch.cat((valid, kv_slots >= 0), dim=1)
    scores = torch.einsum("thd,tkd->thk", q.to(wide), keys) * softmax_scale
    scores = scores.masked_fill(~valid[:, None, :], -torch.inf)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)  # an empty row must not make NaN
    weights = rounded(torch.exp, scores - top)
    total = weights.sum(-1)
    lse = rounded(torch.log, total) + top[..., 0]
    sink = rounded(torch.exp, attn_sink.to(wide)[None, :] - top[..., 0])
    o = torch.einsum("thk,tkd->thd", round_like(weights, q.dtype), keys) / (total + sink)[..., None]
    o = torch.where((total > 0)[..., None] | total.isnan()[..., None], o, 0.0)  # an infinite sink and no key
    return o.to(q.dtype), lse.float()


@define_op(
    tolerance=Tolerance(2**-7, 1e-5, single=(1e-5, 1e-5), why="fp32 weights, one bf16 rounding"),
    determinism="D1",
    cases=caches.attn_merge_cases,
    dims={"heads": "o:2", "dim": "o:3"},
    results=lambda new, a: (new(tuple(a.o.shape[1:]), a.out_dtype), new(tuple(a.o.shape[1:3]), torch.float32)),
)
def attn_merge(o: Tensor, lse: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over splits of the keys, in ascending split order.

    Args:
        o: [S, T, heads, D] float32, each split normalised by its own sum.
        lse: [S, T, heads] float32; -inf for an empty split.
        out_dtype: dtype of the merged output.

    Returns:
        o [T, heads, D] of `out_dtype`, lse [T, heads] float32.
    """
    top = lse.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = rounded(torch.exp, lse - top)
    total, merged = torch.zeros_like(weights[0]), torch.zeros_like(o[0])
    for weight, part in zip(weights, o, strict=True):
        total = total + weight
        merged = merged + part * weight[..., None]
    merged = merged / torch.where(total > 0, total, 1.0)[..., None]
    return merged.to(out_dtype), (rounded(torch.log, total) + top).float()
