"""Engram: hashed n-gram rows from very large tables, gated into the residual streams.

Source: Engram of DeepSeek-V4.1-Flash (model specification, section 11).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import trunk
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import QTensor
from deepinfer.ops.numeric import accumulate, rounded
from deepinfer.ops.quant import dequantize
from deepinfer.ops.results import like
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_rows


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=trunk.engram_ngrams_cases,
    dims={"n": "history:1"},
    touches={"token_map": at_rows("input_ids", "history", lambda a: torch.tensor([a.pad_token_id]))},
    results=lambda new, a: new((a.input_ids.shape[0], a.history.shape[1] + 1), torch.int32),
)
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
    """Compressed ids of each row's token and of those before it.

    Args:
        input_ids: [T] int32.
        row_to_seq: [T] int32.
        cu_seqlens_q: [S + 1] int32.
        history: [S, N - 1] int32: column k is the token k + 1 places before the sequence's first row, -1 for none.
        token_map: [V] int32, token id to compressed id.
        pad_token_id: token whose compressed id stands where there is none.
        blocked: [T] bool, rows inside an image, or None. A blocked place blocks every older one.
        history_blocked: [S, N - 1] bool, or None.

    Returns:
        [T, N] int32; column k is the compressed id of the token k places back.
    """
    num_rows, depth = input_ids.shape[0], history.shape[1] + 1
    row = torch.arange(num_rows, device=input_ids.device)
    seq = row_to_seq.long()
    inside = row - cu_seqlens_q.long()[seq]
    pad = token_map[pad_token_id]
    open_ = torch.ones(num_rows, dtype=torch.bool, device=input_ids.device)
    columns = []
    for back in range(depth):
        here = inside >= back
        older = (back - 1 - inside).clamp(0, max(depth - 2, 0))
        token = input_ids[(row - back).clamp(min=0)]
        shut = blocked[(row - back).clamp(min=0)] if blocked is not None else torch.zeros_like(open_)
        if depth > 1:
            token = torch.where(here, token, history[seq, older])
            before = torch.zeros_like(shut) if history_blocked is None else history_blocked[seq, older]
            shut = torch.where(here, shut, before)
        open_ = open_ & (token >= 0) & ~shut
        columns.append(torch.where(open_, token_map[token.clamp(min=0).long()], pad))
    return torch.stack(columns, 1).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=trunk.engram_hash_cases,
    dims={"n": "ngrams:1"},
    rules=Rules(row_axis=1),
    results=lambda new, a: new((a.primes.shape[0], a.ngrams.shape[0], a.primes.shape[1]), torch.int32),
)
def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of each token's n-grams, for every Engram layer.

    Args:
        ngrams: [T, N] int32 compressed ids, newest first.
        multipliers: [L, N] int64.
        primes: [L, (N - 1) * heads] int64, n-major.
        offsets: [L, (N - 1) * heads] int64, running sums of the primes.

    Returns:
        [L, T, (N - 1) * heads] int32. Products wrap in 64 bits.
    """
    depth = ngrams.shape[1]
    heads = primes.shape[1] // (depth - 1)
    products = ngrams.long()[None] * multipliers[:, None]
    mixed = products[..., 0]
    rows = []
    for n in range(1, depth):
        mixed = mixed ^ products[..., n]
        part = slice((n - 1) * heads, n * heads)
        rows.append(torch.remainder(mixed[..., None], primes[:, None, part]) + offsets[:, None, part])
    return torch.cat(rows, -1).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=trunk.engram_fetch_cases,
    dims={"width": "table:1"},
    rules=Rules(host=("table",)),
    touches={"table": at_rows("rows")},
    results=lambda new, a: new((a.rows.shape[0], a.rows.shape[1] * a.table.shape[1]), a.out_dtype),
)
def engram_fetch(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Gather table rows, dequantise and lay them side by side.

    Args:
        table: [R, W] plain or mxfp8; may be a memory-mapped host tensor.
        rows: [T, C] int32.
        out_dtype: bfloat16 or float32. Rows are rounded to bfloat16 only when it is bfloat16 (exact for mxfp8).

    Returns:
        [T, C * W] of `out_dtype`.
    """
    index = rows.long().flatten()
    if isinstance(table, QTensor):
        picked = QTensor(table.data[index.to(table.device)], table.scale[index.to(table.device)], table.fmt)
        values = dequantize(picked, out_dtype)
    else:
        values = table[index.to(table.device)].to(out_dtype)
    return values.to(rows.device).reshape(rows.shape[0], rows.shape[1] * values.shape[1])


@define_op(
    tolerance=Tolerance(2**-7, 1e-5, single=(1e-5, 1e-5), why="fp32 statistics and gate, one bf16 rounding"),
    determinism="D2",
    cases=trunk.engram_gate_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=like("h"),
)
def engram_gate(
    h: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, blocked: Tensor | None = None
) -> Tensor:
    """Add the gated value to every stream.

    The gate of stream i is `sigmoid(sign(d) sqrt(max(|d|, 1e-6)))` with d the scaled, normalised product of stream and
    key; the sign of zero is its sign bit.

    Args:
        h: [T, M, H].
        kv: [T, (M + 1) * H]: M keys, then the value.
        q_weight: [M, H].
        k_weight: [M, H].
        eps: of both norms.
        blocked: [T] bool rows whose gate is 0 (inside an image), or None.

    Returns:
        [T, M, H] like `h`.
    """
    num_rows, streams, hidden = h.shape
    wide = accumulate(h)
    keys, value = kv.to(wide.dtype).split((streams * hidden, hidden), dim=1)
    keys = keys.reshape(num_rows, streams, hidden)
    weight = q_weight.to(wide.dtype) * k_weight.to(wide.dtype)
    dot = (wide * weight * keys).sum(-1)
    dot = dot * (wide.square().mean(-1) + eps).rsqrt() * (keys.square().mean(-1) + eps).rsqrt() / hidden**0.5
    gate = rounded(torch.sigmoid, torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    if blocked is not None:
        gate = torch.where(blocked[:, None], 0.0, gate)
    out: Tensor = wide + gate[..., None] * value[:, None]
    return out.to(h.dtype)
