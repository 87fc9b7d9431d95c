"""From logits to tokens: filters applied, Gumbels added, argmax taken; and logprobs."""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.draws import (
    arrive,
    better,
    earliest,
    gumbel,
    gumbel_of,
    order_key,
    request_of,
    rivals,
    score_of,
    words_from,
)
from deepinfer.backends.nvidia.filters import (
    CUT_BYTES,
    LOWEST,
    Cuts,
    FindCuts,
    find_cuts,
    id_tile,
    kept_ids,
    room_for_cuts,
)
from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, pitch, rows_of, vector_width
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops.backend import BindContext, Dims

SPLITS: Final = 16
"""Programs that share a row while its best sum is sought; a maximum does not depend on it."""
DRAW_BYTES: Final = SPLITS * 8
"""Bytes per row of what they found."""
LOG2_E: Final = tl.constexpr(1.4426950408889634)
NO_KEY: Final = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below the key of every id."""
_KEPT_IDS: Final = 8192
"""Ids whose logits a program keeps in registers; their sum is the same in any batch, as this does not depend on it."""
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
    tops: tl.tensor,
    usables: tl.tensor,
    seeds: tl.tensor,
    output_index: tl.tensor,
    choices: tl.tensor,
    anchors: tl.tensor,
    cu_seqlens: tl.tensor,
    verdicts: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    requests: tl.int32,
    purpose: tl.int32,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Best sum of score and Gumbel in one of PARTS stretches of a row, and its lowest id; none where it cannot be best.

    Sums are compared exactly, but few are worked out. The best of score + g is the first of the arrivals
    exp(-(score + g)), in units of exp(-top). A pass over the stretch finds their lower bounds, which take no logarithm,
    and the exact sum of the first. Where that is ahead of all bounds but its own, which it nearly always is, it has
    won; else a second pass works out the sums of tiles with bounds before it.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    start = logits + row * (pitch // VEC) * VEC
    ids = (ids // VEC) * VEC
    span = tl.cdiv(ids, PARTS * BLOCK) * BLOCK
    begin = part * span
    end = tl.minimum(begin + span, ids)
    best = float("-inf")
    chosen = tl.full((), 0x7FFFFFFF, tl.int32)
    wanted = tl.load(usables + row) != 0
    if verdicts is not None:
        wanted = wanted & (tl.load(verdicts + row) == 0)
    if wanted:
        owner = row
        place = 0
        if cu_seqlens is not None:
            owner = tl.minimum(request_of(row, cu_seqlens, requests, 128), requests - 1).to(tl.int64)
            place = (row - tl.load(cu_seqlens + owner)).to(tl.int32)
        heat = tl.load(temperature + owner)
        if heat > 0.0:
            key = tl.load(keys + row)
            limit = tl.load(limits + row)
            top = tl.load(tops + row)
            seed = tl.load(seeds + owner)
            index = (tl.load(output_index + owner) + place).to(tl.uint32)
            stream = (purpose + 256 * tl.load(choices + owner)).to(tl.uint32)
            anchor = tl.zeros((), tl.uint32)
            if anchors is not None:
                anchor = tl.load(anchors + owner).to(tl.uint32)
            # more than eight times what roundings change in a score, its sum or its bound
            slack = 1e-4 + tl.abs(top) * 3.8147e-06
            bounded = (tl.abs(top) < 1048576.0) & (heat > 1e-20)
            # the id with the top score arrives by exp(2.82), its Gumbel being at least -2.82, and no u is below 2^-33
            latest = tl.exp(2.83 + slack)
            furthest = 33.01 + (2.83 + slack) * LOG2_E
            if key > LOWEST:
                furthest = tl.minimum(furthest, (top - score_of(key) + slack) * LOG2_E)
            scale = tl.div_rn(LOG2_E, heat)
            zero = top * LOG2_E
            soonest = tl.zeros((BLOCK,), tl.float32) + latest
            second = soonest
            tile = tl.zeros((BLOCK,), tl.int32)
            for first in range(begin, end, BLOCK):
                raw = tl.load(start + first + lane, mask=first + lane < end, other=float("-inf"))
                behind = tl.fma(raw, -scale, zero)
                if tl.min(behind, 0) <= furthest:
                    bound = earliest(words_from(first, index, stream, anchor, seed, BLOCK)) * tl.exp2(behind)
                    bound = tl.where(behind <= furthest, bound, float("inf"))
                    soonest, second, tile = arrive(soonest, second, tile, bound, first)
            lead = tl.min(soonest, 0)
            if (lead < latest) | (bounded == 0):
                by = float("inf")
                if bounded:
                    winner = tl.min(tl.where(soonest == lead, tile + lane, 0x7FFFFFFF), 0)
                    score = tl.div_rn(tl.load(start + winner), heat)
                    if kept_ids(score, winner, key, limit):
                        chosen = winner
                        best = score + gumbel_of(winner, index, stream, anchor, seed)
                        by = tl.exp(top - best + slack)
                if rivals(soonest, second, by) > 1:
                    best = float("-inf")
                    chosen = tl.full((), 0x7FFFFFFF, tl.int32)
                    for first in range(begin, end, BLOCK):
                        token = first + lane
                        raw = tl.load(start + token, mask=token < end, other=float("-inf"))
                        words = words_from(first, index, stream, anchor, seed, BLOCK)
                        behind = tl.fma(raw, -scale, zero)
                        bound = tl.where(behind <= furthest, earliest(words) * tl.exp2(behind), float("inf"))
                        if tl.min(bound, 0) <= by:
                            score = tl.div_rn(raw, heat)
                            kept = kept_ids(score, token, key, limit) & (token < end)
                            best, chosen = better(best, chosen, score + gumbel(words), token, kept)
        else:
            lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
            tile = tl.full((BLOCK,), 0x7FFFFFFF - BLOCK, tl.int32)
            for first in range(begin, end, BLOCK):
                raw = tl.load(start + first + lane, mask=first + lane < end, other=float("-inf"))
                tile = tl.where(raw > lanes, first, tile)
                lanes = tl.maximum(lanes, raw)
            best = tl.max(lanes, 0)
            chosen = tl.min(tl.where(lanes == best, tile + lane, 0x7FFFFFFF), 0)
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
def _logprobs_of_part(
    tops: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    bests: tl.tensor,
    logits: tl.tensor,
    asked: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    num_asked: tl.int32,
    num_best: tl.int32,
    parts: tl.int32,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """What BLOCK ids of a row add to its logprobs, kept in registers; a top that is NaN marks an unusable row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = logits + row * (pitch // VEC) * VEC
    ids = (ids // VEC) * VEC
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(start + token, mask=token < ids, other=float("-inf"))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    top = tl.max(x, 0)
    total = 0.0
    if (broken == 0) & (top > float("-inf")):
        total = tl.sum(tl.exp(x - top), 0)
    tl.store(tops + row * parts + part, tl.where(broken != 0, float("nan"), top))
    tl.store(sums + row * parts + part, total)
    for which in range(num_asked):
        other = tl.load(asked + row * num_asked + which)
        ahead = 0
        if (other >= 0) & (other < ids):
            own = tl.load(start + other)
            ahead = tl.sum((((x > own) | ((x == own) & (token < other))) & (token < ids)).to(tl.int32), 0)
        tl.store(counts + (row * num_asked + which) * parts + part, ahead)
    # a key above, the id reversed below: one integer that sorts as (score down, id up)
    packed_key = (order_key(x).to(tl.int64) << 32) + (0x7FFFFFFF - token)
    packed_key = tl.where(token < ids, packed_key, NO_KEY)
    for which in range(num_best):
        best = tl.max(packed_key, 0)
        packed_key = tl.where(packed_key == best, NO_KEY, packed_key)
        tl.store(bests + (row * num_best + which) * parts + part, best)


@kernel
def _logprobs(
    logprobs: tl.tensor,
    ranks: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    bests: tl.tensor,
    logits: tl.tensor,
    asked: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    num_asked: tl.int32,
    num_top: tl.int32,
    num_best: tl.int32,
    parts: tl.int32,
    PARTS: tl.constexpr,
) -> None:
    """Logprobs and ranks of the ids asked for, and the best ids of a row, from what its parts found."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < parts
    own_top = tl.load(tops + row * parts + part, mask=there, other=float("-inf"))
    own_sum = tl.load(sums + row * parts + part, mask=there, other=0.0)
    broken = tl.max((own_top != own_top).to(tl.int32), 0)
    top = tl.max(tl.where(own_top == own_top, own_top, float("-inf")), 0)
    usable = (broken == 0) & (top > float("-inf"))
    log_total = tl.log(tl.sum(own_sum * tl.exp(own_top - top), 0))
    for which in range(num_asked):
        token = tl.load(asked + row * num_asked + which)
        known = usable & (token >= 0) & (token < ids)
        logprob = float("nan")
        rank = 0
        if known:
            logprob = (tl.load(logits + row * pitch + token) - top) - log_total
            rank = 1 + tl.sum(tl.load(counts + (row * num_asked + which) * parts + part, mask=there, other=0), 0)
        tl.store(logprobs + row * num_asked + which, logprob)
        tl.store(ranks + row * num_asked + which, rank)
    if top_ids is not None:
        # parts have their best ids in order: the next of the row is the next of one of them
        place = tl.zeros((PARTS,), tl.int32)
        for which in range(num_top):
            mask = there & (place < num_best)
            key = tl.load(bests + (row * num_best + place) * parts + part, mask=mask, other=NO_KEY)
            best = tl.max(key, 0)
            place += (key == best).to(tl.int32)
            logprob = (score_of((best >> 32).to(tl.int32)) - top) - log_total
            token = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
            tl.store(top_ids + row * num_top + which, tl.where(usable, token, -1))
            tl.store(top_logprobs + row * num_top + which, tl.where(usable, logprob, float("nan")))


def _cut_scratch(dims: Dims, ctx: BindContext) -> int:
    return ctx.max_tokens * CUT_BYTES


def _draw_scratch(dims: Dims, ctx: BindContext) -> int:
    return ctx.max_tokens * (CUT_BYTES + DRAW_BYTES)


def draw_tile(ids: int) -> int:
    """Ids of a tile of a draw."""
    return min(id_tile(ids), 1024)


def room_for_parts(rows: int, room: Tensor) -> tuple[Tensor, Tensor]:
    """Best values (float32) and ids (int32) of the parts of rows, [rows, SPLITS] each, in the first of [n] uint8."""
    found = room[: rows * DRAW_BYTES].view(torch.int32).view(2, rows, SPLITS)
    return found[0].view(torch.float32), found[1]


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
    cuts: Cuts,
    temperature: Tensor,
    keys: tuple[Tensor, Tensor, Tensor, Tensor | None],
    purpose: int,
    found: Tensor,
    cu_seqlens: Tensor | None = None,
    verdicts: Tensor | None = None,
) -> None:
    """A token per row of logits, as `sample`; with `cu_seqlens`, temperatures and keys are one per request.

    Args:
        out: [N] int32, written.
        logits: [N, V] float32 rows.
        cuts: of the rows.
        temperature: packed.
        keys: seeds, output index, choice and anchor, packed.
        purpose: of the words.
        found: [n] uint8, at least DRAW_BYTES per row.
        cu_seqlens: rows of each request; row i of one draws for its output index plus i.
        verdicts: [N] int32; rows where it is not 0 draw nothing, and what is written for them means nothing.
    """
    rows, ids = logits.shape
    values, tokens = room_for_parts(rows, found)
    _best_of_part(
        (rows, SPLITS),
        values,
        tokens,
        logits,
        temperature,
        cuts.key,
        cuts.limit,
        cuts.top,
        cuts.usable,
        *keys,
        cu_seqlens,
        verdicts,
        logits.stride(0),
        ids,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        purpose,
        BLOCK=draw_tile(ids),
        PARTS=SPLITS,
        VEC=vector_width(logits.stride(0), ids),
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
    flat, heats = rows_of(logits), packed(temperature)
    space = room(scratch, rows * (CUT_BYTES + DRAW_BYTES), logits.device)
    cuts = room_for_cuts(rows, space)
    find(cuts, flat, heats, packed(top_k), packed(top_p), packed(min_p))
    keys = (packed(seeds), packed(output_index), packed(choice), None if anchor is None else packed(anchor))
    draw(out, flat, cuts, heats, keys, int(purpose), space[rows * CUT_BYTES :])
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
    flat, given = rows_of(logits), packed(asked)
    rows, ids = flat.shape
    block = min(max(next_pow2(ids), 16), _KEPT_IDS)
    parts, num_best = -(-ids // block), min(num_top, block)
    words = torch.empty(rows * parts, 2 + num_asked + 2 * num_best, dtype=torch.int32, device=logits.device).view(-1)
    # the best ids first: they are of eight bytes
    bests, counts, tops, sums = words.split([rows * parts * n for n in (2 * num_best, num_asked, 1, 1)])
    found = (tops.view(torch.float32), sums.view(torch.float32), counts, bests.view(torch.int64))
    _logprobs_of_part(
        (rows, parts),
        *found,
        flat,
        given,
        pitch(flat),
        ids,
        num_asked,
        num_best,
        parts,
        BLOCK=block,
        VEC=vector_width(pitch(flat), ids),
        num_warps=8,
    )
    _logprobs(
        (rows,),
        logprob,
        rank,
        top_ids,
        top_logprobs,
        *found,
        flat,
        given,
        pitch(flat),
        ids,
        num_asked,
        num_top,
        num_best,
        parts,
        PARTS=next_pow2(parts),
        num_warps=1,
    )


_Four = tuple[Tensor, Tensor, Tensor, Tensor]


@KERNELS.implements(sampling_ops.token_logprobs, sources=SOURCES)
def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, *, out: _Four | None = None) -> _Four:
    """Programs that each hold a part of a row, and its best ids; then one per row that puts them together."""
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
    """Programs that each hold a part of a row, and count ids ahead; then one per row that puts them together."""
    rows, count = ids.shape
    given = out if out is not None else (None, None)
    logprob = new_like(given[0], (rows, count), torch.float32, logits.device)
    rank = new_like(given[1], (rows, count), torch.int32, logits.device)
    _launch_logprobs(logits, ids, count, logprob, rank, None, None, 0)
    return logprob, rank
