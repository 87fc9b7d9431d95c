"""Products of mxfp8 activations with mxfp8 and mxfp4 weights on the block-scaled tensor cores, dense and over experts.

`linear_grouped_o` has no form here: its activations are never quantised, so its weight becomes bfloat16 as on any
generation. Activations that are not mxfp8 take the shared form too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from deepinfer.backends.cuda_sm100 import BACKEND
from deepinfer.backends.cuda_sm100.scaled import dense_scaled, grouped_scaled
from deepinfer.backends.nvidia import linear as decoded_form
from deepinfer.backends.nvidia.linear import columns_together, load_width, operand_of
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import GROUP, QTensor

_SOURCES: Final = (
    "scaled.py",
    "../nvidia/linear.py",
    "../nvidia/products.py",
    "../nvidia/codes.py",
    "../nvidia/launch.py",
    "../nvidia/tensors.py",
)
_WEIGHTS: Final = ("mxfp8", "mxfp4")
_OUTPUTS: Final = 128
"""Weight rows of a tile: those of the one block-scaled instruction that a single multiprocessor has."""
_DEPTH: Final = 128


@dataclass(frozen=True)
class _Tile:
    """Rows of a tile, and stages of its pipeline."""

    rows: int
    stages: int


def _tile(num_rows: int) -> _Tile:
    """Rows may vary with their number: an instruction adds 32 columns of K whatever its other sizes are."""
    rows = min(max(next_pow2(num_rows), 16), 128)
    return _Tile(rows, stages=3 if rows == 128 else 4)


def _scale_width(depth: int, *scales: Tensor | None) -> int:
    """Scales that rows of them start at a multiple of: those of a step of K, or 1."""
    groups = _DEPTH // GROUP["mxfp8"]
    strides = [stride for scale in scales if scale is not None for stride in scale.stride()[:-1]]
    return groups if depth % _DEPTH == 0 and all(stride % groups == 0 for stride in strides) else 1


def _mxfp8(x: Tensor | QTensor) -> bool:
    return isinstance(x, QTensor) and x.fmt == "mxfp8"


def linear_mx(
    x: Tensor | QTensor,
    weight: QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.linear.linear_mx`."""
    if not _mxfp8(x):
        return decoded_form.linear_mx(x, weight, out_dtype, acc, out=out)
    left, right = operand_of(x), operand_of(weight)
    (num_rows, depth), num_out = x.shape, weight.shape[0]
    y = new_like(out, (num_rows, num_out), out_dtype, left.data.device)
    added = None if acc is None else columns_together(acc)
    tile = _tile(num_rows)
    dense_scaled(
        (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, _OUTPUTS)),
        y,
        left.data,
        left.scale,
        right.data,
        right.scale,
        added,
        num_rows,
        num_out,
        depth,
        y.stride(0),
        left.data.stride(0),
        left.scale_pitch,
        right.data.stride(0),
        right.scale_pitch,
        0 if added is None else added.stride(0),
        W_FMT=right.fmt,
        BM=tile.rows,
        BN=_OUTPUTS,
        BK=_DEPTH,
        VEC=load_width(depth, left.data.stride(0), *right.data.stride()[:-1]),
        SCALE_VEC=_scale_width(depth, left.scale, right.scale),
        num_warps=4,
        num_stages=tile.stages,
    )
    return y


def moe_grouped_gemm(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    psum: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.moe.moe_grouped_gemm`; the grid covers any spread of rows over experts."""
    if not _mxfp8(x) or not isinstance(weight, QTensor):
        return decoded_form.moe_grouped_gemm(x, weight, psum, out_dtype, out=out)
    left, right = operand_of(x), operand_of(weight)
    num_rows, depth = x.shape
    num_experts, num_out = weight.shape[:2]
    y = new_like(out, (num_rows, num_out), out_dtype, left.data.device)
    tile = _tile(-(-num_rows // max(num_experts, 1)))
    most = triton.cdiv(num_rows, tile.rows) + min(num_experts, num_rows)
    grouped_scaled(
        (most if num_experts else 0, triton.cdiv(num_out, _OUTPUTS)),
        y,
        left.data,
        left.scale,
        right.data,
        right.scale,
        packed(psum),
        num_experts,
        num_out,
        depth,
        y.stride(0),
        left.data.stride(0),
        left.scale_pitch,
        right.data.stride(1),
        right.data.stride(0),
        right.scale_pitch,
        0 if right.scale is None else right.scale.stride(0),
        W_FMT=right.fmt,
        EXPERTS=next_pow2(num_experts),
        BM=tile.rows,
        BN=_OUTPUTS,
        BK=_DEPTH,
        VEC=load_width(depth, left.data.stride(0), *right.data.stride()[:-1]),
        SCALE_VEC=_scale_width(depth, left.scale, right.scale),
        num_warps=4,
        num_stages=tile.stages,
    )
    return y


def _both_scaled(dims: Dims) -> bool:
    return dims.get("x") == "mxfp8" and dims.get("weight") in _WEIGHTS


def _weight_scaled(dims: Dims) -> bool:
    return dims.get("weight") in _WEIGHTS


@BACKEND.implements_plan(linear_ops.linear_mx, when=_both_scaled, priority=10, sources=_SOURCES)
def linear_mx_scaled(dims: Dims, ctx: BindContext) -> Plan:
    """Codes and scales go to the tensor cores as they are stored."""
    return KernelPlan(linear_mx)


@BACKEND.implements_plan(moe_ops.moe_grouped_gemm, when=_weight_scaled, priority=10, sources=_SOURCES)
def moe_grouped_gemm_scaled(dims: Dims, ctx: BindContext) -> Plan:
    """The same over the rows of experts; plain activations take the shared form."""
    return KernelPlan(moe_grouped_gemm)
