"""Budgets of `kernels/products.asc`: a tile of 128 rows by 256 columns, at the model's shapes and 8,192 rows."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_ROWS: Final = 128
_COLUMNS: Final = 256
_BATCH: Final = 8192
_BYTES: Final = {"mx": 1.0, "bf16": 2.0, "f32": 4.0, "e4m3": 1.0, "e2m1": 0.5}
_STAGE: Final = 512
_L1: Final = 2 * (_ROWS + _COLUMNS) * (_STAGE + _STAGE // 32)
_HALF_ROWS: Final = 128
_UB: Final = (
    2 * _HALF_ROWS * (256 + 32) + 2 * (_STAGE // 32 * (_HALF_ROWS + 1) * 32 + _HALF_ROWS * 16) + _HALF_ROWS * 256
)
_FIRST_STAGE: Final = 600
"""Cycles until the first stage of a tile is in L0; later ones load while the Cube works."""


def _product(x: str, weight: str | None, n: int, k: int, op: str) -> Budget:
    """One tile: operands once from memory over all tiles, and once per tile from the cache."""
    columns = min(n, _COLUMNS)
    tiles = _BATCH / _ROWS * n / columns
    stored = weight or x
    scales = 1 / 32 if stored != "f32" and stored != "bf16" else 0
    operands = k * (_ROWS * _BYTES[x] + columns * (_BYTES[stored] + scales))
    once = k * (_BATCH * _BYTES[x] + n * (_BYTES[stored] + scales)) / tiles
    values = columns * k
    spread = {None: 0.0, "e2m1": values / 512 * 16, "e4m3": 0.0}[weight]
    if weight and x != "mx":
        spread += values / (64 if x == "f32" else 128) * 9
    name = f"product_{x}" + (f"_{weight}" if weight else "")
    return Budget(
        kernel=name,
        unit=f"tile of {_ROWS} x {columns}, K = {k} ({op})",
        core="mix" if weight else "cube",
        moved=once + _ROWS * columns * 2,
        ub=_UB if weight else 0,
        l1=_L1,
        l0a=2 * 32 * 1024,
        l0b=2 * 32 * 1024,
        l0c=2 * _ROWS * _COLUMNS * 4,
        vector=spread,
        macs=_ROWS * columns * k * (4 if x == "f32" else 1),
        cube_format="mxfp8" if x == "mx" else "bf16",
        cube_waits=_FIRST_STAGE,
        cached=operands - once,
        note="float32 products take the Cube four times as long as bf16" if x == "f32" else "",
    )


_PIECE: Final = 8192
_WIDTH: Final = 5120

BUDGETS: Final = (
    _product("mx", None, 32768, 1280, "q_b"),
    _product("bf16", None, 129280, 5120, "head"),
    _product("f32", None, 24, 20480, "mixing"),
    _product("mx", "e2m1", 4608, 5120, "experts"),
    _product("bf16", "e4m3", 1024, 4096, "output groups"),
    _product("bf16", "e2m1", 4608, 5120, "experts with plain activations"),
    _product("f32", "e4m3", 1024, 4096, "output groups"),
    _product("f32", "e2m1", 4608, 5120, "experts with plain activations"),
    Budget(
        "pad_scales",
        "row of 81 scales",
        "vector",
        81 + 82,
        ub=248 << 10,
        note="as many rows at a time as the buffer holds",
    ),
    Budget("finish_rows", f"row of {_WIDTH}", "vector", 10 * _WIDTH, ub=10 * _PIECE, vector=_WIDTH / 64 * 9),
    Budget("widen_bf16", f"row of {_WIDTH}", "vector", 6 * _WIDTH, ub=6 * _PIECE, vector=_WIDTH / 64 * 4),
)
