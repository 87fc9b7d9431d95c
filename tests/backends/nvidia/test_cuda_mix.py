"""Mixing logits in CUDA C++: right on the CPU thread by thread, the same bits in any batch and form."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of this kernel")

from cpu_programs import on_cpu
from cuda_on_cpu import map_words

from deepinfer.backends.cuda_sm90 import mix
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import mhc as mhc_ops

HIDDEN = 1024
REGISTERS = 65536
SHARED_OF_BLOCK = 227 << 10


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def operands(rows: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, 4, hidden, generator=gen).bfloat16()
    return h, torch.randn(24, 4 * hidden, generator=gen) * (4 * hidden) ** -0.5


def logits(form: mix.MixForm, h: Tensor, fn: Tensor, at_once: int, folder: Path) -> Tensor:
    """What the kernels make; with clusters there is a block for every tile, so `at_once` are all tiles."""
    rows, _, hidden = h.shape
    quads = -(-rows // 4)
    parts = torch.full((form.parts_bytes(rows) // 4,), torch.nan)
    arrivals = torch.zeros(quads + 1, dtype=torch.int32)
    out = torch.full((rows + 1, 24), 7.0)  # a row more than there are, which stays as it is
    words = (ctypes.c_uint64 * 16)(*map_words(h.flatten(1), mix.ROWS))
    places = (t.data_ptr() for t in (fn, parts, arrivals, out))
    params = mix.Params(words, *places, rows, at_once, 1e-6)
    library = on_cpu(form.program(hidden), folder)
    assert library.params_bytes() == ctypes.sizeof(params)
    blocks = form.shares * at_once
    library.launch(ctypes.byref(params), blocks, 1, form.blocks, mix.THREADS, form.shared_bytes(hidden))
    if form.blocks == 1:
        library = on_cpu(form.finish_program(hidden), folder)
        library.launch(ctypes.byref(params), -(-rows * 8 // mix.FINISH_THREADS), 1, 1, mix.FINISH_THREADS, 0)
    assert (arrivals == 0).all()
    assert (out[rows] == 7).all()
    return out[:rows]


@pytest.mark.parametrize(("rows", "hidden", "at_once"), [(1, HIDDEN, 1), (500, HIDDEN, 1), (130, 2048, 2)])
def test_logits_on_the_cpu_are_the_contracts(rows: int, hidden: int, at_once: int, tmp_path: Path) -> None:
    """One row; blocks that go through all tiles and come to stages again; blocks of which some have a tile more."""
    h, fn = operands(rows, hidden)
    want = mhc_ops.mhc_prenorm_mix(h.double(), fn.double(), 1e-6)
    few = logits(mix.FEW, h, fn, -(-rows // mix.ROWS), tmp_path)
    torch.testing.assert_close(few.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits(mix.MANY, h, fn, at_once, tmp_path), few)


def test_a_row_has_the_same_bits_wherever_it_is(tmp_path: Path) -> None:
    h, fn = operands(70)
    whole = logits(mix.FEW, h, fn, 2, tmp_path)
    assert torch.equal(logits(mix.FEW, h[61:].clone(), fn, 1, tmp_path), whole[61:])


@pytest.mark.parametrize("hidden", [1024, 5120])
@pytest.mark.parametrize("form", [mix.FEW, mix.MANY])
def test_sums_stay_in_registers(form: mix.MixForm, hidden: int) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(form.program(hidden).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * mix.THREADS <= REGISTERS
    assert form.shared_bytes(hidden) <= SHARED_OF_BLOCK


def test_adding_parts_stays_in_registers() -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(mix.MANY.finish_program(5120).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 1024 <= REGISTERS
