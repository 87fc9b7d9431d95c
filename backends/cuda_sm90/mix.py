"""Mixing logits of hyper-connections in CUDA C++: streams are read once; a row is summed in one order in any batch."""

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
from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia import mixing as triton_form
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, tensor_map
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import mhc as mhc_ops
from deepinfer.ops.backend import BindContext, Dims, Plan

_FOLDER: Final = Path(__file__).parent / "cuda"
_STREAMS: Final = 4
_COLUMNS: Final = _STREAMS * (_STREAMS + 2)
_STRETCHES: Final = 64
ROWS: Final = 64
"""Of a tile."""
THREADS: Final = 128 + 32
"""Of a block: those that multiply, and a warp for the copies."""
_QUAD_BYTES: Final = 4 * (_COLUMNS + 4) * 4
"""Sums of four rows."""
_WIDTHS: Final = range(1024, 5121, 1024)
"""Channels of a stream for which stretches are whole and shared memory suffices."""
_FEW_ROWS: Final = 192
"""Up to so many rows a block has one tile only."""
_ARRIVAL_BYTES: Final = _FEW_ROWS // 4 * 4
"""A number for every four of them."""
FINISH_THREADS: Final = 128


class Params(ctypes.Structure):
    """The kernels' `Params`, up to the alignment of a tensor map."""

    _fields_ = [
        ("streams", ctypes.c_uint64 * 16),
        *((name, ctypes.c_void_p) for name in ("matrix", "parts", "arrivals", "out")),
        *((name, ctypes.c_int) for name in ("rows", "at_once")),
        ("eps", ctypes.c_float),
        ("padding", ctypes.c_char * 20),
    ]


@dataclass(frozen=True)
class MixForm:
    """A compiled form of the kernel.

    Attributes:
        own: stretches of a block.
        blocks: of a cluster, which adds their sums up; 1 for none.
        stages: of the ring that streams come by.
    """

    own: int
    blocks: int
    stages: int

    @property
    def shares(self) -> int:
        """Blocks of a tile."""
        return _STRETCHES // self.own

    @property
    def parts(self) -> int:
        """Sums of a row that go through memory."""
        return self.shares // self.blocks

    def shared_bytes(self, hidden: int) -> int:
        """As the kernel's places in shared memory, and room for their alignment."""
        matrix = self.own * (_STREAMS * hidden // _STRETCHES) * 3 * _COLUMNS * 2
        sums = 2 * ROWS // 4 * _QUAD_BYTES if self.blocks > 1 else 4 * _QUAD_BYTES
        return self.stages * ROWS * 128 + matrix + sums + 8 * (2 * self.stages + 2) + 1024

    def parts_bytes(self, rows: int) -> int:
        """Of sums of so many rows."""
        return -(-rows // 4) * self.parts * _QUAD_BYTES

    def program(self, hidden: int) -> CudaProgram:
        """What sums."""
        macros = {"STAGES": self.stages, **self._layout(hidden)}
        files = (_FOLDER / "hopper.cuh", _FOLDER / "mix_parts.cuh", _FOLDER / "mix.cu")
        return CudaProgram(files, "mix", macros, (wgmma("multiply", 3 * _COLUMNS),))

    def finish_program(self, hidden: int) -> CudaProgram:
        """What adds the parts of a form without clusters."""
        files = (_FOLDER / "hopper.cuh", _FOLDER / "mix_parts.cuh", _FOLDER / "mix_finish.cu")
        return CudaProgram(files, "mix_finish", self._layout(hidden))

    def _layout(self, hidden: int) -> dict[str, int | str]:
        return {"HIDDEN": hidden, "OWN": self.own, "BLOCKS": self.blocks}


FEW: Final = MixForm(own=1, blocks=8, stages=5)
MANY: Final = MixForm(own=2, blocks=1, stages=12)


@lru_cache(maxsize=32)
def _functions(device: int, form: MixForm, hidden: int) -> tuple[CudaFunction, CudaFunction | None]:
    """What sums, and what adds the parts where that takes a launch."""
    with torch.cuda.device(device):
        finish = CudaFunction(form.finish_program(hidden), "sm_90a") if form.blocks == 1 else None
        return CudaFunction(form.program(hidden), "sm_90a", form.shared_bytes(hidden)), finish


def _fits(h: Tensor, fn: Tensor, mix: Tensor) -> bool:
    """What only run-time arguments show: bfloat16 streams, all where 16-byte accesses may go."""
    return h.dtype == torch.bfloat16 and all(t.data_ptr() % 16 == 0 for t in (h, fn, mix))


def mhc_prenorm_mix(
    h: Tensor,
    fn: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    persistent: Tensor | None = None,
) -> Tensor:
    """See `ops.mhc.mhc_prenorm_mix`."""
    rows, _, hidden = h.shape
    mix = new_like(out, (rows, _COLUMNS), torch.float32, h.device)
    h, fn = packed(h), packed(fn.float())
    if not _fits(h, fn, mix):
        return triton_form.mhc_prenorm_mix(h, fn, eps, out=mix, scratch=scratch)
    if rows == 0:
        return mix
    form = FEW if rows <= _FEW_ROWS else MANY
    tiles = -(-rows // ROWS)
    num_bytes = form.parts_bytes(rows)
    if scratch is None or scratch.shape[0] < num_bytes:
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=h.device)
    if persistent is None:
        persistent = torch.zeros(_ARRIVAL_BYTES, dtype=torch.uint8, device=h.device)
    at_once = tiles if form.blocks > 1 else min(tiles, max(num_processors(h.device.index) // form.shares, 1))
    streams = (ctypes.c_uint64 * 16).from_buffer(tensor_map(h.flatten(1), ROWS, 64))
    places = (t.data_ptr() for t in (fn, scratch, persistent, mix))
    params = Params(streams, *places, rows, at_once, eps)
    run, finish = _functions(h.device.index, form, hidden)
    run.launch((form.shares * at_once,), THREADS, (params,))
    if finish is not None:
        finish.launch((-(-rows * 8 // FINISH_THREADS),), FINISH_THREADS, (params,))
    return mix


def _suits(dims: Dims) -> bool:
    return dims["streams"] == _STREAMS and dims["hidden"] in _WIDTHS


@BACKEND.implements_plan(
    mhc_ops.mhc_prenorm_mix,
    when=_suits,
    priority=10,
    sources=(
        "cuda/hopper.cuh",
        "cuda/mix_parts.cuh",
        "cuda/mix.cu",
        "cuda/mix_finish.cu",
        "device.py",
        "wgmma.py",
        "../nvidia/nvrtc.py",
        "../nvidia/mixing.py",
        "../nvidia/launch.py",
    ),
    interpreted=False,
)
def mhc_prenorm_mix_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """Many rows in blocks that keep their part of the matrix, few in clusters that finish in the same launch."""
    room = max(MANY.parts_bytes(ctx.max_tokens), FEW.parts_bytes(_FEW_ROWS), triton_form.mix_scratch_bytes(dims, ctx))
    return KernelPlan(mhc_prenorm_mix, scratch_bytes=room, persistent_bytes=_ARRIVAL_BYTES)
