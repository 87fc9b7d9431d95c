"""Hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, dense, floats, num_threads
from deepinfer.ops import mhc as mhc_ops

_F32 = torch.float32


@BACKEND.implements(mhc_ops.mhc_prenorm_mix)
def mhc_prenorm_mix(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """A product with the mixing matrix, scaled by the row's own statistic."""
    h, fn = dense(h), floats(fn)
    rows, streams, hidden = h.shape
    mix = torch.empty((rows, streams * (streams + 2)), dtype=_F32)
    _kernels.mhc_mix(
        mix.data_ptr(), h.data_ptr(), KIND[h.dtype], rows, streams, hidden, fn.data_ptr(), eps, num_threads()
    )
    return mix


@BACKEND.implements(mhc_ops.mhc_split_sinkhorn)
def mhc_split_sinkhorn(
    mix: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All rounds of one row while it is in registers."""
    mix, scale, base = floats(mix), floats(scale), floats(base)
    rows, width = mix.shape
    streams = int((width + 1) ** 0.5) - 1
    pre = torch.empty((rows, streams), dtype=_F32)
    post = torch.empty((rows, streams), dtype=_F32)
    comb = torch.empty((rows, streams, streams), dtype=_F32)
    _kernels.mhc_split(
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        mix.data_ptr(),
        rows,
        streams,
        scale.data_ptr(),
        base.data_ptr(),
        iters,
        eps,
        num_threads(),
    )
    return pre, post, comb


@BACKEND.implements(mhc_ops.mhc_apply)
def mhc_apply(h: Tensor, pre: Tensor) -> Tensor:
    """Streams are added in order."""
    h, pre = dense(h), floats(pre)
    rows, streams, hidden = h.shape
    out = torch.empty((rows, hidden), dtype=h.dtype)
    _kernels.mhc_apply(
        out.data_ptr(), h.data_ptr(), KIND[h.dtype], rows, streams, hidden, pre.data_ptr(), num_threads()
    )
    return out


def _step(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor, Tensor, int, float, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, h, post, comb = dense(y), dense(h), floats(post), floats(comb)
    rows, streams, hidden = h.shape
    out = torch.empty(h.shape, dtype=h.dtype)
    if mixing is None:
        none = out[:0]
        results = none, none, none, none
        inputs = (0, 0, 0, 0, 0, 0.0, 0, 0, 0.0)
        outputs = (0, 0, 0, 0)
    else:
        read, fn, scale, base, iters, hc_eps, weight, norm_eps = mixing
        read, fn, scale, base, weight = floats(read), floats(fn), floats(scale), floats(base), dense(weight)
        pointers = read.data_ptr(), fn.data_ptr(), scale.data_ptr(), base.data_ptr()
        inputs = (*pointers, iters, hc_eps, weight.data_ptr(), KIND[weight.dtype], norm_eps)
        results = (
            torch.empty((rows, hidden), dtype=h.dtype),
            torch.empty((rows, streams), dtype=_F32),
            torch.empty((rows, streams), dtype=_F32),
            torch.empty((rows, streams, streams), dtype=_F32),
        )
        outputs = results[0].data_ptr(), results[1].data_ptr(), results[2].data_ptr(), results[3].data_ptr()
    _kernels.mhc_step(
        out.data_ptr(),
        y.data_ptr(),
        KIND[y.dtype],
        h.data_ptr(),
        KIND[h.dtype],
        rows,
        streams,
        hidden,
        post.data_ptr(),
        comb.data_ptr(),
        *inputs,
        *outputs,
        num_threads(),
    )
    return out, *results


@BACKEND.implements(mhc_ops.mhc_post)
def mhc_post(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The first half of `mhc_step`."""
    return _step(y, h, post, comb, None)[0]


@BACKEND.implements(mhc_ops.mhc_expand)
def mhc_expand(x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Copies, and the weights that read the first of them."""
    rows, hidden = x.shape
    h = torch.empty((rows, streams, hidden), dtype=x.dtype)
    h.copy_(x[:, None])
    pre = torch.zeros((rows, streams), dtype=_F32)
    pre[:, 0] = 1
    return h, pre


@BACKEND.implements(mhc_ops.mhc_step)
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
    """The same steps as the separate ops, in the same order, a few rows at a time."""
    return _step(y, h, post, comb, (read, fn, scale, base, iters, hc_eps, norm_weight, norm_eps))
