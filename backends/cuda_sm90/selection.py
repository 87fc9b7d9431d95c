"""Exact top-k in CUDA C++: one pass over a row that one block or a cluster of blocks shares."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, architecture_of
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.selection import topk_select as triton_topk_select
from deepinfer.backends.nvidia.tensors import new_like, next_pow2, packed
from deepinfer.ops import index as index_ops
from deepinfer.ops.backend import BindContext, Dims, Plan

_FOLDER: Final = Path(__file__).parent / "cuda"
_THREADS: Final = 512
_SHARED_BYTES: Final = 8 * (8192 + 32) + 4 * (2048 + 16 + 2 + 3 + 1 + 1 + 2 + 1)
"""The kernel's `Shared`, without the bitmap of columns behind it."""
MOST_CHOSEN: Final = 4096
"""Half of what shared memory keeps: thresholds that let through neither too few nor too many are then easy to find."""
MOST_COLUMNS: Final = 1 << 20
_COLUMNS_OF_BLOCK: Final = 4096
"""A row is not divided further."""


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "lens", "out")),
        ("pitch", ctypes.c_int64),
        ("columns", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


def program(half: bool, cluster: int) -> CudaProgram:
    """The kernel for bfloat16 or float32 rows, each of which so many blocks share."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "topk.cu"),
        entry="topk",
        macros={"HALF": int(half), "CLUSTER": cluster},
    )


def shared_bytes(columns: int) -> int:
    """Dynamic shared memory for rows of so many columns, of which few sizes exist."""
    return _SHARED_BYTES + max(next_pow2(columns), 1 << 14) // 8


def blocks_of_row(rows: int, columns: int, processors: int) -> int:
    """Blocks that share a row: more while each multiprocessor still has at most two, and rows are long enough."""
    blocks = 1
    while blocks < 8 and 2 * blocks * rows <= 2 * processors and columns >= 2 * blocks * _COLUMNS_OF_BLOCK:
        blocks *= 2
    return blocks


@lru_cache(maxsize=128)
def _function(device: int, half: bool, cluster: int, num_bytes: int) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(program(half, cluster), architecture_of(device), num_bytes)


def run(x: Tensor, k: int, lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A block or a cluster per row; rows that are too long for the bitmap take the Triton form."""
    num_rows, num_columns = x.shape
    if num_columns > MOST_COLUMNS or x.dtype not in (torch.float32, torch.bfloat16):
        return triton_topk_select(x, k, lens, out=out)
    y = new_like(out, (num_rows, k), torch.int32, x.device)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 or num_columns <= 1 else x.contiguous()
    lens = packed(lens)
    params = _Params(x.data_ptr(), lens.data_ptr(), y.data_ptr(), x.stride(0), num_columns, k)
    cluster = blocks_of_row(num_rows, num_columns, num_processors(x.device.index))
    function = _function(x.device.index, x.dtype == torch.bfloat16, cluster, shared_bytes(num_columns))
    function.launch((num_rows * cluster,), _THREADS, (params,))
    return y


def _suits(dims: Dims) -> bool:
    return 0 < int(dims["k"]) <= MOST_CHOSEN


@BACKEND.implements_plan(
    index_ops.topk_select,
    when=_suits,
    priority=10,
    sources=("cuda/hopper.cuh", "cuda/topk.cu", "device.py", "../nvidia/nvrtc.py", "../nvidia/selection.py"),
    interpreted=False,
)
def topk_select_onepass(dims: Dims, ctx: BindContext) -> Plan:
    """Keeps what reaches a sampled threshold, and chooses among it in shared memory."""
    return KernelPlan(run)
