"""Every op there is: importing this module defines them all, so `defined_ops()` is complete.

A new op family is one file and one name in this list.
"""

from __future__ import annotations

from deepinfer.ops import (
    attention,
    compress,
    engram,
    heads,
    index,
    kv,
    linear,
    mhc,
    moe,
    norm,
    quant,
    rope,
    sampling,
    shaping,
    step,
    verification,
    vision,
)
from deepinfer.ops.spec import defined_ops

FAMILIES = (
    norm,
    quant,
    rope,
    linear,
    kv,
    attention,
    compress,
    index,
    moe,
    mhc,
    engram,
    heads,
    sampling,
    shaping,
    verification,
    vision,
    step,
)

__all__ = ["FAMILIES", "defined_ops"]
