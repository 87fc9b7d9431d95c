"""The shared kernels under this backend's name; what only Hopper has is in modules of its own beside this one."""

from __future__ import annotations

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.nvidia.families import KERNELS

KERNELS.register(BACKEND, __name__)
