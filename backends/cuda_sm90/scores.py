"""Index scores in CUDA C++ for the model's shape: 32 heads of 128 channels, e2m1 heads and keys, bfloat16 weights.

All three ops run one kernel that computes every score alone, so its bits do not depend on where its key was found.
What does not fit (float32 records or weights, pages that 16-byte loads cannot read) takes the Triton form.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import BACKEND
from deepinfer.backends.cuda_sm90.device import num_processors
from deepinfer.backends.cuda_sm90.wgmma import wgmma
from deepinfer.backends.nvidia import scores as triton_form
from deepinfer.backends.nvidia.nvrtc import CudaFunction, CudaProgram
from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.backends.nvidia.tensors import new_like, packed
from deepinfer.ops import index as index_ops
from deepinfer.ops.backend import BindContext, Dims, Plan
from deepinfer.ops.formats import PagedCache, QTensor

_FOLDER: Final = Path(__file__).parent / "cuda"
_HEADS: Final = 32
_DIM: Final = 128
_THREADS: Final = 128
_TILE: Final = 64
_START: Final = 192
"""Columns that cost about what the start of a block does."""
_SOURCES: Final = (
    "cuda/hopper.cuh",
    "cuda/index_scores.cu",
    "device.py",
    "wgmma.py",
    "../nvidia/nvrtc.py",
    "../nvidia/scores.py",
    "../nvidia/records.py",
)

Mode = Literal["paged", "blocks", "ragged"]
_MODES: Final[dict[Mode, int]] = {"paged": 0, "blocks": 1, "ragged": 2}


class _Params(ctypes.Structure):
    """The kernel's `Params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "q_scales", "keys", "scales", "weights", "ends", "starts")),
        *((name, ctypes.c_void_p) for name in ("blocks", "block_table", "row_to_seq", "out")),
        *((name, ctypes.c_uint64) for name in ("page_bytes", "weights_pitch", "table_pitch")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "num_blocks", "table_columns", "chunk")),
    ]


@dataclass(frozen=True)
class Form:
    """A compiled form of the kernel; all have the same bits.

    Attributes:
        mode: what columns are.
        records: of a page; 1 without pages.
        candidate: positions of a candidate block; 16 without them.
        rows: rows of a block, up to 4: several where they can share keys.
        stages: of the ring of keys.
        resident: blocks of a multiprocessor, as many as shared memory and registers allow.
    """

    mode: Mode
    records: int = 1
    candidate: int = 16
    rows: int = 1
    stages: int = 4
    resident: int = 4

    @property
    def grain(self) -> int:
        """Keys that lie together, wherever they start: 16, 8 or 1."""
        together = 16 if self.mode == "ragged" else math.gcd(self.records, self.candidate, 16)
        return together if together >= 8 else 1

    @property
    def longest(self) -> int:
        """Most columns of a block."""
        return 4096 if self.grain > 1 and self.rows == 1 else 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: heads, their weights and scales, where keys are, keys, and room to align them."""
        heads = self.rows * (_HEADS * (_DIM + 6) + 4)
        runs = (self.longest + (self.stages - 1) * _TILE) // self.grain
        return 1024 + heads + runs * 17 + self.stages * _TILE * 68

    def program(self) -> CudaProgram:
        """Its source."""
        return CudaProgram(
            files=(_FOLDER / "hopper.cuh", _FOLDER / "index_scores.cu"),
            entry="index_scores",
            macros={
                "MODE": _MODES[self.mode],
                "RECORDS": self.records,
                "CANDIDATE": self.candidate,
                "GRAIN": self.grain,
                "ROWS": self.rows,
                "CHUNK": self.longest,
                "STAGES": self.stages,
                "RESIDENT": self.resident,
            },
            generated=(wgmma("mma_dots", _HEADS, registers=True, eight_bits=True),),
        )

    def chunk(self, rows: int, columns: int, processors: int) -> int:
        """Columns of a block: what lets all processors finish soonest, were blocks to start together."""
        groups, places = -(-rows // self.rows), self.resident * processors

        def cost(chunk: int) -> int:
            return -(-groups * -(-columns // chunk) // places) * (min(chunk, columns) + _START)

        chunks = [_TILE]
        while chunks[-1] < self.longest:
            chunks.append(2 * chunks[-1])
        return min(reversed(chunks), key=cost)


@lru_cache(maxsize=64)
def _function(device: int, form: Form) -> CudaFunction:
    with torch.cuda.device(device):
        return CudaFunction(form.program(), "sm_90a", form.shared_bytes)


def _heads_fit(q: Tensor | QTensor, weights: Tensor) -> bool:
    """What only run-time arguments show."""
    return isinstance(q, QTensor) and q.fmt == "mxfp4" and weights.dtype == torch.bfloat16


def _aligned(codes: Tensor, *pitches: int) -> bool:
    return codes.data_ptr() % 16 == 0 and all(pitch % 16 == 0 for pitch in pitches)


def _launch(form: Form, q: QTensor, weights: Tensor, y: Tensor, params: _Params) -> Tensor:
    """Fill in what all modes have, and launch."""
    codes, scales = packed(q.data), packed(q.scale)
    if not _aligned(codes):
        codes = codes.clone()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    num_rows, num_columns = y.shape
    if y.numel() == 0:
        return y
    params.q, params.q_scales, params.weights = codes.data_ptr(), scales.data_ptr(), weights.data_ptr()
    params.weights_pitch, params.out = weights.stride(0), y.data_ptr()
    params.rows, params.columns = num_rows, num_columns
    device = y.device.index
    params.chunk = form.chunk(num_rows, num_columns, num_processors(device))
    grid = (-(-num_rows // form.rows), -(-num_columns // params.chunk))
    _function(device, form).launch(grid, _THREADS, (params,))
    return y


def _stored(
    form: Form,
    q: QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    block_table: Tensor,
    row_to_seq: Tensor,
    y: Tensor,
) -> Tensor:
    visible, block_table, row_to_seq = packed(visible), packed(block_table), packed(row_to_seq)
    blocks = None if blocks is None else packed(blocks)
    params = _Params(
        keys=cache.data.data_ptr(),
        ends=visible.data_ptr(),
        blocks=None if blocks is None else blocks.data_ptr(),
        block_table=block_table.data_ptr(),
        row_to_seq=row_to_seq.data_ptr(),
        page_bytes=cache.data.stride(0),
        table_pitch=block_table.stride(0),
        num_blocks=0 if blocks is None else blocks.shape[1],
        table_columns=block_table.shape[1],
    )
    return _launch(form, q, weights, y, params)


def _cache_fits(cache: PagedCache) -> bool:
    return cache.format.kind == "index" and _aligned(cache.data, cache.data.stride(0))


def paged(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
    num_columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.index.index_logits_paged`."""
    if not isinstance(q, QTensor) or not _heads_fit(q, weights) or not _cache_fits(cache):
        return triton_form.index_logits_paged(q, cache, weights, visible, block_table, row_to_seq, num_columns, out=out)
    y = new_like(out, (q.shape[0], num_columns), torch.float32, weights.device)
    # with a sequence for every row there are none to share keys
    form = Form("paged", cache.records, rows=1 if q.shape[0] <= block_table.shape[0] else 4)
    return _stored(form, q, cache, weights, visible, None, block_table, row_to_seq, y)


