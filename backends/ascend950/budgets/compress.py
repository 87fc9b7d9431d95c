"""Budgets of `kernels/compress.asc`."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_DIM: Final = 512
_RATIO: Final = 2
_GROUP: Final = 8192 * 4
"""Bytes of a group's gates, or values, at most."""


def _pool(kind: str, size: int) -> Budget:
    cast = 1 if kind == "bf16" else 0
    closes = 3 + 2 * (_RATIO - 1) + 7 * _RATIO + 2 + cast
    return Budget(
        kernel=f"pool_rows_{kind}",
        unit=f"group of {_RATIO} rows of {_DIM}",
        core="vector",
        moved=_RATIO * _DIM * (2 * 4 + size),
        ub=5 * _GROUP + _GROUP // 4 * size,
        vector=_DIM / 64 * (closes + (_RATIO - 1) * (2 + cast)),
        note="rows that close no group write zeros and read nothing",
    )


BUDGETS: Final = (
    _pool("f32", 4),
    _pool("bf16", 2),
    Budget("keep_rows", f"row of {_DIM}", "vector", 4 * 4 * _DIM, ub=4 * _GROUP, note="copies alone"),
)
