"""Correcting a planned step on the device, once the step before it is known."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import ends
from deepinfer.ops.spec import EXACT, define_op


@define_op(
    mutates=("input_ids", "positions", "seq_lens", "window_slots", "ratio_slots"),
    tolerance=EXACT,
    determinism="D2",
    cases=ends.advance_step_cases,
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
