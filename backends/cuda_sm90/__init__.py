"""The backend for Hopper GPUs (compute capability 9.0): H100, H200, GH200."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.ops.backend import Availability, Backend

if TYPE_CHECKING:
    from deepinfer.ops.runtime import Runtime


def _probe() -> Availability:
    from deepinfer.backends.nvidia.probe import probe

    return probe(((9, 0),))


def _runtime() -> Runtime:
    from deepinfer.backends.nvidia.runtime import CudaRuntime

    return CudaRuntime()


def _emulation() -> Runtime:
    from deepinfer.backends.nvidia.emulation import emulate

    return emulate()


BACKEND = Backend(
    "cuda_sm90",
    device_type="cuda",
    probe=_probe,
    op_modules=(
        "deepinfer.backends.cuda_sm90.kernels",
        "deepinfer.backends.cuda_sm90.sparse_attn",
        "deepinfer.backends.cuda_sm90.linear",
        "deepinfer.backends.cuda_sm90.narrow_experts",
        "deepinfer.backends.cuda_sm90.plain_products",
        "deepinfer.backends.cuda_sm90.scores",
        "deepinfer.backends.cuda_sm90.selection",
        "deepinfer.backends.cuda_sm90.kv",
        "deepinfer.backends.cuda_sm90.mhc",
        "deepinfer.backends.cuda_sm90.mix",
        "deepinfer.backends.cuda_sm90.index_q",
        "deepinfer.backends.cuda_sm90.cuts",
    ),
    runtime=_runtime,
    priority=20,
    emulation=_emulation,
)
