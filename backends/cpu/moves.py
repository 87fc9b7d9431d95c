"""Ops that only move or add integers, a few thousand at most per step.

Those that run several times in every step use NumPy on the tensors' own memory: a call of its functions costs a
fraction of one of torch's, and at this size the calls are all that it costs. The others are the reference's own lines,
registered so that the CPU backend stands on its own under `strict`.
"""

from __future__ import annotations

import numpy as np
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
    ids = token_ids.numpy()
    return torch.from_numpy(np.where(ids >= 0, ids, np.int32(fallback)))


@BACKEND.implements(step_ops.rewind)
def rewind(values: Tensor, previous: Tensor, planned: Tensor, accepted: Tensor) -> None:
    """One subtraction."""
    if values.shape[0] and planned.shape[0]:
        source = previous.numpy()
        back = (planned.numpy() - accepted.numpy())[np.maximum(source, 0)]
        back[source < 0] = 0
        behind = values.numpy()
        behind -= back


@BACKEND.implements(step_ops.last_emitted)
def last_emitted(tokens: Tensor, starts: Tensor, num_emitted: Tensor) -> Tensor:
    """One gather."""
    return torch.from_numpy(tokens.numpy()[starts.numpy() + num_emitted.numpy() - 1])


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
    """All columns of all sequences at once, [S, N - 1]."""
    if 0 in (history.shape[0], history.shape[1], starts.shape[0]):
        return
    link = previous.numpy()[:, None]
    source = np.maximum(link, 0)
    row, seq = last_rows.numpy()[source], last_seqs.numpy()[source]
    begin = last_cu_seqlens_q.numpy()[seq]
    columns = history.shape[1]
    among_emitted = num_emitted.numpy()[source] - 2 - np.arange(columns, dtype=np.int32)
    here = row + 1 + among_emitted  # the row that ran the token, where it was not emitted but known before
    older = np.clip(begin - here - 1, 0, columns - 1)
    token = np.where(
        here >= begin,
        last_input_ids.numpy()[np.clip(here, 0, max(last_input_ids.shape[0] - 1, 0))],
        last_history.numpy()[seq, older],
    )
    emitted = tokens.numpy()[starts.numpy()[source] + np.maximum(among_emitted, 0)]
    token = np.where(among_emitted >= 0, emitted, token)
    np.copyto(history.numpy(), token, where=link >= 0)


@BACKEND.implements(step_ops.gather_ids)
def gather_ids(ids: Tensor, rows: Tensor) -> Tensor:
    """One gather."""
    if ids.shape[0] == 0:
        return torch.full_like(rows, -1)
    wanted = rows.numpy()
    found = ids.numpy()[np.maximum(wanted, 0)]
    found[wanted < 0] = -1
    return torch.from_numpy(found)


@BACKEND.implements(step_ops.shift)
def shift(values: Tensor, amount: int) -> Tensor:
    """One addition."""
    return torch.from_numpy(values.numpy() + np.int32(amount))
