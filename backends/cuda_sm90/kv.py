"""Writing cache records in CUDA C++ for the model's shapes: 512 channels to fp8 and fp4 records, 128 to index keys."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.nvidia import kv as triton_form
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, architecture_of
from deepinfer.backends.nvidia.records import KIND
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import PagedCache

_FOLDER: Final = Path(__file__).parent / "cuda"
_THREADS: Final = 128
RESIDENT: Final = 7
"""Blocks of a multiprocessor, each of which takes row after row."""
_SHAPES: Final = ((512, "fp8"), (512, "fp4"), (128, "index"))
_SOURCES: Final = (
    "cuda/hopper.cuh",
    "cuda/codes.cuh",
    "cuda/kv_store.cu",
    "device.py",
    "../nvidia/nvrtc.py",
    "../nvidia/kv.py",
    "../nvidia/records.py",
    "../nvidia/norm.py",
    "../nvidia/rope.py",
    "../nvidia/codes.py",
)


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "positions", "table", "cache", "slots", "normed")),
        *((name, ctypes.c_uint64) for name in ("pitch", "page_bytes")),
        *((name, ctypes.c_int) for name in ("rows", "stride", "ratio", "mask")),
        ("eps", ctypes.c_float),
    ]


def program(dim: int, kind: str, width: int, records: int) -> CudaProgram:
    """The kernel for rows of `dim` values, of which the last `width` turn."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "codes.cuh", _FOLDER / "kv_store.cu"),
        entry="kv_store",
        macros={"DIM": dim, "KIND": KIND[kind], "WIDTH": width, "RECORDS": records, "RESIDENT": RESIDENT},
    )


def rows_of_block(dim: int) -> int:
    """Rows that a block takes at a time: a lane has sixteen values."""
    return _THREADS // (dim // 16)


def mask_of(ratio: int) -> int:
    """Bits that a position keeps when what `ratio` leaves of it goes; 0 where that is no matter of bits."""
    return -ratio if ratio & (ratio - 1) == 0 else 0


@lru_cache(maxsize=64)
def _function(device: int, dim: int, kind: str, width: int, records: int) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(program(dim, kind, width, records), architecture_of(device))


def _fits(x: Tensor, weight: Tensor, cos_sin: Tensor, cache: PagedCache, normed: Tensor | None) -> bool:
    """What only run-time arguments show: bfloat16 rows, float32 factors, everything where 16-byte accesses may go."""
    width = cos_sin.shape[1]
    places = [t.data_ptr() for t in (x, weight, cos_sin, cache.data, *(() if normed is None else (normed,)))]
    return (
        x.dtype == torch.bfloat16
        and weight.dtype == torch.float32
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and cache.data.stride(0) % 16 == 0
        and width % 16 == 0
        and width <= x.shape[1]
        and all(place % 16 == 0 for place in places)
    )


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int,
    normed: Tensor | None,
) -> None:
    num_rows, dim = x.shape
    if num_rows == 0:
        return
    positions, slots = packed(positions), packed(slots)
    tile = rows_of_block(dim)
    blocks = min(-(-num_rows // tile), num_processors(x.device.index) * RESIDENT)
    params = _Params(
        x.data_ptr(),
        weight.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cache.data.data_ptr(),
        slots.data_ptr(),
        None if normed is None else normed.data_ptr(),
        x.stride(0),
        cache.data.stride(0),
        num_rows,
        blocks * tile,
        ratio,
        mask_of(ratio),
        eps,
    )
    function = _function(x.device.index, dim, cache.format.kind, cos_sin.shape[1], cache.records)
    function.launch((blocks,), _THREADS, (params,))


def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.kv.kv_norm_rope_store`."""
    normed = new_like(out, tuple(kv.shape), kv.dtype, kv.device)
    weight, cos_sin = packed(weight), packed(cos_sin)
    if not _fits(kv, weight, cos_sin, cache, normed):
        return triton_form.kv_norm_rope_store(kv, weight, eps, positions, cos_sin, cache, slots, ratio, out=normed)
    _launch(kv, weight, eps, positions, cos_sin, cache, slots, ratio, normed)
    return normed


def index_k_store(
    k: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
    *,
    out: None = None,
) -> None:
    """See `ops.kv.index_k_store`."""
    weight, cos_sin = packed(weight), packed(cos_sin)
    if _fits(k, weight, cos_sin, cache, None):
        _launch(k, weight, eps, positions, cos_sin, cache, slots, ratio, None)
    else:
        triton_form.index_k_store(k, weight, eps, positions, cos_sin, cache, slots, ratio)


def _suits(dims: Dims) -> bool:
    return (dims.get("dim"), dims.get("kind")) in _SHAPES


@BACKEND.implements_plan(kv_ops.kv_norm_rope_store, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def kv_norm_rope_store_warps(dims: Dims, ctx: BindContext) -> Plan:
    """A warp per row, and row after row."""
    return KernelPlan(kv_norm_rope_store)


@BACKEND.implements_plan(kv_ops.index_k_store, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def index_k_store_warps(dims: Dims, ctx: BindContext) -> Plan:
    """A quarter of a warp per row."""
    return KernelPlan(index_k_store)
