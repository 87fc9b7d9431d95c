"""Attention over the records that slots name, merging of partial results, and attention inside one image."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, NO_CACHE, cache_args, dense, floats, ids, num_threads
from deepinfer.ops import attention as attention_ops
from deepinfer.ops import vision as vision_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import PagedCache


@BACKEND.implements(attention_ops.sparse_attn)
def sparse_attn(
    q: Tensor,
    window_cache: PagedCache,
    window_slots: Tensor,
    kv_cache: PagedCache | None,
    kv_slots: Tensor | None,
    softmax_scale: float,
    attn_sink: Tensor,
) -> tuple[Tensor, Tensor]:
    """A row reads the records it names, in column order, and nothing else."""
    q, window_slots, attn_sink = dense(q), ids(window_slots), floats(attn_sink)
    rows, heads, dim = q.shape
    if window_cache.format.head_dim != dim:
        raise OpArgumentError(f"q has {dim} channels, the window cache {window_cache.format.head_dim}")
    other, slots, columns = NO_CACHE, 0, 0
    if kv_cache is not None and kv_slots is not None:
        if kv_cache.format.head_dim != dim:
            raise OpArgumentError(f"q has {dim} channels, the compressed cache {kv_cache.format.head_dim}")
        kv_slots = ids(kv_slots)
        other, slots, columns = cache_args(kv_cache), kv_slots.data_ptr(), kv_slots.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty((rows, heads), dtype=torch.float32)
    _kernels.sparse_attn(
        out.data_ptr(),
        lse.data_ptr(),
        q.data_ptr(),
        KIND[q.dtype],
        rows,
        heads,
        dim,
        cache_args(window_cache),
        window_slots.data_ptr(),
        window_slots.shape[1],
        other,
        slots,
        columns,
        softmax_scale,
        attn_sink.data_ptr(),
        num_threads(),
    )
    return out, lse


@BACKEND.implements(attention_ops.attn_merge)
def attn_merge(o: Tensor, lse: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Splits are added in ascending order, head by head."""
    o, lse = floats(o), floats(lse)
    splits, rows, heads, dim = o.shape
    out = torch.empty((rows, heads, dim), dtype=out_dtype)
    total = torch.empty((rows, heads), dtype=torch.float32)
    _kernels.attn_merge(
        out.data_ptr(),
        KIND[out_dtype],
        total.data_ptr(),
        o.data_ptr(),
        lse.data_ptr(),
        splits,
        rows * heads,
        dim,
        num_threads(),
    )
    return out, total


@BACKEND.implements(vision_ops.vision_attn)
def vision_attn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Blocks of queries against all keys of their image."""
    q, k, v, cu_seqlens = dense(q), dense(k), dense(v), ids(cu_seqlens)
    rows, heads, dim = q.shape
    out = torch.zeros_like(q)  # patches outside every image stay zero
    _kernels.vision_attn(
        out.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        KIND[q.dtype],
        rows,
        heads,
        dim,
        cu_seqlens.data_ptr(),
        cu_seqlens.numel() - 1,
        softmax_scale,
        num_threads(),
    )
    return out
