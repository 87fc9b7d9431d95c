"""Engram: n-gram ids and hashes in integers, rows of large tables, and the gate."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import SHORT, WEIGHT_KIND, new_like, packed, rows_of, short
from deepinfer.ops import engram as engram_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import QTensor

_PROGRAM: Final = program("engram.asc")
_NGRAMS: Final = _PROGRAM.kernel(
    "ngrams",
    "out!, input_ids, row_to_seq, cu_seqlens, history, token_map, blocked, history_blocked, rows: i64, depth: i32, "
    "pad_token: i32",
)
_HASHES: Final = _PROGRAM.kernel(
    "hashes", "out!, grams, multipliers, primes, offsets, rows: i64, layers: i32, depth: i32, heads: i32"
)
_FETCH: Final[dict[tuple[str, str], Kernel]] = {
    (kind, name): _PROGRAM.kernel(
        f"fetch_{kind}_{name}",
        "out!, table, scales, rows, count: i64, pitch: i64, scale_pitch: i64, width: i32",
    )
    for kind in ("mxfp8", *SHORT.values())
    for name in SHORT.values()
}
_GATE: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"gate_rows_{name}",
        "out!, h, kv, q_weight, k_weight, blocked, rows: i64, kv_pitch: i64, streams: i32, width: i32, q_kind: i32, "
        "k_kind: i32, eps: f32, root: f32",
    )
    for name in SHORT.values()
}
_SOURCES: Final = ("engram.py", "kernels/engram.asc")
_THREADS: Final = 256
"""Threads of a core in the integer kernels."""
_TABLE_ROWS: Final = 16
"""Table rows that a core fetches at a time, `kTableRows` of the kernel."""
_TABLE_WIDTH: Final = 512
"""`kTableWidth` of the kernel."""
_GATE_BYTES: Final = 248 << 10


def _blocks(count: int, each: int) -> int:
    return min(-(-count // each), VECTOR_CORES)


def _narrow(dims: Dims) -> bool:
    return bool(dims["width"] <= _TABLE_WIDTH)


def _gate_fits(dims: Dims) -> bool:
    # a weight per stream, and two rows each of a stream, its key, the value and the result
    return bool((dims["streams"] + 8) * (-(-dims["hidden"] // 128) * 128) * 4 <= _GATE_BYTES)


@implements(engram_ops.engram_ngrams, sources=_SOURCES)
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
    """A thread per row."""
    rows, depth = input_ids.shape[0], history.shape[1] + 1
    out = new_like(out, (rows, depth), torch.int32, input_ids.device)
    _NGRAMS(
        _blocks(rows, _THREADS),
        out,
        packed(input_ids),
        packed(row_to_seq),
        packed(cu_seqlens_q),
        packed(history),
        packed(token_map),
        None if blocked is None else packed(blocked),
        None if history_blocked is None else packed(history_blocked),
        rows,
        depth,
        pad_token_id,
    )
    return out


@implements(engram_ops.engram_hash, sources=_SOURCES)
def engram_hash(
    ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """A thread per hash, products and remainders in 64 bits."""
    rows, depth = ngrams.shape
    layers, columns = primes.shape
    out = new_like(out, (layers, rows, columns), torch.int32, ngrams.device)
    _HASHES(
        _blocks(out.numel(), _THREADS),
        out,
        packed(ngrams),
        packed(multipliers),
        packed(primes),
        packed(offsets),
        rows,
        layers,
        depth,
        columns // (depth - 1),
    )
    return out


def bring_rows(table: Tensor | QTensor, rows: Tensor) -> tuple[Tensor | QTensor, Tensor]:
    """The rows of a host table that `rows` names, moved beside `rows`, and where each of them is now.

    The host waits for `rows`, so a graph cannot hold this.

    Args:
        table: [R, W] in host memory.
        rows: [T, C] int32 on a device.

    Returns:
        [T * C, W] on the device of `rows`, and [T, C] int32 that counts them.
    """
    picked = rows.flatten().long().to(table.device)
    order = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view(rows.shape)
    if isinstance(table, QTensor):
        data, scale = (part[picked].to(rows.device) for part in (table.data, table.scale))
        return QTensor(data, scale, table.fmt), order
    return table[picked].to(rows.device), order


@implements(engram_ops.engram_fetch, sources=_SOURCES, when=_narrow)
def engram_fetch(table: Tensor | QTensor, rows: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Copies of 16 table rows at a time, decoded while the next ones arrive; see `bring_rows` for a host table."""
    if table.device != rows.device:
        table, rows = bring_rows(table, rows)
    count, columns = rows.shape
    width = table.shape[1]
    out = new_like(out, (count, columns * width), out_dtype, rows.device)
    coded = isinstance(table, QTensor)
    data = rows_of(table.data if isinstance(table, QTensor) else table)
    scales = rows_of(table.scale) if isinstance(table, QTensor) else None
    _FETCH["mxfp8" if coded else short(data.dtype), short(out_dtype)](
        _blocks(rows.numel(), _TABLE_ROWS),
        out,
        data,
        scales,
        packed(rows),
        rows.numel(),
        data.stride(0),
        0 if scales is None else scales.stride(0),
        width,
    )
    return out


@implements(engram_ops.engram_gate, sources=_SOURCES, when=_gate_fits)
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
    """A core per token: its value is read once, its streams and keys one after the other."""
    rows, streams, width = h.shape
    out = new_like(out, (rows, streams, width), h.dtype, h.device)
    flat = rows_of(kv)
    _GATE[short(h.dtype)](
        min(rows, VECTOR_CORES),
        out,
        packed(h),
        flat,
        packed(q_weight),
        packed(k_weight),
        None if blocked is None else packed(blocked),
        rows,
        flat.stride(0),
        streams,
        width,
        WEIGHT_KIND[q_weight.dtype],
        WEIGHT_KIND[k_weight.dtype],
        eps,
        width**0.5,
    )
    return out
