"""What filters keep, in CUDA C++: a cluster of blocks holds a row in shared memory and finds its cuts by histograms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.nvidia import sampling, verification
from deepinfer.backends.nvidia.filters import Cuts
from deepinfer.backends.nvidia.filters import find_cuts as triton_find_cuts
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, architecture_of
from deepinfer.backends.nvidia.registry import KERNELS, KernelPlan
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import verification as verification_ops
from deepinfer.ops.backend import BindContext, Dims, Plan

_FOLDER: Final = Path(__file__).parent / "cuda"
THREADS: Final = 512
_IDS_OF_BLOCK: Final = 8192
"""A row is not divided further."""
_MOST_BLOCKS: Final = 8
_MOST_SHARED: Final = 227 << 10


class Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "cu_seqlens")),
        *((name, ctypes.c_void_p) for name in ("keys", "limits", "tops", "totals", "usables")),
        ("pitch", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("ids", "requests", "want_total")),
    ]


def program(blocks: int) -> CudaProgram:
    """The kernel for rows that so many blocks share."""
    return CudaProgram(files=(_FOLDER / "hopper.cuh", _FOLDER / "cuts.cu"), entry="cuts", macros={"CLUSTER": blocks})


def blocks_of_row(ids: int) -> int:
    """Blocks that share a row. How many rows there are has no say: sums are added in one order."""
    blocks = 1
    while blocks < _MOST_BLOCKS and ids > blocks * _IDS_OF_BLOCK:
        blocks *= 2
    return blocks


def shared_bytes(ids: int, blocks: int) -> int:
    """The kernel's `Shared`, and a block's part of a row behind it."""
    return 4 * (2048 + 64 * blocks + 4 * blocks + 2 * 16 + 4) + 16 * -(-ids // (4 * blocks))


@lru_cache(maxsize=64)
def _function(device: int, blocks: int, num_bytes: int) -> CudaFunction | None:
    """The kernel, loaded; None where the device, a part of a GPU perhaps, has no room for such a cluster."""
    with torch.cuda.device(device):
        function = CudaFunction(program(blocks), architecture_of(device), num_bytes)
        return function if function.clusters_at_once(blocks, THREADS) else None


def params_of(
    cuts: Cuts, logits: Tensor, filters: tuple[Tensor, ...], cu_seqlens: Tensor | None, *, want_total: bool
) -> Params:
    """What the kernel is told; arguments as `find_cuts`, filters from temperature on."""
    return Params(
        *(t.data_ptr() for t in (logits, *filters)),
        None if cu_seqlens is None else cu_seqlens.data_ptr(),
        *(t.data_ptr() for t in cuts),
        logits.stride(0),
        logits.shape[1],
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        want_total,
    )


def _fits(logits: Tensor, filters: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> bool:
    """What only run-time arguments show: types as the contract names them, rows that a cluster has room for."""
    kinds = (torch.float32, torch.float32, torch.int32, torch.float32, torch.float32)
    ids = logits.shape[1]
    return (
        all(t.dtype == kind for t, kind in zip((logits, *filters), kinds, strict=True))
        and (cu_seqlens is None or cu_seqlens.dtype == torch.int32)
        and (ids == 1 or logits.stride(1) == 1)
        and shared_bytes(ids, blocks_of_row(ids)) <= _MOST_SHARED
    )


def find_cuts(
    cuts: Cuts,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    want_total: bool = False,
) -> None:
    """See `backends.nvidia.filters.find_cuts`, which takes what does not fit here."""
    filters = (temperature, top_k, top_p, min_p)
    rows, ids = logits.shape
    if rows == 0 or ids == 0:
        return
    blocks = blocks_of_row(ids)
    function = None
    if _fits(logits, filters, cu_seqlens):
        function = _function(logits.device.index, blocks, shared_bytes(ids, blocks))
    if function is None:
        triton_find_cuts(cuts, logits, *filters, cu_seqlens, want_total=want_total)
        return
    params = params_of(cuts, logits, filters, cu_seqlens, want_total=want_total)
    function.launch((rows * blocks,), THREADS, (params,))


def _with_these(shared: Callable[..., Any], dims: Dims, ctx: BindContext) -> Plan:
    """A shared form that finds cuts as here, with as much scratch."""
    (bind,) = (entry.bind for entry in KERNELS.entries if entry.name == shared.__name__)
    return KernelPlan(partial(shared, find=find_cuts), bind(dims, ctx).scratch_bytes)


_SOURCES: Final = (
    "cuda/hopper.cuh",
    "cuda/cuts.cu",
    "../nvidia/nvrtc.py",
    "../nvidia/sampling.py",
    "../nvidia/verification.py",
    "../nvidia/filters.py",
    "../nvidia/draws.py",
    "../nvidia/launch.py",
)


@BACKEND.implements_plan(sampling_ops.process_logits, priority=10, sources=_SOURCES, interpreted=False)
def process_logits_clusters(dims: Dims, ctx: BindContext) -> Plan:
    """A cluster per row finds its cut; then every id is held against it."""
    return _with_these(sampling.process_logits, dims, ctx)


@BACKEND.implements_plan(sampling_ops.sample, priority=10, sources=_SOURCES, interpreted=False)
def sample_clusters(dims: Dims, ctx: BindContext) -> Plan:
    """A cluster per row finds its cut; then the shared form draws."""
    return _with_these(sampling.sample, dims, ctx)


@BACKEND.implements_plan(verification_ops.verify, priority=10, sources=_SOURCES, interpreted=False)
def verify_clusters(dims: Dims, ctx: BindContext) -> Plan:
    """As `sample_clusters`, for targets and drafts."""
    return _with_these(verification.verify, dims, ctx)
