"""Budgets of `kernels/kv_store.asc`."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_DIM: Final = 512
_RECORD: Final = 528
_ROTARY: Final = 64
_MAX_WIDTH: Final = 1024
_UB: Final = 4 * _MAX_WIDTH * (1 + 2 + 2 + 2 + 1 + 1) + 2 * _MAX_WIDTH + 2 * _MAX_WIDTH // 4 + _MAX_WIDTH // 2
"""A weight; two each of rows in, normed and turned rows, angles, codes and scales; the maxima of every eight values."""


def _store(kind: str, size: int) -> Budget:
    registers, cast = _DIM // 64, 1 if kind == "bf16" else 0
    return Budget(
        kernel=f"store_records_{kind}",
        unit=f"row of {_DIM} to an fp8 record, {_ROTARY} channels turned",
        core="vector",
        moved=2 * _DIM * size + _RECORD + 4 * _ROTARY + 8,
        ub=_UB,
        vector=registers * (4 + 6 + 12 + 5 * cast) + 20 + 22 + 4 * cast,
        note="sum of squares, norm, codes; the weight is read once per core",
    )


BUDGETS: Final = (_store("f32", 4), _store("bf16", 2))
