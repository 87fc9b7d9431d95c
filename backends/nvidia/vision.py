"""Attention of the vision tower: tiles of patches that never straddle images, keys from the image's first one on.

So a patch meets its keys in the same order wherever its image stands in the batch.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import vision as vision_ops

_QUERIES, _KEYS = 64, 64
"""Tile: patches that ask, and patches that are asked."""


@kernel
def _attend(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cu_seqlens: tl.tensor,
    images: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    scale: tl.float32,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    head = tl.program_id(1)
    # which image, and which of its tiles: tiles are numbered through the images
    begin = 0
    end = 0
    first = 0
    seen = 0
    for image in range(images):
        low = tl.load(cu_seqlens + image)
        high = tl.load(cu_seqlens + image + 1)
        tiles = (high - low + QUERIES - 1) // QUERIES
        mine = (tile >= seen) & (tile < seen + tiles)
        begin = tl.where(mine, low, begin)
        end = tl.where(mine, high, end)
        first = tl.where(mine, low + (tile - seen) * QUERIES, first)
        seen += tiles
    place = tl.arange(0, BLOCK)
    inside = place < DIM
    if tile >= seen:
        # patches behind the last image see nothing
        last = tl.load(cu_seqlens + images)
        row = last + (tile - seen) * QUERIES + tl.arange(0, QUERIES)
        at = (row.to(tl.int64)[:, None] * heads + head) * DIM + place[None, :]
        zero = tl.zeros((QUERIES, BLOCK), out.dtype.element_ty)
        tl.store(out + at, zero, mask=(row < rows)[:, None] & inside[None, :])
    else:
        row = first + tl.arange(0, QUERIES)
        at = (row.to(tl.int64)[:, None] * heads + head) * DIM + place[None, :]
        live = (row < end)[:, None] & inside[None, :]
        query = tl.load(q + at, mask=live, other=0.0)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        result = tl.zeros((QUERIES, BLOCK), tl.float32)
        for start in range(begin, end, KEYS):
            key_row = start + tl.arange(0, KEYS)
            key_at = (key_row.to(tl.int64)[:, None] * heads + head) * DIM + place[None, :]
            visible = key_row < end
            key = tl.load(k + key_at, mask=visible[:, None] & inside[None, :], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale
            score = tl.where(visible[None, :], score, float("-inf"))
            best = tl.max(tl.where(score == score, score, float("inf")), 1)
            best = tl.maximum(top, best)
            weight = tl.exp(score - best[:, None])
            fade = tl.exp(top - best)
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(v + key_at, mask=visible[:, None] & inside[None, :], other=0.0)
            result = result * fade[:, None]
            result = tl.dot(weight.to(value.dtype), value, result, input_precision="tf32x3")
            top = best
        result = tl.div_rn(result, total[:, None])
        tl.store(out + at, result.to(out.dtype.element_ty), mask=live)


@KERNELS.implements(vision_ops.vision_attn)
def vision_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float, *, out: Tensor | None = None
) -> Tensor:
    """A program per tile of patches and head; as many tiles as there can be, the rest return at once."""
    rows, heads, dim = q.shape
    images = cu_seqlens.shape[0] - 1
    out = new_like(out, (rows, heads, dim), q.dtype, q.device)
    _attend(
        (-(-rows // _QUERIES) + images, heads if rows else 0),
        out,
        packed(q),
        packed(k),
        packed(v),
        packed(cu_seqlens),
        images,
        heads,
        rows,
        softmax_scale,
        DIM=dim,
        BLOCK=max(next_pow2(dim), 16),
        QUERIES=_QUERIES,
        KEYS=_KEYS,
    )
    return out
