"""Launching the WGMMA products: a kernel's form from static facts and numbers of rows, its operands, its grid."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.cuda_sm90.packing import BLOCK
from deepinfer.backends.cuda_sm90.packing_narrow import NARROW
from deepinfer.backends.cuda_sm90.wgmma import WIDTH, wgmma
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram, tensor_map
from deepinfer.ops.formats import QTensor

_FOLDER: Final = Path(__file__).parent / "cuda"
_TOKENS: Final = (8, 16, 24, 32, 48, 64, 80, 96, 128, 144, 192)
"""Tokens of a tile, any of which gives the same bits."""
_FEW: Final = 96
"""Tokens of a tile up to which a multiprocessor has several blocks with e2m1 weights."""
_SHARED_OF_BLOCK: Final = 227 << 10
_SHARED_OF_ALL: Final = 228 << 10
_RESERVED: Final = 1 << 10
"""Bytes of shared memory that the system takes of every resident block."""
_MOST_STAGES: Final = 8
_STAGES_AHEAD: Final = 5
"""Stages from which on it pays to read a block ahead, which keeps one stage more occupied."""
_SWEEP: Final = 48
"""Output tiles that are taken for one row tile before the next: their weights stay in the L2 cache."""
MOST_EXPERTS: Final = 1024
_PAIRED: Final = 264
"""Blocks of 64 rows of a weight that a device holds at once, two by two; a constant, since bits depend on it."""
_CLUSTERED: Final = 234
"""As many in clusters of three to six, for which some multiprocessors of a group are left over: measured."""
_MOST_PARTS: Final = 8
_ROWS_OF_PARTS: Final = 64
"""Rows up to which a block for each part of K is faster than one for all."""


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "row_ends", "out", "acc", "token_scales")),
        *((name, ctypes.c_uint64) for name in ("token_scale_rows", "out_pitch", "acc_pitch", "acc_step")),
        *((name, ctypes.c_int) for name in ("experts", "rows", "row_tiles", "out_tiles", "depth_blocks")),
        *((name, ctypes.c_int) for name in ("sweep", "group_tiles", "acc_halves")),
    ]


@dataclass(frozen=True)
class Form:
    """A compiled form of the kernel.

    Attributes:
        bits: of a weight's code, 4 or 8.
        tokens: of a tile.
        groups: warpgroups that multiply, 64 weight rows each.
        wide: float32 results instead of bfloat16.
        experts: whose row ends shared memory holds; 0 for a product without experts.
        narrow: weights are packed for e4m3 products.
        eight: these are e4m3 products.
        split: parts of K that a block each sums.
        lone: no multiprocessor has more than one block to run, which may take all of its shared memory.
    """

    bits: int
    tokens: int
    groups: int
    wide: bool
    experts: int = 0
    narrow: bool = False
    eight: bool = False
    split: int = 1
    lone: bool = False

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor: as many as registers allow, and rings of three stages."""
        if self.lone:
            return 1
        if self.bits == 8:
            return 2 if self.tokens <= 64 else 1
        if self.eight:
            return 3 if self.tokens <= 8 else 2
        return 3 if self.tokens <= 16 else 2 if self.tokens <= _FEW else 1

    @property
    def shorter(self) -> int:
        """Narrower products that tiles with fewer rows take: where products, not their operands, bound the time."""
        return 4 if self.experts and self.tokens > _FEW and not self.eight else 0

    @property
    def ahead(self) -> bool:
        """Whether codes are read a block ahead: where blocks walk K alone, and a longer ring makes up for it."""
        alone = self.groups == 1 and self.split == 1 and not self.experts
        return alone and self.bits == 8 and self.stages >= _STAGES_AHEAD

    @property
    def _stage_bytes(self) -> int:
        of_token = BLOCK + 16 if self.eight else BLOCK * 2
        return self.groups * (64 * BLOCK * self.bits // 8 + 256) + self.tokens * of_token

    @property
    def _fixed_bytes(self) -> int:
        return 1024 + 16 * _MOST_STAGES + 8 * self.experts  # alignment, barriers, ends

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
            files=(_FOLDER / "hopper.cuh", _FOLDER / "products.cu"),
            entry="products",
            macros={
                "BITS": self.bits,
                "TOKENS": self.tokens,
                "STAGES": self.stages,
                "GROUPS": self.groups,
                "RESIDENT": self.resident,
                "WIDE": int(self.wide),
                "NARROW": int(self.narrow),
                "EIGHT": int(self.eight),
                "SPLIT": self.split,
                "SHORTER": self.shorter,
                "AHEAD": int(self.ahead),
            },
            generated=(WIDTH, *(self._multiply(self.tokens - 8 * i) for i in range(self.shorter + 1))),
        )

    def _multiply(self, width: int) -> str:
        return wgmma("multiply", width, registers=True, eight_bits=self.eight, widest=self.tokens)


