"""Sparse attention over the records that slots name: one program per row and block of heads.

Both lists are walked in column order in tiles of one size, so a row's bits depend on its own slots only. Softmax is
online: probabilities are rounded to bfloat16 against the running maximum, the denominator keeps them unrounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.records import KIND, load_whole
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, vector_width
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.formats import PagedCache


@device_function
def _attend(
    query: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    o: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    num_columns: tl.tensor,
    page_bytes: tl.tensor,
    softmax_scale: tl.tensor,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDED: tl.constexpr,
    KEYS: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """One list of slots; returns the running maximum, sum and output."""
    for first in range(0, num_columns, KEYS):
        column = first + tl.arange(0, KEYS)
        slot = tl.load(slots + column, mask=column < num_columns, other=-1)
        ok = slot >= 0
        # a hole reads nothing: page 0 may hold NaN, and NaN times a probability of 0 is NaN
        keys = load_whole(cache, tl.where(ok, slot, 0), ok, page_bytes, RECORDS, KIND, DIM, BLOCK, VEC, WIDE)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * softmax_scale
        scores = tl.where(ok[None, :], scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(best == -float("inf"), 0.0, best)  # nothing valid so far
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        if ROUNDED:
            weights = weights.to(tl.bfloat16)
        o = tl.dot(weights.to(WIDE), keys, o * shrink[:, None], input_precision="ieee")
        top = best
    return top, total, o


@kernel
def _sparse_attn(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    window_slots: tl.tensor,
    kv: tl.tensor,
    kv_slots: tl.tensor,
    num_heads: tl.int32,
    window_columns: tl.int32,
    kv_columns: tl.int32,
    softmax_scale: tl.float32,
    q_row: tl.int64,
    q_head: tl.int64,
    window_pitch: tl.int64,
    kv_pitch: tl.int64,
    window_bytes: tl.int64,
    kv_bytes: tl.int64,
    WINDOW_RECORDS: tl.constexpr,
    WINDOW_KIND: tl.constexpr,
    KV_RECORDS: tl.constexpr,
    KV_KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDED: tl.constexpr,
    WINDOW_VEC: tl.constexpr,
    KV_VEC: tl.constexpr,
) -> None:
    """Grid (rows, blocks of heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    head_ok = head < num_heads
    live = head_ok[:, None] & (channel < DIM)[None, :]
    query = tl.load(q + row * q_row + head[:, None] * q_head + channel[None, :], mask=live, other=0.0).to(WIDE)
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    o = tl.zeros((HEADS, BLOCK), tl.float32)
    top, total, o = _attend(
        query,
        top,
        total,
        o,
        window,
        window_slots + row * window_pitch,
        window_columns,
        window_bytes,
        softmax_scale,
        WINDOW_RECORDS,
        WINDOW_KIND,
        DIM,
        BLOCK,
        WIDE,
        ROUNDED,
        KEYS,
        WINDOW_VEC,
    )
    if kv is not None:
        top, total, o = _attend(
            query,
            top,
            total,
            o,
            kv,
            kv_slots + row * kv_pitch,
            kv_columns,
            kv_bytes,
            softmax_scale,
            KV_RECORDS,
            KV_KIND,
            DIM,
            BLOCK,
            WIDE,
            ROUNDED,
            KEYS,
            KV_VEC,
        )
    shift = tl.where(top == -float("inf"), 0.0, top)
    below = total + tl.exp(tl.load(sink + head, mask=head_ok, other=0.0) - shift)
    o = tl.where((total == 0.0)[:, None], 0.0, o / below[:, None])
    place = (row * num_heads + head[:, None]) * DIM + channel[None, :]
    tl.store(out + place, o.to(out.dtype.element_ty), mask=live)
    tl.store(lse + row * num_heads + head, tl.log(total) + shift, mask=head_ok)


@dataclass(frozen=True)
class Tile:
    """What one program works on.

    Attributes:
        heads: of a row.
        keys: of a step.
        warps: of the program.
        stages: depth of the pipeline over steps.
    """

    heads: int
    keys: int
    warps: int
    stages: int


def _tile(num_heads: int, block: int, single: bool) -> Tile:
    """Sizes at which output, query and a step of keys stay in registers."""
    covering = max(next_pow2(num_heads), 16)
    if single:
        return Tile(16, 16, 4, 2)
    heads = min(covering, 32)
    return Tile(heads, 32, 8 if block * heads >= 8192 else 4, 1)


def is_single(q: Tensor, *caches: PagedCache | None) -> bool:
    """Whether queries or records are float32, which bfloat16 would round."""
    return q.dtype == torch.float32 or any(cache is not None and cache.format.kind == "f32" for cache in caches)


@KERNELS.implements(attention_ops.sparse_attn, sources=("records.py",))
def sparse_attn(
    q: Tensor,
    window_cache: PagedCache,
    window_slots: Tensor,
    kv_cache: PagedCache | None,
    kv_slots: Tensor | None,
    softmax_scale: float,
    attn_sink: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Records are decoded tile by tile; plain float32 records are multiplied as float32.

    `tile` is for a backend that knows better; float32 operands need the default.
    """
    num_rows, num_heads, dim = q.shape
    o = new_like(out[0] if out else None, (num_rows, num_heads, dim), q.dtype, q.device)
    lse = new_like(out[1] if out else None, (num_rows, num_heads), torch.float32, q.device)
    if kv_slots is None:
        kv_cache = None
    single = is_single(q, window_cache, kv_cache)
    q = q if q.stride(2) == 1 else q.contiguous()
    window_slots = _columns_together(window_slots)
    kv_slots = None if kv_slots is None else _columns_together(kv_slots)
    block = max(next_pow2(dim), 32)
    tile = _tile(num_heads, block, single) if tile is None else tile
    _sparse_attn(
        (num_rows, triton.cdiv(num_heads, tile.heads)),
        o,
        lse,
        q,
        packed(attn_sink),
        window_cache.data,
        window_slots,
        None if kv_cache is None else kv_cache.data,
        kv_slots,
        num_heads,
        window_slots.shape[1],
        0 if kv_slots is None else kv_slots.shape[1],
        softmax_scale,
        q.stride(0),
        q.stride(1),
        window_slots.stride(0),
        0 if kv_slots is None else kv_slots.stride(0),
        window_cache.data.stride(0),
        0 if kv_cache is None else kv_cache.data.stride(0),
        WINDOW_RECORDS=window_cache.records,
        WINDOW_KIND=KIND[window_cache.format.kind],
        KV_RECORDS=1 if kv_cache is None else kv_cache.records,
        KV_KIND=0 if kv_cache is None else KIND[kv_cache.format.kind],
        DIM=dim,
        BLOCK=block,
        HEADS=tile.heads,
        KEYS=tile.keys,
        WIDE=tl.float32 if single else tl.bfloat16,
        ROUNDED=q.dtype == torch.bfloat16,
        WINDOW_VEC=vector_width(window_cache.data.stride(0)),
        KV_VEC=1 if kv_cache is None else vector_width(kv_cache.data.stride(0)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return o, lse


def _columns_together(slots: Tensor) -> Tensor:
    return slots if slots.stride(1) == 1 or slots.shape[1] <= 1 else slots.contiguous()
