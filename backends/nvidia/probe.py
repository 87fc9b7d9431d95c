"""Is a GPU of this generation here, and if not, what is missing: answered without importing a kernel module."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

from deepinfer.ops.backend import Availability

Capability = tuple[int, int]

_PACKAGES: Final = {"triton": "triton", "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings"}
"""Distributions of the extra `cuda`, and a module of each. A CUDA build of torch brings some of them, but not all."""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it is there
        return False


def probe(capabilities: tuple[Capability, ...]) -> Availability:
    """Whether the current CUDA device can run kernels made for `capabilities`.

    Args:
        capabilities: compute capabilities (major, minor) that are served.
    """
    if torch.version.cuda is None:
        return Availability(False, f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch")
    missing = [package for package, module in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        return Availability(False, f"{', '.join(missing)} {are} not installed; pip install {' '.join(missing)}")
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES")
    found = torch.cuda.get_device_capability()
    if found not in capabilities:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
        name = torch.cuda.get_device_name()
        return Availability(
            False, f"{name} has compute capability {found[0]}.{found[1]}; these kernels are made for {wanted}"
        )
    return Availability(True)
