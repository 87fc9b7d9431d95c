"""The CPU backend: row kernels in C++ whose bits do not depend on the batch, the chunk or the number of threads."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from deepinfer.ops.backend import Availability, Backend

if TYPE_CHECKING:
    from deepinfer.ops.runtime import Runtime

_OP_MODULES = (
    "norm",
    "quant",
    "linear",
    "kv",
    "attention",
    "index",
    "compress",
    "mhc",
    "engram",
    "moe",
    "moves",
    "heads",
    "step",
    "sampling",
)


def _probe() -> Availability:
    if find_spec("deepinfer.backends.cpu._kernels") is None:
        return Availability(False, "deepinfer.backends.cpu._kernels is not built; install deepinfer again")
    return Availability(True)


def _runtime() -> Runtime:
    from deepinfer.backends.cpu.runtime import CpuRuntime

    return CpuRuntime()


BACKEND = Backend(
    "cpu",
    device_type="cpu",
    probe=_probe,
    op_modules=tuple(f"deepinfer.backends.cpu.{name}" for name in _OP_MODULES),
    runtime=_runtime,
    priority=0,
    sources=("native/*.cpp", "native/*.hpp"),
)
