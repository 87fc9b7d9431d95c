"""Budgets of `kernels/heads.asc`: the draft's Markov head over the vocabulary, and its confidence."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_ROWS: Final = 32
_TILE: Final = 128
_RANK: Final = 256
_HIDDEN: Final = 5120
_MAX_HIDDEN: Final = 8192
_MAX_TOKEN: Final = 1024
_SIZE: Final = {"f32": 4, "bf16": 2}


def _markov(kind: str) -> Budget:
    size = _SIZE[kind]
    return Budget(
        kernel=f"markov_logits_{kind}",
        unit=f"tile of {_TILE} ids, {_ROWS} rows, rank {_RANK}",
        core="mix",
        moved=_TILE * _RANK * size + 2 * _ROWS * _TILE * 4,
        ub=4 * 128 * 64 * 4,
        l1=2 * 128 * 1024 + _TILE * _RANK * size,
        l0a=64 << 10,
        l0b=64 << 10,
        l0c=2 * 128 * _TILE * 4,
        vector=2 * _ROWS * 4,
        macs=_ROWS * _TILE * _RANK * (4 if kind == "f32" else 1),
        note="tokens are gathered once per core",
    )


def _confidence(hidden: str, embed: str, proj: str) -> Budget:
    def casts(row: str) -> int:
        return 6 + (row == "bf16") + (proj == "bf16")

    return Budget(
        kernel=f"draft_confidence_{hidden}_{embed}_{proj}",
        unit=f"row of {_HIDDEN} and a token of {_RANK}",
        core="vector",
        moved=_HIDDEN * _SIZE[hidden] + _RANK * _SIZE[embed] + 4,
        ub=3 * 4 * (_MAX_HIDDEN + _MAX_TOKEN) + 3 * 256,
        vector=_HIDDEN / 64 * casts(hidden) + _RANK / 64 * casts(embed) + 12,
        note="the vector is read once per core",
    )


BUDGETS: Final = (
    *(_markov(kind) for kind in _SIZE),
    *(_confidence(hidden, embed, proj) for hidden in _SIZE for embed in _SIZE for proj in _SIZE),
)