def split_of(num_out: int, depth_blocks: int) -> int:
    """Parts of K for a matrix of so many rows: as many as find room at once with one tile of tokens."""
    halves = -(-num_out // 64)
    fitting = max(_CLUSTERED // halves, min(_PAIRED // halves, 2))
    return max(min(fitting, _MOST_PARTS, depth_blocks), 1)


def tile_tokens(num_rows: int, experts: int = 1) -> int:
    """Tokens of a tile for so many rows, spread at random over experts; known without reading who has how many."""
    mean = num_rows / max(experts, 1)
    need = mean + 4 / 3 * math.sqrt(mean) if experts > 1 else mean  # one expert in eleven then needs one more tile
    need = min(need, num_rows)
    tiles = max(math.ceil(need / _TOKENS[-1]), 1)
    return next(t for t in _TOKENS if t * tiles >= need)


@lru_cache(maxsize=256)
def _function(device: int, form: Form) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(form.program(), "sm_90a", form.shared_bytes)


def sweep_of(out_tiles: int) -> int:
    """The largest divisor up to the limit."""
    return next(s for s in range(min(out_tiles, _SWEEP), 0, -1) if out_tiles % s == 0)


def multiply(
    x: Tensor,
    weight: QTensor,
    out: Tensor,
    *,
    row_ends: Tensor | None = None,
    groups: int = 1,
    acc: Tensor | None = None,
    token_scales: Tensor | None = None,
    invariant: bool = True,
) -> None:
    """`out = x W^T + acc` with a packed weight.

    Args:
        x: [T, groups * K] bfloat16, rows at multiples of 16 bytes; e4m3 codes with `token_scales`. For a weight that is
            packed for e4m3 products, bfloat16 columns stand in the order of `evens_first`.
        weight: [N, K], [G, N, K] with one group of columns of `x` and of `out` each, or [E, N, K].
        out: [T, groups * N] bfloat16 or float32, columns side by side, rows at multiples of 8 bytes.
        row_ends: [E] int32 running ends of the experts' rows; None without experts.
        groups: matrices that stand side by side.
        acc: [T, groups * N] bfloat16 or float32, added before the rounding.
        token_scales: [K / 128, at least T + a tile, 4] float32 powers of two, for e4m3 products with experts.
        invariant: rows have the same bits in any batch; False lets blocks sum parts of K where rows are few.
    """
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    if acc is not None and acc.dtype not in (torch.bfloat16, torch.float32):
        acc = acc.float()
    experts = 0 if row_ends is None else weight.shape[0]
    num_out, depth = weight.shape[-2:]
    may_split = not invariant and experts == 0 and num_rows <= _ROWS_OF_PARTS
    split = split_of(groups * num_out, depth // BLOCK) if may_split else 1
    tokens = tile_tokens(num_rows, max(experts, 1))
    device = x.device.index
    processors = num_processors(device)
    row_tiles = -(-num_rows // tokens)
    # few tiles: halves of them occupy twice the multiprocessors
    halves = split > 1 or (experts == 0 and row_tiles * groups * (num_out // BLOCK) < processors)
    bits = 4 if weight.fmt == "mxfp4" else 8
    form = Form(
        bits=bits,
        tokens=tokens,
        groups=1 if halves else 2,
        wide=out.dtype == torch.float32,
        experts=experts,
        narrow=weight.layout == NARROW,
        eight=token_scales is not None,
        split=split,
        # halves beside each other would share the ring's room; e2m1 weights gain nothing from a longer one
        lone=bits == 8 and halves and split == 1 and row_tiles * groups * (num_out // 64) <= processors,
    )
    group_tiles = num_out // (64 * form.groups)
    out_tiles = groups * group_tiles
    params = _Params(
        weight.data.data_ptr(),
        weight.scale.data_ptr(),
        None if row_ends is None else row_ends.data_ptr(),
        out.data_ptr(),
        None if acc is None else acc.data_ptr(),
        None if token_scales is None else token_scales.data_ptr(),
        0 if token_scales is None else token_scales.shape[1],
        out.stride(0),
        *((0, 0) if acc is None else acc.stride()),
        experts,
        num_rows,
        row_tiles,
        out_tiles,
        depth // BLOCK,
        out_tiles if experts else sweep_of(out_tiles),
        group_tiles,
        acc is not None and acc.dtype == torch.bfloat16,
    )
    most = (row_tiles + min(experts, num_rows)) * out_tiles
    blocks = most * split if split > 1 else min(processors * form.resident, most)
    columns = x if token_scales is None else x.view(torch.bfloat16)  # the map only counts bytes
    _function(device, form).launch((blocks,), 128 * form.groups + 32, (tensor_map(columns, tokens, 64), params))
