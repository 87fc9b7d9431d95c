"""Hyper-connections in a single pass: four residual streams, read by one mix and written back by another.

Source: mHC of DeepSeek-V4.1-Flash (model specification, section 5); manifold-constrained hyper-connections
(arXiv:2512.24880).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import trunk
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.numeric import accumulate, rounded, row_products
from deepinfer.ops.results import New, like
from deepinfer.ops.spec import Tolerance, define_op

STREAMS = Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="fp32 sums over four streams, one bf16 rounding")


def _mixes(new: New, rows: int, streams: int) -> tuple[Tensor, Tensor, Tensor]:
    """Read and write weights and the combination of streams."""
    pre, post = (new((rows, streams), torch.float32) for _ in range(2))
    return pre, post, new((rows, streams, streams), torch.float32)


def _streams(new: New, a: Any) -> tuple[Tensor, Tensor]:
    rows, hidden = a.x.shape
    return new((rows, a.streams, hidden), a.x.dtype), new((rows, a.streams), torch.float32)


def _step(new: New, a: Any) -> tuple[Tensor, ...]:
    rows, streams, hidden = a.h.shape
    return new((rows, streams, hidden), a.h.dtype), new((rows, hidden), a.h.dtype), *_mixes(new, rows, streams)


@define_op(
    tolerance=Tolerance(1e-4, 1e-5, sim=1e-6, why="fp32 dot products over all streams"),
    determinism="D2",
    cases=trunk.mhc_prenorm_mix_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=lambda new, a: new((a.h.shape[0], a.fn.shape[0]), torch.float32),
)
def mhc_prenorm_mix(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Mixing logits of each row: `(s fn^T) / sqrt(mean(s^2) + eps)` with s the streams side by side.

    Args:
        h: [T, M, H] bfloat16 or float32.
        fn: [M + M + M * M, M * H] float32.
        eps: added to the mean.

    Returns:
        [T, M + M + M * M] float32.
    """
    s = accumulate(h).flatten(1)
    return row_products(s, fn.to(s.dtype)) * (s.square().mean(-1, keepdim=True) + eps).rsqrt()


@define_op(
    tolerance=Tolerance(1e-5, 1e-6, why="fp32 sigmoid, exponential and 20 normalisations"),
    determinism="D2",
    cases=trunk.mhc_split_sinkhorn_cases,
    results=lambda new, a: _mixes(new, a.mix.shape[0], int((a.mix.shape[1] + 1) ** 0.5) - 1),
)
def mhc_split_sinkhorn(
    mix: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing logits to read weights, write weights and a nearly doubly stochastic stream matrix.

    Args:
        mix: [T, M + M + M * M] float32.
        scale: [3] float32, one per part.
        base: [M + M + M * M] float32.
        iters: normalisation rounds; the first softmax and column step count as one.
        eps: added to `pre`, to the softmax and to every sum.

    Returns:
        pre [T, M] = sigmoid + eps, post [T, M] = 2 sigmoid, comb [T, M, M]; float32.
    """
    streams = int((mix.shape[1] + 1) ** 0.5) - 1
    first, second, third = mix.split((streams, streams, streams * streams), dim=1)
    base_pre, base_post, base_comb = base.to(mix.dtype).split((streams, streams, streams * streams))
    scale = scale.to(mix.dtype)
    pre = rounded(torch.sigmoid, first * scale[0] + base_pre) + eps
    post = 2 * rounded(torch.sigmoid, second * scale[1] + base_post)
    logits = (third * scale[2] + base_comb).unflatten(1, (streams, streams))
    comb = rounded(lambda x: x.softmax(-1), logits) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


@define_op(
    tolerance=STREAMS,
    determinism="D2",
    cases=trunk.mhc_apply_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=lambda new, a: new((a.h.shape[0], a.h.shape[2]), a.h.dtype),
)
def mhc_apply(h: Tensor, pre: Tensor) -> Tensor:
    """Read the streams: `sum_i pre_i h_i`.

    Args:
        h: [T, M, H] bfloat16 or float32.
        pre: [T, M] float32.

    Returns:
        [T, H] like `h`.
    """
    wide = accumulate(h)
    return (wide * pre.to(wide.dtype)[..., None]).sum(1).to(h.dtype)


@define_op(
    tolerance=STREAMS,
    determinism="D2",
    cases=trunk.mhc_post_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=like("h"),
)
def mhc_post(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output back: `post_j y + sum_i comb_ij h_i`.

    Args:
        y: [T, H].
        h: [T, M, H].
        post: [T, M] float32.
        comb: [T, M, M] float32, summed over its first stream index.

    Returns:
        [T, M, H] like `h`.
    """
    wide = accumulate(h)
    kept = (comb.to(wide.dtype).transpose(1, 2)[..., None] * wide[:, None]).sum(2)
    return (post.to(wide.dtype)[..., None] * y.to(wide.dtype)[:, None] + kept).to(h.dtype)


@define_op(
    tolerance=STREAMS,
    determinism="D2",
    cases=trunk.mhc_expand_cases,
    dims={"streams": "streams", "hidden": "x:1"},
    results=_streams,
)
def mhc_expand(x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Start of the trunk: every stream is the embedding, and the first one is read.

    Args:
        x: [T, H].
        streams: M.

    Returns:
        h [T, M, H] like `x`, and pre [T, M] float32 = (1, 0, ...).
    """
    pre = accumulate(x).new_zeros(x.shape[0], streams)
    pre[:, 0] = 1
    return x[:, None].repeat(1, streams, 1), pre


@define_op(
    tolerance=STREAMS,
    determinism="D2",
    cases=trunk.mhc_step_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=_step,
)
def mhc_step(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    read: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One fused step between two sublayers: write the first back, mix for the second, read and normalise.

    Args:
        y: [T, H], output of the sublayer just done.
        h: [T, M, H], streams before it.
        post: [T, M], its write weights.
        comb: [T, M, M], its stream matrix.
        read: [T, M], the weights the next sublayer reads with (made one sublayer earlier).
        fn: [M + M + M * M, M * H] mixing matrix of the next sublayer, as in `mhc_prenorm_mix`.
        scale: [3] of it.
        base: [M + M + M * M] of it.
        iters: of it.
        hc_eps: of it.
        norm_weight: [H] of the next sublayer's norm.
        norm_eps: of that norm and of the mixing statistic.

    Returns:
        New streams [T, M, H], normed input of the next sublayer [T, H], and its pre, post and comb.
    """
    h = mhc_post(y, h, post, comb)
    next_pre, next_post, next_comb = mhc_split_sinkhorn(mhc_prenorm_mix(h, fn, norm_eps), scale, base, iters, hc_eps)
    return h, rms_norm(mhc_apply(h, read), norm_weight, norm_eps), next_pre, next_post, next_comb
