"""Dense products and the products of experts: plain and quantised operands, float32 accumulation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.products import dense, grouped
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import FORMAT, new_like, next_pow2, packed
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.formats import QTensor

_SOURCES = ("products.py",)


@dataclass(frozen=True)
class Operand:
    """What kernels read of a matrix.

    Attributes:
        data: codes or values.
        scale: scales of codes; None for plain values.
        fmt: 0 for plain values, else the format of codes.
        single: whether values are float32.
    """

    data: Tensor
    scale: Tensor | None
    fmt: int
    single: bool

    @property
    def scale_pitch(self) -> int:
        """Scales from row to row; 0 where there are none."""
        return 0 if self.scale is None else self.scale.stride(-2)


def columns_together(x: Tensor) -> Tensor:
    """The tensor with neighbouring columns side by side; a copy only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def operand_of(x: Tensor | QTensor) -> Operand:
    """A matrix, plain or quantised, as kernels read it."""
    if isinstance(x, QTensor):
        return Operand(columns_together(x.data), columns_together(x.scale), FORMAT[x.fmt], False)
    return Operand(columns_together(x), None, 0, x.dtype == torch.float32)


@dataclass(frozen=True)
class _Tile:
    """A tile's shape. Tokens may vary with their number; outputs and depth may not, since they fix a row's bits."""

    rows: int
    outputs: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 2


def _tile(num_rows: int, left: Operand, right: Operand) -> _Tile:
    if left.single or right.single:  # no tensor cores: what counts is that the tile stays in registers
        return _Tile(16, depth=32)
    rows = min(max(next_pow2(num_rows), 16), 128)
    return _Tile(rows, stages=4 if left.fmt == right.fmt == 0 else 2)  # plain operands go straight to shared memory


def load_width(depth: int, *pitches: int) -> int:
    """Elements that rows start at a multiple of, which makes loads wide."""
    return 16 if depth % 32 == 0 and all(p % 16 == 0 for p in pitches) else 1


def product(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`x [T, K] weight [N, K]^T * factor + acc`, [T, N]."""
    left, right = operand_of(x), operand_of(weight)
    (num_rows, depth), num_out = x.shape, weight.shape[0]
    y = new_like(out, (num_rows, num_out), out_dtype, left.data.device)
    single = left.single or right.single
    tile = _tile(num_rows, left, right)
    added = None if acc is None else columns_together(acc)
    dense(
        (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.outputs), 1),
        y,
        left.data,
        left.scale,
        right.data,
        right.scale,
        added,
        num_rows,
        num_out,
        depth,
        factor,
        y.stride(0),
        0,
        left.data.stride(0),
        0,
        left.scale_pitch,
        right.data.stride(0),
        0,
        right.scale_pitch,
        0,
        0 if added is None else added.stride(0),
        X_FMT=left.fmt,
        W_FMT=right.fmt,
        WIDE=tl.float32 if single else tl.bfloat16,
        BM=tile.rows,
        BN=tile.outputs,
        BK=tile.depth,
        VEC=load_width(depth, left.data.stride(0), right.data.stride(0)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@KERNELS.implements(linear_ops.linear_mx, sources=_SOURCES)
def linear_mx(
    x: Tensor | QTensor,
    weight: QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Quantised operands become bfloat16, which holds them exactly; float32 activations are multiplied as float32."""
    return product(x, weight, out_dtype, acc, out=out)


@KERNELS.implements(linear_ops.linear_bf16, sources=_SOURCES)
def linear_bf16(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, out_scale: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """The weight stays in its own dtype in memory."""
    return product(x, weight, out_dtype, factor=out_scale, out=out)


@KERNELS.implements(linear_ops.linear_grouped_o, sources=_SOURCES)
def linear_grouped_o(x: Tensor, weight: Tensor | QTensor, *, out: Tensor | None = None) -> Tensor:
    """One product per group, all groups in one launch."""
    left, right = operand_of(x), operand_of(weight)
    num_rows, groups, depth = x.shape
    num_out = weight.shape[1]
    y = new_like(out, (num_rows, groups, num_out), x.dtype, x.device)
    single = left.single or right.single
    tile = _tile(num_rows, left, right)
    dense(
        (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.outputs), groups),
        y,
        left.data,
        None,
        right.data,
        right.scale,
        None,
        num_rows,
        num_out,
        depth,
        1.0,
        y.stride(0),
        y.stride(1),
        left.data.stride(0),
        left.data.stride(1),
        0,
        right.data.stride(1),
        right.data.stride(0),
        right.scale_pitch,
        0 if right.scale is None else right.scale.stride(0),
        0,
        X_FMT=0,
        W_FMT=right.fmt,
        WIDE=tl.float32 if single else tl.bfloat16,
        BM=tile.rows,
        BN=tile.outputs,
        BK=tile.depth,
        VEC=load_width(depth, *left.data.stride()[:2], *right.data.stride()[:2]),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@KERNELS.implements(moe_ops.moe_grouped_gemm, sources=_SOURCES)
def moe_grouped_gemm(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    psum: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The grid covers any spread of rows over experts, so nothing of `psum` is read on the host."""
    left, right = operand_of(x), operand_of(weight)
    num_rows, depth = x.shape
    num_experts, num_out = weight.shape[:2]
    y = new_like(out, (num_rows, num_out), out_dtype, left.data.device)
    single = left.single or right.single
    tile = _tile(-(-num_rows // max(num_experts, 1)), left, right)
    most = triton.cdiv(num_rows, tile.rows) + min(num_experts, num_rows)
    grouped(
        (most if num_experts else 0, triton.cdiv(num_out, tile.outputs)),
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
        X_FMT=left.fmt,
        W_FMT=right.fmt,
        WIDE=tl.float32 if single else tl.bfloat16,
        EXPERTS=next_pow2(num_experts),
        BM=tile.rows,
        BN=tile.outputs,
        BK=tile.depth,
        VEC=load_width(depth, left.data.stride(0), *right.data.stride()[:2]),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
