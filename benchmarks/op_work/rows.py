"""Norms, quantisers, rotations, activations and stores: rows in, rows out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from deepinfer.ops import index, kv, moe, norm, quant, rope
from op_work.work import (
    CHOSEN,
    CODE_BYTES,
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    INTERMEDIATE,
    Q_RANK,
    ROTATED,
    Families,
    Maker,
    Work,
)


def row_ops(make: Maker) -> Iterator[Work]:
    """What moves rows and computes little."""
    few, many = make.sizes.few, make.sizes.many
    for rows, width in ((few, HIDDEN), (few, Q_RANK), (many, HIDDEN), (many, Q_RANK), (4 * many, Q_RANK)):
        yield from _normed(make, rows, width)
    for rows in (few, few * CHOSEN, many, many * CHOSEN):
        yield _gated(make, rows)
    for rows in (few, many):
        yield from _turned(make, rows)
    for count in (few, 8 * many):
        yield from (_store(make, count, kind) for kind in ("fp4", "fp8", "index"))


def _normed(make: Maker, rows: int, width: int) -> Iterator[Work]:
    x, weight = make.plain(rows, width), torch.ones(width, device=make.device)
    size, shape = float(rows * width), f"{rows} x {width}"
    yield Work(norm.rms_norm, shape, [{"x": x, "weight": weight, "eps": 1e-6}], 0.0, 4 * size)
    args = {"x": x, "weight": weight, "eps": 1e-6, "fmt": "mxfp8"}
    yield Work(norm.rms_norm_quant, f"{shape}, mxfp8", [args], 0.0, (4 + CODE_BYTES) * size)
    yield Work(quant.quantize, f"{shape}, mxfp8", [{"x": x, "fmt": "mxfp8"}], 0.0, (2 + CODE_BYTES) * size)


def _gated(make: Maker, rows: int) -> Work:
    both = make.plain(rows, 2 * INTERMEDIATE)
    args = {
        "gate": both[:, :INTERMEDIATE],
        "up": both[:, INTERMEDIATE:],
        "limit": 10.0,
        "row_weight": make.single(rows),
        "fmt": "mxfp8",
    }
    size = float(rows * INTERMEDIATE)
    return Work(moe.swiglu_quant, f"{rows} x {INTERMEDIATE}, mxfp8", [args], 0.0, (4 + CODE_BYTES) * size)


def _turned(make: Maker, rows: int) -> Iterator[Work]:
    """Rotations of queries, of attention's output, and of index queries on their way to codes."""
    at = {"positions": make.numbers(0, rows), "cos_sin": make.single(rows, ROTATED)}
    heads, shape = make.plain(rows, HEADS, DIM), f"{rows} x {HEADS} x {DIM}"
    size, table = float(rows * HEADS * DIM), rows * 4.0 * ROTATED
    yield Work(rope.q_norm_rope, shape, [{"q": heads, **at}], 0.0, 4 * size + table)
    yield Work(rope.o_rope, shape, [{"o": heads, **at, "num_groups": GROUPS}], 0.0, 4 * size + table)
    heads, shape = make.plain(rows, INDEX_HEADS, INDEX_DIM), f"{rows} x {INDEX_HEADS} x {INDEX_DIM}"
    size = float(rows * INDEX_HEADS * INDEX_DIM)
    yield Work(rope.rope, shape, [{"x": heads, **at}], 0.0, 4 * size + table)
    args = {"q": heads, **at, "fmt": "mxfp4"}
    yield Work(index.index_q_quant, f"{shape}, mxfp4", [args], 0.0, (2 + 17 / 32) * size + table)


def _store(make: Maker, count: int, kind: str) -> Work:
    """Records of a kind; entries and windows come with the normed rows, index keys without."""
    dim = INDEX_DIM if kind == "index" else DIM
    cache = make.cache(kind, count // 64 + 2, 64, dim)
    args = {
        "weight": torch.ones(dim, device=make.device),
        "eps": 1e-6,
        "positions": make.numbers(0, count),
        "cos_sin": make.single(count, ROTATED),
        "cache": cache,
        "slots": make.numbers(64, 64 + count),
    }
    num_bytes = count * (2.0 * dim + cache.format.record_bytes + 4 * ROTATED)
    shape, x = f"{count} x {dim}, {kind}", make.plain(count, dim)
    if kind == "index":
        return Work(kv.index_k_store, shape, [{"k": x, **args}], 0.0, num_bytes)
    return Work(kv.kv_norm_rope_store, shape, [{"kv": x, **args}], 0.0, num_bytes + count * 2.0 * dim)


def decoded(make: Maker) -> Iterator[Work]:
    """Codes back to values, in one pass over a matrix."""
    rows = make.sizes.many
    for fmt, code_bytes in (("mxfp8", CODE_BYTES), ("mxfp4", 17 / 32)):
        args = {"x": make.codes(rows, HIDDEN, fmt=fmt), "dtype": torch.bfloat16}
        yield Work(quant.dequantize, f"{rows} x {HIDDEN}, {fmt}", [args], 0.0, (2 + code_bytes) * rows * HIDDEN)


FAMILIES: Final[Families] = {
    row_ops: (
        "rms_norm",
        "rms_norm_quant",
        "quantize",
        "swiglu_quant",
        "q_norm_rope",
        "o_rope",
        "rope",
        "index_q_quant",
        "kv_norm_rope_store",
        "index_k_store",
    ),
    decoded: ("dequantize",),
}
