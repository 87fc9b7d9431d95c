"""Products with quantised weights in CUDA C++: dense, in groups, and over experts; one arithmetic for all row counts.

Activations are bfloat16; quantised ones are decoded to that first, exactly. What does not fit the kernel takes a Triton
form: a weight that cannot be packed the shared one, float32 activations one that reads packed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.packing import BLOCK, LAYOUT, fits, pack
from deepinfer.backends.cuda_sm90.products import MOST_EXPERTS, multiply, split_of
from deepinfer.backends.cuda_sm90.wide_products import product
from deepinfer.backends.nvidia import linear as triton_form
from deepinfer.backends.nvidia.decode import decode_rows
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import QTensor

_SOURCES: Final = (
    "cuda/hopper.cuh",
    "cuda/products.cu",
    "device.py",
    "packing.py",
    "products.py",
    "wgmma.py",
    "packing_narrow.py",
    "wide_products.py",
    "../nvidia/nvrtc.py",
    "../nvidia/decode.py",
    "../nvidia/linear.py",
    "../nvidia/products.py",
    "../nvidia/codes.py",
    "../nvidia/launch.py",
)
_RESULTS: Final = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedPlan(KernelPlan):
    """A plan whose weight is packed once, where it can be."""

    def prepare(self, name: str, value: Any) -> Any:
        """The packed form of a weight; anything else as it is. Reads the scales on the host."""
        return pack(value) if name == "weight" and isinstance(value, QTensor) and fits(value) else value


def _suits_kernel(x: Tensor | QTensor, out_dtype: torch.dtype) -> bool:
    """What only run-time arguments show."""
    known = x.fmt == "mxfp8" if isinstance(x, QTensor) else x.dtype == torch.bfloat16
    return known and out_dtype in _RESULTS


def _rows(x: Tensor | QTensor, scratch: Tensor | None) -> Tensor:
    """[T, K] bfloat16 with rows at multiples of 16 bytes; where that takes a copy, in scratch if it fits there."""
    if isinstance(x, Tensor) and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    num_rows, depth = x.shape
    num_bytes = 2 * num_rows * depth
    if scratch is not None and num_bytes <= scratch.shape[0]:
        room = scratch[:num_bytes].view(torch.bfloat16).view(num_rows, depth)
    else:
        room = torch.empty((num_rows, depth), dtype=torch.bfloat16, device=x.device)
    if isinstance(x, Tensor):
        return room.copy_(x)
    return decode_rows(QTensor(_side_by_side(x.data), _side_by_side(x.scale), x.fmt), room)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def linear_mx(
    x: Tensor | QTensor,
    weight: QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    invariant: bool = True,
) -> Tensor:
    """See `ops.linear.linear_mx`; without `invariant`, few rows are summed in parts of K by a block each."""
    if weight.layout != LAYOUT:
        return triton_form.linear_mx(x, weight, out_dtype, acc, out=out)
    y = new_like(out, (x.shape[0], weight.shape[0]), out_dtype, x.device)
    if not _suits_kernel(x, out_dtype):
        return product(x, weight, y, acc=acc)
    multiply(_rows(x, scratch), weight, y, acc=acc, invariant=invariant)
    return y


def linear_grouped_o(
    x: Tensor, weight: Tensor | QTensor, *, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """See `ops.linear.linear_grouped_o`."""
    if not isinstance(weight, QTensor) or weight.layout != LAYOUT:
        return triton_form.linear_grouped_o(x, weight, out=out)
    num_rows, groups, _ = x.shape
    y = new_like(out, (num_rows, groups, weight.shape[1]), x.dtype, x.device)
    if not _suits_kernel(x, x.dtype):
        return product(x, weight, y)
    multiply(_rows(x.flatten(1), scratch), weight, y.view(num_rows, -1), groups=groups)
    return y


def moe_grouped_gemm(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    psum: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """See `ops.moe.moe_grouped_gemm`."""
    if not isinstance(weight, QTensor) or weight.layout != LAYOUT:
        return triton_form.moe_grouped_gemm(x, weight, psum, out_dtype, out=out)
    y = new_like(out, (x.shape[0], weight.shape[1]), out_dtype, x.device)
    if not _suits_kernel(x, out_dtype):
        return product(x, weight, y, row_ends=psum)
    multiply(_rows(x, scratch), weight, y, row_ends=packed(psum))
    return y


def _whole_blocks(dims: Dims) -> bool:
    return all(int(dims.get(name, 1)) % BLOCK == 0 for name in ("n", "k"))


def _expert_blocks(dims: Dims) -> bool:
    return (
        _whole_blocks(dims) and dims.get("weight") in ("mxfp4", "mxfp8") and 0 < dims.get("experts", 0) <= MOST_EXPERTS
    )


def _plan(function: Callable[..., Any], dims: Dims, ctx: BindContext) -> Plan:
    """With room for the decoded rows of the largest step."""
    rows = ctx.max_tokens * dims.get("choices", 1)
    return PackedPlan(function, scratch_bytes=rows * dims["k"] * 2)


@BACKEND.implements_plan(linear_ops.linear_mx, when=_whole_blocks, priority=10, sources=_SOURCES, interpreted=False)
def linear_mx_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """Decodes weights in registers."""
    return _plan(linear_mx, dims, ctx)


def _small(dims: Dims) -> bool:
    """Whether parts of K pay."""
    return _whole_blocks(dims) and split_of(int(dims.get("n", 0)), int(dims.get("k", 0)) // BLOCK) > 1


@BACKEND.implements_plan(
    linear_ops.linear_mx, when=_small, priority=11, batch_invariant=False, sources=_SOURCES, interpreted=False
)
def linear_mx_parts(dims: Dims, ctx: BindContext) -> Plan:
    """As `linear_mx_wgmma`, but blocks sum parts of K where rows are few."""
    return _plan(partial(linear_mx, invariant=False), dims, ctx)


@BACKEND.implements_plan(
    linear_ops.linear_grouped_o, when=_whole_blocks, priority=10, sources=_SOURCES, interpreted=False
)
def linear_grouped_o_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """All groups in one launch; activations are never quantised, so there is nothing to decode."""
    return PackedPlan(linear_grouped_o)


@BACKEND.implements_plan(
    moe_ops.moe_grouped_gemm, when=_expert_blocks, priority=10, sources=_SOURCES, interpreted=False
)
def moe_grouped_gemm_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """Finds the tiles of experts on the device."""
    return _plan(moe_grouped_gemm, dims, ctx)
