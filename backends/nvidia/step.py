"""Correcting a planned step on the device: integers, a thread per row or sequence."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import step as step_ops

_FLAT = 256
"""Values that one program takes."""


def stretches(count: int) -> int:
    """Programs that cover so many values."""
    return -(-count // _FLAT)


@kernel
def _advance(
    input_ids: tl.tensor,
    positions: tl.tensor,
    window_slots: tl.tensor,
    cu_seqlens: tl.tensor,
    row_to_seq: tl.tensor,
    previous: tl.tensor,
    planned: tl.tensor,
    accepted: tl.tensor,
    sampled_ids: tl.tensor,
    draft_ids: tl.tensor,
    window_tables: tl.tensor,
    window_first_page: tl.tensor,
    input_step: tl.int64,
    position_step: tl.int64,
    slot_step: tl.int64,
    table_pitch: tl.int64,
    num_pages: tl.int32,
    window_page: tl.int32,
    num_seqs: tl.int32,
    rows: tl.int32,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows) & (row < tl.load(cu_seqlens + num_seqs))
    seq = tl.load(row_to_seq + row, mask=mask, other=0).to(tl.int64)
    source = tl.load(previous + seq, mask=mask, other=-1)
    live = mask & (source >= 0)
    back = tl.load(planned + source, mask=live, other=0) - tl.load(accepted + source, mask=live, other=0)
    wide = row.to(tl.int64)
    position = tl.load(positions + wide * position_step, mask=live, other=0) - back
    tl.store(positions + wide * position_step, position, mask=live)
    token = tl.load(sampled_ids + source, mask=live, other=0)
    if DRAFTS > 0:
        place = row - tl.load(cu_seqlens + seq, mask=live, other=0)
        draft = tl.minimum(tl.maximum(place - 1, 0), DRAFTS - 1)
        drafted = tl.load(draft_ids + source * DRAFTS + draft, mask=live, other=0)
        token = tl.where(place == 0, token, drafted)
    tl.store(input_ids + wide * input_step, token, mask=live)
    column = position // window_page - tl.load(window_first_page + seq, mask=live, other=0)
    column = tl.minimum(tl.maximum(column, 0), num_pages - 1)
    page = tl.load(window_tables + seq * table_pitch + column, mask=live, other=0)
    tl.store(window_slots + wide * slot_step, page * window_page + position % window_page, mask=live)


@kernel
def _close_groups(
    slots: tl.tensor,
    positions: tl.tensor,
    cu_seqlens: tl.tensor,
    row_to_seq: tl.tensor,
    previous: tl.tensor,
    block_tables: tl.tensor,
    slot_step: tl.int64,
    position_step: tl.int64,
    table_pitch: tl.int64,
    num_blocks: tl.int32,
    per_block: tl.int32,
    ratio: tl.int32,
    num_seqs: tl.int32,
    rows: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows) & (row < tl.load(cu_seqlens + num_seqs))
    seq = tl.load(row_to_seq + row, mask=mask, other=0).to(tl.int64)
    live = mask & (tl.load(previous + seq, mask=mask, other=-1) >= 0)
    wide = row.to(tl.int64)
    position = tl.load(positions + wide * position_step, mask=live, other=0)
    entry = position // ratio
    column = tl.minimum(entry // per_block, num_blocks - 1)
    block = tl.load(block_tables + seq * table_pitch + column, mask=live, other=0)
    slot = tl.where((position + 1) % ratio == 0, block * per_block + entry % per_block, -1)
    tl.store(slots + wide * slot_step, slot, mask=live)


@kernel
def _take_back(
    values: tl.tensor,
    previous: tl.tensor,
    planned: tl.tensor,
    accepted: tl.tensor,
    step: tl.int64,
    count: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(previous + place, mask=place < count, other=-1)
    live = source >= 0
    back = tl.load(planned + source, mask=live, other=0) - tl.load(accepted + source, mask=live, other=0)
    at = values + place.to(tl.int64) * step
    tl.store(at, tl.load(at, mask=live, other=0) - back, mask=live)


@kernel
def _last(
    out: tl.tensor, tokens: tl.tensor, starts: tl.tensor, num_emitted: tl.tensor, count: tl.int32, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    at = tl.load(starts + place, mask=mask, other=0) + tl.load(num_emitted + place, mask=mask, other=1) - 1
    tl.store(out + place, tl.load(tokens + at, mask=mask, other=0), mask=mask)


@kernel
def _history(
    history: tl.tensor,
    previous: tl.tensor,
    tokens: tl.tensor,
    starts: tl.tensor,
    num_emitted: tl.tensor,
    last_rows: tl.tensor,
    last_seqs: tl.tensor,
    last_input_ids: tl.tensor,
    last_cu_seqlens: tl.tensor,
    last_history: tl.tensor,
    pitch: tl.int64,
    step: tl.int64,
    num_seqs: tl.int32,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(previous + seq, mask=seq < num_seqs, other=-1)
    live = source >= 0
    emitted = tl.load(num_emitted + source, mask=live, other=0)
    first = tl.load(starts + source, mask=live, other=0)
    row = tl.load(last_rows + source, mask=live, other=0)
    old = tl.load(last_seqs + source, mask=live, other=0).to(tl.int64)
    begin = tl.load(last_cu_seqlens + old, mask=live, other=0)
    for place in tl.static_range(DEPTH):
        among = emitted - 2 - place
        back = -1 - among
        here = row - back
        older = tl.minimum(tl.maximum(back - (row - begin) - 1, 0), DEPTH - 1)
        token = tl.load(last_input_ids + here, mask=live & (among < 0) & (here >= begin), other=0)
        kept = tl.load(last_history + old * DEPTH + older, mask=live & (among < 0) & (here < begin), other=0)
        token = tl.where(here >= begin, token, kept)
        new = tl.load(tokens + first + among, mask=live & (among >= 0), other=0)
        at = history + seq.to(tl.int64) * pitch + place * step
        tl.store(at, tl.where(among >= 0, new, token), mask=live)


@kernel
def _gather_ids(
    out: tl.tensor, ids: tl.tensor, rows: tl.tensor, num_ids: tl.int32, count: tl.int32, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=-1)
    tl.store(out + place, tl.load(ids + row, mask=(row >= 0) & (num_ids > 0), other=-1), mask=mask)


@kernel
def _shift(out: tl.tensor, values: tl.tensor, amount: tl.int32, count: tl.int32, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(out + place, tl.load(values + place, mask=mask, other=0) + amount, mask=mask)


@kernel
def _known(out: tl.tensor, ids: tl.tensor, fallback: tl.int32, count: tl.int32, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    token = tl.load(ids + place, mask=mask, other=0)
    tl.store(out + place, tl.where(token >= 0, token, fallback), mask=mask)


@kernel
def _draft_rows(
    ids: tl.tensor,
    positions: tl.tensor,
    before: tl.tensor,
    seqs: tl.tensor,
    own: tl.tensor,
    blocks: tl.tensor,
    anchor_ids: tl.tensor,
    anchor_positions: tl.tensor,
    anchor_seqs: tl.tensor,
    noise: tl.int32,
    count: tl.int32,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    anchor = row // TOKENS
    place = row % TOKENS
    token = tl.load(anchor_ids + anchor, mask=mask, other=-1)
    position = tl.load(anchor_positions + anchor, mask=mask, other=0)
    tl.store(ids + row, tl.where((place == 0) & (token >= 0), token, noise), mask=mask)
    tl.store(positions + row, position + place, mask=mask)
    tl.store(before + row, position - 1, mask=mask)
    tl.store(seqs + row, tl.load(anchor_seqs + anchor, mask=mask, other=0), mask=mask)
    tl.store(own + row, row, mask=mask)
    for column in tl.static_range(TOKENS):
        tl.store(blocks + row * TOKENS + column, anchor * TOKENS + column, mask=mask)


@KERNELS.implements(step_ops.advance_step)
def advance_step(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    window_slots: Tensor,
    ratio_slots: Tensor,
    cu_seqlens_q: Tensor,
    row_to_seq: Tensor,
    previous: Tensor,
    planned: Tensor,
    accepted: Tensor,
    sampled_ids: Tensor,
    draft_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
    window_tables: Tensor,
    window_first_page: Tensor,
    window_page: int,
    ratios: tuple[int, ...],
    *,
    out: None = None,
) -> None:
    """Rows, then lengths, then a launch per ratio that reads the corrected positions."""
    rows, num_seqs = row_to_seq.shape[0], cu_seqlens_q.shape[0] - 1
    cu_seqlens, seqs, before = packed(cu_seqlens_q), packed(row_to_seq), packed(previous)
    windows, blocks = packed(window_tables), packed(block_tables)
    plans, counts = packed(planned), packed(accepted)
    _advance(
        (stretches(rows),),
        input_ids,
        positions,
        window_slots,
        cu_seqlens,
        seqs,
        before,
        plans,
        counts,
        packed(sampled_ids),
        packed(draft_ids),
        windows,
        packed(window_first_page),
        input_ids.stride(0),
        positions.stride(0),
        window_slots.stride(0),
        windows.stride(0),
        windows.shape[1],
        window_page,
        num_seqs,
        rows,
        DRAFTS=draft_ids.shape[1],
        BLOCK=_FLAT,
    )
    if rows:
        _take_back((stretches(num_seqs),), seq_lens, before, plans, counts, seq_lens.stride(0), num_seqs, BLOCK=_FLAT)
    for which, ratio in enumerate(ratios):
        slots = ratio_slots[which]
        _close_groups(
            (stretches(rows),),
            slots,
            positions,
            cu_seqlens,
            seqs,
            before,
            blocks,
            slots.stride(0),
            positions.stride(0),
            blocks.stride(0),
            blocks.shape[1],
            block_size // ratio,
            ratio,
            num_seqs,
            rows,
            BLOCK=_FLAT,
        )


@KERNELS.implements(step_ops.rewind)
def rewind(values: Tensor, previous: Tensor, planned: Tensor, accepted: Tensor, *, out: None = None) -> None:
    """One subtraction where there was a step before."""
    count = values.shape[0] if planned.shape[0] else 0
    _take_back(
        (stretches(count),),
        values,
        packed(previous),
        packed(planned),
        packed(accepted),
        values.stride(0),
        count,
        BLOCK=_FLAT,
    )


@KERNELS.implements(step_ops.last_emitted)
def last_emitted(tokens: Tensor, starts: Tensor, num_emitted: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One gather."""
    count = starts.shape[0]
    out = new_like(out, (count,), torch.int32, tokens.device)
    _last((stretches(count),), out, packed(tokens), packed(starts), packed(num_emitted), count, BLOCK=_FLAT)
    return out


