"""The backend for Blackwell data-centre GPUs (compute capability 10.0 and 10.3): B200, GB200, B300."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.ops.backend import Availability, Backend

if TYPE_CHECKING:
    from deepinfer.ops.runtime import Runtime


def _probe() -> Availability:
    from deepinfer.backends.nvidia.probe import probe

    return probe(((10, 0), (10, 3)))


def _runtime() -> Runtime:
    from deepinfer.backends.nvidia.runtime import CudaRuntime

    return CudaRuntime()


def _emulation() -> Runtime:
    from deepinfer.backends.nvidia.emulation import emulate

    return emulate()


BACKEND = Backend(
    "cuda_sm100",
    device_type="cuda",
    probe=_probe,
    op_modules=(
        "deepinfer.backends.cuda_sm100.kernels",
        "deepinfer.backends.cuda_sm100.linear",
        "deepinfer.backends.cuda_sm100.attention",
        "deepinfer.backends.cuda_sm100.portable",
    ),
    runtime=_runtime,
    priority=20,
    emulation=_emulation,
)
