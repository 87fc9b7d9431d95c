"""Index lists and ids: windows, dense positions, lengths, slots, draft rows, corrections of a plan. Integers only."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import index as index_ops
from deepinfer.ops import step as step_ops

_SOURCES: Final = (*SOURCES, "lists.py", "kernels/generated/lists.asc")
_LINES: Final = 16
"""Rows that a core works on at a time (`tiles/common.py`)."""
_FLAT: Final = 512
"""Entries of a list that a core works on at a time."""


def _by_row(name: str, rows: int, width: int, /, **arguments: object) -> None:
    if width:
        family("lists")[name](tasks_of(rows, _LINES), rows=rows, **arguments)


def _by_entry(name: str, count: int, /, **arguments: object) -> None:
    family("lists")[name](tasks_of(count, _FLAT), count=count, **arguments)


@implements(index_ops.build_swa_index, sources=_SOURCES)
def build_swa_index(
    positions: Tensor,
    row_to_seq: Tensor,
    window_tables: Tensor,
    window_first_page: Tensor,
    window_page: int,
    window: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A warp per row."""
    rows, tables = positions.shape[0], packed(window_tables)
    out = new_like(out, (rows, window), torch.int32, positions.device)
    _by_row(
        "window_index",
        rows,
        window,
        positions=packed(positions),
        row_to_seq=packed(row_to_seq),
        tables=tables,
        first_pages=packed(window_first_page),
        out=out,
        window=window,
        page_size=window_page,
        num_pages=tables.shape[1],
        table_pitch=tables.stride(0),
    )
    return out


@implements(index_ops.clip_window, sources=_SOURCES)
def clip_window(indices: Tensor, positions: Tensor, row_to_seq: Tensor, starts: Tensor, *, out: None = None) -> None:
    """Stores of -1 alone; what stays is not touched."""
    rows, window = indices.shape
    _by_row(
        "clip_window",
        rows,
        window,
        indices=indices,
        positions=packed(positions),
        row_to_seq=packed(row_to_seq),
        starts=packed(starts),
        window=window,
        pitch=indices.stride(0),
        stride=indices.stride(1),
    )


@implements(index_ops.build_dense_index, sources=_SOURCES)
def build_dense_index(visible_lens: Tensor, num_columns: int, *, out: Tensor | None = None) -> Tensor:
    """A warp per row."""
    rows = visible_lens.shape[0]
    out = new_like(out, (rows, num_columns), torch.int32, visible_lens.device)
    _by_row("dense_index", rows, num_columns, visible=packed(visible_lens), out=out, columns=num_columns)
    return out


@implements(index_ops.logical_to_slot, sources=_SOURCES)
def logical_to_slot(
    indices: Tensor, block_size: int, block_table: Tensor, row_to_seq: Tensor, *, out: None = None
) -> None:
    """In place; -1 is not touched."""
    rows, columns = indices.shape
    tables = packed(block_table)
    _by_row(
        "slots_of",
        rows,
        columns,
        indices=indices,
        tables=tables,
        row_to_seq=packed(row_to_seq),
        columns=columns,
        block_size=block_size,
        num_blocks=tables.shape[1],
        table_pitch=tables.stride(0),
        pitch=indices.stride(0),
        stride=indices.stride(1),
    )


@implements(index_ops.blocks_to_positions, sources=_SOURCES)
def blocks_to_positions(indices: Tensor, blocks: Tensor, block: int, *, out: Tensor | None = None) -> Tensor:
    """A look-up and a product."""
    rows, columns = indices.shape
    out = new_like(out, (rows, columns), torch.int32, indices.device)
    _by_row(
        "block_positions",
        rows,
        columns,
        indices=packed(indices),
        blocks=packed(blocks),
        out=out,
        columns=columns,
        num_blocks=blocks.shape[1],
        block=block,
    )
    return out


@implements(index_ops.visible_lens, sources=_SOURCES)
def visible_lens(positions: Tensor, ratio: int, *, out: Tensor | None = None) -> Tensor:
    """One division."""
    out = new_like(out, tuple(positions.shape), torch.int32, positions.device)
    _by_entry("groups_before", positions.shape[0], positions=packed(positions), out=out, ratio=ratio)
    return out


@implements(index_ops.uniform_lens, sources=_SOURCES)
def uniform_lens(like: Tensor, value: int, *, out: Tensor | None = None) -> Tensor:
    """One store."""
    out = new_like(out, (like.shape[0],), torch.int32, like.device)
    _by_entry("fill_ids", like.shape[0], out=out, value=value)
    return out


@implements(heads_ops.known_ids, sources=_SOURCES)
def known_ids(token_ids: Tensor, fallback: int, *, out: Tensor | None = None) -> Tensor:
    """One comparison."""
    out = new_like(out, tuple(token_ids.shape), torch.int32, token_ids.device)
    _by_entry("known_ids", token_ids.shape[0], ids=packed(token_ids), out=out, fallback=fallback)
    return out


@implements(heads_ops.draft_rows, sources=_SOURCES)
def draft_rows(
    anchor_ids: Tensor,
    anchor_positions: Tensor,
    seqs: Tensor,
    num_tokens: int,
    noise_id: int,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A thread per row makes all six."""
    count, device = anchor_ids.shape[0] * num_tokens, anchor_ids.device
    given = out if out is not None else (None,) * 6
    ids, positions, ends, row_seqs, numbers = (new_like(g, (count,), torch.int32, device) for g in given[:5])
    block = new_like(given[5], (count, num_tokens), torch.int32, device)
    _by_entry(
        "draft_rows",
        count,
        anchor_ids=packed(anchor_ids),
        anchor_positions=packed(anchor_positions),
        seqs=packed(seqs),
        ids=ids,
        positions=positions,
        context_ends=ends,
        row_seqs=row_seqs,
        numbers=numbers,
        block_numbers=block,
        num_tokens=num_tokens,
        noise_id=noise_id,
    )
    return ids, positions, ends, row_seqs, numbers, block


@implements(step_ops.gather_ids, sources=_SOURCES)
def gather_ids(ids: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One look-up; -1 stays."""
    out = new_like(out, tuple(rows.shape), torch.int32, rows.device)
    _by_entry("gather_ids", rows.shape[0], ids=packed(ids), picks=packed(rows), out=out, num_ids=ids.shape[0])
    return out


@implements(step_ops.shift, sources=_SOURCES)
def shift(values: Tensor, amount: int, *, out: Tensor | None = None) -> Tensor:
    """One sum."""
    out = new_like(out, tuple(values.shape), torch.int32, values.device)
    _by_entry("shift_ids", values.shape[0], values=packed(values), out=out, amount=amount)
    return out


@implements(step_ops.last_emitted, sources=_SOURCES)
def last_emitted(tokens: Tensor, starts: Tensor, num_emitted: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One look-up."""
    out = new_like(out, tuple(starts.shape), torch.int32, starts.device)
    _by_entry(
        "last_emitted",
        starts.shape[0],
        tokens=packed(tokens),
        starts=packed(starts),
        emitted=packed(num_emitted),
        out=out,
    )
    return out


@implements(step_ops.rewind, sources=_SOURCES)
def rewind(values: Tensor, previous: Tensor, planned: Tensor, accepted: Tensor, *, out: None = None) -> None:
    """In place; entries that are right already are not touched."""
    if planned.shape[0]:
        _by_entry(
            "rewind",
            values.shape[0],
            values=values,
            previous=packed(previous),
            planned=packed(planned),
            accepted=packed(accepted),
            stride=values.stride(0),
        )
