"""Sparse attention and dense copies of cache records.

Attention is on the Cube for bfloat16 queries over quantised records; threads take everything else.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import CUBE_CORES, VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import RECORD_KIND, SHORT, new_like, packed, short
from deepinfer.ops import attention as attention_ops
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import PagedCache

_SOURCES: Final = ("kernels/attention.asc",)
_PROGRAM: Final = program("attention.asc")
_ATTENTION: Final = """out!, lse!, q, sink, window, window_slots, compressed, compressed_slots, rows: i64, q_row: i64,
    q_head: i64, window_page: i64, window_pitch: i64, compressed_page: i64, compressed_pitch: i64, heads: i32, dim: i32,
    window_columns: i32, compressed_columns: i32, window_records: i32, compressed_records: i32, window_kind: i32,
    compressed_kind: i32, scale: f32"""
_CUBE: Final = _PROGRAM.kernel("attend_cube", _ATTENTION, "mix")
_THREADS: Final[dict[str, Kernel]] = {name: _PROGRAM.kernel(f"attend_{name}", _ATTENTION) for name in SHORT.values()}
_GATHER: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"gather_records_{name}",
        "out!, cache, slots, rows: i64, page_bytes: i64, records: i32, kind: i32, dim: i32",
    )
    for name in SHORT.values()
}

_CUBE_DIMS: Final = (64, 128, 256, 512)
_CUBE_HEADS: Final = 64
_THREAD_HEADS: Final = 8
_WIDEST: Final = 1024
"""What a tile of keys leaves room for in the unified buffer; `kWidest` of the kernel."""
_GATHER_ROWS: Final = 16


def _fits(dims: Dims) -> bool:
    return bool(dims["dim"] <= _WIDEST)


@implements(attention_ops.sparse_attn, sources=_SOURCES, when=_fits)
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
) -> tuple[Tensor, Tensor]:
    """Keys by tiles in the order of their columns, for a row and up to 64 heads at a time."""
    num_rows, num_heads, dim = q.shape
    o = new_like(out[0] if out else None, (num_rows, num_heads, dim), q.dtype, q.device)
    lse = new_like(out[1] if out else None, (num_rows, num_heads), torch.float32, q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    lists = _list(window_cache, window_slots), _list(kv_cache, kv_slots)
    kinds = {part["kind"] for part in lists if part["columns"]}
    if q.dtype == torch.bfloat16 and dim in _CUBE_DIMS and kinds <= {RECORD_KIND["fp8"], RECORD_KIND["fp4"]}:
        kernel, cores, heads = _CUBE, CUBE_CORES, _CUBE_HEADS
    else:
        kernel, cores, heads = _THREADS[short(q.dtype)], VECTOR_CORES, _THREAD_HEADS
    kernel(
        min(num_rows * -(-num_heads // heads), cores),
        o,
        lse,
        q,
        packed(attn_sink),
        *(part[name] for part in lists for name in ("cache", "slots")),
        num_rows,
        q.stride(0),
        q.stride(1),
        *(part[name] for part in lists for name in ("page", "pitch")),
        num_heads,
        dim,
        *(part[name] for name in ("columns", "records", "kind") for part in lists),
        softmax_scale,
    )
    return o, lse


@implements(kv_ops.kv_gather, sources=_SOURCES)
def kv_gather(cache: PagedCache, slots: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """A thread per value; the product of a code and its scale is exact in float32."""
    dim = cache.format.head_dim
    out = new_like(out, (*slots.shape, dim), dtype, cache.data.device)
    rows = slots.numel()
    _GATHER[short(dtype)](
        min(-(-rows // _GATHER_ROWS), VECTOR_CORES),
        out,
        cache.data,
        packed(slots),
        rows,
        cache.data.stride(0),
        cache.records,
        RECORD_KIND[cache.format.kind],
        dim,
    )
    return out


def _list(cache: PagedCache | None, slots: Tensor | None) -> dict[str, Any]:
    """What a kernel is told about one list of slots; a list without columns names no memory."""
    if cache is None or slots is None or slots.shape[1] == 0:
        return {"cache": None, "slots": None, "page": 0, "pitch": 0, "columns": 0, "records": 1, "kind": 0}
    slots = slots if slots.stride(1) == 1 or slots.shape[1] == 1 else slots.contiguous()
    return {
        "cache": cache.data,
        "slots": slots,
        "page": cache.data.stride(0),
        "pitch": slots.stride(0),
        "columns": slots.shape[1],
        "records": cache.records,
        "kind": RECORD_KIND[cache.format.kind],
    }
