"""Engram: n-grams, hashes, table rows and the gate."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, address, dense, ids, num_threads, operand
from deepinfer.ops import engram as engram_ops
from deepinfer.ops.formats import QTensor


def gather_table(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Rows of a stored table [R, W] as [*rows.shape, W] of `out_dtype`; only the rows named are read."""
    data, scale, kind = operand(table)
    rows = ids(rows)
    num_rows, width = table.shape
    out = torch.empty((*rows.shape, width), dtype=out_dtype)
    _kernels.gather_table(
        out.data_ptr(),
        KIND[out_dtype],
        data.data_ptr(),
        address(scale),
        kind,
        num_rows,
        width,
        rows.data_ptr(),
        rows.numel(),
        num_threads(),
    )
    return out


@BACKEND.implements(engram_ops.engram_ngrams)
def engram_ngrams(
    input_ids: Tensor,
    row_to_seq: Tensor,
    cu_seqlens_q: Tensor,
    history: Tensor,
    token_map: Tensor,
    pad_token_id: int,
    blocked: Tensor | None,
    history_blocked: Tensor | None,
) -> Tensor:
    """One pass per row, newest place first."""
    input_ids, row_to_seq, cu_seqlens_q = ids(input_ids), ids(row_to_seq), ids(cu_seqlens_q)
    history, token_map = ids(history), ids(token_map)
    if blocked is not None:
        blocked = dense(blocked)
    if history_blocked is not None:
        history_blocked = dense(history_blocked)
    rows, depth = input_ids.shape[0], history.shape[1] + 1
    out = torch.empty((rows, depth), dtype=torch.int32)
    _kernels.engram_ngrams(
        out.data_ptr(),
        rows,
        depth,
        input_ids.data_ptr(),
        row_to_seq.data_ptr(),
        cu_seqlens_q.data_ptr(),
        history.shape[0],
        history.data_ptr(),
        token_map.data_ptr(),
        token_map.shape[0],
        pad_token_id,
        address(blocked),
        address(history_blocked),
    )
    return out


@BACKEND.implements(engram_ops.engram_hash)
def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Products wrap in 64 bits; remainders are not negative."""
    ngrams, multipliers, primes, offsets = ids(ngrams), dense(multipliers), dense(primes), dense(offsets)
    rows, depth = ngrams.shape
    layers, columns = primes.shape
    out = torch.empty((layers, rows, columns), dtype=torch.int32)
    _kernels.engram_hash(
        out.data_ptr(),
        layers,
        rows,
        depth,
        columns // (depth - 1),
        ngrams.data_ptr(),
        multipliers.data_ptr(),
        primes.data_ptr(),
        offsets.data_ptr(),
        num_threads(),
    )
    return out


@BACKEND.implements(engram_ops.engram_fetch)
def engram_fetch(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Touches the pages of the rows named and no others, so a memory-mapped table stays on disk."""
    return gather_table(table, rows, out_dtype).view(rows.shape[0], rows.shape[1] * table.shape[1])


@BACKEND.implements(engram_ops.engram_gate)
def engram_gate(
    h: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, blocked: Tensor | None = None
) -> Tensor:
    """Three sums per stream, then one pass that adds the value."""
    h, kv, q_weight, k_weight = dense(h), dense(kv), dense(q_weight), dense(k_weight)
    if blocked is not None:
        blocked = dense(blocked)
    rows, streams, hidden = h.shape
    out = torch.empty(h.shape, dtype=h.dtype)
    _kernels.engram_gate(
        out.data_ptr(),
        h.data_ptr(),
        KIND[h.dtype],
        rows,
        streams,
        hidden,
        kv.data_ptr(),
        KIND[kv.dtype],
        q_weight.data_ptr(),
        KIND[q_weight.dtype],
        k_weight.data_ptr(),
        KIND[k_weight.dtype],
        eps,
        address(blocked),
        num_threads(),
    )
    return out
