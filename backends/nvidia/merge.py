"""The merge of partial attention results over splits of the keys, in ascending order."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, warps_for
from deepinfer.ops import attention as attention_ops


@kernel
def _merge(
    out: tl.tensor,
    out_lse: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    rows: tl.int64,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < DIM
    top = tl.load(lse + row)
    for split in range(1, SPLITS):
        other = tl.load(lse + split * rows + row)
        top = tl.where((other > top) | (other != other), other, top)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    merged = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        weight = tl.exp(tl.load(lse + split * rows + row) - top)
        total += weight
        merged += weight * tl.load(o + (split * rows + row) * DIM + place, mask=mask, other=0.0)
    merged = tl.div_rn(merged, tl.where(total > 0.0, total, 1.0))
    tl.store(out + row * DIM + place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + row, tl.log(total) + top)


@KERNELS.implements(attention_ops.attn_merge)
def attn_merge(
    o: Tensor, lse: Tensor, out_dtype: torch.dtype, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """A program per row and head."""
    splits, rows, heads, dim = o.shape
    given = out if out is not None else (None, None)
    merged = new_like(given[0], (rows, heads, dim), out_dtype, o.device)
    sums = new_like(given[1], (rows, heads), torch.float32, o.device)
    block = next_pow2(dim)
    _merge(
        (rows * heads,),
        merged,
        sums,
        packed(o),
        packed(lse),
        rows * heads,
        SPLITS=splits,
        DIM=dim,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return merged, sums
