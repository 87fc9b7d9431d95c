"""Products over experts of which each gets few tokens, for `batch_invariant=False`: e4m3 operands as they are.

Decoding e2m1 weights to bfloat16 costs more than memory takes to bring them; decoding them to e4m3 does not. The sums
have other bits than those of the bfloat16 form, which many tokens for each expert still take, so a token's bits depend
on how many come with it. Within a group of 32 this device sums e4m3 products with 14 bits or so: enough for bfloat16
results, not for float32 ones, which stay with the other form. One packing of a weight serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.packing import BLOCK
from deepinfer.backends.cuda_sm90.packing_narrow import NARROW, evens_first, fits_narrow, pack_narrow
from deepinfer.backends.cuda_sm90.products import MOST_EXPERTS, multiply, tile_tokens
from deepinfer.backends.cuda_sm90.wide_products import product
from deepinfer.backends.nvidia import linear as triton_form
from deepinfer.backends.nvidia.decode import decode_rows, spread_scales
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import QTensor

_MOST_TOKENS: Final = 16
"""Tokens of a tile up to which e4m3 products are faster."""


@dataclass(frozen=True)
class NarrowPlan(KernelPlan):
    """A plan whose weight is packed once, where it can be."""

    def prepare(self, name: str, value: Any) -> Any:
        """The packed form of a weight; anything else as it is. Reads the scales on the host."""
        fitting = name == "weight" and isinstance(value, QTensor) and fits_narrow(value)
        return pack_narrow(value) if fitting else value


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
    if not isinstance(weight, QTensor) or weight.layout != NARROW:
        return triton_form.moe_grouped_gemm(x, weight, psum, out_dtype, out=out)
    num_rows, experts = x.shape[0], weight.shape[0]
    y = new_like(out, (num_rows, weight.shape[1]), out_dtype, x.device)
    known = x.fmt == "mxfp8" if isinstance(x, QTensor) else x.dtype == torch.bfloat16
    if not known or out_dtype not in (torch.bfloat16, torch.float32):
        return product(x, weight, y, row_ends=psum)
    if num_rows == 0:
        return y
    tokens = tile_tokens(num_rows, experts)
    if isinstance(x, QTensor) and tokens <= _MOST_TOKENS and out_dtype == torch.bfloat16:
        codes, scale = _aligned(x.data), packed(x.scale)
        blocks, places = x.shape[1] // BLOCK, num_rows + tokens  # the last tile reads behind the last row
        room = _room(scratch, 16 * blocks * places, x.device).view(torch.float32).view(blocks, places, 4)
        multiply(codes, weight, y, row_ends=packed(psum), token_scales=spread_scales(scale, room))
    else:
        rows = _room(scratch, 2 * num_rows * x.shape[1], x.device).view(torch.bfloat16).view(num_rows, -1)
        if isinstance(x, QTensor):
            decode_rows(QTensor(packed(x.data), packed(x.scale), x.fmt), rows, evens_first=True)
        else:
            ordered = evens_first(x)
            rows.view(ordered.shape).copy_(ordered)
        multiply(rows, weight, y, row_ends=packed(psum))
    return y


def _aligned(codes: Tensor) -> Tensor:
    """Rows side by side from a multiple of 16 bytes on, as a tensor map wants them."""
    fits = codes.is_contiguous() and codes.data_ptr() % 16 == 0
    return codes if fits else codes.clone(memory_format=torch.contiguous_format)


def _room(scratch: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """So many bytes of scratch, or new memory where they are not there."""
    if scratch is not None and num_bytes <= scratch.shape[0]:
        return scratch[:num_bytes]
    return torch.empty((num_bytes,), dtype=torch.uint8, device=device)


def _suits(dims: Dims) -> bool:
    whole = all(int(dims.get(name, 1)) % BLOCK == 0 for name in ("n", "k"))
    return whole and dims.get("weight") == "mxfp4" and 0 < dims.get("experts", 0) <= MOST_EXPERTS


@BACKEND.implements_plan(
    moe_ops.moe_grouped_gemm,
    when=_suits,
    priority=11,
    batch_invariant=False,
    sources=(
        "cuda/hopper.cuh",
        "cuda/products.cu",
        "device.py",
        "packing.py",
        "packing_narrow.py",
        "products.py",
        "wgmma.py",
        "wide_products.py",
        "../nvidia/nvrtc.py",
        "../nvidia/decode.py",
        "../nvidia/linear.py",
        "../nvidia/products.py",
        "../nvidia/codes.py",
        "../nvidia/launch.py",
    ),
    interpreted=False,
)
def moe_grouped_gemm_e4m3(dims: Dims, ctx: BindContext) -> Plan:
    """e4m3 products where experts get few tokens, bfloat16 products elsewhere."""
    rows = ctx.max_tokens * dims.get("choices", 1)
    return NarrowPlan(moe_grouped_gemm, scratch_bytes=rows * dims["k"] * 2)
