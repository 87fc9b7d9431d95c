"""Correcting a planned step on the device: integers, a thread per row or sequence."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import packed
from deepinfer.ops import step as step_ops

_PROGRAM: Final = program("step.asc")
_ROWS: Final = _PROGRAM.kernel(
    "advance_rows",
    "input_ids!, positions!, seq_lens!, window_slots!, cu_seqlens, row_to_seq, previous, planned, accepted, "
    "sampled_ids, draft_ids, tables, first_page, rows: i64, input_step: i64, position_step: i64, length_step: i64, "
    "slot_step: i64, num_seqs: i32, drafts: i32, pages: i32, page_size: i32",
)
_GROUPS: Final = _PROGRAM.kernel(
    "close_groups",
    "slots!, positions, cu_seqlens, row_to_seq, previous, tables, rows: i64, slot_step: i64, position_step: i64, "
    "num_seqs: i32, columns: i32, per_block: i32, ratio: i32",
)
_HISTORY: Final = _PROGRAM.kernel(
    "advance_history",
    "history!, previous, tokens, starts, num_emitted, last_rows, last_seqs, last_input_ids, last_cu_seqlens, "
    "last_history, pitch: i64, column_step: i64, num_seqs: i32, depth: i32",
)
_SOURCES: Final = ("step.py", "kernels/step.asc")
_THREADS: Final = 256
"""`kThreads` of the kernels."""


def _blocks(count: int) -> int:
    return min(-(-count // _THREADS), VECTOR_CORES)


@implements(step_ops.advance_step, sources=_SOURCES)
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
    """Rows and lengths, then a launch per ratio that reads the corrected positions."""
    rows, num_seqs = row_to_seq.shape[0], cu_seqlens_q.shape[0] - 1
    cu_seqlens, seqs, before = packed(cu_seqlens_q), packed(row_to_seq), packed(previous)
    windows, tables = packed(window_tables), packed(block_tables)
    _ROWS(
        _blocks(rows),
        input_ids,
        positions,
        seq_lens,
        window_slots,
        cu_seqlens,
        seqs,
        before,
        packed(planned),
        packed(accepted),
        packed(sampled_ids),
        packed(draft_ids),
        windows,
        packed(window_first_page),
        rows,
        input_ids.stride(0),
        positions.stride(0),
        seq_lens.stride(0),
        window_slots.stride(0),
        num_seqs,
        draft_ids.shape[1],
        windows.shape[1],
        window_page,
    )
    for slots, ratio in zip(ratio_slots, ratios, strict=True):
        _GROUPS(
            _blocks(rows),
            slots,
            positions,
            cu_seqlens,
            seqs,
            before,
            tables,
            rows,
            slots.stride(0),
            positions.stride(0),
            num_seqs,
            tables.shape[1],
            block_size // ratio,
            ratio,
        )


@implements(step_ops.advance_history, sources=_SOURCES)
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
    _HISTORY(
        _blocks(num_seqs),
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
        depth,
    )
