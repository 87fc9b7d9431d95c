"""The compressor: groups pooled per channel, then the newest tokens kept, in two launches: reads before writes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import SHORT, new_like, packed, short
from deepinfer.ops import compress as compress_ops
from deepinfer.ops.backend import Dims

_PROGRAM: Final = program("compress.asc")
_LISTS: Final = "state_slots, positions, row_to_seq, cu_seqlens"
_PITCHES: Final = "slot_pitch: i64, ring_pitch: i64, kind_pitch: i64, step: i64, ring: i32"
_POOL: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"pool_rows_{name}",
        f"out!, gate, value, state, {_LISTS}, rows: i64, {_PITCHES}, width: i32, ratio: i32",
    )
    for name in SHORT.values()
}
_KEEP: Final = _PROGRAM.kernel("keep_rows", f"gate, value, state!, {_LISTS}, rows: i64, {_PITCHES}, width: i32")
_MAX_VALUES: Final = 8192
"""`kMaxValues` of the kernel."""


def _fits(dims: Dims) -> bool:
    return bool(dims["ratio"] * (-(-dims["dim"] // 64) * 64) <= _MAX_VALUES)


@implements(compress_ops.kv_compress, sources=("compress.py", "kernels/compress.asc"), when=_fits)
def kv_compress(
    gate: Tensor,
    value: Tensor,
    state: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    row_to_seq: Tensor,
    cu_seqlens_q: Tensor,
    ratio: int,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A row to a core; one that closes no group reads nothing and writes zeros."""
    rows, width = gate.shape
    out = new_like(out, (rows, width), out_dtype, gate.device)
    gates, values = packed(gate), packed(value)
    lists = (packed(state_slots), packed(positions), packed(row_to_seq), packed(cu_seqlens_q))
    pitches = (*state.stride(), state.shape[1])
    blocks = min(rows, VECTOR_CORES)
    _POOL[short(out_dtype)](blocks, out, gates, values, state, *lists, rows, *pitches, width, ratio)
    _KEEP(blocks, gates, values, state, *lists, rows, *pitches, width)
    return out
