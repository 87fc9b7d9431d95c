"""Sparse attention with tiles for tcgen05: 64 heads fill the rows of its MMA, and its accumulators are no registers."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.cuda_sm100 import BACKEND
from deepinfer.backends.nvidia import attention as shared
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import PagedCache

_HEADS: Final = 64
_TILE: Final = shared.Tile(heads=_HEADS, keys=32, warps=8, stages=1)
"""A second stage of decoded keys would not fit beside the output, which comes to registers to be scaled anew."""
_SOURCES: Final = (
    "../nvidia/attention.py",
    "../nvidia/records.py",
    "../nvidia/codes.py",
    "../nvidia/launch.py",
    "../nvidia/tensors.py",
)


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
    """See `ops.attention.sparse_attn`; float32 queries take the shared tile."""
    tile = None if shared.is_single(q, window_cache, kv_cache) else _TILE
    return shared.sparse_attn(
        q, window_cache, window_slots, kv_cache, kv_slots, softmax_scale, attn_sink, out=out, tile=tile
    )


def _fills_tile(dims: Dims) -> bool:
    kinds = (dims.get("window_kind"), dims.get("kv_kind"))
    return int(dims.get("heads", 0)) >= _HEADS and "f32" not in kinds


@BACKEND.implements_plan(attention_ops.sparse_attn, when=_fills_tile, priority=10, sources=_SOURCES)
def sparse_attn_tcgen05(dims: Dims, ctx: BindContext) -> Plan:
    """The shared kernel with 64 heads to a program."""
    return KernelPlan(sparse_attn)
