"""Sparse attention in CUDA C++ for the model's shape: 64 heads of 512 channels, bfloat16 queries, quantised records."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia.attention import sparse_attn as triton_sparse_attn
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, tensor_map
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import PagedCache

_FOLDER: Final = Path(__file__).parent / "cuda"
_HEADS: Final = 64
_DIM: Final = 512
_THREADS: Final = 512
_SHARED_BYTES: Final = 65536 + 2 * 65536 + 8192 + 1024 + 512 + 512 + 64 + 1024
_CARRIED: Final = 512.0
"""Decoded keys are this much too small."""


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("window", "kv", "window_slots", "kv_slots", "sink", "out", "lse")),
        *((name, ctypes.c_uint64) for name in ("window_page_bytes", "kv_page_bytes", "window_pitch", "kv_pitch")),
        *((name, ctypes.c_int) for name in ("rows", "window_columns", "kv_columns")),
        ("scale", ctypes.c_float),
    ]


def program(window_records: int, kv_records: int, kv_fp4: bool) -> CudaProgram:
    """The kernel for pages of so many records."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "sparse_attn.cu"),
        entry="sparse_attn",
        macros={"WINDOW_RECORDS": window_records, "KV_RECORDS": kv_records, "KV_FP4": int(kv_fp4)},
        generated=(wgmma("mma_scores", 32), wgmma("mma_values", 128, transposed=True)),
    )


@lru_cache(maxsize=64)
def _function(device: int, window_records: int, kv_records: int, kv_fp4: bool) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(program(window_records, kv_records, kv_fp4), "sm_90a", _SHARED_BYTES)


@lru_cache(maxsize=64)
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits(q: Tensor, caches: tuple[PagedCache | None, ...], columns: int) -> bool:
    """What only run-time arguments show: dtype, and records at multiples of 16 bytes, as the kernel loads them."""
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
) -> tuple[Tensor, Tensor]:
    """One persistent block per multiprocessor; what does not fit the kernel goes to the Triton form."""
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
    device = q.device.index
    params = _Params(
        window_cache.data.data_ptr(),
        second.data.data_ptr(),
        window_slots.data_ptr(),
        kv_slots.data_ptr(),
        sink.data_ptr(),
        o.data_ptr(),
        lse.data_ptr(),
        window_cache.data.stride(0),
        second.data.stride(0),
        window_slots.stride(0),
        kv_slots.stride(0),
        num_rows,
        window_slots.shape[1],
        kv_columns,
        softmax_scale * math.log2(math.e) * _CARRIED,
    )
    function = _function(device, window_cache.records, second.records, second.format.kind == "fp4")
    query = tensor_map(q.view(num_rows * _HEADS, _DIM), _HEADS, 64)
    function.launch((min(_num_processors(device), num_rows),), _THREADS, (query, params))
    return o, lse


def _rows(slots: Tensor) -> Tensor:
    return slots if slots.stride(1) == 1 or slots.shape[1] <= 1 else slots.contiguous()


def _suits(dims: Dims) -> bool:
    kinds: tuple[Any, Any] = (dims.get("window_kind"), dims.get("kv_kind"))
    return (
        dims.get("heads") == _HEADS
        and dims.get("dim") == _DIM
        and kinds[0] == "fp8"
        and kinds[1]
        in (
            "fp4",
            "fp8",
            "none",
        )
    )


@BACKEND.implements_plan(
    attention_ops.sparse_attn,
    when=_suits,
    priority=10,
    sources=("cuda/hopper.cuh", "cuda/sparse_attn.cu", "wgmma.py", "../nvidia/nvrtc.py", "../nvidia/attention.py"),
    interpreted=False,
)
def sparse_attn_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """WGMMA and TMA through NVRTC."""
    return KernelPlan(run)
