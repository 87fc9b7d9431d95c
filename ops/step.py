"""Correcting a planned step on the device, once the step before it is known."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import ends, steps
from deepinfer.ops.results import int32_like, nothing
from deepinfer.ops.spec import EXACT, define_op


@define_op(
    mutates=("input_ids", "positions", "seq_lens", "window_slots", "ratio_slots"),
    tolerance=EXACT,
    determinism="D2",
    cases=ends.advance_step_cases,
    results=nothing,
)
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
) -> None:
    """Turn upper bounds into what the step before it really accepted; the host is not asked.

    A sequence that was planned for `planned` new tokens and got `accepted` of them moves back by the difference: its
    positions, lengths, slots and input ids follow. Sequences that did not run in the step before (`previous` = -1) are
    left as the host wrote them.

    Args:
        input_ids: [T] int32. The first row of a sequence takes its last sampled id, the rows after it its drafts.
        positions: [T] int32.
        seq_lens: [S] int32, lengths with this step's rows.
        window_slots: [T] int32.
        ratio_slots: [len(ratios), T] int32, -1 where a row closes no group.
        cu_seqlens_q: [S + 1] int32.
        row_to_seq: [T] int32.
        previous: [S] int32, index of the sequence in the step before, -1 for none.
        planned: [S'] int32, tokens the host assumed each sequence of the step before would get.
        accepted: [S'] int32, tokens it got (at least 1).
        sampled_ids: [S'] int32, the last of them.
        draft_ids: [S', D] int32, drafts made after it.
        block_tables: [S, max_blocks] int32.
        block_size: tokens per block.
        window_tables: [S, max_pages] int32.
        window_first_page: [S] int32.
        window_page: tokens per window page.
        ratios: compress ratios, in the order of `ratio_slots`.
    """
    num_rows = int(cu_seqlens_q[-1])
    if num_rows == 0:
        return
    rows = slice(0, num_rows)
    seq = row_to_seq[rows].long()
    source = previous.long()
    known = source >= 0
    back = torch.where(known, (planned - accepted)[source.clamp(min=0)], 0).int()
    live = known[seq]
    positions[rows] -= back[seq]
    seq_lens[: len(back)] -= back
    place = torch.arange(num_rows, device=input_ids.device) - cu_seqlens_q.long()[seq]
    drafts = draft_ids.shape[1]
    token = sampled_ids[source[seq].clamp(min=0)]
    if drafts:
        drafted = draft_ids[source[seq].clamp(min=0), (place - 1).clamp(0, drafts - 1)]
        token = torch.where(place == 0, token, drafted)
    input_ids[rows] = torch.where(live, token, input_ids[rows])
    position = positions[rows].long()
    column = position // window_page - window_first_page.long()[seq]
    slot = window_tables[seq, column.clamp(0, window_tables.shape[1] - 1)].long() * window_page + position % window_page
    window_slots[rows] = torch.where(live, slot.int(), window_slots[rows])
    for which, ratio in enumerate(ratios):
        per_block = block_size // ratio
        entry = position // ratio
        block = block_tables[seq, (entry // per_block).clamp(max=block_tables.shape[1] - 1)].long()
        closed = torch.where((position + 1) % ratio == 0, block * per_block + entry % per_block, -1).int()
        ratio_slots[which, rows] = torch.where(live, closed, ratio_slots[which, rows])


@define_op(
    mutates=("values",),
    tolerance=EXACT,
    determinism="D2",
    cases=steps.rewind_cases,
    results=nothing,
)
def rewind(values: Tensor, previous: Tensor, planned: Tensor, accepted: Tensor) -> None:
    """Take back what a plan assumed too much: `values -= planned - accepted` of the step before, in place.

    Args:
        values: [R] int32, positions or output indices that the host wrote as upper bounds.
        previous: [R] int32, index into `planned`, -1 for a value that is right already.
        planned: [R'] int32.
        accepted: [R'] int32.
    """
    if values.shape[0] and planned.shape[0]:
        source = previous.long()
        values -= torch.where(source >= 0, (planned - accepted)[source.clamp(min=0)], 0).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=steps.last_emitted_cases,
    results=int32_like("starts"),
)
def last_emitted(tokens: Tensor, starts: Tensor, num_emitted: Tensor) -> Tensor:
    """The newest token of each request: `tokens[starts + num_emitted - 1]`.

    Args:
        tokens: [T] int32, emitted tokens packed as `verify` gives them.
        starts: [R] int32, first entry of each request.
        num_emitted: [R] int32, at least 1.

    Returns:
        [R] int32; -1 where the request's last row had no token.
    """
    return tokens[(starts + num_emitted - 1).long()]


@define_op(
    mutates=("history",),
    tolerance=EXACT,
    determinism="D2",
    cases=steps.advance_history_cases,
    results=nothing,
)
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
) -> None:
    """Fill in the tokens before the first row of each sequence, which the host does not know yet.

    The first row is the newest emitted token of the step before. Behind it stand the other tokens that step emitted,
    then the rows it ran up to the one it drew from, then what was its own history.

    Args:
        history: [S, N - 1] int32, newest first; rows with `previous` = -1 stay.
        previous: [S] int32, index into the requests that drew in the step before.
        tokens: [T'] int32, what they emitted, packed.
        starts: [R'] int32, first emitted token of each.
        num_emitted: [R'] int32.
        last_rows: [R'] int32, the row of the step before whose logits gave the first emitted token.
        last_seqs: [R'] int32, that row's sequence in the step before.
        last_input_ids: [T''] int32, the step before's own ids, corrected.
        last_cu_seqlens_q: [S' + 1] int32.
        last_history: [S', N - 1] int32, corrected.
    """
    if 0 in (history.shape[0], history.shape[1], starts.shape[0]):
        return
    source = previous.long().clamp(min=0)
    emitted, first = num_emitted.long()[source], starts.long()[source]
    row, seq = last_rows.long()[source], last_seqs.long()[source]
    begin = last_cu_seqlens_q.long()[seq]
    for place in range(history.shape[1]):
        among_emitted = emitted - 2 - place
        back = -1 - among_emitted  # rows behind the one that was drawn from
        here = row - back
        older = (back - (row - begin) - 1).clamp(0, history.shape[1] - 1)
        token = torch.where(
            here >= begin, last_input_ids[here.clamp(0, max(last_input_ids.shape[0] - 1, 0))], last_history[seq, older]
        )
        token = torch.where(among_emitted >= 0, tokens[(first + among_emitted.clamp(min=0))], token)
        history[:, place] = torch.where(previous >= 0, token, history[:, place])


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=steps.gather_ids_cases,
    results=int32_like("rows"),
)
def gather_ids(ids: Tensor, rows: Tensor) -> Tensor:
    """Selected entries of [T] int32 by [n] int32; -1 stays -1."""
    if ids.shape[0] == 0:
        return torch.full_like(rows, -1)
    return torch.where(rows >= 0, ids[rows.clamp(min=0).long()], -1).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=steps.shift_cases,
    results=int32_like("values"),
)
def shift(values: Tensor, amount: int) -> Tensor:
    """`values + amount`, [n] int32."""
    return values + amount
