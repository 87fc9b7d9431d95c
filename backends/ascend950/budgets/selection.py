"""Budgets of `kernels/selection.asc`, for the pool of candidate blocks, its selection and the router."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget

_COLUMNS: Final = 32768
_CHUNK: Final = 24576
_MAX_K: Final = 8192
_STRETCH: Final = 16384
_EXPERTS: Final = 384
_CHOICES: Final = 6
_MAX_EXPERTS: Final = 1024
_BATCH: Final = 8


def _topk(kind: str, size: int) -> Budget:
    keys, counts, taken = (15 if size == 2 else 14), 4 + 3 * 6, 17
    return Budget(
        kernel=f"topk_select_{kind}",
        unit=f"row of {_COLUMNS}, 512 chosen",
        core="vector",
        moved=_COLUMNS * size + 512 * 4,
        ub=2 * 4 * _CHUNK + 4 * 256 + 4 * 256 + 4 * _MAX_K,
        vector=_COLUMNS / 64 * (keys + counts + taken) + 4 * 9 * 4 * 7,
        note=f"a row of up to {2 * _CHUNK} is read once, a longer one five times; one core per row",
    )


BUDGETS: Final = (
    _topk("f32", 4),
    _topk("bf16", 2),
    Budget(
        kernel="block_max",
        unit=f"stretch of {_STRETCH} scores, blocks of 8",
        core="vector",
        moved=_STRETCH * 4 * (1 + 1 / 8) + 4,
        ub=3 * 4 * _STRETCH + 256,
        vector=_STRETCH / 64 * 8 + _STRETCH / 512 * 7,
        note="blocks of another length take a gather per column",
    ),
    Budget(
        kernel="moe_gate",
        unit=f"row of {_EXPERTS} experts, {_CHOICES} chosen",
        core="vector",
        moved=_EXPERTS * 4 + _CHOICES * 12,
        ub=(2 * _BATCH + 4) * 4 * _MAX_EXPERTS + 2 * _BATCH * (512 + 256),
        vector=_EXPERTS / 64 * 27 + _CHOICES * (_EXPERTS / 64 * 8 + 7) + 15,
        note="exponential, logarithm, division and root counted as one instruction each",
    ),
)
