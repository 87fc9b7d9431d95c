"""The step between sublayers in CUDA C++: streams are read and written once, by clusters that also mix and norm."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia import mhc as triton_form
from deepinfer.backends.nvidia.mixing import mix_scratch_bytes
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.errors import DeviceError

_FOLDER: Final = Path(__file__).parent / "cuda"
_STREAMS: Final = 4
_COLUMNS: Final = _STREAMS * (_STREAMS + 2)
BLOCKS: Final = 8
"""Of a cluster, each with as many channels."""
ROWS: Final = 64
"""Of a tile, which a cluster takes at a time, at most."""
_FEWEST_ROWS: Final = 16
"""Of a tile: those of one warp on every part of a multiprocessor."""
_ROWS_OF_WARP: Final = 4
THREADS: Final = 32 * (16 + 4)
_WIDTHS: Final = range(1536, 5121, 512)
"""Channels of a stream for which steps and segments are whole and shared memory suffices."""
_STAGES, _MATRICES = 2, 1


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "h", "post", "comb", "read", "terms", "scale", "base", "weight")),
        *((name, ctypes.c_void_p) for name in ("out", "normed", "next_pre", "next_post", "next_comb")),
        *((name, ctypes.c_int) for name in ("rows", "tile_rows", "last_rows", "turns", "iters", "clusters")),
        *((name, ctypes.c_float) for name in ("hc_eps", "norm_eps")),
    ]


class _TermParams(ctypes.Structure):
    """The `Params` of what splits the matrix."""

    _fields_ = [("matrix", ctypes.c_void_p), ("terms", ctypes.c_void_p)]


def step_program(hidden: int) -> CudaProgram:
    """The step."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "mhc_step.cu"),
        entry="mhc_step",
        macros={"HIDDEN": hidden, "STAGES": _STAGES, "MATRICES": _MATRICES},
        generated=(wgmma("multiply", 3 * _COLUMNS),),
    )


def terms_program(hidden: int) -> CudaProgram:
    """What brings the mixing matrix into the form that the step reads."""
    return CudaProgram(
        files=(_FOLDER / "hopper.cuh", _FOLDER / "mhc_terms.cu"), entry="mhc_terms", macros={"HIDDEN": hidden}
    )


def shared_bytes(hidden: int) -> int:
    """As the kernel's places in shared memory, and room for their alignment."""
    steps = hidden // BLOCKS // 64
    streams, matrix = _STAGES * _STREAMS * ROWS * 128, _MATRICES * _STREAMS * 3 * _COLUMNS * 128
    kept, weight, part = (steps + 2) * ROWS * 128, hidden // BLOCKS * 4, ROWS // BLOCKS * (_COLUMNS + 4) * 4
    sums = (BLOCKS + 1) * part + 2 * BLOCKS * (part + 4 * ROWS) + 5 * 4 * ROWS + 16 * (BLOCKS + 1)
    return streams + matrix + kept + weight + sums + 8 * (2 * _STAGES + 8) + 1024


