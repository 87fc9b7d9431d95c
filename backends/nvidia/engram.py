"""Engram: n-gram ids and hashes in integers, rows of large tables, and the gate."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import e4m3_value, ue8m0_value
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed, pitch, rows_of, vector_width
from deepinfer.ops import engram as engram_ops
from deepinfer.ops.errors import CaptureError
from deepinfer.ops.formats import QTensor

_ROWS = 64
"""Rows that one program of the integer kernels takes."""
_FETCHED = 8
"""Table rows that a program takes: enough of them on their way to hide that they lie anywhere."""
_GATED = 4
"""Rows of a stream that a program takes at most, with the same weights."""
_GATED_ALONE = 256
"""Rows for each of those before a program takes one more: few rows are spread over all multiprocessors."""


@kernel
def _ngrams(
    out: tl.tensor,
    input_ids: tl.tensor,
    row_to_seq: tl.tensor,
    cu_seqlens: tl.tensor,
    history: tl.tensor,
    token_map: tl.tensor,
    blocked: tl.tensor,
    history_blocked: tl.tensor,
    rows: tl.int32,
    pad_token: tl.int32,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    seq = tl.load(row_to_seq + row, mask=live, other=0).to(tl.int64)
    inside = row - tl.load(cu_seqlens + seq, mask=live, other=0)
    pad = tl.load(token_map + pad_token)
    open_ = live
    for back in tl.static_range(DEPTH):
        here = live & (inside >= back)
        before = live & (inside < back)
        token = tl.load(input_ids + row - back, mask=here, other=-1)
        if blocked is not None:
            open_ = open_ & ((tl.load(blocked + row - back, mask=here, other=0) == 0) | before)
        if DEPTH > 1:
            place = seq * (DEPTH - 1) + back - 1 - inside
            token = tl.where(here, token, tl.load(history + place, mask=before, other=-1))
            if history_blocked is not None:
                open_ = open_ & (tl.load(history_blocked + place, mask=before, other=0) == 0)
        open_ = open_ & (token >= 0)
        value = tl.load(token_map + tl.maximum(token, 0), mask=open_, other=0)
        tl.store(out + row.to(tl.int64) * DEPTH + back, tl.where(open_, value, pad), mask=live)


@kernel
def _hash(
    out: tl.tensor,
    ngrams: tl.tensor,
    multipliers: tl.tensor,
    primes: tl.tensor,
    offsets: tl.tensor,
    rows: tl.int32,
    DEPTH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    layer = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    inside = column < COLUMNS
    live = row < rows
    mixed = tl.load(ngrams + row * DEPTH, mask=live, other=0).to(tl.int64) * tl.load(multipliers + layer * DEPTH)
    chosen = tl.zeros((BLOCK, COLUMN_BLOCK), tl.int64)
    for n in tl.static_range(1, DEPTH):
        gram = tl.load(ngrams + row * DEPTH + n, mask=live, other=0).to(tl.int64)
        mixed = mixed ^ (gram * tl.load(multipliers + layer * DEPTH + n))
        chosen = tl.where(column // HEADS == n - 1, mixed, chosen)
    prime = tl.load(primes + layer * COLUMNS + column, mask=inside, other=1)
    left = chosen % prime
    left = tl.where(left < 0, left + prime, left)
    place = left + tl.load(offsets + layer * COLUMNS + column, mask=inside, other=0)
    tl.store(out + (layer * rows + row) * COLUMNS + column, place.to(tl.int32), mask=live & inside)


@kernel
def _fetch(
    out: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    count: tl.int32,
    data_pitch: tl.int64,
    scale_pitch: tl.int64,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Tiles [rows, groups, 32], so that a scale is loaded once for its group."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = number < count
    row = tl.load(rows + number, mask=live, other=0).to(tl.int64)
    group = tl.arange(0, GROUPS)[None, :]
    place = group[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    mask = live[:, None, None] & (place < WIDTH)
    value = tl.load(data + row[:, None, None] * (data_pitch // VEC) * VEC + place, mask=mask, other=0.0)
    if scale is None:
        value = value.to(tl.float32)
    else:
        factor = tl.load(scale + row[:, None] * scale_pitch + group, mask=live[:, None] & (group * 32 < WIDTH), other=0)
        value = e4m3_value(value) * ue8m0_value(factor)[:, :, None]
    tl.store(out + number.to(tl.int64)[:, None, None] * WIDTH + place, value.to(out.dtype.element_ty), mask=mask)


@device_function
def _part(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, HIDDEN: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """BLOCK values of a row's stream, key and value, from FIRST on."""
    place = FIRST + tl.arange(0, BLOCK)
    mask = place < HIDDEN
    return (
        tl.load(query + place, mask=mask, other=0.0).to(tl.float32),
        tl.load(key + place, mask=mask, other=0.0).to(tl.float32),
        tl.load(value + place, mask=mask, other=0.0).to(tl.float32),
    )


