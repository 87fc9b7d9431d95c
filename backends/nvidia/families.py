"""Every op family of this folder: importing this module fills `KERNELS`."""

from __future__ import annotations

from deepinfer.backends.nvidia import (
    attention,
    compress,
    engram,
    heads,
    kv,
    linear,
    lists,
    merge,
    mhc,
    mixing,
    moe,
    moves,
    norm,
    quant,
    rope,
    sampling,
    scores,
    selection,
    shaping,
    step,
    verification,
    vision,
)
from deepinfer.backends.nvidia.registry import KERNELS

FAMILIES = (
    norm,
    quant,
    rope,
    moves,
    kv,
    mhc,
    mixing,
    verification,
    sampling,
    shaping,
    vision,
    merge,
    heads,
    step,
    moe,
    engram,
    compress,
    lists,
    linear,
    attention,
    scores,
    selection,
)

__all__ = ["FAMILIES", "KERNELS"]
