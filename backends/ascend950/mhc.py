"""Residual streams: read, write back, mix, and the step between two sublayers that does all three."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.moves import move_rows
from deepinfer.backends.ascend950.norm import rms_norm
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed, rows_of, short
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.errors import OpArgumentError

_STREAMS_SOURCES: Final = (*SOURCES, "mhc.py", "kernels/generated/streams.asc")
_SINKHORN_SOURCES: Final = (*SOURCES, "mhc.py", "kernels/generated/sinkhorn.asc")
_EXPAND_SOURCES: Final = (
    *SOURCES,
    "mhc.py",
    "moves.py",
    "kernels/generated/moves.asc",
    "kernels/generated/sinkhorn.asc",
)
_STEP_SOURCES: Final = (*_STREAMS_SOURCES, "norm.py", "kernels/norm.asc", "kernels/generated/sinkhorn.asc")
_STRETCH: Final = 1024
"""Channels of a task (`tiles/streams.py`)."""
_TOKENS: Final = 8
"""Tokens whose mixing logits are made together."""
_THREADS: Final = 128
"""Tokens of a core at a time in the split (`tiles/sinkhorn.py`)."""
_MOST: Final = 8
"""Most streams of the split."""
_COUNTS: Final = (2, 4)
"""Numbers of streams that have text."""


def _known_streams(dims: Dims) -> bool:
    return dims["streams"] in _COUNTS


def _few_streams(dims: Dims) -> bool:
    return bool(dims["streams"] <= max(_COUNTS))


def _dense(x: Tensor) -> Tensor:
    """The tensor with neighbouring channels in a row."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _read(h: Tensor, weights: Tensor | None, out: Tensor | None) -> Tensor:
    rows, streams, hidden = h.shape
    out = new_like(out, (rows, hidden), h.dtype, h.device)
    given = _dense(h)
    name = "average" if weights is None else "weigh"
    family("streams")[f"{name}_streams_{short(h.dtype)}"](
        rows * tasks_of(hidden, _STRETCH),
        h=given,
        weights=None if weights is None else packed(weights),
        out=out,
        rows=rows,
        streams=streams,
        hidden=hidden,
        share=1.0 / streams,
        row_pitch=given.stride(0),
        stream_pitch=given.stride(1),
        weight_pitch=streams,
        out_pitch=hidden,
    )
    return out


@implements(mhc_ops.mhc_apply, sources=_STREAMS_SOURCES, when=_few_streams)
def mhc_apply(h: Tensor, pre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A weighted sum, in the order of the streams."""
    return _read(h, pre, out)


@implements(heads_ops.stream_mean, sources=_STREAMS_SOURCES, when=_few_streams)
def stream_mean(h: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same with equal weights."""
    return _read(h, None, out)


@implements(mhc_ops.mhc_post, sources=_STREAMS_SOURCES, when=_known_streams)
def mhc_post(y: Tensor, h: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None) -> Tensor:
    """All streams of a stretch of channels at once, their weights in registers."""
    rows, streams, hidden = h.shape
    out = new_like(out, tuple(h.shape), h.dtype, h.device)
    given, update = _dense(h), _dense(y)
    family("streams")[f"write_streams_{short(h.dtype)}_{streams}"](
        rows * tasks_of(hidden, _STRETCH),
        y=update,
        h=given,
        post=packed(post),
        comb=packed(comb),
        out=out,
        rows=rows,
        width=hidden,
        row_pitch=given.stride(0),
        stream_pitch=given.stride(1),
        y_pitch=update.stride(0),
        out_row_pitch=streams * hidden,
        out_stream_pitch=hidden,
    )
    return out


@implements(mhc_ops.mhc_prenorm_mix, sources=_STREAMS_SOURCES, when=_few_streams)
def mhc_prenorm_mix(h: Tensor, fn: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Eight tokens share each load of the matrix; sums run along the channels."""
    flat = rows_of(h.flatten(1))
    rows, width = flat.shape
    logits = fn.shape[0]
    out = new_like(out, (rows, logits), torch.float32, h.device)
    matrix = rows_of(fn)
    family("streams")[f"mix_streams_{short(h.dtype)}"](
        tasks_of(rows, _TOKENS),
        h=flat,
        fn=matrix,
        out=out,
        rows=rows,
        width=width,
        logits=logits,
        eps=eps,
        row_pitch=flat.stride(0),
        fn_pitch=matrix.stride(0),
        out_pitch=logits,
    )
    return out


@implements(mhc_ops.mhc_split_sinkhorn, sources=_SINKHORN_SOURCES)
def mhc_split_sinkhorn(
    mix: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    eps: float,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A thread per token.

    Raises:
        OpArgumentError: more streams than the kernel has room for.
    """
    streams = int((mix.shape[1] + 1) ** 0.5) - 1
    if streams > _MOST:
        raise OpArgumentError(f"mixing logits of {streams} streams: the kernel has room for {_MOST}")
    given = rows_of(mix)
    rows = given.shape[0]
    parts = out if out is not None else (None, None, None)
    shapes = ((rows, streams), (rows, streams), (rows, streams, streams))
    pre, post, comb = (
        new_like(part, shape, torch.float32, mix.device) for part, shape in zip(parts, shapes, strict=True)
    )
    family("sinkhorn")["sinkhorn_4" if streams == 4 else "sinkhorn"](
        tasks_of(rows, _THREADS),
        mix=given,
        scale=packed(scale),
        base=packed(base),
        pre=pre,
        post=post,
        comb=comb,
        rows=rows,
        streams=streams,
        iters=iters,
        eps=eps,
        mix_pitch=given.stride(0),
    )
    return pre, post, comb


@implements(mhc_ops.mhc_expand, sources=_EXPAND_SOURCES)
def mhc_expand(x: Tensor, streams: int, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """A copy for each stream, and weights that read the first."""
    rows, hidden = x.shape
    h = new_like(None if out is None else out[0], (rows, streams, hidden), x.dtype, x.device)
    pre = new_like(None if out is None else out[1], (rows, streams), torch.float32, x.device)
    for stream in range(streams):
        move_rows(h[:, stream], x)
    family("sinkhorn")["read_first"](tasks_of(rows * streams, _THREADS), pre=pre, count=rows * streams, streams=streams)
    return h, pre


@implements(mhc_ops.mhc_step, sources=_STEP_SOURCES, when=_known_streams, capturable=False)
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
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Five launches: write, mix, split, read, norm."""
    given = out if out is not None else (None,) * 5
    fresh = mhc_post(y, h, post, comb, out=given[0])
    mix = mhc_prenorm_mix(fresh, fn, norm_eps)
    targets = None if out is None else (out[2], out[3], out[4])
    next_pre, next_post, next_comb = mhc_split_sinkhorn(mix, scale, base, iters, hc_eps, out=targets)
    normed = rms_norm(mhc_apply(fresh, read), norm_weight, norm_eps, out=given[1])
    return fresh, normed, next_pre, next_post, next_comb
