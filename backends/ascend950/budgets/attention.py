"""Budgets of `kernels/attention.asc`: a row of the model, 64 heads of 512 over 640 records."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_HEADS: Final = 64
_DIM: Final = 512
_WINDOW: Final = 128
_TOPK: Final = 512
_TILE: Final = 64
_GROUP: Final = 5
_RING: Final = _GROUP + 1
_RECORD: Final = {"fp8": 528, "fp4": 288}
_PIECE: Final = 16
"""Keys that a vector core expands at a time."""

_L1: Final = _TILE * _DIM * 2 * (1 + _RING) + _RING * _TILE * _TILE * 2
"""Queries, a ring of keys, a ring of probabilities."""
_UB: Final = (
    2 * _HEADS // 2 * _DIM * 4  # sums of values, those that arrive and those of earlier groups
    + _RING * _TILE * _HEADS // 2 * 4  # scores
    + 2 * (_PIECE * 544 + 256)  # records
    + 2 * _DIM // 16 * (_PIECE + 1) * 32  # keys as blocks
    + _PIECE * _DIM // 16 * 2  # their scales
    + 2 * _TILE * _HEADS // 2 * 2  # probabilities
    + _RING * 2 * _TILE * 4  # holes
    + 25 * 256  # slots, what is kept per head, places of scales
)

_TILES: Final = {"fp8": _WINDOW // _TILE, "fp4": _TOPK // _TILE}
_ALL_TILES: Final = sum(_TILES.values())
_GROUPS: Final = -(-_ALL_TILES // _GROUP)
_REGISTERS: Final = _HEADS // 2 * _DIM // 64
"""Registers of a core's sums of values."""

_PER_128: Final = {"fp8": 8, "fp4": 5}
"""Load, convert, bring together, load the scale, multiply, store; of fp4 one instruction converts 128 codes."""
_PER_SCALES: Final = {"fp8": 6, "fp4": 6}
"""Instructions for the scales of four records."""


def _vector() -> float:
    """Register instructions of one vector core for a row."""
    keys = sum(
        tiles * (_TILE // 2 * (_DIM // 128 * _PER_128[kind]) + _TILE // 8 * _PER_SCALES[kind] + 2)
        for kind, tiles in _TILES.items()
    )
    scores = _TILE // 4 * (2 * 4 + 1) + 5  # load, scale and mark, maximum, store; a mark for two
    weights = _TILE // 2 * 5 + 6  # load, exponential, sum, round, store
    holes = 10
    renewed = 2 * 16 * _GROUPS
    sums = _REGISTERS * (6 if _GROUPS > 1 else 4) + _REGISTERS * 4 * max(_GROUPS - 2, 0) + _HEADS // 2 * 4 + 40
    return keys + _ALL_TILES * (scores + weights + holes) + renewed + sums


_RECORD_BYTES: Final = _WINDOW * _RECORD["fp8"] + _TOPK * _RECORD["fp4"]
_ROW_BYTES: Final = 2 * _HEADS * _DIM * 2 + _HEADS * 4 + 2 * (_WINDOW + _TOPK) * 4

_THREAD_HEADS: Final = 8
_THREAD_UB: Final = 2 * 8 * 1024 * 4 + 8 * 32 * 4 + 1024 + 32 * 1025 * 4


def _by_threads(kind: str, size: int) -> Budget:
    """Eight heads at a time: records are decoded again for every eight."""
    keys, units = _WINDOW + _TOPK, _HEADS // _THREAD_HEADS
    decoded, products = keys * _DIM * units / 32 * 24, 2 * keys * _DIM * _HEADS / 32 * 3
    return Budget(
        f"attend_{kind}",
        f"row of {_HEADS} heads of {_DIM}, {keys} records",
        "simt",
        _RECORD_BYTES + 2 * _HEADS * _DIM * size,
        ub=_THREAD_UB,
        vector=decoded + products,
        cached=_RECORD_BYTES * (units - 1),
        note="what the Cube does not take; not for the model's own shapes",
    )


def _gather(kind: str, size: int) -> Budget:
    return Budget(
        f"gather_records_{kind}",
        f"fp4 record of {_DIM}",
        "simt",
        _RECORD["fp4"] + 4 + _DIM * size,
        vector=_DIM / 32 * 28,
        note="values are decoded one by one",
    )


BUDGETS: Final = (
    Budget(
        "attend_cube",
        f"row of {_HEADS} heads of {_DIM}, {_WINDOW} fp8 and {_TOPK} fp4 records",
        "mix",
        _RECORD_BYTES + _ROW_BYTES,
        ub=_UB,
        l1=_L1,
        l0a=4 * _TILE * 128 * 2,
        l0b=4 * _TILE * 128 * 2,
        l0c=_TILE * _DIM * 4 + 2 * _TILE * _TILE * 4,
        vector=2 * _vector(),
        macs=2 * _HEADS * _DIM * (_WINDOW + _TOPK),
        cube_waits=512,
        note="queries of the next row load while the Cube adds the last values of this one; the traffic from L1 to L0, "
        "200 KB a tile, has no public rate and is not counted; an exponential counts as one instruction",
    ),
    *(_by_threads(kind, size) for kind, size in (("f32", 4), ("bf16", 2))),
    *(_gather(kind, size) for kind, size in (("f32", 4), ("bf16", 2))),
)
