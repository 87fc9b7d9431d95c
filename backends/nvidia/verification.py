"""Which drafts are kept: every row draws as if alone, then a request's rows are read up to the first that differs."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.draws import (
    arrive,
    better,
    earliest,
    gumbel,
    gumbel_of,
    philox,
    request_of,
    rivals,
    uniform,
    words_from,
)
from deepinfer.backends.nvidia.filters import CUT_BYTES, FindCuts, find_cuts, kept_ids, room_for_cuts
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.sampling import DRAW_BYTES, SPLITS, draw, draw_tile, room, room_for_parts
from deepinfer.backends.nvidia.tensors import new_like, packed, rows_of, vector_width
from deepinfer.ops import verification as verification_ops
from deepinfer.ops.backend import BindContext, Dims
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose
from deepinfer.ops.verification import VerifyMode

_ROW_BYTES = 2 * CUT_BYTES + DRAW_BYTES + 8
"""Scratch per row: cuts of target and draft, what parts of a row found, the token drawn, the verdict on its draft."""
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_KEPT = tl.constexpr(1)
_REJECTED = tl.constexpr(2)


@device_function
def _chance(
    raw: tl.tensor,
    token: tl.tensor,
    heat: tl.tensor,
    key: tl.tensor,
    limit: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Probability of ids under a filtered softmax, and whether they are kept."""
    score = tl.div_rn(raw, heat)
    kept = kept_ids(score, token, key, limit)
    return tl.where(kept, tl.div_rn(tl.exp(score - top), total), 0.0), kept


@kernel
def _judge(
    verdicts: tl.tensor,
    logits: tl.tensor,
    draft_logits: tl.tensor,
    draft_ids: tl.tensor,
    cu_seqlens: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    output_index: tl.tensor,
    choices: tl.tensor,
    keys: tl.tensor,
    limits: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    usables: tl.tensor,
    draft_keys: tl.tensor,
    draft_limits: tl.tensor,
    draft_tops: tl.tensor,
    draft_totals: tl.tensor,
    draft_usables: tl.tensor,
    pitch: tl.int64,
    draft_pitch: tl.int64,
    ids: tl.int32,
    requests: tl.int32,
) -> None:
    """Whether a row's draft is kept or rejected; 0 for rows that have none to judge and draw."""
    row = tl.program_id(0).to(tl.int64)
    request = request_of(row, cu_seqlens, requests, 128)
    owner = tl.minimum(request, requests - 1).to(tl.int64)
    heat = tl.load(temperature + owner)
    last = row + 1 == tl.load(cu_seqlens + owner + 1)
    draft = tl.load(draft_ids + row)
    judged = (request < requests) & (last == 0) & (draft >= 0) & (heat > 0.0)
    verdict = 0
    if judged & (tl.load(usables + row) != 0) & (tl.load(draft_usables + row) != 0):
        verdict = _REJECTED
        if draft < ids:
            place = (row - tl.load(cu_seqlens + owner)).to(tl.int32)
            index = (tl.load(output_index + owner) + place).to(tl.uint32)
            stream = (256 * tl.load(choices + owner) + _ACCEPT).to(tl.uint32)
            none = tl.zeros((), tl.uint32)
            word, _, _, _ = philox(none, index, stream, none, tl.load(seeds + owner))
            key, limit = tl.load(keys + row), tl.load(limits + row)
            raw = tl.load(logits + row * pitch + draft)
            own, _ = _chance(raw, draft, heat, key, limit, tl.load(tops + row), tl.load(totals + row))
            key, limit = tl.load(draft_keys + row), tl.load(draft_limits + row)
            raw = tl.load(draft_logits + row * draft_pitch + draft)
            theirs, _ = _chance(raw, draft, heat, key, limit, tl.load(draft_tops + row), tl.load(draft_totals + row))
            verdict = tl.where((uniform(word) * theirs) < own, _KEPT, _REJECTED)
    tl.store(verdicts + row, verdict)


