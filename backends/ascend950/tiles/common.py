"""What tile definitions share: extents, how work is dealt out to cores and threads, rows in registers of float32.

The functions build expressions of TileLang; they run while a definition is read, never in an engine.
"""

from __future__ import annotations

from typing import Any, Final

import tilelang.ascend.language as T

FAR: Final = 1 << 40
"""Extent of a flat tensor in global memory. Real extents are run-time numbers that the launching Python has checked;
with a bound this far no test of it is left in the text."""

MANY: Final = 1 << 24
"""The same for one axis of a tensor with several."""

LANES: Final = 32
"""Threads of a SIMT block that share a row."""

LINES: Final = 16
"""Rows that a SIMT block works on at a time."""

FLAT: Final = LANES * LINES
"""Threads of a SIMT block over a list without columns."""

VECTOR: Final = 64
"""float32 values in a register."""

TYPES: Final = {"bf16": T.bfloat16, "f32": T.float32}
"""Activation types by the ending of a kernel's name."""


def turns(count: Any, first: Any, stride: Any) -> Any:
    """How many of first, first + stride, ... are below count; 0 where count is too small."""
    return T.truncdiv(T.max(count - first, 0) + stride - 1, stride)


def load(place: Any, mask: Any) -> Any:
    """64 values from a place in the unified buffer as float32; lanes outside `mask` are 0 if the memory is bfloat16."""
    if str(place.buffer.dtype) == "float32":
        return T.simd.vld(place)
    return T.simd.vcvt(T.simd.vld(place, dist="UNPK_B16"), "float32", mask)


def store(place: Any, value: Any, mask: Any) -> None:
    """64 float32 values to a place in the unified buffer, rounded to its type; lanes outside `mask` write nothing.

    Without saturation, for that would turn NaN into 0 and infinity into a number.
    """
    if str(place.buffer.dtype) == "float32":
        T.evaluate(T.simd.vsts(place, value, mask))
    else:
        T.evaluate(T.simd.vsts(place, T.simd.vcvt(value, "bfloat16", mask, sat=False), mask, dist="PK_B32"))


def named(definition: Any, name: str) -> Any:
    """The definition under a name of its own, for factories."""
    return definition.with_attr("global_symbol", name)
