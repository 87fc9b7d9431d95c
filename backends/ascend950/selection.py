"""Choosing: exact top-k of rows, the best score of each candidate block, experts of tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import SHORT, new_like, packed, rows_of, short
from deepinfer.ops import index as index_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import Dims

_SOURCES: Final = ("kernels/selection.asc",)
_PROGRAM: Final = program("selection.asc")
_TOPK: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(f"topk_select_{name}", "x, lens, out!, rows: i64, pitch: i64, columns: i64, k: i32")
    for name in SHORT.values()
}
_BLOCK_MAX: Final = _PROGRAM.kernel(
    "block_max", "logits, lens, scores!, counts!, rows: i64, pitch: i64, columns: i64, block: i32, stretch: i32"
)
_GATE: Final = _PROGRAM.kernel(
    "moe_gate",
    "logits, bias, image_bias, image_mask, ids!, weights!, rows: i64, pitch: i64, experts: i32, k: i32, batch: i32, "
    "scale: f32",
)
_MAX_K: Final = 8192
"""Columns that are chosen of a row at most: `kMaxK` of the kernel."""
_STRETCH: Final = 16384
"""Columns of a row that one task of `block_max` takes at most: `kStretch` of the kernel."""
_MAX_EXPERTS: Final = 1024
_MAX_CHOICES: Final = 64
_BATCH: Final = 8
"""Rows that a core of the router takes together at most: `kBatch` of the kernel."""


@implements(index_ops.topk_select, sources=_SOURCES, when=lambda dims: bool(dims["k"] <= _MAX_K))
def topk_select(x: Tensor, k: int, lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One core per row: byte histograms of sortable keys find the k-th, and a last pass writes columns in order."""
    y = new_like(out, (x.shape[0], k), torch.int32, x.device)
    flat = rows_of(x)
    rows, columns = flat.shape
    blocks = min(rows, VECTOR_CORES) if k else 0
    _TOPK[short(x.dtype)](blocks, flat, packed(lens), y, rows, flat.stride(0), columns, k)
    return y


@implements(index_ops.block_max, sources=_SOURCES, when=lambda dims: bool(dims["block"] <= _STRETCH))
def block_max(
    logits: Tensor, lens: Tensor, block: int, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Stretches of rows over all cores; maxima of eight are one reduction of the vector unit."""
    rows, columns = logits.shape
    scores = new_like(None if out is None else out[0], (rows, -(-columns // block)), torch.float32, logits.device)
    counts = new_like(None if out is None else out[1], (rows,), torch.int32, logits.device)
    flat = rows_of(logits)
    stretch = _STRETCH // block * block
    tasks = rows * max(1, -(-columns // stretch))
    _BLOCK_MAX(
        min(tasks, VECTOR_CORES), flat, packed(lens), scores, counts, rows, flat.stride(0), columns, block, stretch
    )
    return scores, counts


def _few(dims: Dims) -> bool:
    return bool(dims["experts"] <= _MAX_EXPERTS and dims["k"] <= _MAX_CHOICES)


@implements(moe_ops.moe_gate, sources=_SOURCES, when=_few)
def moe_gate(
    logits: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    image_mask: Tensor | None,
    k: int,
    scale: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Affinities of a row in the unified buffer, k times the next best of them; rows are stored in batches."""
    rows, experts = logits.shape
    k = min(k, experts)
    ids = new_like(None if out is None else out[0], (rows, k), torch.int64, logits.device)
    weights = new_like(None if out is None else out[1], (rows, k), torch.float32, logits.device)
    flat = rows_of(logits)
    images = image_bias is not None and image_mask is not None
    batch = max(1, min(_BATCH, -(-rows // VECTOR_CORES)))
    _GATE(
        min(-(-rows // batch), VECTOR_CORES) if k else 0,
        flat,
        packed(bias),
        packed(image_bias) if images and image_bias is not None else None,
        packed(image_mask) if images and image_mask is not None else None,
        ids,
        weights,
        rows,
        flat.stride(0),
        experts,
        k,
        batch,
        scale,
    )
    return ids, weights
