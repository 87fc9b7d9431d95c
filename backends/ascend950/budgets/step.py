"""Budgets of `kernels/step.asc`: bytes of the entries, a few dozen instructions of a warp for 32 of them."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_DEPTH: Final = 3

BUDGETS: Final = (
    Budget("advance_rows", "32 rows", "simt", 32 * 4 * 14, vector=90),
    Budget("close_groups", "32 rows of one ratio", "simt", 32 * 4 * 6, vector=110),
    Budget(
        "advance_history",
        f"32 sequences, {_DEPTH} tokens each",
        "simt",
        32 * 4 * (6 + 2 * _DEPTH),
        vector=30 + 20 * _DEPTH,
    ),
)
