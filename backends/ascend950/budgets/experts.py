"""Budgets of `kernels/experts.asc`: the model's 384 experts, of which a token has 6."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_HIDDEN: Final = 5120
_CHOICES: Final = 6
_LISTS: Final = 7
"""Experts of a core: 384 and one list of choices without an expert, over 64 cores."""
_CORES: Final = 55
"""Cores that have some."""

BUDGETS: Final = (
    Budget(
        kernel="place_choices",
        unit=f"token of {_CHOICES} choices",
        core="simt",
        moved=_CHOICES * (8 + 4 + 4 + 4),
        ub=2 * 8 * 8192 + 4 * (8192 + 64) + 2 * 256 + 4 * _LISTS,
        vector=_CORES * (7 + _LISTS * 8) * _CHOICES / 64 + 6 * _CHOICES / 32,
        cached=(_CORES - 1 + _CORES * _LISTS) * 8 * _CHOICES,
        vector_cores=_CORES,
        note="every core looks at all choices; up to 8,192 of them are read once",
    ),
    Budget(
        kernel="send_rows",
        unit=f"row of {_HIDDEN} bytes to {_CHOICES} experts",
        core="vector",
        moved=(1 + _CHOICES) * _HIDDEN + 4 * _CHOICES,
        ub=2 * 96 * 1024,
        note="copies alone; a second launch moves the scales",
    ),
    Budget(
        kernel="combine_rows",
        unit=f"row of {_HIDDEN}, {_CHOICES} experts and the shared one, bf16",
        core="vector",
        moved=(_CHOICES + 1 + 1) * 2 * _HIDDEN + 4 * _CHOICES,
        ub=5 * 4 * 8192,
        vector=((_CHOICES + 1) * 6 + 4) * _HIDDEN / 64,
        note="the sum is loaded and stored once per row that is added",
    ),
)
