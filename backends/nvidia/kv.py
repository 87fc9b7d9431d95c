"""Writing, reading and copying cache records."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.moves import move_rows
from deepinfer.backends.nvidia.norm import normed_rows
from deepinfer.backends.nvidia.records import (
    cache_arguments,
    cache_constants,
    load_record,
    record_block,
    store_records,
)
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.rope import rotate
from deepinfer.backends.nvidia.tensors import new_like, packed, pitch, rows_of, vector_width, warps_for
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.formats import PagedCache

_TILE = 512
"""Values that one program stores, in whole rows: more made it slower on an H200."""
_STORE_SOURCES = ("records.py", "rope.py", "norm.py")


@kernel
def _store(
    normed: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    rows: tl.int32,
    x_pitch: tl.int64,
    table_pitch: tl.int64,
    page_bytes: tl.int64,
    ratio: tl.int32,
    eps: tl.float32,
    WIDTH: tl.constexpr,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    X_VEC: tl.constexpr,
    PAGE_VEC: tl.constexpr,
) -> None:
    """Grid (tiles of ROWS rows,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    place = tl.arange(0, BLOCK)[None, :]
    mask = live[:, None] & (place < DIM)
    slot = tl.load(slots + row, mask=live, other=-1)
    position = (tl.load(positions + row, mask=live, other=0) // ratio * ratio).to(tl.int64)
    at = row.to(tl.int64)[:, None]
    value = tl.load(x + at * (x_pitch // X_VEC) * X_VEC + place, mask=mask, other=0.0).to(tl.float32)
    y = normed_rows(value, weight, eps, mask, place, DIM).to(x.dtype.element_ty)
    if normed is not None:
        tl.store(normed + at * DIM + place, y, mask=mask)
    turned = rotate(y.to(tl.float32), table + position[:, None] * table_pitch, False, ROWS, BLOCK, DIM, WIDTH)
    # rounded to the activations' type before it is quantised
    record = turned.to(x.dtype.element_ty).to(tl.float32)
    store_records(cache, slot, page_bytes, record, RECORDS, KIND, DIM, ROWS, BLOCK, PAGE_VEC)


@kernel
def _gather(
    out: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    page_bytes: tl.int64,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    place = tl.arange(0, BLOCK)
    inside = place < DIM
    value = load_record(cache, slot, page_bytes, place, inside & (slot >= 0), RECORDS, KIND, DIM)
    tl.store(out + row * DIM + place, value.to(out.dtype.element_ty), mask=inside)


def _launch_store(
    normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int,
) -> None:
    flat, table = rows_of(x), packed(cos_sin)
    data, page_bytes = cache_arguments(cache)
    rows, block = flat.shape[0], record_block(cache)
    tile = max(1, _TILE // block)
    _store(
        (-(-rows // tile),),
        normed,
        flat,
        packed(weight),
        packed(positions),
        table,
        data,
        packed(slots),
        rows,
        pitch(flat),
        table.shape[1],
        page_bytes,
        ratio,
        eps,
        WIDTH=table.shape[1],
        **cache_constants(cache),
        ROWS=tile,
        X_VEC=vector_width(pitch(flat)),
        PAGE_VEC=vector_width(page_bytes),
        num_warps=warps_for(tile * block, 16),
    )


@KERNELS.implements(kv_ops.kv_norm_rope_store, sources=_STORE_SOURCES)
def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Norm, rotation, codes and record of a row without leaving registers."""
    out = new_like(out, tuple(kv.shape), kv.dtype, kv.device)
    _launch_store(out, kv, weight, eps, positions, cos_sin, cache, slots, ratio)
    return out


@KERNELS.implements(kv_ops.index_k_store, sources=_STORE_SOURCES)
def index_k_store(
    k: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
    *,
    out: None = None,
) -> None:
    """As `kv_norm_rope_store`, without the normed rows."""
    _launch_store(None, k, weight, eps, positions, cos_sin, cache, slots, ratio)


@KERNELS.implements(kv_ops.kv_gather, sources=("records.py",))
def kv_gather(cache: PagedCache, slots: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """A program per record."""
    out = new_like(out, (*slots.shape, cache.format.head_dim), dtype, slots.device)
    data, page_bytes = cache_arguments(cache)
    _gather((slots.numel(),), out, data, packed(slots), page_bytes, **cache_constants(cache), num_warps=1)
    return out


@KERNELS.implements(kv_ops.copy_blocks, sources=("moves.py",))
def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor, *, out: None = None) -> None:
    """Rows of bytes, source and destination named by lists."""
    move_rows(pool, pool, sources, destinations)
