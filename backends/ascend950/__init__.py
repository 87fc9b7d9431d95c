"""The backend for Ascend 950: kernels in Ascend C, run on the device by its own runtime and on any host by a twin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from deepinfer.ops.backend import Availability, Backend

if TYPE_CHECKING:
    from deepinfer.ops.runtime import Runtime

OP_MODULES: Final = (
    "norm",
    "kv_store",
    "compress",
    "engram",
    "step",
    "vision",
    "linear",
    "providers",
    "moves",
    "lists",
    "shaping",
    "rope",
    "mhc",
    "quant",
    "swiglu",
    "merge",
    "attention",
    "selection",
    "sampling",
    "experts",
    "scores",
    "heads",
)
"""Modules of this folder that register implementations, one per family of ops."""


def _probe() -> Availability:
    from deepinfer.backends.ascend950.host.probe import probe

    return probe()


def _runtime() -> Runtime:
    from deepinfer.backends.ascend950.host.runtime import open_runtime

    return open_runtime()


def _emulation() -> Runtime:
    from deepinfer.backends.ascend950.emulation import emulate

    return emulate()


BACKEND: Final = Backend(
    "ascend950",
    device_type="npu",
    probe=_probe,
    op_modules=tuple(f"deepinfer.backends.ascend950.{name}" for name in OP_MODULES),
    runtime=_runtime,
    priority=20,
    emulation=_emulation,
    sources=("launch.py", "twin_call.py", "registry.py", "tensors.py", "kernels/*.h", "twin/*.h", "twin/*/*.h"),
)
