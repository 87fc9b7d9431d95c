"""The draft's sequential head: a rank-limited bias of the logits, and the confidence in a drafted token."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import CUBE_CORES, VECTOR_CORES, program
from deepinfer.backends.ascend950.linear import widen
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import SHORT, new_like, packed, rows_of, short
from deepinfer.ops import heads as heads_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.errors import OpArgumentError

_SOURCES: Final = ("kernels/heads.asc", "linear.py", "kernels/products.asc")
_PROGRAM: Final = program("heads.asc")
_MARKOV: Final = {
    name: _PROGRAM.kernel(
        f"markov_logits_{name}",
        "base, tokens, embed, head, out!, rows: i64, ids: i64, base_pitch: i64, row_bytes: i64, embed_pitch: i64, "
        "head_pitch: i64",
        "mix",
    )
    for name in SHORT.values()
}
_CONFIDENCE: Final = {
    (hidden, embed, proj): _PROGRAM.kernel(
        f"draft_confidence_{hidden}_{embed}_{proj}",
        "hidden, tokens, embed, proj, out!, rows: i64, hidden_pitch: i64, embed_pitch: i64, width: i32, rank: i32, "
        "temperature: f32",
    )
    for hidden in SHORT.values()
    for embed in SHORT.values()
    for proj in SHORT.values()
}
_TILE: Final = 128
"""Rows and ids of a tile: `kTileRows` and `kTileIds` of the kernel."""
_MAX_RANK: Final = 256
"""What two tiles of float32 leave room for in L1: `kMaxRowBytes` of the kernel."""
_MAX_HIDDEN: Final = 8192
_MAX_TOKEN: Final = 1024
"""Values of an embedded token that the confidence takes at most: `kMaxRank` of the kernel."""


@implements(heads_ops.markov_logits, sources=_SOURCES, when=lambda dims: bool(dims["rank"] <= _MAX_RANK))
def markov_logits(base: Tensor, token_ids: Tensor, embed: Tensor, head: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One kernel: embedded tokens stay in L1 while tiles of the head pass by, and the base is added on the way out."""
    if embed.dtype != head.dtype:  # the Cube wants both to be float32
        embed, head = (widen(x) if short(x.dtype) == "bf16" else x for x in (embed, head))
    rows, ids = base.shape
    y = new_like(out, (rows, ids), torch.float32, base.device)
    flat, table, matrix = rows_of(base), rows_of(embed), rows_of(head)
    size = table.element_size()
    _MARKOV[short(embed.dtype)](
        min(-(-rows // _TILE) * -(-ids // _TILE), CUBE_CORES),
        flat,
        packed(token_ids),
        table,
        matrix,
        y,
        rows,
        ids,
        flat.stride(0),
        matrix.shape[1] * size,
        table.stride(0) * size,
        matrix.stride(0) * size,
    )
    return y


def _narrow(dims: Dims) -> bool:
    return bool(dims["hidden"] <= _MAX_HIDDEN)


@implements(heads_ops.draft_confidence, sources=_SOURCES, when=_narrow)
def draft_confidence(
    hidden: Tensor,
    token_ids: Tensor,
    embed: Tensor,
    proj: Tensor,
    temperature: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A row and its token in the unified buffer, 64 running sums, one sigmoid."""
    rows, width = hidden.shape
    rank = embed.shape[1]
    if rank > _MAX_TOKEN:
        raise OpArgumentError(f"the kernel takes embeddings of up to {_MAX_TOKEN} values, got {rank}")
    y = new_like(out, (rows,), torch.float32, hidden.device)
    flat, table = rows_of(hidden), rows_of(embed)
    _CONFIDENCE[short(hidden.dtype), short(embed.dtype), short(proj.dtype)](
        min(rows, VECTOR_CORES),
        flat,
        packed(token_ids),
        table,
        packed(proj),
        y,
        rows,
        flat.stride(0),
        table.stride(0),
        width,
        rank,
        temperature,
    )
    return y
