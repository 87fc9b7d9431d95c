"""Budgets of `kernels/scores.asc`: rows of one sequence against a tile of its keys, at the model's heads."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_ROWS: Final = 4
_HEADS: Final = 32
_DIM: Final = 128
_QUERIES: Final = 128
_HALF: Final = 128
"""Keys that one vector core looks after."""
_STAGE: Final = (_QUERIES + _HALF) * 512 + (_QUERIES + 2 * _HALF) * 8
_UB: Final = (
    2 * _QUERIES * _HALF * 4  # products
    + 4 * _QUERIES * 32  # scales of keys and queries as rows
    + 4 * _QUERIES * 8  # and as fractals
    + 2 * (_QUERIES * 4 + 256)  # weights
    + 2 * 2048  # candidate blocks
    + 2 * 8 * 2 * _HALF * 4  # results
)


def _scores(kind: str, weights: str) -> Budget:
    tile = 2 * _HALF if kind == "mxfp4" else _HALF
    record = _DIM // 2 + _DIM // 32 if kind == "mxfp4" else 4 * _DIM
    size = 2 if weights == "bf16" else 4
    lanes = 128 if weights == "bf16" else 64
    row = _HEADS * (9 if weights == "bf16" else 6) * tile / lanes + 20 * tile / 64
    scales = 2 * (tile + _QUERIES) / 16 if kind == "mxfp4" else 0
    return Budget(
        kernel=f"index_scores_{kind}_{weights}",
        unit=f"{_ROWS} rows of a sequence by {tile} keys, {_HEADS} heads of {_DIM}",
        core="mix",
        moved=(tile + _ROWS * _HEADS) * record + _ROWS * _HEADS * size + _ROWS * tile * 4,
        ub=_UB,
        l1=2 * _STAGE,
        l0a=(32 << 10) + (_QUERIES * 64 if kind == "mxfp4" else 32 << 10),
        l0b=(32 << 10) + (tile * 64 if kind == "mxfp4" else 32 << 10),
        l0c=_QUERIES * 256 * 4 + _QUERIES * tile * 4,
        vector=_ROWS * row + scales,
        macs=_ROWS * _HEADS * tile * _DIM * (1 if kind == "mxfp4" else 4),
        cube_format="mxfp4" if kind == "mxfp4" else "bf16",
        note="bound by weighing and adding up the heads; rows of candidate blocks go one by one",
    )


BUDGETS: Final = tuple(_scores(kind, weights) for kind in ("mxfp4", "f32") for weights in ("bf16", "f32"))
