"""The shared kernels under this backend's name; what only Blackwell has is in modules of its own beside this one."""

from __future__ import annotations

from deepinfer.backends.cuda_sm100 import BACKEND
from deepinfer.backends.nvidia.families import KERNELS

KERNELS.register(BACKEND, __name__)
