"""Index queries in CUDA C++ for the model's heads of 128 values: rotation and e2m1 codes from registers."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.nvidia import rope as triton_form
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, architecture_of
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_codes, packed
from deepinfer.ops import index as index_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import QTensor, QuantFormat

_FOLDER: Final = Path(__file__).parent / "cuda"
THREADS: Final = 128
_DIM: Final = 128
_HEADS: Final = 8
"""Of a row, that a warp takes."""


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "positions", "table", "codes", "scales")),
        *((name, ctypes.c_uint64) for name in ("row_pitch", "head_pitch")),
        *((name, ctypes.c_int) for name in ("rows", "heads")),
    ]


def program(width: int) -> CudaProgram:
    """The kernel for heads of which the last `width` values turn."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "codes.cuh", _FOLDER / "index_q.cu"),
        entry="index_q",
        macros={"WIDTH": width},
    )


def num_blocks(rows: int, heads: int) -> int:
    """Blocks of four warps."""
    return -(-rows * -(-heads // _HEADS) // (THREADS // 32))


@lru_cache(maxsize=16)
def _function(device: int, width: int) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(program(width), architecture_of(device))


def _fits(q: Tensor, cos_sin: Tensor, codes: QTensor) -> bool:
    """What only run-time arguments show: bfloat16 heads, everything where 16-byte accesses may go."""
    width = cos_sin.shape[1]
    return (
        q.dtype == torch.bfloat16
        and q.stride(2) == 1
        and q.stride(0) % 8 == 0
        and q.stride(1) % 8 == 0
        and width % 16 == 0
        and width <= _DIM // 2
        and codes.data.is_contiguous()
        and codes.scale.is_contiguous()
        and all(t.data_ptr() % 4 == 0 for t in (codes.data, codes.scale))
        and all(t.data_ptr() % 16 == 0 for t in (q, cos_sin))
    )


def index_q_quant(
    q: Tensor, positions: Tensor, cos_sin: Tensor, fmt: QuantFormat, *, out: QTensor | None = None
) -> QTensor:
    """See `ops.index.index_q_quant`."""
    codes = new_codes(out, tuple(q.shape), fmt, q.device)
    cos_sin, positions = packed(cos_sin), packed(positions)
    if not _fits(q, cos_sin, codes):
        triton_form.turn(q, positions, cos_sin, codes.data, codes.scale, fmt=fmt)
        return codes
    rows, heads, _ = q.shape
    if rows * heads == 0:
        return codes
    places = (t.data_ptr() for t in (q, positions, cos_sin, codes.data, codes.scale))
    params = _Params(*places, q.stride(0), q.stride(1), rows, heads)
    _function(q.device.index, cos_sin.shape[1]).launch((num_blocks(rows, heads),), THREADS, (params,))
    return codes


def _suits(dims: Dims) -> bool:
    return bool(dims["dim"] == _DIM and dims["fmt"] == "mxfp4")


@BACKEND.implements_plan(
    index_ops.index_q_quant,
    when=_suits,
    priority=10,
    sources=(
        "cuda/hopper.cuh",
        "cuda/codes.cuh",
        "cuda/index_q.cu",
        "../nvidia/nvrtc.py",
        "../nvidia/rope.py",
        "../nvidia/codes.py",
        "../nvidia/launch.py",
    ),
    interpreted=False,
)
def index_q_quant_warps(dims: Dims, ctx: BindContext) -> Plan:
    """A quarter of a warp per head."""
    return KernelPlan(index_q_quant)
