"""The ends of the model: embedding, row selection, stream means and the draft's heads."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.engram import gather_table
from deepinfer.backends.cpu.tensors import KIND, dense, floats, ids, num_threads
from deepinfer.ops import heads as heads_ops


@BACKEND.implements(heads_ops.embedding)
def embedding(weight: Tensor, input_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Rows named by the ids."""
    return gather_table(weight, input_ids, out_dtype)


@BACKEND.implements(heads_ops.gather_rows)
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """A copy, which torch does as well as anyone."""
    return x.index_select(0, rows)


@BACKEND.implements(heads_ops.markov_logits)
def markov_logits(base: Tensor, token_ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
    """A product over the Markov rank, added to the base logits."""
    base, token_ids, embed, head = floats(base), ids(token_ids), dense(embed), dense(head)
    rows, vocabulary = base.shape
    out = torch.empty((rows, vocabulary), dtype=torch.float32)
    _kernels.markov(
        out.data_ptr(),
        base.data_ptr(),
        rows,
        vocabulary,
        token_ids.data_ptr(),
        embed.data_ptr(),
        KIND[embed.dtype],
        embed.shape[0],
        head.data_ptr(),
        KIND[head.dtype],
        embed.shape[1],
        num_threads(),
    )
    return out


@BACKEND.implements(heads_ops.draft_confidence)
def draft_confidence(hidden: Tensor, token_ids: Tensor, embed: Tensor, proj: Tensor, temperature: float) -> Tensor:
    """One dot product per row over the state and the embedding side by side."""
    hidden, token_ids, embed, proj = dense(hidden), ids(token_ids), dense(embed), dense(proj)
    rows, width = hidden.shape
    out = torch.empty((rows,), dtype=torch.float32)
    _kernels.confidence(
        out.data_ptr(),
        hidden.data_ptr(),
        KIND[hidden.dtype],
        rows,
        width,
        token_ids.data_ptr(),
        embed.data_ptr(),
        KIND[embed.dtype],
        embed.shape[0],
        embed.shape[1],
        proj.data_ptr(),
        KIND[proj.dtype],
        temperature,
    )
    return out


@BACKEND.implements(heads_ops.stream_mean)
def stream_mean(h: Tensor) -> Tensor:
    """Streams are added in order."""
    h = dense(h)
    rows, streams, hidden = h.shape
    out = torch.empty((rows, hidden), dtype=h.dtype)
    _kernels.stream_mean(out.data_ptr(), h.data_ptr(), KIND[h.dtype], rows, streams, hidden, num_threads())
    return out
