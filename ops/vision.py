"""Attention of the vision tower: full, bidirectional, within one image."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from deepinfer.ops.attention import ATTENTION
from deepinfer.ops.cases import caches
from deepinfer.ops.numeric import accumulate
from deepinfer.ops.results import like
from deepinfer.ops.spec import define_op


@define_op(
    tolerance=ATTENTION,
    determinism="D1",
    cases=caches.vision_attn_cases,
    dims={"heads": "q:1", "dim": "q:2"},
    results=like("q"),
)
def vision_attn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Attention of every patch over all patches of its own image.

    Args:
        q: [T, heads, D].
        k: [T, heads, D].
        v: [T, heads, D].
        cu_seqlens: [images + 1] int32, prefix sums of patches.
        softmax_scale: multiplies q.k.

    Returns:
        [T, heads, D] like `q`.
    """
    out = torch.zeros_like(q)
    ends = cu_seqlens.tolist()
    for start, end in pairwise(ends):
        a, b, c = (accumulate(t[start:end]) for t in (q, k, v))
        weights = (torch.einsum("qhd,khd->hqk", a, b) * softmax_scale).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, c).to(q.dtype)
    return out
