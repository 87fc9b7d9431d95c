"""Ops that only move or add integers, a few hundred at most per step: torch does them as well as anyone.

The lines are the reference's own. They are registered so that the CPU backend stands on its own under `strict`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND
from deepinfer.ops import heads as heads_ops
from deepinfer.ops import step as step_ops


@BACKEND.implements(heads_ops.concat_columns)
def concat_columns(parts: tuple[Tensor, ...]) -> Tensor:
    """One copy."""
    return torch.cat(parts, dim=1)


@BACKEND.implements(heads_ops.draft_rows)
def draft_rows(
    anchor_ids: Tensor, anchor_positions: Tensor, seqs: Tensor, num_tokens: int, noise_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Five rows for each sequence."""
    return heads_ops.draft_rows.reference(anchor_ids, anchor_positions, seqs, num_tokens, noise_id)


@BACKEND.implements(heads_ops.known_ids)
def known_ids(token_ids: Tensor, fallback: int) -> Tensor:
    """One selection."""
    return torch.where(token_ids >= 0, token_ids, fallback).int()


@BACKEND.implements(step_ops.rewind)
def rewind(values: Tensor, previous: Tensor, planned: Tensor, accepted: Tensor) -> None:
    """One subtraction."""
    step_ops.rewind.reference(values, previous, planned, accepted)


@BACKEND.implements(step_ops.last_emitted)
def last_emitted(tokens: Tensor, starts: Tensor, num_emitted: Tensor) -> Tensor:
    """One gather."""
    return tokens[(starts + num_emitted - 1).long()]


@BACKEND.implements(step_ops.advance_history)
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
    """Three columns for each sequence."""
    step_ops.advance_history.reference(
        history,
        previous,
        tokens,
        starts,
        num_emitted,
        last_rows,
        last_seqs,
        last_input_ids,
        last_cu_seqlens_q,
        last_history,
    )


@BACKEND.implements(step_ops.gather_ids)
def gather_ids(ids: Tensor, rows: Tensor) -> Tensor:
    """One gather."""
    return step_ops.gather_ids.reference(ids, rows)


@BACKEND.implements(step_ops.shift)
def shift(values: Tensor, amount: int) -> Tensor:
    """One addition."""
    return values + amount
