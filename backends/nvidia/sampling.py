"""From logits to tokens: filters applied, Gumbels added, argmax taken; and logprobs."""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.draws import gumbels, order_key, request_of
from deepinfer.backends.nvidia.filters import CUT_BYTES, FindCuts, find_cuts, id_tile, kept_ids, room_for_cuts
from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, packed, pitch, rows_of
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops.backend import BindContext, Dims

SPLITS: Final = 16
"""Programs that share a row while its best sum is sought; a maximum does not depend on it."""
DRAW_BYTES: Final = SPLITS * 8
"""Bytes per row of what they found."""
SOURCES: Final = ("filters.py", "draws.py")


@kernel
def _apply(
    out: tl.tensor,
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    limits: tl.tensor,
    usables: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < ids
    raw = tl.load(logits + row * pitch + token, mask=mask, other=0.0)
    heat = tl.load(temperature + row)
    score = raw
    if (heat > 0.0) & (tl.load(usables + row) != 0):
        score = tl.div_rn(raw, heat)
        score = tl.where(kept_ids(score, token, tl.load(keys + row), tl.load(limits + row)), score, float("-inf"))
    tl.store(out + row * ids + token, score, mask=mask)


@kernel
def _best_of_part(
    values: tl.tensor,
    tokens: tl.tensor,
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    limits: tl.tensor,
    usables: tl.tensor,
    seeds: tl.tensor,
    output_index: tl.tensor,
    choices: tl.tensor,
    anchors: tl.tensor,
    cu_seqlens: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    requests: tl.int32,
    purpose: tl.int32,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Best sum of score and Gumbel among every PARTS-th tile of a row, and its lowest id."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    owner = row
    place = 0
    if cu_seqlens is not None:
        owner = tl.minimum(request_of(row, cu_seqlens, requests, 128), requests - 1).to(tl.int64)
        place = (row - tl.load(cu_seqlens + owner)).to(tl.int32)
    best = float("-inf")
    chosen = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.load(usables + row) != 0:
        heat = tl.load(temperature + owner)
        drawn = heat > 0.0
        divisor = tl.where(drawn, heat, 1.0)
        key = tl.load(keys + row)
        limit = tl.load(limits + row)
        seed = tl.load(seeds + owner)
        index = (tl.load(output_index + owner) + place).to(tl.uint32)
        stream = (purpose + 256 * tl.load(choices + owner)).to(tl.uint32)
        anchor = tl.zeros((), tl.uint32)
        if anchors is not None:
            anchor = tl.load(anchors + owner).to(tl.uint32)
        for first in range(part * BLOCK, ids, PARTS * BLOCK):
            token = first + tl.arange(0, BLOCK)
            raw = tl.load(logits + row * pitch + token, mask=token < ids, other=float("-inf"))
            score = tl.div_rn(raw, divisor)
            if drawn:
                kept = kept_ids(score, token, key, limit) & (token < ids)
                noise = gumbels(first, index, stream, anchor, seed, BLOCK)
                score = tl.where(kept, score + noise, float("-inf"))
            top = tl.max(score, 0)
            winner = tl.min(tl.where((score == top) & (token < ids), token, 0x7FFFFFFF), 0)
            take = (top > best) | ((top == best) & (winner < chosen))
            chosen = tl.where(take, winner, chosen)
            best = tl.where(take, top, best)
    tl.store(values + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, chosen)


@kernel
def _best(out: tl.tensor, values: tl.tensor, tokens: tl.tensor, usables: tl.tensor, PARTS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * PARTS + part)
    token = tl.load(tokens + row * PARTS + part)
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(value == top, token, 0x7FFFFFFF), 0)
    tl.store(out + row, tl.where(tl.load(usables + row) != 0, chosen, -1))


@kernel
def _logprobs(
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    logits: tl.tensor,
    asked: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    num_asked: tl.int32,
    num_top: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Logprobs and ranks of the ids asked for, and the best ids of a row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * pitch
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, ids, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(start + token, mask=token < ids, other=float("-inf"))
        bad = (x != x) | (x == float("inf"))
        broken += bad.to(tl.int32)
        best = tl.maximum(best, tl.where(bad, float("-inf"), x))
    top = tl.max(best, 0)
    usable = (tl.sum(broken, 0) == 0) & (top > float("-inf"))
    sums = tl.zeros((BLOCK,), tl.float32)
    if usable:
        for first in range(0, ids, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(start + token, mask=token < ids, other=float("-inf"))
            sums += tl.exp(x - top)
    log_total = tl.log(tl.sum(sums, 0))
    for which in range(num_asked):
        token = tl.load(asked + row * num_asked + which)
        known = usable & (token >= 0) & (token < ids)
        logprob = float("nan")
        rank = 0
        if known:
            own = tl.load(start + token)
            better = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, ids, BLOCK):
                other = first + tl.arange(0, BLOCK)
                x = tl.load(start + other, mask=other < ids, other=float("-inf"))
                better += (((x > own) | ((x == own) & (other < token))) & (other < ids)).to(tl.int32)
            rank = tl.sum(better, 0) + 1
            logprob = (own - top) - log_total
        tl.store(logprobs + row * num_asked + which, logprob)
        tl.store(ranks + row * num_asked + which, rank)
    if top_ids is not None:
        # a key above, the id reversed below: one integer that sorts as (score down, id up)
        before = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for which in range(num_top):
            token = -1
            logprob = float("nan")
            if usable:
                lanes = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
                for first in range(0, ids, BLOCK):
                    other = first + tl.arange(0, BLOCK)
                    x = tl.load(start + other, mask=other < ids, other=float("-inf"))
                    packed_key = (order_key(x).to(tl.int64) << 32) + (0x7FFFFFFF - other)
                    ahead = tl.where((packed_key < before) & (other < ids), packed_key, -0x7FFFFFFFFFFFFFFF)
                    lanes = tl.maximum(lanes, ahead)
                before = tl.max(lanes, 0)
                token = (0x7FFFFFFF - (before & 0xFFFFFFFF)).to(tl.int32)
                logprob = (tl.load(start + token) - top) - log_total
            tl.store(top_ids + row * num_top + which, token)
            tl.store(top_logprobs + row * num_top + which, logprob)


def _cut_scratch(dims: Dims, ctx: BindContext) -> int:
    return ctx.max_tokens * CUT_BYTES


def _draw_scratch(dims: Dims, ctx: BindContext) -> int:
    return ctx.max_tokens * (CUT_BYTES + DRAW_BYTES)


def room(scratch: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 of scratch, or new memory for more rows than were planned for."""
    if scratch is not None and scratch.shape[0] >= num_bytes:
        return scratch[:num_bytes]
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@KERNELS.implements(sampling_ops.process_logits, scratch=_cut_scratch, sources=SOURCES)
def process_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    find: FindCuts = find_cuts,
) -> Tensor:
    """`find` cuts every row; then every id is held against its row's cut."""
    rows, ids = logits.shape
    out = new_like(out, (rows, ids), torch.float32, logits.device)
    flat, heats = rows_of(logits), packed(temperature)
    cuts = room_for_cuts(rows, room(scratch, rows * CUT_BYTES, logits.device))
    find(cuts, flat, heats, packed(top_k), packed(top_p), packed(min_p))
    block = id_tile(ids)
    _apply(
        (rows, -(-ids // block)),
        out,
        flat,
        heats,
        cuts.key,
        cuts.limit,
        cuts.usable,
        pitch(flat),
        ids,
        BLOCK=block,
        num_warps=8,
    )
    return out


def draw(
    out: Tensor,
    logits: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor, Tensor, Tensor | None],
    purpose: int,
    scratch: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    find: FindCuts = find_cuts,
) -> None:
    """A token per row of logits, as `sample`; with `cu_seqlens`, filters and keys are one per request.

    Args:
        out: [N] int32, written.
        logits: [N, V] float32 rows.
        filters: temperature, top_k, top_p, min_p, packed.
        keys: seeds, output index, choice and anchor, packed.
        purpose: of the words.
        scratch: at least CUT_BYTES + DRAW_BYTES per row.
        cu_seqlens: rows of each request; row i of one draws for its output index plus i.
        find: what filters keep.
    """
    rows, ids = logits.shape
    cuts = room_for_cuts(rows, scratch)
    found = scratch[rows * CUT_BYTES : rows * (CUT_BYTES + DRAW_BYTES)].view(torch.int32).view(2, rows, SPLITS)
    values, tokens = found[0].view(torch.float32), found[1]
    find(cuts, logits, *filters, cu_seqlens)
    block = min(id_tile(ids), 1024)
    _best_of_part(
        (rows, SPLITS),
        values,
        tokens,
        logits,
        filters[0],
        cuts.key,
        cuts.limit,
        cuts.usable,
        *keys,
        cu_seqlens,
        logits.stride(0),
        ids,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        purpose,
        BLOCK=block,
        PARTS=SPLITS,
    )
    _best((rows,), out, values, tokens, cuts.usable, PARTS=SPLITS, num_warps=1)


@KERNELS.implements(sampling_ops.sample, scratch=_draw_scratch, sources=SOURCES)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int = 0,
    anchor: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    find: FindCuts = find_cuts,
) -> Tensor:
    """Cuts, then sixteen programs per row that draw and compare, then the best of them."""
    rows = logits.shape[0]
    out = new_like(out, (rows,), torch.int32, logits.device)
    draw(
        out,
        rows_of(logits),
        (packed(temperature), packed(top_k), packed(top_p), packed(min_p)),
        (packed(seeds), packed(output_index), packed(choice), None if anchor is None else packed(anchor)),
        int(purpose),
        room(scratch, rows * (CUT_BYTES + DRAW_BYTES), logits.device),
        find=find,
    )
    return out


def _launch_logprobs(
    logits: Tensor,
    asked: Tensor,
    num_asked: int,
    logprob: Tensor,
    rank: Tensor,
    top_ids: Tensor | None,
    top_logprobs: Tensor | None,
    num_top: int,
) -> None:
    flat = rows_of(logits)
    _logprobs(
        (flat.shape[0],),
        logprob,
        rank,
        top_ids,
        top_logprobs,
        flat,
        packed(asked),
        pitch(flat),
        flat.shape[1],
        num_asked,
        num_top,
        BLOCK=id_tile(flat.shape[1]),
        num_warps=8,
    )


_Four = tuple[Tensor, Tensor, Tensor, Tensor]


@KERNELS.implements(sampling_ops.token_logprobs, sources=SOURCES)
def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, *, out: _Four | None = None) -> _Four:
    """A program per row; a pass over it for each of the best ids."""
    rows, device = logits.shape[0], logits.device
    given = out if out is not None else (None,) * 4
    logprob = new_like(given[0], (rows,), torch.float32, device)
    rank = new_like(given[1], (rows,), torch.int32, device)
    top_ids = new_like(given[2], (rows, num_top), torch.int32, device)
    top_logprobs = new_like(given[3], (rows, num_top), torch.float32, device)
    _launch_logprobs(logits, tokens, 1, logprob, rank, top_ids, top_logprobs, num_top)
    return logprob, rank, top_ids, top_logprobs


@KERNELS.implements(shaping_ops.logprobs_of, sources=SOURCES)
def logprobs_of(logits: Tensor, ids: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """A program per row; a pass over it for each id."""
    rows, count = ids.shape
    given = out if out is not None else (None, None)
    logprob = new_like(given[0], (rows, count), torch.float32, logits.device)
    rank = new_like(given[1], (rows, count), torch.int32, logits.device)
    _launch_logprobs(logits, ids, count, logprob, rank, None, None, 0)
    return logprob, rank
