"""Which drafts are kept: every row draws as if alone, then a request's rows are read up to the first that differs."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.draws import gumbels, philox, request_of, uniform
from deepinfer.backends.nvidia.filters import CUT_BYTES, FindCuts, find_cuts, id_tile, kept_ids, room_for_cuts
from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.sampling import DRAW_BYTES, draw, room
from deepinfer.backends.nvidia.tensors import new_like, packed, rows_of
from deepinfer.ops import verification as verification_ops
from deepinfer.ops.backend import BindContext, Dims
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose
from deepinfer.ops.verification import VerifyMode

_ROW_BYTES = 2 * CUT_BYTES + DRAW_BYTES + 4
"""Scratch per row: cuts of target and draft, what parts of a row found, the token drawn."""
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))


@kernel
def _reject(
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
    BLOCK: tl.constexpr,
) -> None:
    """Where a row judges a draft, its token: the draft, or what replaces it. Other rows keep what they drew."""
    row = tl.program_id(0).to(tl.int64)
    request = request_of(row, cu_seqlens, requests, 128)
    owner = tl.minimum(request, requests - 1).to(tl.int64)
    heat = tl.load(temperature + owner)
    last = row + 1 == tl.load(cu_seqlens + owner + 1)
    draft = tl.load(draft_ids + row)
    judged = (request < requests) & (last == 0) & (draft >= 0) & (heat > 0.0)
    if judged & (tl.load(usables + row) != 0) & (tl.load(draft_usables + row) != 0):
        place = (row - tl.load(cu_seqlens + owner)).to(tl.int32)
        index = (tl.load(output_index + owner) + place).to(tl.uint32)
        choice = tl.load(choices + owner)
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
        accepted = 0
        if draft < ids:
            score = tl.div_rn(tl.load(logits + row * pitch + draft), heat)
            own = tl.where(kept_ids(score, draft, key, limit), tl.div_rn(tl.exp(score - top), total), 0.0)
            score = tl.div_rn(tl.load(draft_logits + row * draft_pitch + draft), heat)
            theirs = tl.div_rn(tl.exp(score - draft_top), draft_total)
            theirs = tl.where(kept_ids(score, draft, draft_key, draft_limit), theirs, 0.0)
            stream = (256 * choice + _ACCEPT).to(tl.uint32)
            word, _, _, _ = philox(none, index, stream, none, seed)
            accepted = ((uniform(word) * theirs) < own).to(tl.int32)
        token = draft
        if accepted == 0:
            stream = (256 * choice + _RESIDUAL).to(tl.uint32)
            best = float("-inf")
            chosen = tl.full((), 0x7FFFFFFF, tl.int32)
            best_score = float("-inf")
            chosen_score = tl.full((), 0x7FFFFFFF, tl.int32)
            for first in range(0, ids, BLOCK):
                other = first + tl.arange(0, BLOCK)
                mask = other < ids
                raw = tl.load(logits + row * pitch + other, mask=mask, other=float("-inf"))
                score = tl.div_rn(raw, heat)
                kept = kept_ids(score, other, key, limit) & mask
                p = tl.where(kept, tl.div_rn(tl.exp(score - top), total), 0.0)
                raw = tl.load(draft_logits + row * draft_pitch + other, mask=mask, other=float("-inf"))
                draft_score = tl.div_rn(raw, heat)
                theirs = tl.div_rn(tl.exp(draft_score - draft_top), draft_total)
                q = tl.where(kept_ids(draft_score, other, draft_key, draft_limit) & mask, theirs, 0.0)
                noise = gumbels(first, index, stream, none, seed, BLOCK)
                more = p > q
                gain = tl.where(more, tl.log(tl.where(more, p - q, 1.0)) + noise, float("-inf"))
                high = tl.max(gain, 0)
                winner = tl.min(tl.where((gain == high) & more, other, 0x7FFFFFFF), 0)
                take = (high > best) | ((high == best) & (winner < chosen))
                chosen = tl.where(take, winner, chosen)
                best = tl.where(take, high, best)
                sums = tl.where(kept, score + noise, float("-inf"))
                high = tl.max(sums, 0)
                winner = tl.min(tl.where((sums == high) & mask, other, 0x7FFFFFFF), 0)
                take = (high > best_score) | ((high == best_score) & (winner < chosen_score))
                chosen_score = tl.where(take, winner, chosen_score)
                best_score = tl.where(take, high, best_score)
            token = tl.where(chosen < ids, chosen, chosen_score)
        tl.store(drawn + row, token)


@kernel
def _emit(
    num_emitted: tl.tensor,
    tokens: tl.tensor,
    drawn: tl.tensor,
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
        keys = (packed(seeds), packed(output_index), packed(choice), None)
        space = room(scratch, rows * _ROW_BYTES, device)
        drawn = space[: 4 * rows].view(torch.int32)
        rest = space[4 * rows :]
        draw(drawn, flat, filters, keys, int(Purpose.TARGET), rest, bounds, find=find)
        if mode == "rejection" and draft_logits is not None:
            theirs = rows_of(draft_logits)
            own_cuts = room_for_cuts(rows, rest)
            draft_cuts = room_for_cuts(rows, rest[rows * (CUT_BYTES + DRAW_BYTES) :])
            find(own_cuts, flat, *filters, bounds, want_total=True)
            find(draft_cuts, theirs, *filters, bounds, want_total=True)
            _reject(
                (rows,),
                drawn,
                flat,
                theirs,
                drafts,
                bounds,
                filters[0],
                *keys[:3],
                *own_cuts,
                *draft_cuts,
                flat.stride(0),
                theirs.stride(0),
                ids,
                requests,
                BLOCK=min(id_tile(ids), 1024),
            )
        _emit((requests,), num_emitted, tokens, drawn, drafts, bounds, num_warps=1)
    else:
        num_emitted.zero_()
    _clear_tail((-(-rows // 256),), tokens, bounds, requests, rows, BLOCK=256)
    return num_emitted, tokens