def pooled(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor,
    candidate_block: int,
    block_table: Tensor,
    row_to_seq: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.index.index_logits_blocks`."""
    if not isinstance(q, QTensor) or not _heads_fit(q, weights) or not _cache_fits(cache):
        return triton_form.index_logits_blocks(
            q, cache, weights, visible, blocks, candidate_block, block_table, row_to_seq, out=out
        )
    y = new_like(out, (q.shape[0], blocks.shape[1] * candidate_block), torch.float32, weights.device)
    form = Form("blocks", cache.records, candidate_block)
    return _stored(form, q, cache, weights, visible, blocks, block_table, row_to_seq, y)


def ragged(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `ops.index.index_logits_ragged`; the host reads the lengths, on which the width of the result depends."""
    if not isinstance(q, QTensor) or not _heads_fit(q, weights) or not isinstance(k, QTensor) or k.fmt != "mxfp4":
        return triton_form.index_logits_ragged(q, k, weights, starts, ends, out=out)
    num_columns = max(int((ends - starts).max()), 0) if q.shape[0] else 0
    y = new_like(out, (q.shape[0], num_columns), torch.float32, weights.device)
    codes, scales, starts, ends = packed(k.data), packed(k.scale), packed(starts), packed(ends)
    codes = codes if _aligned(codes) else codes.clone()
    scales = scales if scales.data_ptr() % 4 == 0 else scales.clone()
    params = _Params(keys=codes.data_ptr(), scales=scales.data_ptr(), starts=starts.data_ptr(), ends=ends.data_ptr())
    return _launch(Form("ragged"), q, weights, y, params)


def _suits(dims: Dims) -> bool:
    return dims.get("heads") == _HEADS and dims.get("dim") == _DIM and dims.get("fmt") == "mxfp4"


@BACKEND.implements_plan(index_ops.index_logits_paged, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def index_logits_paged_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """Decodes keys in registers, once for all rows of a block."""
    return KernelPlan(paged)


@BACKEND.implements_plan(index_ops.index_logits_blocks, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def index_logits_blocks_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """A block of threads a row, since rows choose their own candidates."""
    return KernelPlan(pooled)


@BACKEND.implements_plan(index_ops.index_logits_ragged, when=_suits, priority=10, sources=_SOURCES, interpreted=False)
def index_logits_ragged_wgmma(dims: Dims, ctx: BindContext) -> Plan:
    """As for stored keys, which lie in one array here."""
    return KernelPlan(ragged, capturable=False)
