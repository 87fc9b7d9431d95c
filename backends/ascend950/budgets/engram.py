"""Budgets of `kernels/engram.asc`."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_HIDDEN: Final = 5120
_STREAMS: Final = 4
_DEPTH: Final = 4
_HEADS: Final = 8
_LAYERS: Final = 2
_TABLE_WIDTH: Final = 256
_COLUMNS: Final = (_DEPTH - 1) * _HEADS
_SIZE: Final = {"f32": 4, "bf16": 2}
_FETCHED: Final = 16 * 512 * 4
"""Bytes of 16 table rows of 512 float32 values, the most that are fetched at a time."""


def _fetch(stored: str, made: str) -> Budget:
    coded = stored == "mxfp8"
    row = _TABLE_WIDTH * 33 / 32 if coded else _TABLE_WIDTH * _SIZE[stored]
    per_register = (5 if coded else 1 + (stored == "bf16")) + 1 + (made == "bf16")
    return Budget(
        kernel=f"fetch_{stored}_{made}",
        unit=f"token of {_COLUMNS} table rows of {_TABLE_WIDTH}",
        core="vector",
        moved=_COLUMNS * (4 + row + _TABLE_WIDTH * _SIZE[made]),
        ub=4 * _FETCHED + 2 * 16 * 64,
        vector=_COLUMNS * (_TABLE_WIDTH / 64 * per_register + (8 if coded else 0)),
        note="two copies per table row" if coded else "a copy per table row",
    )


def _gate(kind: str) -> Budget:
    size, cast = _SIZE[kind], 1 if kind == "bf16" else 0
    return Budget(
        kernel=f"gate_rows_{kind}",
        unit=f"token of {_STREAMS} streams of {_HIDDEN}",
        core="vector",
        moved=(3 * _STREAMS + 1) * _HIDDEN * size,
        ub=_HIDDEN * (_STREAMS * 4 + 8 * size),
        vector=_STREAMS * (_HIDDEN / 64 * (15 + 5 * cast) + 40),
        note="weights of the streams are multiplied once per core and stay",
    )


BUDGETS: Final = (
    Budget("ngrams", f"32 tokens, {_DEPTH} ids each", "simt", 32 * 4 * (3 + 2 * _DEPTH), vector=12 + 14 * _DEPTH),
    Budget(
        "hashes",
        f"token of {_LAYERS} layers with {_COLUMNS} hashes each",
        "simt",
        4 * (_DEPTH + _LAYERS * _COLUMNS),
        vector=_LAYERS * _COLUMNS / 32 * (3 * 12 + 150),
        note="products of 64 bits as four of 32, remainders by a division in software",
    ),
    *(_fetch(stored, made) for stored in ("mxfp8", "f32", "bf16") for made in _SIZE),
    *(_gate(kind) for kind in _SIZE),
)
