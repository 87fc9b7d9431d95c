"""Products with small bfloat16 matrices in CUDA C++: the router and its like; one arithmetic for all row counts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.cuda_sm90.products import split_of, tile_tokens
from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia import linear as triton_form
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, tensor_map
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like
from deepinfer.ops import linear as linear_ops
from deepinfer.ops.backend import BindContext, Dims, Plan

_FOLDER: Final = Path(__file__).parent / "cuda"
_DEPTH: Final = 128
_MOST_ROWS_OF_WEIGHT: Final = 4096
"""Beyond this a matrix has tiles enough for the Triton form to reach the memory's rate."""
_TOKENS_OF_CLUSTER: Final = 128
"""Tokens up to which there is a block for each part of K."""
_SHARED_OF_BLOCK: Final = 227 << 10
_SHARED_OF_ALL: Final = 228 << 10
_RESERVED: Final = 1 << 10
_MOST_STAGES: Final = 8


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("out_pitch", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "out_tiles", "num_tiles", "depth_blocks")),
        ("factor", ctypes.c_float),
    ]


@dataclass(frozen=True)
class PlainForm:
    """A compiled form of the kernel.

    Attributes:
        tokens: of a tile.
        groups: warpgroups that multiply, 64 weight rows each.
        wide: float32 results instead of bfloat16.
        split: parts of K that are summed on their own.
        cluster: a block for each of them.
    """

    tokens: int
    groups: int
    wide: bool
    split: int
    cluster: bool

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.groups == 1 and self.tokens <= 144 else 1

    @property
    def _stage_bytes(self) -> int:
        return (64 * self.groups + self.tokens) * _DEPTH * 2

    @property
    def _fixed_bytes(self) -> int:
        return 1024 + 16 * _MOST_STAGES  # alignment, barriers

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        room = min(_SHARED_OF_ALL // self.resident - _RESERVED, _SHARED_OF_BLOCK) - self._fixed_bytes
        return min(room // self._stage_bytes, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * self._stage_bytes + self._fixed_bytes

    def program(self) -> CudaProgram:
        """Its source."""
        return CudaProgram(
            files=(_FOLDER / "hopper.cuh", _FOLDER / "plain_products.cu"),
            entry="plain_products",
            macros={
                "TOKENS": self.tokens,
                "STAGES": self.stages,
                "GROUPS": self.groups,
                "RESIDENT": self.resident,
                "WIDE": int(self.wide),
                "SPLIT": self.split,
                "CLUSTER": int(self.cluster),
            },
            generated=(wgmma("multiply", self.tokens),),
        )


@lru_cache(maxsize=128)
def _function(device: int, form: PlainForm) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(form.program(), "sm_90a", form.shared_bytes)


def linear_bf16(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, out_scale: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """See `ops.linear.linear_bf16`. What a tensor map cannot read goes to the Triton form."""
    if x.dtype != torch.bfloat16 or out_dtype not in (torch.bfloat16, torch.float32) or not _mapped(weight):
        return triton_form.linear_bf16(x, weight, out_dtype, out_scale, out=out)
    num_rows, (num_out, depth) = x.shape[0], weight.shape
    y = new_like(out, (num_rows, num_out), out_dtype, x.device)
    if num_rows == 0:
        return y
    x = x if _mapped(x) else x.clone(memory_format=torch.contiguous_format)
    split, tokens = split_of(num_out, depth // _DEPTH), tile_tokens(num_rows)
    processors, token_tiles = num_processors(x.device.index), -(-num_rows // tokens)
    cluster = split > 1 and num_rows <= _TOKENS_OF_CLUSTER
    groups = 1 if cluster or token_tiles * (num_out // 64) <= processors else 2
    form = PlainForm(tokens, groups, out_dtype == torch.float32, split, cluster)
    out_tiles = num_out // (64 * groups)
    num_tiles = token_tiles * out_tiles
    params = _Params(y.data_ptr(), y.stride(0), num_rows, out_tiles, num_tiles, depth // _DEPTH, out_scale)
    blocks = num_tiles * split if cluster else min(processors * form.resident, num_tiles)
    maps = tensor_map(weight, 64 * groups, 64), tensor_map(x, tokens, 64)
    _function(x.device.index, form).launch((blocks,), 128 * groups + 32, (*maps, params))
    return y


def _mapped(x: Tensor) -> bool:
    """Whether a tensor map can read a matrix: neighbours side by side, rows at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _suits(dims: Dims) -> bool:
    n, k = int(dims.get("n", 0)), int(dims.get("k", 0))
    small = 0 < n <= _MOST_ROWS_OF_WEIGHT and n % 128 == 0 and k > 0 and k % _DEPTH == 0
    return small and str(dims.get("weight")) == "torch.bfloat16"


@BACKEND.implements_plan(
    linear_ops.linear_bf16,
    when=_suits,
    priority=10,
    sources=(
        "cuda/hopper.cuh",
        "cuda/plain_products.cu",
        "device.py",
        "products.py",
        "wgmma.py",
        "../nvidia/nvrtc.py",
        "../nvidia/linear.py",
        "../nvidia/products.py",
        "../nvidia/codes.py",
        "../nvidia/launch.py",
    ),
    interpreted=False,
)
def linear_bf16_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """Splits K of small matrices, equally for all row counts."""
    return KernelPlan(linear_bf16)