@device_function
def _weight(
    q_weight: tl.tensor, k_weight: tl.tensor, HIDDEN: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Products of a stream's two weights, likewise."""
    place = FIRST + tl.arange(0, BLOCK)
    mask = place < HIDDEN
    weight = tl.load(q_weight + place, mask=mask, other=0.0).to(tl.float32)
    return weight * tl.load(k_weight + place, mask=mask, other=0.0).to(tl.float32)


@kernel
def _add_gated(
    out: tl.tensor,
    h: tl.tensor,
    kv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    blocked: tl.tensor,
    kv_pitch: tl.int64,
    rows: tl.int32,
    each: tl.int32,
    eps: tl.float32,
    root: tl.float32,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Grid (streams, stretches of `each` rows): a stream's weights stay in registers, a row's value in the cache.

    A row is BLOCK values and REST after them, both powers of two.
    """
    stream = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * each
    weight = _weight(q_weight + stream * HIDDEN, k_weight + stream * HIDDEN, HIDDEN, 0, BLOCK)
    if REST > 0:
        rest_weight = _weight(q_weight + stream * HIDDEN, k_weight + stream * HIDDEN, HIDDEN, BLOCK, REST)
    for turn in range(0, tl.minimum(each, rows - first)):
        row = first + turn
        line = h + (row * STREAMS + stream) * HIDDEN
        start = kv + row * (kv_pitch // VEC) * VEC
        query, key, value = _part(line, start + stream * HIDDEN, start + STREAMS * HIDDEN, HIDDEN, 0, BLOCK)
        if REST > 0:
            rest_query, rest_key, rest_value = _part(
                line, start + stream * HIDDEN, start + STREAMS * HIDDEN, HIDDEN, BLOCK, REST
            )
        dot = tl.sum(query * weight * key, 0)
        query_square = tl.sum(query * query, 0)
        key_square = tl.sum(key * key, 0)
        if REST > 0:
            dot += tl.sum(rest_query * rest_weight * rest_key, 0)
            query_square += tl.sum(rest_query * rest_query, 0)
            key_square += tl.sum(rest_key * rest_key, 0)
        dot = dot * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(query_square, HIDDEN * 1.0) + eps))
        dot = dot * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(key_square, HIDDEN * 1.0) + eps))
        dot = tl.div_rn(dot, root)
        size = tl.abs(dot)
        size = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))
        signed = tl.where(dot.to(tl.int32, bitcast=True) < 0, -size, size)
        gate = tl.div_rn(1.0, 1.0 + tl.exp(-signed))
        if blocked is not None:
            gate = tl.where(tl.load(blocked + row) != 0, 0.0, gate)
        to = out + (row * STREAMS + stream) * HIDDEN
        place = tl.arange(0, BLOCK)
        tl.store(to + place, (query + gate * value).to(out.dtype.element_ty), mask=place < HIDDEN)
        if REST > 0:
            place = BLOCK + tl.arange(0, REST)
            tl.store(to + place, (rest_query + gate * rest_value).to(out.dtype.element_ty), mask=place < HIDDEN)


@KERNELS.implements(engram_ops.engram_ngrams)
def engram_ngrams(
    input_ids: Tensor,
    row_to_seq: Tensor,
    cu_seqlens_q: Tensor,
    history: Tensor,
    token_map: Tensor,
    pad_token_id: int,
    blocked: Tensor | None,
    history_blocked: Tensor | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A program per stretch of rows."""
    rows, depth = input_ids.shape[0], history.shape[1] + 1
    out = new_like(out, (rows, depth), torch.int32, input_ids.device)
    _ngrams(
        (-(-rows // _ROWS),),
        out,
        packed(input_ids),
        packed(row_to_seq),
        packed(cu_seqlens_q),
        packed(history),
        packed(token_map),
        None if blocked is None else packed(blocked),
        None if history_blocked is None else packed(history_blocked),
        rows,
        pad_token_id,
        DEPTH=depth,
        BLOCK=_ROWS,
        num_warps=2,
    )
    return out


@KERNELS.implements(engram_ops.engram_hash)
def engram_hash(
    ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Products and remainders in 64 bits."""
    rows, depth = ngrams.shape
    layers, columns = primes.shape
    out = new_like(out, (layers, rows, columns), torch.int32, ngrams.device)
    _hash(
        (-(-rows // 16), layers),
        out,
        packed(ngrams),
        packed(multipliers),
        packed(primes),
        packed(offsets),
        rows,
        DEPTH=depth,
        HEADS=columns // (depth - 1),
        COLUMNS=columns,
        COLUMN_BLOCK=next_pow2(columns),
        BLOCK=16,
    )
    return out


def _reads_on_host(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype) -> str:
    return "rows of a table on the host are read there" if table.device != rows.device else ""


@KERNELS.implements(engram_ops.engram_fetch, waits=_reads_on_host)
def engram_fetch(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """A program per few table rows. From a table in host memory the rows are picked there first, and the host waits.

    Raises:
        CaptureError: the table is in host memory and a graph is being captured.
    """
    if table.device != rows.device:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("engram_fetch: the table is in host memory, so the host must look at the rows to fetch")
        picked = rows.flatten().long().to(table.device)
        if isinstance(table, QTensor):
            table = QTensor(table.data[picked].to(rows.device), table.scale[picked].to(rows.device), table.fmt)
        else:
            table = table[picked].to(rows.device)
        rows = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view(rows.shape)
    count, columns = rows.shape
    data = rows_of(table.data if isinstance(table, QTensor) else table)
    scale = rows_of(table.scale) if isinstance(table, QTensor) else None
    width = table.shape[1]
    out = new_like(out, (count, columns * width), out_dtype, rows.device)
    fetched = count * columns
    _fetch(
        (-(-fetched // _FETCHED),),
        out,
        data,
        scale,
        packed(rows),
        fetched,
        pitch(data),
        0 if scale is None else pitch(scale),
        WIDTH=width,
        GROUPS=next_pow2(-(-width // 32)),
        ROWS=_FETCHED,
        VEC=vector_width(pitch(data), width),
    )
    return out


@KERNELS.implements(engram_ops.engram_gate)
def engram_gate(
    h: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A program per stream and stretch of rows."""
    rows, streams, hidden = h.shape
    out = new_like(out, (rows, streams, hidden), h.dtype, h.device)
    flat = rows_of(kv)
    block = next_pow2(hidden + 1) // 2
    each = max(1, min(_GATED, rows // _GATED_ALONE))
    _add_gated(
        (streams, -(-rows // each)),
        out,
        packed(h),
        flat,
        packed(q_weight),
        packed(k_weight),
        None if blocked is None else packed(blocked),
        pitch(flat),
        rows,
        each,
        eps,
        hidden**0.5,
        STREAMS=streams,
        HIDDEN=hidden,
        BLOCK=block,
        REST=next_pow2(hidden - block) if hidden > block else 0,
        VEC=vector_width(pitch(flat), hidden),
    )
    return out
