"""Rows to the experts of one device and back."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import WEIGHT_KIND, new_like, packed, rows_of
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor
from deepinfer.ops.moe import DispatchHandle

_SOURCES: Final = ("experts.py", "kernels/experts.asc")
_PROGRAM: Final = program("experts.asc")
_PLACE: Final = _PROGRAM.kernel(
    "place_choices",
    "expert_ids, weights, slots!, row_weights!, psum!, choices: i64, experts: i32, per_core: i32",
)
_SEND: Final = _PROGRAM.kernel("send_rows", "x, slots, rows!, tokens: i64, pitch: i64, row_bytes: i64, k: i32")
_COMBINE: Final = _PROGRAM.kernel(
    "combine_rows",
    "y, slots, bias, out!, tokens: i64, y_pitch: i64, bias_pitch: i64, out_pitch: i64, width: i32, k: i32, "
    "y_kind: i32, bias_kind: i32, out_kind: i32",
)
_MAX_EXPERTS: Final = 256 * VECTOR_CORES - 1
"""`kMaxExperts` lists for each core, one of them for choices without an expert."""
_COPY: Final = 96 * 1024
"""Bytes of a row that a core moves together: `kCopy` of the kernel."""
_WIDTH: Final = 8192
"""Elements of a row that a core sums together: `kWidth` of the kernel."""

_Dispatched = tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]


def _send(rows: Tensor, x: Tensor, slots: Tensor) -> None:
    flat = rows_of(x)
    size = flat.element_size()
    tokens, row_bytes = flat.shape[0], flat.shape[1] * size
    tasks = tokens * -(-row_bytes // _COPY)
    blocks = min(tasks, VECTOR_CORES)
    _SEND(blocks, flat, slots, rows, tokens, flat.stride(0) * size, row_bytes, slots.shape[1])


def _expanded(x: Tensor, count: int) -> Tensor:
    return torch.empty((count, x.shape[1]), dtype=x.dtype, device=x.device)


@implements(moe_ops.ep_dispatch, sources=_SOURCES, when=lambda dims: bool(dims["experts"] <= _MAX_EXPERTS))
def ep_dispatch(
    x: Tensor | QTensor, expert_ids: Tensor, weights: Tensor, num_experts: int, *, out: _Dispatched | None = None
) -> _Dispatched:
    """A core per few experts lists their choices in order; then a row is read once and written for each choice."""
    tokens, k = expert_ids.shape
    count, device = tokens * k, expert_ids.device
    row_weights = new_like(None if out is None else out[1], (count,), torch.float32, device)
    psum = new_like(None if out is None else out[2], (num_experts,), torch.int32, device)
    slots = new_like(None if out is None else out[3].slot_to_row, (tokens, k), torch.int32, device)
    per_core = -(-(num_experts + 1) // VECTOR_CORES)
    blocks = -(-(num_experts + 1) // per_core)
    _PLACE(blocks, packed(expert_ids), packed(weights), slots, row_weights, psum, count, num_experts, per_core)
    rows = None if out is None else out[0]
    if isinstance(x, QTensor):
        if not isinstance(rows, QTensor):
            rows = QTensor(_expanded(x.data, count), _expanded(x.scale, count), x.fmt)
        _send(rows.data, x.data, slots)
        _send(rows.scale, x.scale, slots)
    else:
        if not isinstance(rows, Tensor):
            rows = _expanded(x, count)
        _send(rows, x, slots)
    return rows, row_weights, psum, DispatchHandle(slots)


def _kind(dtype: torch.dtype) -> int:
    if dtype not in WEIGHT_KIND:
        raise OpArgumentError(f"the kernels sum float32 and bfloat16, got {dtype}; float64 is the reference's")
    return WEIGHT_KIND[dtype]


@implements(moe_ops.ep_combine, sources=_SOURCES)
def ep_combine(
    y: Tensor, handle: DispatchHandle, bias: Tensor | None, out_dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """The sum of a token stays in the unified buffer; rows that no choice names are not read."""
    slots, flat = packed(handle.slot_to_row), rows_of(y)
    (tokens, k), width = slots.shape, flat.shape[1]
    out = new_like(out, (tokens, width), out_dtype, y.device)
    added = None if bias is None else rows_of(bias)
    _COMBINE(
        min(tokens * -(-width // _WIDTH), VECTOR_CORES),
        flat,
        slots,
        added,
        out,
        tokens,
        flat.stride(0) * flat.element_size(),
        0 if added is None else added.stride(0) * added.element_size(),
        out.stride(0) * out.element_size(),
        width,
        k,
        _kind(flat.dtype),
        0 if added is None else _kind(added.dtype),
        _kind(out_dtype),
    )
    return out
