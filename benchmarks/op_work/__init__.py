"""What `benchmarks/ops.py` times: every op at DeepSeek-V4.1-Flash's real shapes, and what torch offers for the same.

A module per theme. Bytes are those that an ideal implementation moves: of a cache or table what a call names, of a
result all of it. Operands of an op that writes in place are such that any number of calls finds them valid.

Peers say in their name what they leave out: a copy in bfloat16 was decoded beforehand, one scale is not the model's
format, gathered keys were gathered beforehand.
"""

from __future__ import annotations

from typing import Final

from op_work import attention, drafts, engram, index, lists, moves, products, routing, rows, sampling, steps, streams
from op_work.work import Calls, Families, Maker, Peer, Sizes, Work

__all__ = ["FAMILIES", "Calls", "Families", "Maker", "Peer", "Sizes", "Work"]

_THEMES = (products, routing, attention, index, rows, streams, moves, lists, steps, engram, drafts, sampling)

FAMILIES: Final[Families] = {family: names for theme in _THEMES for family, names in theme.FAMILIES.items()}
"""The ops of each family, known before its operands are made."""
