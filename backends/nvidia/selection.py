"""Exact top-k of long rows: the k-th value by four passes of 256 bins, then one pass that writes columns in order.

Values are compared as integers that sort like the floats do, with -0.0 made 0.0 (they are equal, so the smaller column
wins) and NaN made -inf. Counts are integers, so nothing depends on order.
"""

from __future__ import annotations

from typing import Final

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.registry import KERNELS
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import index as index_ops

_CHUNK: Final = 4096
_NOTHING = tl.constexpr(0x007FFFFF)  # where -inf sorts


@device_function
def _keys(x: tl.tensor, row_at: tl.tensor, column: tl.tensor, length: tl.tensor) -> tl.tensor:
    """[n] uint32 that sort as the values do; what cannot be chosen sorts as -inf."""
    value = tl.load(x + row_at + column, mask=column < length, other=-float("inf")).to(tl.float32)
    value = tl.where((value == value) & (value != 0.0), value, tl.where(value == 0.0, 0.0, -float("inf")))
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@kernel
def _select(
    out: tl.tensor,
    x: tl.tensor,
    lens: tl.tensor,
    num_columns: tl.int32,
    k: tl.int32,
    x_pitch: tl.int64,
    CHUNK: tl.constexpr,
    K_BLOCK: tl.constexpr,
) -> None:
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    row_at = row * x_pitch
    length = tl.minimum(tl.load(lens + row), num_columns)
    bins = tl.arange(0, 256)
    prefix = tl.zeros((), tl.uint32)  # the upper bits of the k-th value, as far as they are known
    wanted = k  # how many are still to come from below the bins that are certain
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, length, CHUNK):
            column = first + tl.arange(0, CHUNK)
            key = _keys(x, row_at, column, length)
            ok = (column < length) & (key > _NOTHING)
            if step > 0:
                ok = ok & ((key >> (shift + 8)) == prefix)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=ok)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # in bins that are larger
        chosen = tl.max(tl.where(above + counts >= wanted, bins, 0), 0)  # 0 also where fewer than `wanted` are left
        wanted -= tl.sum(tl.where(bins == chosen, above, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    # `wanted` of those that equal `prefix` are chosen, those with the smallest columns
    place = tl.arange(0, K_BLOCK)
    written = tl.zeros((), tl.int32)
    taken = tl.zeros((), tl.int32)
    for first in range(0, length, CHUNK):
        column = first + tl.arange(0, CHUNK)
        key = _keys(x, row_at, column, length)
        ok = (column < length) & (key > _NOTHING)
        tie = (ok & (key == prefix)).to(tl.int32)
        rank = taken + tl.cumsum(tie, 0)
        pick = ok & ((key > prefix) | ((tie == 1) & (rank <= wanted)))
        at = written + tl.cumsum(pick.to(tl.int32), 0) - 1
        tl.store(out + row * k + at, column, mask=pick & (at < k))
        written += tl.sum(pick.to(tl.int32), 0)
        taken += tl.sum(tie, 0)
    tl.store(out + row * k + place, tl.full((K_BLOCK,), -1, tl.int32), mask=(place >= written) & (place < k))


@KERNELS.implements(index_ops.topk_select)
def topk_select(x: Tensor, k: int, lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One program per row."""
    num_rows, num_columns = x.shape
    y = new_like(out, (num_rows, k), lens.dtype, x.device)
    x = x if x.stride(1) == 1 or num_columns <= 1 else x.contiguous()
    chunk = min(_CHUNK, max(next_pow2(num_columns), 32))
    _select(
        (num_rows if k else 0,),
        y,
        x,
        packed(lens),
        num_columns,
        k,
        x.stride(0),
        CHUNK=chunk,
        K_BLOCK=next_pow2(k),
        num_warps=max(1, min(16, chunk // 256)),
    )
    return y
