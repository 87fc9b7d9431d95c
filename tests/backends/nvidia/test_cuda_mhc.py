"""The step between sublayers in CUDA C++: right on the CPU thread by thread, the same bits in any batch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of this kernel")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import mhc
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import mhc as mhc_ops

HIDDEN = 1536
REGISTERS = 65536
LAUNCHED_WITH = 96
SHARED_OF_BLOCK = 227 << 10
SPILLED = 32
"""Bytes outside registers: what writers need once a step or between tiles."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def operands(rows: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(rows)
    return {
        "y": torch.randn(rows, HIDDEN, generator=gen).bfloat16(),
        "h": torch.randn(rows, 4, HIDDEN, generator=gen).bfloat16(),
        "post": torch.rand(rows, 4, generator=gen) * 2,
        "comb": torch.rand(rows, 4, 4, generator=gen),
        "read": torch.rand(rows, 4, generator=gen),
        "fn": torch.randn(24, 4 * HIDDEN, generator=gen) * (4 * HIDDEN) ** -0.5,
        "scale": torch.tensor([0.5, 0.7, 1.3]),
        "base": torch.randn(24, generator=gen) * 0.5,
        "norm_weight": torch.randn(HIDDEN, generator=gen) * 0.2 + 1,
    }


def split(fn: Tensor, folder: Path) -> Tensor:
    """The matrix in three terms, as the kernel for it makes them."""
    terms = torch.full((mhc.terms_bytes(HIDDEN) // 2,), torch.nan, dtype=torch.bfloat16)
    params = mhc._TermParams(fn.data_ptr(), terms.data_ptr())
    library = on_cpu(mhc.terms_program(HIDDEN), folder)
    assert library.params_bytes() == ctypes.sizeof(params)
    library.launch(ctypes.byref(params), mhc.terms_blocks(HIDDEN), 1, 1, 256, 0)
    return terms


def step(
    args: dict[str, Tensor], terms: Tensor, clusters: int, folder: Path, tile: tuple[int, int] = (64, 64)
) -> tuple[Tensor, ...]:
    """With tiles of so many rows, and of so many in the last turn."""
    rows = args["h"].shape[0]
    turns = 1 + max(0, -(-(rows - tile[1] * clusters) // (tile[0] * clusters)))
    shapes = ((rows, 4, HIDDEN), (rows, HIDDEN), (rows, 4), (rows, 4), (rows, 4, 4))
    kinds = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32)
    # a row more than there are, which stays as it is
    results = [torch.full((s[0] + 1, *s[1:]), 7.0, dtype=kind) for s, kind in zip(shapes, kinds, strict=True)]
    names = ("y", "h", "post", "comb", "read")
    operands = (*(args[n] for n in names), terms, args["scale"], args["base"], args["norm_weight"], *results)
    params = mhc._Params(*(t.data_ptr() for t in operands), rows, *tile, turns, 20, clusters, 1e-6, 1e-6)
    library = on_cpu(mhc.step_program(HIDDEN), folder)
    assert library.params_bytes() == ctypes.sizeof(params)
    blocks = clusters * mhc.BLOCKS
    library.launch(ctypes.byref(params), blocks, 1, mhc.BLOCKS, mhc.THREADS, mhc.shared_bytes(HIDDEN))
    assert all((t[rows] == 7).all() for t in results)
    return tuple(t[:rows] for t in results)


def test_the_matrix_is_the_sum_of_its_terms(tmp_path: Path) -> None:
    fn = operands(1)["fn"]
    fn[3, 17] = 0.0
    tiles = split(fn, tmp_path).view(HIDDEN // 64, 4, 72, 8, 8)  # step, stream, term and column, chunk, value
    chunks = torch.arange(8) ^ torch.arange(72)[:, None] % 8
    plain = tiles.gather(3, chunks[None, None, :, :, None].expand_as(tiles)).view(HIDDEN // 64, 4, 3, 24, 64)
    whole = plain.double().sum(2).permute(2, 1, 0, 3).reshape(24, 4 * HIDDEN)
    assert torch.equal(whole, fn.double())


@pytest.mark.parametrize(
    ("rows", "clusters", "tile"),
    [(1, 1, (16, 16)), (130, 1, (64, 64)), (260, 2, (64, 64)), (150, 2, (64, 16)), (58, 2, (20, 20))],
)
def test_the_step_on_the_cpu_is_the_contracts(rows: int, clusters: int, tile: tuple[int, int], tmp_path: Path) -> None:
    """One tile; more than there is room for; a turn that one cluster has alone; narrower tiles, at last or always."""
    args = operands(rows)
    terms = split(args["fn"], tmp_path)
    got = step(args, terms, clusters, tmp_path, tile)
    wide = {name: value.double() if value.dtype == torch.float32 else value for name, value in args.items()}
    want = mhc_ops.mhc_step(**wide, iters=20, hc_eps=1e-6, norm_eps=1e-6)
    for one, other in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
    # weights follow from streams as they were rounded here: one that rounds to its other neighbour moves them
    mix = mhc_ops.mhc_prenorm_mix(got[0].double(), wide["fn"], 1e-6)
    weights = mhc_ops.mhc_split_sinkhorn(mix, wide["scale"], wide["base"], 20, 1e-6)
    for one, other in zip(got[2:], weights, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_wherever_it_is_and_in_any_tile(tmp_path: Path) -> None:
    args = operands(70)
    terms = split(args["fn"], tmp_path)
    whole = step(args, terms, 1, tmp_path)
    names = ("y", "h", "post", "comb", "read")
    part = step(
        {name: value[61:] if name in names else value for name, value in args.items()}, terms, 1, tmp_path, (16, 16)
    )
    assert all(torch.equal(one[61:], other) for one, other in zip(whole, part, strict=True))


@pytest.mark.parametrize("num_rows", [1, 240, 241, 960, 961, 1024, 8192, 65537])
def test_turns_have_room_for_all_rows(num_rows: int) -> None:
    most = 15
    rows, last, turns = mhc.turns_of(num_rows, most)
    assert 16 <= last <= rows <= mhc.ROWS and rows % 4 == 0 and last % 4 == 0
    before = (turns - 1) * rows * most
    assert before < num_rows <= before + last * most


@pytest.mark.parametrize("hidden", [1536, 5120])
def test_steps_stay_in_registers(hidden: int) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(mhc.step_program(hidden).compile("sm_90a"))
    assert local_bytes <= SPILLED
    assert registers == LAUNCHED_WITH  # what warps hand to each other later is counted from that
    assert registers * mhc.THREADS <= REGISTERS
    assert mhc.shared_bytes(hidden) <= SHARED_OF_BLOCK


def test_splitting_the_matrix_stays_in_registers() -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(mhc.terms_program(5120).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 1024 <= REGISTERS
