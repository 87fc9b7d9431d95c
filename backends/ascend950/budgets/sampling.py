"""Budgets of `kernels/sampling.asc`: rows of the model's vocabulary."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_VOCABULARY: Final = 129280
_REGISTERS: Final = _VOCABULARY / 64
_BYTES: Final = 4 * _VOCABULARY
_LISTED: Final = 6144 / 64
"""Registers of a full list."""
_PASSES: Final = 16
"""Parts of four until one of 2^32 keys is left."""

_SURVEY: Final = 8 * _REGISTERS
_SUM: Final = 15 * _REGISTERS
_NUCLEUS: Final = _SURVEY + _SUM + 22 * _REGISTERS + 20 * _LISTED + _PASSES * 12 * _LISTED
"""Best score, sum of the softmax, a list of what has mass, the search in the list."""

_STREAMS: Final = 4 * 12288 * 4
"""Two stretches of a row, two of a second one, of results or of a list."""
_SEARCH: Final = _STREAMS + 21 * 256 + 4 * (6144 + 64)
_RANKED: Final = 20

BUDGETS: Final = (
    Budget(
        kernel="filter_rows",
        unit=f"row of {_VOCABULARY}, temperature and top-p",
        core="vector",
        moved=2 * _BYTES,
        ub=_SEARCH,
        vector=_NUCLEUS + 13 * _REGISTERS,
        cached=3 * _BYTES,
        note="a row streams four times; a nucleus of more than about 6,000 ids is searched for in 16 more",
    ),
    Budget(
        kernel="draw_rows",
        unit=f"row of {_VOCABULARY}, temperature and top-p",
        core="vector",
        moved=_BYTES,
        ub=_SEARCH + 256,
        vector=_NUCLEUS + 150 * _LISTED,
        cached=2 * _BYTES,
        note="Gumbels of listed ids alone; without filters a second and last pass draws for every id, 46 a register",
    ),
    Budget(
        kernel="emit_tokens",
        unit="request of 6 rows",
        core="simt",
        moved=6 * 12 + 12,
        vector=6 * 12 / 32,
        vector_cores=1,
        note="a thread per request",
    ),
    Budget(
        kernel="rank_rows",
        unit=f"row of {_VOCABULARY}, one id asked for, {_RANKED} best",
        core="vector",
        moved=_BYTES,
        ub=_SEARCH + 2 * 256 + 2 * 4 * 1024,
        vector=_SURVEY + _SUM + 9 * _REGISTERS + 8 * 20 * _REGISTERS + (_PASSES * 12 + _RANKED * 10) * _LISTED,
        cached=(2 + 8) * _BYTES,
        note="eight passes until few enough ids are left for a list, from which the best are taken",
    ),
)
