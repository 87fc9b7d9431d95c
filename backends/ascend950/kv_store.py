"""Storing cache records: norm, rotation, codes and both parts of the record in one pass over a row."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import RECORD_KIND, SHORT, WEIGHT_KIND, new_like, packed, rows_of, short
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import PagedCache

_PROGRAM: Final = program("kv_store.asc")
_STORE: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"store_records_{name}",
        "x, weight, positions, table, slots, normed!, data!, rows: i64, pitch: i64, page_bytes: i64, width: i32, "
        "pairs: i32, records: i32, kind: i32, ratio: i32, weight_kind: i32, eps: f32",
    )
    for name in SHORT.values()
}
_SOURCES: Final = ("kv_store.py", "kernels/kv_store.asc")
_MAX_WIDTH: Final = 1024
"""`kMaxWidth` of the kernel."""


def _narrow(dims: Dims) -> bool:
    return bool(dims["dim"] <= _MAX_WIDTH)


def _store(
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
    rows = flat.shape[0]
    _STORE[short(x.dtype)](
        min(rows, VECTOR_CORES),
        flat,
        packed(weight),
        packed(positions),
        table,
        packed(slots),
        normed,
        cache.data,
        rows,
        flat.stride(0),
        cache.data.stride(0),
        cache.format.head_dim,
        table.shape[1] // 2,
        cache.records,
        RECORD_KIND[cache.format.kind],
        ratio,
        WEIGHT_KIND[weight.dtype],
        eps,
    )


@implements(kv_ops.kv_norm_rope_store, sources=_SOURCES, when=_narrow)
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
    """A row in two buffers in turn: while one is normed, rotated and coded, the next one arrives."""
    out = new_like(out, tuple(kv.shape), kv.dtype, kv.device)
    _store(out, kv, weight, eps, positions, cos_sin, cache, slots, ratio)
    return out


@implements(kv_ops.index_k_store, sources=_SOURCES, when=_narrow)
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
    """As `kv_norm_rope_store`; a row without a slot is not even read."""
    _store(None, k, weight, eps, positions, cos_sin, cache, slots, ratio)
