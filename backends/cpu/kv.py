"""Writing, reading and copying cache records."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, cache_args, dense, floats, ids, num_threads
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.formats import PagedCache


def _store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int,
    normed: Tensor | None,
) -> None:
    x, weight, positions, cos_sin, slots = dense(x), dense(weight), ids(positions), floats(cos_sin), ids(slots)
    rows, dim = x.shape
    _kernels.store_rows(
        0 if normed is None else normed.data_ptr(),
        x.data_ptr(),
        KIND[x.dtype],
        rows,
        dim,
        weight.data_ptr(),
        KIND[weight.dtype],
        eps,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        cos_sin.shape[1],
        cache_args(cache),
        slots.data_ptr(),
        ratio,
        num_threads(),
    )


@BACKEND.implements(kv_ops.kv_norm_rope_store)
def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
) -> Tensor:
    """One pass per row; the row is quantised straight into its record."""
    normed = torch.empty(kv.shape, dtype=kv.dtype)
    _store(kv, weight, eps, positions, cos_sin, cache, slots, ratio, normed)
    return normed


@BACKEND.implements(kv_ops.index_k_store)
def index_k_store(
    k: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
) -> None:
    """As for key/value rows; rows without a slot are skipped."""
    _store(k, weight, eps, positions, cos_sin, cache, slots, ratio, None)


@BACKEND.implements(kv_ops.kv_gather)
def kv_gather(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the records named; float64 results are left to the reference."""
    if dtype not in KIND:
        return kv_ops.kv_gather(cache, slots, dtype)
    slots = ids(slots)
    out = torch.empty((*slots.shape, cache.format.head_dim), dtype=dtype)
    _kernels.gather(out.data_ptr(), KIND[dtype], cache_args(cache), slots.data_ptr(), slots.numel(), num_threads())
    return out


@BACKEND.implements(kv_ops.copy_blocks)
def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """One memcpy per block; a pool whose blocks are not contiguous inside is left to the reference."""
    if pool.shape[0] and not pool[0].is_contiguous():
        kv_ops.copy_blocks(pool, sources, destinations)
        return
    sources, destinations = ids(sources), ids(destinations)
    size = pool.element_size()
    row_bytes = pool[0].numel() * size if pool.shape[0] else 0
    _kernels.copy_rows(
        pool.data_ptr(),
        pool.shape[0],
        pool.stride(0) * size,
        row_bytes,
        sources.data_ptr(),
        destinations.data_ptr(),
        sources.numel(),
    )