@kernel
def _residual_of_part(
    values: tl.tensor,
    tokens: tl.tensor,
    verdicts: tl.tensor,
    drawn: tl.tensor,
    logits: tl.tensor,
    draft_logits: tl.tensor,
    draft_ids: tl.tensor,
    cu_seqlens: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    output_index: tl.tensor,
    choices: tl.tensor,
    keys: tl.tensor,
    limits: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    draft_keys: tl.tensor,
    draft_limits: tl.tensor,
    draft_tops: tl.tensor,
    draft_totals: tl.tensor,
    pitch: tl.int64,
    draft_pitch: tl.int64,
    ids: tl.int32,
    requests: tl.int32,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Best ln(p - q) + Gumbel in one of PARTS stretches of a row, and its id, where a request's first draft goes.

    As `_best_of_part`, lower bounds of arrivals decide which sums are worked out. A stretch without p > q has the best
    score + Gumbel instead, and its id with all bits inverted: it counts where no stretch has any.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best = float("-inf")
    chosen = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.load(verdicts + row) == _REJECTED:
        owner = tl.minimum(request_of(row, cu_seqlens, requests, 128), requests - 1).to(tl.int64)
        opened = tl.load(cu_seqlens + owner)
        # no one reads what replaces a draft behind the row that ends its request
        reached = True
        for earlier in range(opened, row.to(tl.int32)):
            verdict = tl.load(verdicts + earlier)
            token = tl.load(drawn + earlier)
            same = (verdict == 0) & (token >= 0) & (token == tl.load(draft_ids + earlier))
            reached = reached & ((verdict == _KEPT) | same)
        if reached:
            start = logits + row * (pitch // VEC) * VEC
            draft_start = draft_logits + row * (draft_pitch // VEC) * VEC
            ids = (ids // VEC) * VEC
            span = tl.cdiv(ids, PARTS * BLOCK) * BLOCK
            begin = part * span
            end = tl.minimum(begin + span, ids)
            heat = tl.load(temperature + owner)
            index = (tl.load(output_index + owner) + (row - opened).to(tl.int32)).to(tl.uint32)
            stream = (256 * tl.load(choices + owner) + _RESIDUAL).to(tl.uint32)
            seed = tl.load(seeds + owner)
            none = tl.zeros((), tl.uint32)
            key = tl.load(keys + row)
            limit = tl.load(limits + row)
            top = tl.load(tops + row)
            total = tl.load(totals + row)
            draft_key = tl.load(draft_keys + row)
            draft_limit = tl.load(draft_limits + row)
            draft_top = tl.load(draft_tops + row)
            draft_total = tl.load(draft_totals + row)
            soonest = tl.full((BLOCK,), float("inf"), tl.float32)
            second = soonest
            tile = tl.zeros((BLOCK,), tl.int32)
            for first in range(begin, end, BLOCK):
                token = first + lane
                raw = tl.load(start + token, mask=token < end, other=float("-inf"))
                p, _ = _chance(raw, token, heat, key, limit, top, total)
                if tl.max(p, 0) > 0.0:
                    raw = tl.load(draft_start + token, mask=token < end, other=float("-inf"))
                    q, _ = _chance(raw, token, heat, draft_key, draft_limit, draft_top, draft_total)
                    bound = earliest(words_from(first, index, stream, none, seed, BLOCK))
                    bound = tl.minimum(bound / tl.where(p > q, p - q, 1.0), 3e38)
                    soonest, second, tile = arrive(soonest, second, tile, tl.where(p > q, bound, float("inf")), first)
            lead = tl.min(soonest, 0)
            some = lead < float("inf")
            by = float("inf")
            if some:
                chosen = tl.min(tl.where(soonest == lead, tile + lane, 0x7FFFFFFF), 0)
                p, _ = _chance(tl.load(start + chosen), chosen, heat, key, limit, top, total)
                raw = tl.load(draft_start + chosen)
                q, _ = _chance(raw, chosen, heat, draft_key, draft_limit, draft_top, draft_total)
                best = tl.log(p - q) + gumbel_of(chosen, index, stream, none, seed)
                by = tl.exp(1e-4 - best)
            if rivals(soonest, second, by) > 1:
                best = float("-inf")
                chosen = tl.full((), 0x7FFFFFFF, tl.int32)
                for first in range(begin, end, BLOCK):
                    token = first + lane
                    raw = tl.load(start + token, mask=token < end, other=float("-inf"))
                    p, kept = _chance(raw, token, heat, key, limit, top, total)
                    kept = kept & (token < end)
                    if tl.max(kept.to(tl.int32), 0) != 0:
                        noise = gumbel(words_from(first, index, stream, none, seed, BLOCK))
                        value = tl.div_rn(raw, heat)
                        if some:
                            raw = tl.load(draft_start + token, mask=token < end, other=float("-inf"))
                            q, _ = _chance(raw, token, heat, draft_key, draft_limit, draft_top, draft_total)
                            kept = kept & (p > q)
                            value = tl.log(tl.where(p > q, p - q, 1.0))
                        best, chosen = better(best, chosen, value + noise, token, kept)
                if (some == 0) & (chosen < ids):
                    chosen = ~chosen
    tl.store(values + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, chosen)


@kernel
def _settle(
    drawn: tl.tensor,
    verdicts: tl.tensor,
    draft_ids: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    """The token of a row whose draft was judged: the draft, or the best that parts found in its place."""
    row = tl.program_id(0).to(tl.int64)
    verdict = tl.load(verdicts + row)
    if verdict == _KEPT:
        tl.store(drawn + row, tl.load(draft_ids + row))
    if verdict == _REJECTED:
        part = tl.arange(0, PARTS)
        value = tl.load(values + row * PARTS + part)
        token = tl.load(tokens + row * PARTS + part)
        gained = (token >= 0) & (token < 0x7FFFFFFF)
        none = tl.max(gained.to(tl.int32), 0) == 0
        value = tl.where(gained | none, value, float("-inf"))
        token = tl.where(token < 0, ~token, token)
        tl.store(drawn + row, tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0))


@kernel
def _emit(
    num_emitted: tl.tensor,
    tokens: tl.tensor,
    drawn: tl.tensor,
    verdicts: tl.tensor,
    draft_ids: tl.tensor,
    cu_seqlens: tl.tensor,
) -> None:
    """A request's tokens up to the first that is not its draft."""
    request = tl.program_id(0)
    begin = tl.load(cu_seqlens + request)
    end = tl.load(cu_seqlens + request + 1)
    going = 1
    emitted = 0
    for row in range(begin, end):
        token = tl.load(drawn + row)
        draft = tl.load(draft_ids + row)
        tl.store(tokens + row, tl.where(going != 0, token, -1))
        emitted += going
        same = (token == draft) & (token >= 0) & (row + 1 < end)
        if verdicts is not None:
            same = same & (tl.load(verdicts + row) != _REJECTED)
        going = tl.where(same, going, 0)
    tl.store(num_emitted + request, emitted)


@kernel
def _clear_tail(
    tokens: tl.tensor, cu_seqlens: tl.tensor, requests: tl.int32, rows: tl.int32, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = (row >= tl.load(cu_seqlens + requests)) & (row < rows)
    tl.store(tokens + row, tl.full((BLOCK,), -1, tl.int32), mask=behind)


def _scratch_bytes(dims: Dims, ctx: BindContext) -> int:
    return ctx.max_tokens * _ROW_BYTES


@KERNELS.implements(verification_ops.verify, scratch=_scratch_bytes, sources=("sampling.py", "filters.py", "draws.py"))
def verify(
    logits: Tensor,
    cu_seqlens: Tensor,
    draft_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    mode: VerifyMode = "coupled",
    draft_logits: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
    find: FindCuts = find_cuts,
) -> tuple[Tensor, Tensor]:
    """All rows at once; only the last, small kernel walks through a request.

    Raises:
        OpArgumentError: an unknown mode, or "rejection" without draft logits.
    """
    if mode not in ("coupled", "rejection"):
        raise OpArgumentError(f"verify: mode is {mode!r}; it is 'coupled' or 'rejection'")
    if mode == "rejection" and draft_logits is None:
        raise OpArgumentError("verify: mode 'rejection' needs draft_logits")
    rows, ids = logits.shape
    requests, device = cu_seqlens.shape[0] - 1, logits.device
    given = out if out is not None else (None, None)
    num_emitted = new_like(given[0], (requests,), torch.int32, device)
    tokens = new_like(given[1], (rows,), torch.int32, device)
    bounds, drafts, flat = packed(cu_seqlens), packed(draft_ids), rows_of(logits)
    if requests and rows:
        filters = (packed(temperature), packed(top_k), packed(top_p), packed(min_p))
        keys = (packed(seeds), packed(output_index), packed(choice))
        space = room(scratch, rows * _ROW_BYTES, device)
        drawn, verdict = space[: 8 * rows].view(torch.int32).view(2, rows)
        found = space[8 * rows :]
        cuts = room_for_cuts(rows, found[rows * DRAW_BYTES :])
        draft_cuts = room_for_cuts(rows, found[rows * (DRAW_BYTES + CUT_BYTES) :])
        theirs = rows_of(draft_logits) if mode == "rejection" and draft_logits is not None else None
        verdicts = None if theirs is None else verdict
        find(cuts, flat, *filters, bounds, want_total=theirs is not None)
        if theirs is not None:
            pitches = (flat.stride(0), theirs.stride(0))
            both = (flat, theirs, drafts, bounds, filters[0], *keys)
            find(draft_cuts, theirs, *filters, bounds, want_total=True)
            _judge((rows,), verdict, *both, *cuts, *draft_cuts, *pitches, ids, requests, num_warps=1)
        draw(drawn, flat, cuts, filters[0], (*keys, None), int(Purpose.TARGET), found, bounds, verdicts)
        if theirs is not None:
            parts = room_for_parts(rows, found)
            _residual_of_part(
                (rows, SPLITS),
                *parts,
                verdict,
                drawn,
                *both,
                *cuts[:4],
                *draft_cuts[:4],
                *pitches,
                ids,
                requests,
                BLOCK=draw_tile(ids),
                PARTS=SPLITS,
                VEC=vector_width(*pitches, ids),
            )
            _settle((rows,), drawn, verdict, drafts, *parts, PARTS=SPLITS, num_warps=1)
        _emit((requests,), num_emitted, tokens, drawn, verdicts, drafts, bounds, num_warps=1)
    else:
        num_emitted.zero_()
    _clear_tail((-(-rows // 256),), tokens, bounds, requests, rows, BLOCK=256)
    return num_emitted, tokens