@KERNELS.implements(step_ops.advance_history)
def advance_history(
    history: Tensor,
    previous: Tensor,
    tokens: Tensor,
    starts: Tensor,
    num_emitted: Tensor,
    last_rows: Tensor,
    last_seqs: Tensor,
    last_input_ids: Tensor,
    last_cu_seqlens_q: Tensor,
    last_history: Tensor,
    *,
    out: None = None,
) -> None:
    """A thread per sequence fills its columns."""
    num_seqs, depth = history.shape
    if depth == 0 or starts.shape[0] == 0:
        return
    _history(
        (stretches(num_seqs),),
        history,
        packed(previous),
        packed(tokens),
        packed(starts),
        packed(num_emitted),
        packed(last_rows),
        packed(last_seqs),
        packed(last_input_ids),
        packed(last_cu_seqlens_q),
        packed(last_history),
        history.stride(0),
        history.stride(1),
        num_seqs,
        DEPTH=depth,
        BLOCK=_FLAT,
    )


@KERNELS.implements(step_ops.gather_ids)
def gather_ids(ids: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One gather; -1 stays."""
    count = rows.shape[0]
    out = new_like(out, (count,), torch.int32, rows.device)
    _gather_ids((stretches(count),), out, packed(ids), packed(rows), ids.shape[0], count, BLOCK=_FLAT)
    return out


@KERNELS.implements(step_ops.shift)
def shift(values: Tensor, amount: int, *, out: Tensor | None = None) -> Tensor:
    """One addition."""
    count = values.shape[0]
    out = new_like(out, (count,), torch.int32, values.device)
    _shift((stretches(count),), out, packed(values), amount, count, BLOCK=_FLAT)
    return out


@KERNELS.implements(heads_ops.known_ids)
def known_ids(token_ids: Tensor, fallback: int, *, out: Tensor | None = None) -> Tensor:
    """One selection."""
    count = token_ids.shape[0]
    out = new_like(out, (count,), torch.int32, token_ids.device)
    _known((stretches(count),), out, packed(token_ids), fallback, count, BLOCK=_FLAT)
    return out


_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@KERNELS.implements(heads_ops.draft_rows)
def draft_rows(
    anchor_ids: Tensor,
    anchor_positions: Tensor,
    seqs: Tensor,
    num_tokens: int,
    noise_id: int,
    *,
    out: _Six | None = None,
) -> _Six:
    """A thread per row."""
    count, device = anchor_ids.shape[0] * num_tokens, anchor_ids.device
    if out is None:
        lists = [torch.empty(count, dtype=torch.int32, device=device) for _ in range(5)]
        blocks = torch.empty((count, num_tokens), dtype=torch.int32, device=device)
        out = (lists[0], lists[1], lists[2], lists[3], lists[4], blocks)
    _draft_rows(
        (stretches(count),),
        *out,
        packed(anchor_ids),
        packed(anchor_positions),
        packed(seqs),
        noise_id,
        count,
        TOKENS=num_tokens,
        BLOCK=_FLAT,
    )
    return out
