"""Index scores of rows against dense keys, stored keys, or stored keys of candidate blocks: one family of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import CUBE_CORES, program
from deepinfer.backends.ascend950.linear import widen
from deepinfer.backends.ascend950.quant import dequantize
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed, short
from deepinfer.ops import index as index_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import PagedCache, QTensor

_SOURCES: Final = (
    "kernels/scores.asc",
    "linear.py",
    "kernels/products.asc",
    "quant.py",
    "kernels/generated/codes.asc",
)
_PROGRAM: Final = program("scores.asc")
_SIGNATURE: Final = (
    "q, q_scale, keys, key_scale, weights, origin, limit, blocks, table, out!, rows: i64, heads: i64, row_bytes: i64, "
    "scale_bytes: i64, columns: i64, tile: i64, group: i64, records: i64, page_bytes: i64, table_columns: i64, "
    "table_pitch: i64, num_blocks: i64, candidate: i64"
)
_SCORES: Final = {
    (kind, weights): _PROGRAM.kernel(f"index_scores_{kind}_{weights}", _SIGNATURE, "mix")
    for kind in ("mxfp4", "f32")
    for weights in ("bf16", "f32")
}
_TILE: Final = {"mxfp4": 256, "f32": 128}
"""Keys of a tile: what the Cube's buffers hold of either kind. Never affects a score."""
_MAX_HEADS: Final = 128
_MAX_DIM: Final = 128
_MAX_GROUP: Final = 8


@dataclass(frozen=True)
class _Keys:
    """Where keys are.

    Attributes:
        kind: "mxfp4" or "f32".
        data: dense rows, or pages.
        scale: of dense rows of codes.
        origin: [T] int32, the first key of each row, or its sequence.
        limit: [T] int32, one past the last key of each row, or how many it sees.
        blocks: [T, B] int32 candidate blocks, or None for all keys.
        candidate: positions of a candidate block.
        table: [S, P] int32 pages, or None for dense rows.
        records: keys of a page.
    """

    kind: str
    data: Tensor
    scale: Tensor | None
    origin: Tensor
    limit: Tensor
    blocks: Tensor | None = None
    candidate: int = 0
    table: Tensor | None = None
    records: int = 0


def _plain(x: Tensor | QTensor) -> Tensor:
    """float32 values in a row."""
    if isinstance(x, QTensor):
        return dequantize(x, torch.float32)
    return widen(packed(x)) if short(x.dtype) == "bf16" else packed(x)


def _launch(q: Tensor | QTensor, keys: _Keys, weights: Tensor, out: Tensor) -> Tensor:
    num_rows, heads, dim = q.shape
    rows = q if keys.kind == "mxfp4" else _plain(q)
    blocks, table = keys.blocks, keys.table
    tile = _TILE[keys.kind]
    group = 1 if blocks is not None else max(1, min(_MAX_GROUP, _MAX_HEADS // heads))
    columns = out.shape[1]
    tasks = -(-num_rows // group) * -(-columns // tile)
    _SCORES[keys.kind, short(weights.dtype)](
        min(tasks, CUBE_CORES),
        packed(rows.data) if isinstance(rows, QTensor) else rows,
        packed(rows.scale) if isinstance(rows, QTensor) else None,
        keys.data,
        keys.scale,
        packed(weights),
        packed(keys.origin),
        packed(keys.limit),
        blocks,
        table,
        out,
        num_rows,
        heads,
        dim // 2 if keys.kind == "mxfp4" else dim * 4,
        dim // 32 if keys.kind == "mxfp4" else 0,
        columns,
        tile,
        group,
        keys.records,
        keys.data.stride(0) if table is not None else 0,
        0 if table is None else table.shape[1],
        0 if table is None else table.stride(0),
        0 if blocks is None else blocks.shape[1],
        keys.candidate,
    )
    return out


def _stored(
    q: Tensor | QTensor,
    cache: PagedCache,
    limit: Tensor,
    blocks: Tensor | None,
    candidate: int,
    table: Tensor,
    sequence: Tensor,
) -> _Keys:
    kind = {"index": "mxfp4", "f32": "f32"}.get(cache.format.kind)
    if kind is None or (kind == "mxfp4") != (isinstance(q, QTensor) and q.fmt == "mxfp4"):
        have = q.fmt if isinstance(q, QTensor) else str(q.dtype).removeprefix("torch.")
        raise OpArgumentError(
            f"no kernel scores {have} queries against {cache.format.tag} records: index records take mxfp4 queries, "
            "and f32 records plain ones"
        )
    chosen = None if blocks is None else packed(blocks)
    return _Keys(kind, cache.data, None, sequence, limit, chosen, candidate, packed(table), cache.records)


def _fits(dims: Dims) -> bool:
    return bool(dims["heads"] <= _MAX_HEADS and dims["dim"] <= _MAX_DIM)


@implements(index_ops.index_logits_paged, sources=_SOURCES, when=_fits)
def index_logits_paged(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
    num_columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Neighbouring rows of one sequence read its keys once; what no row of a tile sees is filled without products."""
    y = new_like(out, (q.shape[0], num_columns), torch.float32, weights.device)
    return _launch(q, _stored(q, cache, visible, None, 0, block_table, row_to_seq), weights, y)


@implements(index_ops.index_logits_blocks, sources=_SOURCES, when=_fits)
def index_logits_blocks(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor,
    candidate_block: int,
    block_table: Tensor,
    row_to_seq: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same kernel over the columns of candidate blocks, so the bits are those of the paged scores."""
    num_columns = blocks.shape[1] * candidate_block
    y = new_like(out, (q.shape[0], num_columns), torch.float32, weights.device)
    keys = _stored(q, cache, visible, blocks, candidate_block, block_table, row_to_seq)
    return _launch(q, keys, weights, y)


@implements(index_ops.index_logits_ragged, sources=_SOURCES, when=_fits, capturable=False)
def index_logits_ragged(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The width of the result depends on the lengths, which the host reads. Unequal formats are scored as float32."""
    num_columns = max(int((ends - starts).max()), 0) if len(starts) else 0
    y = new_like(out, (q.shape[0], num_columns), torch.float32, weights.device)
    if isinstance(q, QTensor) and isinstance(k, QTensor) and q.fmt == k.fmt == "mxfp4":
        keys = _Keys("mxfp4", packed(k.data), packed(k.scale), starts, ends)
    else:
        keys = _Keys("f32", _plain(k), None, starts, ends)
    return _launch(q, keys, weights, y)
