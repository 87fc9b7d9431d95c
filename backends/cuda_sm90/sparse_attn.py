"""Sparse attention in CUDA C++ for the model's shape: 64 heads of 512 channels, bfloat16 queries, quantised records."""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.attention_forms import (
    BLOCKS_OF_ROW,
    MARKING_BYTES,
    Form,
    Pages,
    Room,
    attention_function,
    block_threads,
    choose_form,
    divide_scratch,
    helper_function,
    scratch_bytes,
    works_on_parts,
)
from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.nvidia.attention import sparse_attn as triton_sparse_attn
from deepinfer.backends.nvidia.nvrtc import tensor_map
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import PagedCache

_HEADS: Final = 64
_DIM: Final = 512
_CARRIED: Final = 512.0
"""Decoded keys are this much too small."""
_MARKING_THREADS, _DECODING_THREADS = 1024, 256
_DECODING_BLOCKS: Final = 8
"""Blocks a multiprocessor of the kernel that decodes records beforehand."""


class _Params(ctypes.Structure):
    """The kernels' `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("window", "kv", "window_slots", "kv_slots", "sink", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("gathered_bits", "gathered_places", "num_gathered", "gathered")),
        *((name, ctypes.c_uint64) for name in ("window_page_bytes", "kv_page_bytes", "window_pitch", "kv_pitch")),
        *((name, ctypes.c_int) for name in ("rows", "window_columns", "kv_columns")),
        *((name, ctypes.c_uint32) for name in ("window_words", "capacity")),
        ("scale", ctypes.c_float),
    ]


def _fits(q: Tensor, caches: tuple[PagedCache | None, ...], columns: int) -> bool:
    """What only run-time arguments show: dtype, and records at multiples of 16 bytes, as the kernels load them."""
    aligned = all(c.data.data_ptr() % 16 == 0 and c.data.stride(0) % 16 == 0 for c in caches if c is not None)
    return q.dtype == torch.bfloat16 and aligned and columns > 0


def run(
    q: Tensor,
    window_cache: PagedCache,
    window_slots: Tensor,
    kv_cache: PagedCache | None,
    kv_slots: Tensor | None,
    softmax_scale: float,
    attn_sink: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
    invariant: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `ops.attention.sparse_attn`. What does not fit the kernels goes to the Triton form.

    Args:
        q: as the op's, and so are those behind it.
        window_cache: see there.
        window_slots: see there.
        kv_cache: see there.
        kv_slots: see there.
        softmax_scale: see there.
        attn_sink: see there.
        out: memory for the results.
        scratch: room for decoded records; without it the form that needs it is not used.
        invariant: rows have the same bits in any batch; False lets blocks work on parts of rows.
    """
    if kv_slots is None:
        kv_cache = None
    kv_columns = 0 if kv_cache is None or kv_slots is None else kv_slots.shape[1]
    if not _fits(q, (window_cache, kv_cache), window_slots.shape[1] + kv_columns):
        return triton_sparse_attn(q, window_cache, window_slots, kv_cache, kv_slots, softmax_scale, attn_sink, out=out)
    num_rows = q.shape[0]
    o = new_like(out[0] if out else None, (num_rows, _HEADS, _DIM), q.dtype, q.device)
    lse = new_like(out[1] if out else None, (num_rows, _HEADS), torch.float32, q.device)
    if num_rows == 0:
        return o, lse
    q, sink = packed(q), packed(attn_sink)
    window_slots = _rows(window_slots)
    kv_slots = window_slots if kv_slots is None else _rows(kv_slots)
    second = window_cache if kv_cache is None else kv_cache
    params = _Params(
        window_cache.data.data_ptr(),
        second.data.data_ptr(),
        window_slots.data_ptr(),
        kv_slots.data_ptr(),
        sink.data_ptr(),
        o.data_ptr(),
        lse.data_ptr(),
        window_page_bytes=window_cache.data.stride(0),
        kv_page_bytes=second.data.stride(0),
        window_pitch=window_slots.stride(0),
        kv_pitch=kv_slots.stride(0),
        rows=num_rows,
        window_columns=window_slots.shape[1],
        kv_columns=kv_columns,
        scale=softmax_scale * math.log2(math.e) * _CARRIED,
    )
    pages = Pages(window_cache.records, second.records, second.format.kind == "fp4")
    maps = (_rows_of_heads(q),)
    parts = pages.parts(window_slots.shape[1], kv_columns)
    if not invariant and works_on_parts(num_rows, parts):
        _launch(Form.PARTS, maps, params, pages, q.device.index, parts)
        return o, lse
    room = None
    if scratch is not None:
        room = divide_scratch(scratch.shape[0], window_cache.num_slots, 0 if kv_cache is None else kv_cache.num_slots)
    form = choose_form(num_rows, pages.tiles(window_slots.shape[1], kv_columns), room)
    if form is Form.GATHERED and scratch is not None and room is not None:
        _gather(params, pages, room, scratch)
        _launch(form, (*maps, _rows_of_heads(o)), params, pages, q.device.index)
        if room.holds_all_slots:
            return o, lse
        form = Form.DIRECT  # of the two that know about gathered records, one finds that it is not needed
    _launch(form, maps, params, pages, q.device.index)
    return o, lse


