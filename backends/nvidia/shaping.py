"""Changes to single logits: each step of the contract rounded once, so no multiply and add are fused."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import packed
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops

_FLAT = 256
"""Entries that one program takes."""
_WORDS = 64
"""Mask words that one program takes of a row."""


@kernel
def _bitmask(
    logits: tl.tensor,
    mask: tl.tensor,
    rows: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    mask_pitch: tl.int64,
    ids: tl.int32,
    WORDS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(rows + row).to(tl.int64)
    if chosen >= 0:
        token = tl.program_id(1) * WORDS * 32 + tl.arange(0, WORDS * 32)
        word = tl.load(mask + chosen * mask_pitch + token // 32, mask=token < ids, other=-1)
        forbidden = ((word >> (token % 32)) & 1) == 0
        gone = tl.full((WORDS * 32,), float("-inf"), tl.float32)
        tl.store(logits + row * pitch + token.to(tl.int64) * step, gone, mask=forbidden & (token < ids))


@kernel
def _adjust(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    count: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry, mask=entry < count, other=-1)
    used = row >= 0
    token = tl.load(ids + entry, mask=used, other=0)
    at = logits + row.to(tl.int64) * pitch + token.to(tl.int64) * step
    tl.store(at, tl.load(at, mask=used, other=0.0) + tl.load(values + entry, mask=used, other=0.0), mask=used)


@kernel
def _penalise(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    count: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry, mask=entry < count, other=-1)
    used = row >= 0
    token = tl.load(ids + entry, mask=used, other=0)
    seen = tl.load(counts + entry, mask=used, other=0)
    at = logits + row.to(tl.int64) * pitch + token.to(tl.int64) * step
    x = tl.load(at, mask=used, other=0.0)
    factor = tl.load(repetition + row, mask=used, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = x - tl.load(frequency + row, mask=used, other=0.0) * seen.to(tl.float32)
    x = x - tl.where(seen > 0, tl.load(presence + row, mask=used, other=0.0), 0.0)
    tl.store(at, x, mask=used)


@KERNELS.implements(sampling_ops.apply_bitmask)
def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor, *, out: None = None) -> None:
    """Stores of -inf alone; rows without a mask are left at once."""
    count, ids = logits.shape
    words = packed(mask)
    _bitmask(
        (count, -(-ids // (32 * _WORDS))),
        logits,
        words,
        packed(rows),
        logits.stride(0),
        logits.stride(1),
        words.stride(0),
        ids,
        WORDS=_WORDS,
    )


@KERNELS.implements(shaping_ops.adjust_logits)
def adjust_logits(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor, *, out: None = None) -> None:
    """A thread per entry."""
    count = rows.shape[0]
    _adjust(
        (-(-count // _FLAT),),
        logits,
        packed(rows),
        packed(ids),
        packed(values),
        logits.stride(0),
        logits.stride(1),
        count,
        BLOCK=_FLAT,
    )


@KERNELS.implements(shaping_ops.apply_penalties)
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    *,
    out: None = None,
) -> None:
    """A thread per entry."""
    count = rows.shape[0]
    _penalise(
        (-(-count // _FLAT),),
        logits,
        packed(rows),
        packed(ids),
        packed(counts),
        packed(repetition),
        packed(frequency),
        packed(presence),
        logits.stride(0),
        logits.stride(1),
        count,
        BLOCK=_FLAT,
    )
