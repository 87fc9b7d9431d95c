"""Correcting a planned step."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import ids
from deepinfer.ops import step as step_ops


@BACKEND.implements(step_ops.advance_step)
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
    """One pass over the rows; arrays that cannot be written in place as int32 rows are left to the reference."""
    written = (input_ids, positions, seq_lens, window_slots)
    whole = all(t.dtype is torch.int32 and t.is_contiguous() for t in written)
    if not whole or ratio_slots.dtype is not torch.int32 or (ratio_slots.numel() and ratio_slots.stride(1) != 1):
        step_ops.advance_step(
            input_ids,
            positions,
            seq_lens,
            window_slots,
            ratio_slots,
            cu_seqlens_q,
            row_to_seq,
            previous,
            planned,
            accepted,
            sampled_ids,
            draft_ids,
            block_tables,
            block_size,
            window_tables,
            window_first_page,
            window_page,
            ratios,
        )
        return
    cu_seqlens_q, row_to_seq, previous = ids(cu_seqlens_q), ids(row_to_seq), ids(previous)
    planned, accepted, sampled_ids, draft_ids = ids(planned), ids(accepted), ids(sampled_ids), ids(draft_ids)
    block_tables, window_tables, first_page = ids(block_tables), ids(window_tables), ids(window_first_page)
    numbers = (
        input_ids.shape[0],
        previous.shape[0],
        input_ids.data_ptr(),
        positions.data_ptr(),
        seq_lens.data_ptr(),
        window_slots.data_ptr(),
        ratio_slots.data_ptr(),
        ratio_slots.stride(0),
        cu_seqlens_q.data_ptr(),
        row_to_seq.data_ptr(),
        previous.data_ptr(),
        planned.shape[0],
        planned.data_ptr(),
        accepted.data_ptr(),
        sampled_ids.data_ptr(),
        draft_ids.data_ptr(),
        draft_ids.shape[1],
        block_tables.data_ptr(),
        block_tables.shape[1],
        block_size,
        window_tables.data_ptr(),
        window_tables.shape[1],
        first_page.data_ptr(),
        window_page,
    )
    _kernels.advance_step(numbers, tuple(ratios))