def _launch(form: Form, maps: tuple[Any, ...], params: _Params, pages: Pages, device: int, parts: int = 0) -> None:
    if form in (Form.FEW, Form.PARTS):
        blocks = params.rows * (BLOCKS_OF_ROW if form is Form.FEW else parts)
    else:
        blocks = min(num_processors(device), params.rows)
    attention_function(device, pages, form, parts).launch((blocks,), block_threads(form), (*maps, params))


def _gather(params: _Params, pages: Pages, room: Room, scratch: Tensor) -> None:
    """Decode the records that the slots name into scratch, and note in `params` where they are."""
    device, base = scratch.device.index, scratch.data_ptr()
    scratch[: room.cleared_bytes].zero_()
    params.num_gathered = base
    params.gathered_bits = base + 16
    params.gathered_places = base + room.cleared_bytes
    params.gathered = base + room.records_start
    params.window_words, params.capacity = room.window_words, room.records
    counts, bits, places, records = (
        ctypes.c_void_p(at) for at in (base, params.gathered_bits, params.gathered_places, params.gathered)
    )
    words, shared_words = ctypes.c_int(room.words), ctypes.c_int(MARKING_BYTES // 4)
    processors = num_processors(device)
    helper_function(device, pages, "mark_slots").launch(
        (min(processors, params.rows),), _MARKING_THREADS, (params, bits, counts, words, shared_words)
    )
    helper_function(device, pages, "decode_records").launch(
        (processors * _DECODING_BLOCKS,), _DECODING_THREADS, (params, bits, places, counts, records, words)
    )


def _rows_of_heads(x: Tensor) -> Any:
    """A map of queries or results, with boxes of a row's heads and 64 channels."""
    return tensor_map(x.view(-1, _DIM), _HEADS, 64)


def _rows(slots: Tensor) -> Tensor:
    return slots if slots.stride(1) == 1 or slots.shape[1] <= 1 else slots.contiguous()


def _suits(dims: Dims) -> bool:
    return (
        dims.get("heads") == _HEADS
        and dims.get("dim") == _DIM
        and dims.get("window_kind") == "fp8"
        and dims.get("kv_kind") in ("fp4", "fp8", "none")
    )


_SOURCES: Final = (
    "attention_forms.py",
    "device.py",
    "cuda/hopper.cuh",
    "cuda/attention.cuh",
    "cuda/sparse_attn.cu",
    "cuda/sparse_attn_few.cu",
    "cuda/sparse_attn_gathered.cu",
    "cuda/gather_records.cu",
    "wgmma.py",
    "../nvidia/nvrtc.py",
    "../nvidia/attention.py",
)


@BACKEND.implements_plan(attention_ops.sparse_attn, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def sparse_attn_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """WGMMA and TMA through NVRTC, with scratch for records that many rows share."""
    return KernelPlan(run, scratch_bytes=scratch_bytes(ctx.max_tokens))


@BACKEND.implements_plan(
    attention_ops.sparse_attn,
    when=_suits,
    priority=11,
    batch_invariant=False,
    sources=(*_SOURCES, "cuda/sparse_attn_parts.cu"),
    interpreted=False,
)
def sparse_attn_parts(dims: Dims, ctx: BindContext) -> Plan:
    """As `sparse_attn_wgmma`, but few rows are worked on in parts, which are merged."""
    return KernelPlan(partial(run, invariant=False), scratch_bytes=scratch_bytes(ctx.max_tokens))
