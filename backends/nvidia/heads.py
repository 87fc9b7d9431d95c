"""The draft's sequential head: a rank-limited bias of the logits, and the confidence in a drafted token."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, pitch, rows_of, warps_for
from deepinfer.ops import heads as heads_ops

_ROWS, _IDS, _TERMS = 16, 128, 64
"""Tile of the bias: rows, ids, and terms of a step."""


@kernel
def _markov(
    out: tl.tensor,
    base: tl.tensor,
    token_ids: tl.tensor,
    embed: tl.tensor,
    head: tl.tensor,
    rows: tl.int32,
    ids: tl.int32,
    base_pitch: tl.int64,
    embed_pitch: tl.int64,
    head_pitch: tl.int64,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    TERMS: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * IDS + tl.arange(0, IDS)
    token = tl.load(token_ids + row, mask=row < rows, other=0).to(tl.int64)
    total = tl.zeros((ROWS, IDS), tl.float32)
    for first in range(0, RANK, TERMS):
        term = first + tl.arange(0, TERMS)
        left = tl.load(
            embed + token[:, None] * embed_pitch + term[None, :],
            mask=(row < rows)[:, None] & (term < RANK)[None, :],
            other=0.0,
        )
        right = tl.load(
            head + column.to(tl.int64)[None, :] * head_pitch + term[:, None],
            mask=(column < ids)[None, :] & (term < RANK)[:, None],
            other=0.0,
        )
        if embed.dtype.element_ty == tl.bfloat16 and head.dtype.element_ty == tl.bfloat16:
            total = tl.dot(left, right, total)
        else:
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="tf32x3")
    mask = (row < rows)[:, None] & (column < ids)[None, :]
    at = row.to(tl.int64)[:, None]
    total += tl.load(base + at * base_pitch + column[None, :], mask=mask, other=0.0)
    tl.store(out + at * ids + column[None, :], total, mask=mask)


@kernel
def _confidence(
    out: tl.tensor,
    hidden: tl.tensor,
    token_ids: tl.tensor,
    embed: tl.tensor,
    proj: tl.tensor,
    hidden_pitch: tl.int64,
    embed_pitch: tl.int64,
    temperature: tl.float32,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(hidden + row * hidden_pitch + place, mask=place < HIDDEN, other=0.0).to(tl.float32)
    weight = tl.load(proj + place, mask=place < HIDDEN, other=0.0).to(tl.float32)
    logit = tl.sum(tl.where(place < HIDDEN, x * weight, 0.0), 0)
    term = tl.arange(0, RANK_BLOCK)
    token = tl.load(token_ids + row).to(tl.int64)
    e = tl.load(embed + token * embed_pitch + term, mask=term < RANK, other=0.0).to(tl.float32)
    weight = tl.load(proj + HIDDEN + term, mask=term < RANK, other=0.0).to(tl.float32)
    logit += tl.sum(e * weight, 0)
    logit = tl.div_rn(logit, temperature)
    tl.store(out + row, tl.div_rn(1.0, 1.0 + tl.exp(-logit)))


@KERNELS.implements(heads_ops.markov_logits)
def markov_logits(base: Tensor, token_ids: Tensor, embed: Tensor, head: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A tile of rows and ids per program; the terms of a row come in one order."""
    rows, ids = base.shape
    out = new_like(out, (rows, ids), torch.float32, base.device)
    flat, table, matrix = rows_of(base), rows_of(embed), rows_of(head)
    _markov(
        (-(-ids // _IDS), -(-rows // _ROWS)),
        out,
        flat,
        packed(token_ids),
        table,
        matrix,
        rows,
        ids,
        pitch(flat),
        pitch(table),
        pitch(matrix),
        RANK=head.shape[1],
        ROWS=_ROWS,
        IDS=_IDS,
        TERMS=_TERMS,
        num_stages=3,
    )
    return out


@KERNELS.implements(heads_ops.draft_confidence)
def draft_confidence(
    hidden: Tensor,
    token_ids: Tensor,
    embed: Tensor,
    proj: Tensor,
    temperature: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A program per row."""
    rows, width = hidden.shape
    out = new_like(out, (rows,), torch.float32, hidden.device)
    flat, table, block = rows_of(hidden), rows_of(embed), next_pow2(width)
    _confidence(
        (rows,),
        out,
        flat,
        packed(token_ids),
        table,
        packed(proj),
        pitch(flat),
        pitch(table),
        temperature,
        HIDDEN=width,
        RANK=embed.shape[1],
        BLOCK=block,
        RANK_BLOCK=next_pow2(embed.shape[1]),
        num_warps=warps_for(block),
    )
    return out
