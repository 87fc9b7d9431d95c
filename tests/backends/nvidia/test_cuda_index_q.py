"""Codes of index queries in CUDA C++: the contract's bits on the CPU, and in registers on Hopper."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the fallback of this kernel")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import index_q
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import index as index_ops
from deepinfer.ops.cases.common import rotary


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("heads", "width"), [(32, 64), (5, 32)])
def test_codes_on_the_cpu_are_the_contracts(heads: int, width: int, tmp_path: Path) -> None:
    """Bit for bit: ties of every scale, tiny and huge heads, any bits, zeros, heads that no warp is full of."""
    gen = torch.Generator().manual_seed(heads)
    rows = 8
    wide = torch.randn(rows, heads + 1, 128, generator=gen).bfloat16()
    wide[1, 0], wide[1, 1, 5], wide[1, 2, 120] = 0.0, torch.nan, torch.inf
    wide[2, 0] *= 2.0**-130
    wide[2, 1] *= 2.0**120
    wide[2, 2] = torch.arange(128) / 16  # values that do not turn are ties every fourth time
    wide[2, 3] = torch.randint(-24, 25, (128,), generator=gen) / 4
    any_bits = torch.randint(-(2**15), 2**15, wide[3:5].shape, generator=gen).short().view(torch.bfloat16)
    wide[3:5] = torch.where(any_bits.isfinite(), any_bits, -0.0)
    wide[3, :3, 1], wide[3, :3, 33] = torch.inf, torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    scale = 2.0 ** torch.randint(-133, 125, (2, heads + 1, 4, 1), generator=gen)
    wide[5] = (torch.randint(-24, 25, (heads + 1, 4, 32), generator=gen) / 4 * scale[0]).flatten(1)
    wide[6] = (torch.randn(heads + 1, 4, 32, generator=gen) * scale[1]).flatten(1)
    x = wide[:, 1:] if heads == 5 else wide[:, :heads]
    positions = torch.randint(0, 50, (rows,), generator=gen, dtype=torch.int32)
    table = rotary(50, width)
    codes = torch.full((rows, heads, 64), 0xA5, dtype=torch.uint8)
    scales = torch.full((rows, heads, 4), 0xA5, dtype=torch.uint8)
    places = (t.data_ptr() for t in (x, positions, table, codes, scales))
    params = index_q._Params(*places, x.stride(0), x.stride(1), rows, heads)
    library = on_cpu(index_q.program(width), tmp_path)
    assert library.params_bytes() == ctypes.sizeof(params)
    library.launch(ctypes.byref(params), index_q.num_blocks(rows, heads), 1, 1, index_q.THREADS, 0)
    want = index_ops.index_q_quant(x, positions, table, "mxfp4")
    assert isinstance(want, index_ops.QTensor)
    assert torch.equal(scales, want.scale)
    known = (scales != 255).repeat_interleave(16, 2)  # the contract leaves codes under a NaN scale open
    assert not known.all()
    assert torch.equal(codes[known], want.data[known])


def test_codes_stay_in_registers() -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(index_q.program(64).compile("sm_90a"))
    assert local_bytes == 0
    assert registers <= 64  # 32 warps of a multiprocessor
