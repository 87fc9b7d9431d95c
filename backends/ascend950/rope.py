"""Rotation of the last channels of heads: alone, after a norm, back for the output groups, before index codes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.norm import quantize, rms_norm
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed, short
from deepinfer.ops import index as index_ops
from deepinfer.ops import rope as rope_ops
from deepinfer.ops.backend import BindContext, Dims
from deepinfer.ops.formats import QTensor, QuantFormat

_SOURCES: Final = (*SOURCES, "rope.py", "kernels/generated/rope.asc")
_WITH_NORM: Final = (*_SOURCES, "norm.py", "kernels/norm.asc")
_HEADS: Final = 16
"""Heads of a task (`tiles/rope.py`)."""
_STAY: Final = 512
_TURN: Final = 128
"""Most channels that stay, and that turn."""


def _fits(dims: Dims) -> bool:
    width = dims.get("width", min(_TURN, dims["dim"]))
    return bool(width <= _TURN and dims["dim"] - width <= _STAY)


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, conjugate: bool, out: Tensor) -> Tensor:
    heads_in = x[:, None] if x.dim() == 2 else x.flatten(1, -2) if x.dim() > 3 else x
    if heads_in.stride(2) != 1 and heads_in.shape[2] > 1:
        heads_in = heads_in.contiguous()
    rows, heads, dim = heads_in.shape
    table = packed(cos_sin)
    width = table.shape[1]
    family("rope")[f"rope_{short(x.dtype)}"](
        rows * tasks_of(heads, _HEADS),
        x=heads_in,
        positions=packed(positions),
        table=table,
        out=out,
        rows=rows,
        heads=heads,
        stay=dim - width,
        pairs=width // 2,
        direction=-1.0 if conjugate else 1.0,
        row_pitch=heads_in.stride(0),
        head_pitch=heads_in.stride(1),
        out_pitch=heads * dim,
        width=dim,
        table_pitch=width,
    )
    return out


@implements(rope_ops.rope, sources=_SOURCES, when=_fits)
def rope(
    x: Tensor, positions: Tensor, cos_sin: Tensor, conjugate: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """A task for a token's heads; channels that stay are copied on the way."""
    return _rotate(x, positions, cos_sin, conjugate, new_like(out, tuple(x.shape), x.dtype, x.device))


@implements(rope_ops.q_norm_rope, sources=_WITH_NORM, when=_fits)
def q_norm_rope(
    q: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    normalise: bool = False,
    eps: float = 1e-20,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rotation; with `normalise` after a launch of the norm over each head."""
    out = new_like(out, tuple(q.shape), q.dtype, q.device)
    heads = rms_norm(q, None, eps) if normalise else q
    return _rotate(heads, positions, cos_sin, False, out)


@implements(rope_ops.o_rope, sources=_SOURCES, when=_fits)
def o_rope(o: Tensor, positions: Tensor, cos_sin: Tensor, num_groups: int, *, out: Tensor | None = None) -> Tensor:
    """The rotation back; groups are consecutive heads, so the layout by group is that of the heads."""
    rows, heads, dim = o.shape
    out = new_like(out, (rows, num_groups, heads // num_groups * dim), o.dtype, o.device)
    return _rotate(o, positions, cos_sin, True, out)


def _turned_bytes(dims: Dims, ctx: BindContext) -> int:
    """Of the rotated heads between two launches; none where nothing is quantised."""
    return 0 if dims["fmt"] == "f32" else 4 * ctx.max_tokens * int(dims["heads"]) * int(dims["dim"])


@implements(index_ops.index_q_quant, sources=_WITH_NORM, when=_fits, scratch=_turned_bytes)
def index_q_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    fmt: QuantFormat | None,
    *,
    out: Tensor | QTensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor | QTensor:
    """The rotation, and a launch of the quantiser over each head."""
    if fmt is None:
        plain = out if isinstance(out, Tensor) else None
        return _rotate(q, positions, cos_sin, False, new_like(plain, tuple(q.shape), q.dtype, q.device))
    size = q.numel() * q.element_size()
    if scratch is not None and size <= scratch.numel():
        turned = scratch[:size].view(q.dtype).view(q.shape)
    else:  # more rows than the plan was bound for, as when it is called on its own
        turned = torch.empty(tuple(q.shape), dtype=q.dtype, device=q.device)
    _rotate(q, positions, cos_sin, False, turned)
    return quantize(turned, fmt, out=out if isinstance(out, QTensor) else None)
