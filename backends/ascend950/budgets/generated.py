"""Budgets of the kernels in `kernels/generated`, from the buffers and loops of their definitions in `tiles/`."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget
from deepinfer.backends.ascend950.launch import VECTOR_CORES

_HIDDEN: Final = 5120
_STREAMS: Final = 4
_HEADS: Final = 64
_HEAD_DIM: Final = 512
_ROTARY: Final = 64
_EXPERT: Final = 2304
_VOCABULARY: Final = 129280
_SIZE: Final = {"bf16": 2, "f32": 4}
_CAST: Final = {"bf16": 2, "f32": 0}
"""Instructions that a register of 64 values costs to widen or to round, beyond the load or the store."""


def _entries() -> tuple[Budget, ...]:
    """Lists and ids: bytes of the entries, some twenty instructions of a warp for 32 of them."""

    def one(kernel: str, unit: str, moved: float, instructions: float = 20, cores: int = VECTOR_CORES) -> Budget:
        return Budget(f"{kernel}_kernel", unit, "simt", moved, vector=instructions, vector_cores=cores)

    window, topk = 128, 512
    return (
        one("window_index", f"row of a window of {window}", window * 4 + 8, window / 32 * 24),
        one("clip_window", f"row of a window of {window}", window * 4 / 2, window / 32 * 10),
        one("dense_index", f"row of {topk} columns", topk * 4 + 4, topk / 32 * 8),
        one("slots_of", f"row of {topk} positions", topk * 8 + 4, topk / 32 * 40),
        one("block_positions", f"row of {topk} positions", topk * 8, topk / 32 * 40),
        one("groups_before", "32 positions", 256),
        one("fill_ids", "32 entries", 128, 4),
        one("known_ids", "32 ids", 256, 6),
        one("shift_ids", "32 ids", 256, 4),
        one("gather_ids", "32 ids", 384, 8),
        one("last_emitted", "32 requests", 512, 8),
        one("rewind", "32 values", 640, 12),
        one("draft_rows", "32 rows of blocks of 5", 32 * (12 / 5 + 5 * 4 + 5 * 4), 60),
        one("add_to_logits", "32 entries", 32 * 20, 12),
        one("penalise", "32 entries", 32 * 32, 40),
        one(
            "forbid",
            f"row of {_VOCABULARY} ids, half of them forbidden",
            _VOCABULARY * (2 + 1 / 8),
            _VOCABULARY / 32 * 10,
        ),
        one("sinkhorn_4", "32 tokens, 20 rounds", 32 * 48 * 4, 20 * 2 * 4 * (4 + 4 * 8) + 24 * 20),
        one(
            "sinkhorn",
            "32 tokens of 4 streams, 20 rounds, matrix on the stack",
            32 * 48 * 4,
            20 * 2 * 4 * (12 + 4 * 12),
        ),
        one("read_first", "32 weights", 128, 6),
    )


def _moves() -> tuple[Budget, ...]:
    stretch, cast = 65536, 8192
    ub = 2 * cast * (2 + 4)
    per_row = _HIDDEN / 64 * 5
    return (
        Budget("move_rows_kernel", f"row of {_HIDDEN} bf16", "vector", 4 * _HIDDEN, ub=2 * stretch),
        Budget("widen_rows_kernel", f"row of {_HIDDEN}", "vector", 6 * _HIDDEN, ub=ub, vector=per_row),
        Budget("narrow_rows_kernel", f"row of {_HIDDEN}", "vector", 6 * _HIDDEN, ub=ub, vector=per_row),
    )


def _rope(kind: str) -> Budget:
    size = _SIZE[kind]
    return Budget(
        f"rope_{kind}_kernel",
        f"token of {_HEADS} heads of {_HEAD_DIM}, {_ROTARY} channels turned",
        "vector",
        2 * _HEADS * _HEAD_DIM * size + 4 * _ROTARY,
        ub=2 * (16 * (_HEAD_DIM + 2 * 128) * size + 2 * 64 * 4),
        vector=_HEADS * (12 + 2 * _CAST[kind]),
        cached=3 * 4 * _ROTARY,
        note="a task is 16 heads, so the angles of a token come four times, three from the cache",
    )


def _streams(kind: str) -> tuple[Budget, ...]:
    size, cast, stretch = _SIZE[kind], _CAST[kind] / 2, 1024
    registers = _HIDDEN / 64
    part, tokens, logits = 512, 8, _STREAMS * (2 + _STREAMS)
    width = _STREAMS * _HIDDEN
    reading = 2 * stretch * (4 + 1) * size
    row = (_STREAMS + 1) * _HIDDEN * size
    mixing = Budget(
        f"mix_streams_{kind}_kernel",
        f"token of {_STREAMS} streams of {_HIDDEN}",
        "vector",
        width * size + logits * 4,
        ub=2 * part * (tokens * size + logits * 4) + tokens * (part + logits * 64 + 64 + 32) * 4,
        vector=width / 64 * (6 + cast + logits * (2 + 2 / tokens)) + width / part * 2 * logits + 5 * logits,
        cached=logits * width * 4 / tokens,
        note="float32 products on vector cores; the matrix comes from the cache once for each eight tokens",
    )

    def writing(streams: int) -> Budget:
        products = streams * (2 * streams + 1 + 1 + cast) + (streams + 1) * (1 + cast) + 1
        return Budget(
            f"write_streams_{kind}_{streams}_kernel",
            f"token of {streams} streams of {_HIDDEN}",
            "vector",
            (2 * streams + 1) * _HIDDEN * size + (streams + streams * streams) * 4,
            ub=2 * (stretch * (2 * streams + 1) * size + (8 + 16) * 4),
            vector=registers * products,
        )

    return (
        Budget(
            f"weigh_streams_{kind}_kernel",
            f"token of {_STREAMS} streams of {_HIDDEN}",
            "vector",
            row + _STREAMS * 4,
            ub=reading + 2 * 8 * 4,
            vector=registers * (_STREAMS * (4 + cast) + 3 + cast),
        ),
        Budget(
            f"average_streams_{kind}_kernel",
            f"token of {_STREAMS} streams of {_HIDDEN}",
            "vector",
            row,
            ub=reading,
            vector=registers * (_STREAMS * (3 + cast) + 3 + cast),
        ),
        writing(2),
        writing(4),
        mixing,
    )


def _dequantize(fmt: str, kind: str) -> Budget:
    stretch, size = 2048, _SIZE[kind]
    group, per_byte = {"mxfp8": (32, 1), "mxfp4": (32, 2), "nvfp4": (16, 2)}[fmt]
    scales = 64 / group / 64 * (24 if group == 32 else 8)
    values = (5 if per_byte == 1 else 15) + _CAST[kind] / 2 + scales
    return Budget(
        f"dequantize_{fmt}_{kind}_kernel",
        f"row of {_HIDDEN}",
        "vector",
        _HIDDEN * (1 / per_byte + 1 / group + size),
        ub=2 * (stretch // per_byte + stretch // group + stretch * size) + stretch // 8 * 4,
        vector=_HIDDEN / 64 * values,
    )


def _swiglu(kind: str, result: str) -> Budget:
    stretch, size = 2048, _SIZE[kind]
    quantised = result == "mxfp8"
    made = 1 if quantised else _SIZE[result]
    activation = 17 + _CAST[kind]
    codes = 6 + 5 + 40 / 16 if quantised else 1 + _CAST[result] / 2
    return Budget(
        f"swiglu_{kind}_{result}_kernel",
        f"row of {_EXPERT}",
        "vector",
        _EXPERT * (2 * size + made + (1 / 32 if quantised else 0)) + 4,
        ub=2 * stretch * (2 * size + made)
        + (stretch * 4 + 2 * stretch // 8 * 4 + 2 * stretch // 32 if quantised else 0),
        vector=_EXPERT / 64 * (activation + codes),
        note="exponential and division counted as one instruction each",
    )


def _merge(kind: str) -> Budget:
    splits, size = 2, _SIZE[kind]
    registers = _HEADS * _HEAD_DIM / 64
    return Budget(
        f"merge_{kind}_kernel",
        f"token of {_HEADS} heads of {_HEAD_DIM}, {splits} splits",
        "vector",
        _HEADS * _HEAD_DIM * (4 * splits + size) + _HEADS * 4 * (splits + 1),
        ub=2 * 32 * 128 * 4 + 2 * 128 * 4 + 2 * (32 * _HEAD_DIM * 4 + _HEAD_DIM * size),
        vector=registers * (4 * splits + 4 + _CAST[kind] / 2),
    )


BUDGETS: Final = (
    *_entries(),
    *_moves(),
    *(_rope(kind) for kind in _SIZE),
    *(budget for kind in _SIZE for budget in _streams(kind)),
    *(_dequantize(fmt, kind) for fmt in ("mxfp8", "mxfp4", "nvfp4") for kind in _SIZE),
    *(
        _swiglu(*types)
        for types in (("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32"), ("bf16", "mxfp8"), ("f32", "mxfp8"))
    ),
    *(_merge(kind) for kind in _SIZE),
)
