"""The mixing product of hyper-connections: twenty-four logits of a row from all its streams.

It has twenty thousand terms. Their sum is cut in a number of parts that depends on the model's width alone, so a row
has the same bits alone and in any batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import BindContext, Dims

_TILE_ROWS = 64
_TILE_TERMS = 128
_LANE_TERMS = 8
"""Squares that are added before any others: those of a 16-byte load."""
_FEW_ROWS = 512
"""Up to so many rows every tile splits the matrix itself, to the same bits, which costs less than another launch."""
_SPLIT_BLOCK = 1024
"""Matrix elements that one program splits."""
_MAX_PARTS = 32
_PART_TERMS = 512
"""Terms of a part at least, where there are so many."""


@kernel
def _three_terms(split: tl.tensor, fn: tl.tensor, COUNT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """float32 as a sum of three bfloat16 [3, COUNT], the largest first; products of those are exact in float32."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < COUNT
    rest = tl.load(fn + place, mask=mask, other=0.0)
    for i in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(split + i * COUNT + place, part, mask=mask)
        rest = rest - part.to(tl.float32)


@kernel
def _mix_parts(
    parts: tl.tensor,
    h: tl.tensor,
    fn: tl.tensor,
    rows: tl.int32,
    TERMS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    LANE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Products and squares of one part of the terms: [rows, PARTS, COLUMN_BLOCK], squares in column COLUMNS.

    With SPLIT `fn` is in its three terms, so that tiles of both operands go straight to the tensor cores.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.arange(0, COLUMN_BLOCK)
    product = tl.zeros((ROWS, COLUMN_BLOCK), tl.float32)
    squares = tl.zeros((ROWS, STEP // LANE), tl.float32)
    start = h + row.to(tl.int64)[:, None] * TERMS
    for first in range(part * PART, part * PART + PART, STEP):
        term = first + tl.arange(0, STEP)
        s = tl.load(start + term[None, :], mask=(row < rows)[:, None] & (term < TERMS)[None, :], other=0.0)
        live = (column < COLUMNS)[None, :] & (term < TERMS)[:, None]
        weight = fn + column[None, :] * TERMS + term[:, None]
        if SPLIT:
            product = tl.dot(s, tl.load(weight + 2 * COLUMNS * TERMS, mask=live, other=0.0), product)
            product = tl.dot(s, tl.load(weight + COLUMNS * TERMS, mask=live, other=0.0), product)
            product = tl.dot(s, tl.load(weight, mask=live, other=0.0), product)
        elif h.dtype.element_ty == tl.bfloat16:
            whole = tl.load(weight, mask=live, other=0.0)
            high = whole.to(tl.bfloat16)
            rest = whole - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            product = tl.dot(s, (rest - middle.to(tl.float32)).to(tl.bfloat16), product)
            product = tl.dot(s, middle, product)
            product = tl.dot(s, high, product)
        else:
            product = tl.dot(s, tl.load(weight, mask=live, other=0.0), product, input_precision="tf32x3")
        wide = s.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (ROWS, STEP // LANE, LANE)), 2)
    value = tl.where(column[None, :] == COLUMNS, tl.sum(squares, 1)[:, None], product)
    at = parts + (row.to(tl.int64)[:, None] * PARTS + part) * COLUMN_BLOCK + column[None, :]
    tl.store(at, value, mask=(row < rows)[:, None] & (column <= COLUMNS)[None, :])


@kernel
def _mix_sum(
    mix: tl.tensor,
    parts: tl.tensor,
    eps: tl.float32,
    TERMS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
) -> None:
    """The parts in ascending order, and the statistic of the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMN_BLOCK)
    total = tl.zeros((COLUMN_BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):  # loads of all parts are under way before the first is added
        at = parts + (row * PARTS + part) * COLUMN_BLOCK + column
        total += tl.load(at, mask=column <= COLUMNS, other=0.0)
    mean = tl.div_rn(tl.sum(tl.where(column == COLUMNS, total, 0.0), 0), TERMS * 1.0)
    value = total * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(mix + row * COLUMNS + column, value, mask=column < COLUMNS)


def _parts(terms: int) -> tuple[int, int]:
    """How many parts a sum of so many terms has, and terms of a part."""
    parts = max(1, min(_MAX_PARTS, terms // _PART_TERMS))
    steps = -(-terms // (parts * _TILE_TERMS))
    return parts, steps * _TILE_TERMS


def _split_bytes(count: int) -> int:
    """Of a matrix of so many elements in three terms, up to a multiple of 16."""
    return -(-count * 3 * 2 // 16) * 16


def mix_scratch_bytes(dims: Dims, ctx: BindContext) -> int:
    """What a mix needs: sums of parts, and the matrix in its terms."""
    streams, terms = int(dims["streams"]), int(dims["streams"]) * int(dims["hidden"])
    columns = streams * (streams + 2)
    floats = _parts(terms)[0] * max(next_pow2(columns + 1), 16) + columns
    return 4 * floats * ctx.max_tokens + _split_bytes(columns * terms)


def mixing_logits(h: Tensor, fn: Tensor, eps: float, mix: Tensor | None, scratch: Tensor | None) -> Tensor:
    """Mixing logits [T, columns] of packed streams; their memory is `mix`, or scratch."""
    rows, terms, columns = h.shape[0], h.shape[1] * h.shape[2], fn.shape[0]
    parts, part = _parts(terms)
    width = max(next_pow2(columns + 1), 16)
    many = h.dtype == torch.bfloat16 and rows > _FEW_ROWS
    split = _split_bytes(columns * terms) if many else 0
    need = split + 4 * rows * (parts * width + columns)
    if scratch is None or scratch.shape[0] < need:
        scratch = torch.empty(need, dtype=torch.uint8, device=h.device)
    room = scratch[split:need].view(torch.float32)
    if mix is None:
        mix = room[rows * parts * width :].view(rows, columns)
    matrix = packed(fn.float())
    if many:
        matrix, whole = scratch[:split].view(torch.bfloat16), matrix  # three terms of each element, one after another
        count = columns * terms
        _three_terms((-(-count // _SPLIT_BLOCK),), matrix, whole, COUNT=count, BLOCK=_SPLIT_BLOCK)
    common = {"TERMS": terms, "PARTS": parts, "COLUMNS": columns, "COLUMN_BLOCK": width}
    _mix_parts(
        (-(-rows // _TILE_ROWS), parts),
        room,
        h,
        matrix,
        rows,
        TERMS=terms,
        PART=part,
        PARTS=parts,
        COLUMNS=columns,
        COLUMN_BLOCK=width,
        ROWS=_TILE_ROWS,
        STEP=_TILE_TERMS,
        LANE=_LANE_TERMS,
        SPLIT=many,
        num_stages=1,  # with copies under way rows came out wrong now and then on an H200, most of them split
    )
    _mix_sum((rows,), mix, room, eps, **common, num_warps=1)
    return mix


@KERNELS.implements(mhc_ops.mhc_prenorm_mix, scratch=mix_scratch_bytes)
def mhc_prenorm_mix(
    h: Tensor, fn: Tensor, eps: float, *, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """Tensor cores, the matrix as a sum of three, in a fixed number of parts."""
    out = new_like(out, (h.shape[0], fn.shape[0]), torch.float32, h.device)
    return mixing_logits(packed(h), fn, eps, out, scratch)
