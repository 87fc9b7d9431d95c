"""Budgets of `kernels/norm.asc`."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_HIDDEN: Final = 5120
_MAX_WIDTH: Final = 8192
_UB: Final = 5 * 4 * _MAX_WIDTH + 2 * _MAX_WIDTH + 2 * _MAX_WIDTH // 16 + _MAX_WIDTH // 2
"""A weight, two rows in and two out as float32, two rows of codes and of scales, the maxima of every eight values."""


def _norm(kind: str, size: int) -> Budget:
    registers, cast = _HIDDEN / 64, 1 if kind == "bf16" else 0
    return Budget(
        kernel=f"norm_rows_{kind}",
        unit=f"row of {_HIDDEN}, normed and quantised to mxfp8",
        core="vector",
        moved=2 * _HIDDEN * size + _HIDDEN * 33 / 32,
        ub=_UB,
        vector=registers * (4 + 5 + 12 + 5 * cast),
        note="sum of squares, norm, codes; the weight is read once per core",
    )


BUDGETS: Final = (_norm("f32", 4), _norm("bf16", 2))
