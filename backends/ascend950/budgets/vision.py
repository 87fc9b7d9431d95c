"""Budgets of `kernels/vision.asc`: 128 patches by a tile of keys, one head, in an image of 1,536 patches.

Buffers have the same places for both types, so what float32 needs is planned for bfloat16 too.
"""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_QUERIES: Final = 128
_DIM: Final = 64
_PATCHES: Final = 1536
_REGISTER: Final = 256


def _attend(kind: str, size: int) -> Budget:
    keys, cast = 256 // size, 2 if kind == "bf16" else 0
    tiles, units = _PATCHES / keys, _PATCHES / _QUERIES
    tile = 2 * keys * _DIM * size
    scores, sums, operand = 128 * _QUERIES * 4, _QUERIES * _DIM * 4, _QUERIES * _DIM * 4
    soften = keys * (3 + 5 + cast) + 18
    return Budget(
        kernel=f"attend_patches_{kind}",
        unit=f"{_QUERIES} patches by {keys} keys of {_DIM}",
        core="mix",
        moved=2 * _QUERIES * _DIM * size / tiles + tile / units,
        ub=scores + 2 * (16384 + 8 * 32) + 2 * sums + 6 * _REGISTER,
        l1=2 * (operand + tile + _QUERIES * keys * size),
        l0a=2 * operand,
        l0b=operand + _QUERIES * _DIM * size,
        l0c=2 * (scores + sums),
        vector=2 * (soften + _QUERIES / 2 * 6 + 4),
        macs=2 * _QUERIES * keys * _DIM * (4 if kind == "f32" else 1),
        cached=tile - tile / units,
        note="softmax bounds it: heads of 64 are too small for the Cube to matter",
    )


BUDGETS: Final = (_attend("f32", 4), _attend("bf16", 2))
