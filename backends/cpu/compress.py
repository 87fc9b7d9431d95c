"""The compressor."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import KIND, floats, ids, num_threads
from deepinfer.ops import compress as compress_ops


@BACKEND.implements(compress_ops.kv_compress)
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
) -> Tensor:
    """Reads all groups first, then writes the state; slots may be strided, the inside of one may not."""
    num_slots, ring, _, width = state.shape
    if state.dtype is not torch.float32 or state.stride()[1:] != (2 * width, width, 1):
        return compress_ops.kv_compress(
            gate, value, state, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype
        )
    gate, value, state_slots, positions = floats(gate), floats(value), ids(state_slots), ids(positions)
    row_to_seq, cu_seqlens_q = ids(row_to_seq), ids(cu_seqlens_q)
    rows = gate.shape[0]
    out = torch.empty((rows, width), dtype=out_dtype)
    _kernels.kv_compress(
        out.data_ptr(),
        KIND[out_dtype],
        gate.data_ptr(),
        value.data_ptr(),
        rows,
        width,
        state.data_ptr(),
        num_slots,
        state.stride(0),
        ring,
        state_slots.data_ptr(),
        positions.data_ptr(),
        row_to_seq.data_ptr(),
        cu_seqlens_q.data_ptr(),
        state_slots.shape[0],
        ratio,
        num_threads(),
    )
    return out
