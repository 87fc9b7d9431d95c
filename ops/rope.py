"""Rotary embedding on the trailing channels, both ways.

Adjacent channels (2i, 2i+1) form pair i. Tables hold cos and sin side by side so that one row serves a position.

Source: RoFormer (arXiv:2104.09864); YaRN frequencies (arXiv:2309.00071) as DeepSeek-V4.1-Flash uses them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import rows
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.numeric import accumulate
from deepinfer.ops.results import New, like
from deepinfer.ops.spec import Tolerance, define_op
from deepinfer.ops.touches import at_rows

ROTATION = Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="two products and a sum in fp32, one bf16 rounding")


def rope_table(num_positions: int, frequencies: Tensor) -> Tensor:
    """[num_positions, 2 * pairs] float32: cosines, then sines, computed in float64."""
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies.double()
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2i/dim) for i < dim/2, float64."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original_max: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN frequencies without a magnitude factor, float64 [dim/2]."""
    base = plain_frequencies(dim, theta)

    def turns(rotations: float) -> float:
        return dim * math.log(original_max / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(turns(beta_fast)), 0)
    high = min(math.ceil(turns(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base * (1 - ramp) + base / factor * ramp


def _rotate(x: Tensor, positions: Tensor, table: Tensor, conjugate: bool) -> Tensor:
    """Rotate the last `table.shape[1]` channels of x [T, ..., D] at positions [T]."""
    width = table.shape[1]
    wide = accumulate(x)
    keep, turn = wide[..., :-width], wide[..., -width:]
    row = table[positions.long()].to(wide.dtype)
    row = row.reshape(row.shape[0], *[1] * (x.dim() - 2), width)
    cos, sin = row.chunk(2, dim=-1)
    if conjugate:
        sin = -sin
    even, odd = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((keep, turned), dim=-1).to(x.dtype)


@define_op(
    tolerance=ROTATION,
    determinism="D2",
    cases=rows.rope_cases,
    dims={"dim": "x:-1", "width": "cos_sin:1"},
    touches={"cos_sin": at_rows("positions")},
    results=like("x"),
)
def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, conjugate: bool = False) -> Tensor:
    """Rotate the last channels of every head.

    Args:
        x: [T, ..., D] bfloat16 or float32; usually [T, heads, D] or [T, D].
        positions: [T] int32.
        cos_sin: [P, Dr] float32 of `rope_table`; Dr channels at the end of D are rotated.
        conjugate: rotate back.

    Returns:
        Like `x`.
    """
    return _rotate(x, positions, cos_sin, conjugate)


@define_op(
    tolerance=ROTATION,
    determinism="D2",
    cases=rows.q_norm_rope_cases,
    dims={"heads": "q:1", "dim": "q:2"},
    touches={"cos_sin": at_rows("positions")},
    results=like("q"),
)
def q_norm_rope(q: Tensor, positions: Tensor, cos_sin: Tensor, normalise: bool = False, eps: float = 1e-20) -> Tensor:
    """Rotate the query heads, after an optional RMSNorm of each head (V4 had it, V4.1 does not).

    Args:
        q: [T, heads, D].
        positions: [T] int32.
        cos_sin: [P, Dr] float32.
        normalise: normalise each head first, rounded to the activation dtype.
        eps: of that norm.

    Returns:
        Like `q`.
    """
    return _rotate(rms_norm(q, None, eps) if normalise else q, positions, cos_sin, False)


def _grouped(new: New, a: Any) -> Tensor:
    rows, heads, dim = a.o.shape
    return new((rows, a.num_groups, heads // a.num_groups * dim), a.o.dtype)


@define_op(
    tolerance=ROTATION,
    determinism="D2",
    cases=rows.o_rope_cases,
    dims={"heads": "o:1", "dim": "o:2", "groups": "num_groups"},
    touches={"cos_sin": at_rows("positions")},
    results=_grouped,
)
def o_rope(o: Tensor, positions: Tensor, cos_sin: Tensor, num_groups: int) -> Tensor:
    """Rotate the attention output back and lay it out by output group.

    Args:
        o: [T, heads, D].
        positions: [T] int32, those of the queries.
        cos_sin: [P, Dr] float32.
        num_groups: output groups of consecutive heads.

    Returns:
        [T, num_groups, heads / num_groups * D], dtype of `o`; not quantised.
    """
    width = o.shape[1] // num_groups * o.shape[2]
    return _rotate(o, positions, cos_sin, True).reshape(o.shape[0], num_groups, width)