def turns_of(num_rows: int, most: int) -> tuple[int, int, int]:
    """Rows of a tile, of a tile of the last turn, and turns, for at most so many clusters.

    What is left for the last turn, which may be the only one, is spread over all clusters: a tile with fewer rows takes
    less time.
    """
    turns = -(-num_rows // (ROWS * most))
    left = num_rows - (turns - 1) * ROWS * most
    last = max(_FEWEST_ROWS, -(-left // (most * _ROWS_OF_WARP)) * _ROWS_OF_WARP)
    return (last if turns == 1 else ROWS), last, turns


def terms_bytes(hidden: int) -> int:
    """Three bfloat16 terms of every element of the matrix."""
    return 3 * 2 * _COLUMNS * _STREAMS * hidden


def terms_blocks(hidden: int) -> int:
    """Blocks of 256 threads that split the matrix, eight elements a thread."""
    return -(-_COLUMNS * _STREAMS * hidden // (8 * 256))


@lru_cache(maxsize=32)
def _functions(device: int, hidden: int) -> tuple[CudaFunction, CudaFunction, int]:
    """What splits the matrix, the step, and how many clusters of it the device has room for."""
    with torch.cuda.device(device):
        step = CudaFunction(step_program(hidden), "sm_90a", shared_bytes(hidden))
        most = step.clusters_at_once(BLOCKS, THREADS)
        if most == 0:
            raise DeviceError(
                f"mhc_step needs room for a cluster of {BLOCKS} blocks, which this part of a GPU does not have; "
                "override it with the Triton form, cuda_sm90.mhc_step"
            )
        return CudaFunction(terms_program(hidden), "sm_90a"), step, most


def _fits(streams: tuple[Tensor, ...], singles: tuple[Tensor, ...]) -> bool:
    """What only run-time arguments show: bfloat16 streams, float32 weights, all where 16-byte accesses may go."""
    return (
        all(t.dtype == torch.bfloat16 for t in streams)
        and all(t.dtype == torch.float32 for t in singles)
        and all(t.data_ptr() % 16 == 0 for t in (*streams, *singles))
    )


def mhc_step(
    y: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    read: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `ops.mhc.mhc_step`."""
    num_rows, _, hidden = h.shape
    given = out if out is not None else (None,) * 5
    new = new_like(given[0], (num_rows, _STREAMS, hidden), h.dtype, h.device)
    normed = new_like(given[1], (num_rows, hidden), h.dtype, h.device)
    pre, next_post = (new_like(t, (num_rows, _STREAMS), torch.float32, h.device) for t in given[2:4])
    next_comb = new_like(given[4], (num_rows, _STREAMS, _STREAMS), torch.float32, h.device)
    results = (new, normed, pre, next_post, next_comb)
    streams = (packed(y), packed(h), new, normed)
    singles = tuple(packed(t) for t in (post, comb, read, fn, scale, base, norm_weight, pre, next_post, next_comb))
    if not _fits(streams, singles):
        return triton_form.mhc_step(
            y, h, post, comb, read, fn, scale, base, iters, hc_eps, norm_weight, norm_eps, out=results, scratch=scratch
        )
    if num_rows == 0:
        return results
    if scratch is None or scratch.shape[0] < terms_bytes(hidden):
        scratch = torch.empty(terms_bytes(hidden), dtype=torch.uint8, device=h.device)
    split, step, most = _functions(h.device.index, hidden)
    of_tile, of_last, turns = turns_of(num_rows, most)
    clusters = min(-(-num_rows // of_tile), most)
    post, comb, read, fn, scale, base, norm_weight = singles[:7]
    split.launch((terms_blocks(hidden),), 256, (_TermParams(fn.data_ptr(), scratch.data_ptr()),))
    operands = (*streams[:2], post, comb, read, scratch, scale, base, norm_weight, *results)
    params = _Params(
        *(t.data_ptr() for t in operands), num_rows, of_tile, of_last, turns, iters, clusters, hc_eps, norm_eps
    )
    step.launch((clusters * BLOCKS,), THREADS, (params,))
    return results


def _suits(dims: Dims) -> bool:
    return dims["streams"] == _STREAMS and dims["hidden"] in _WIDTHS


@BACKEND.implements_plan(
    mhc_ops.mhc_step,
    when=_suits,
    priority=10,
    sources=(
        "cuda/hopper.cuh",
        "cuda/mhc_step.cu",
        "cuda/mhc_terms.cu",
        "wgmma.py",
        "../nvidia/nvrtc.py",
        "../nvidia/mhc.py",
        "../nvidia/mixing.py",
        "../nvidia/norm.py",
        "../nvidia/launch.py",
    ),
    interpreted=False,
)
def mhc_step_clusters(dims: Dims, ctx: BindContext) -> Plan:
    """Clusters of blocks take tile after tile; all that is made of a stream is made before it leaves the processor."""
    spare = mix_scratch_bytes(dims, ctx)
    return KernelPlan(mhc_step, scratch_bytes=max(terms_bytes(int(dims["hidden"])), spare))
