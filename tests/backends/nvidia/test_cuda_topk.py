"""Exact top-k in CUDA C++: right on the CPU thread by thread, in registers on Hopper, divided as rows are few."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import selection
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import index as index_ops

SHARED_OF_BLOCK = 227 << 10
SHARED_OF_MULTIPROCESSOR = 228 << 10
REGISTERS = 65536


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def rows_of(name: str, rows: int, columns: int) -> Tensor:
    gen = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=gen)
    if name == "equal":
        x = torch.full_like(x, -0.5)
    elif name == "zeros":
        x = torch.where(x < 0, 0.0, -0.0)
    elif name == "broken":
        kind = torch.rand(rows, columns, generator=gen)
        x[kind < 0.3], x[kind > 0.7] = torch.nan, -torch.inf
        x[(kind > 0.4) & (kind < 0.45)] = torch.inf
    elif name == "few":
        x = torch.where(torch.arange(columns) % (columns // 300 + 1) == 0, x, torch.nan)
    elif name == "burst":
        x = torch.where(
            (torch.arange(columns) > columns // 3) & (torch.arange(columns) < columns // 3 + 900), x + 9, 0.0
        )
    return x


def choose(library: ctypes.CDLL, x: Tensor, k: int, lens: Tensor, cluster: int) -> Tensor:
    out = torch.full((x.shape[0], k), -7, dtype=torch.int32)
    params = selection._Params(x.data_ptr(), lens.data_ptr(), out.data_ptr(), x.stride(0), x.shape[1], k)
    assert library.params_bytes() == ctypes.sizeof(params)
    shared = selection.shared_bytes(x.shape[1])
    library.launch(ctypes.byref(params), x.shape[0] * cluster, 1, cluster, 512, shared)
    return out


@pytest.mark.parametrize(("half", "cluster"), [(False, 1), (True, 2)])
def test_topk_on_the_cpu_is_the_contracts(half: bool, cluster: int, tmp_path: Path) -> None:
    """Rows shorter and longer than what is kept without a sample, unaligned, with every kind of tie."""
    library = on_cpu(selection.program(half, cluster), tmp_path)
    for name in ("plain", "equal", "zeros", "broken", "few", "burst"):
        for columns, k in ((70, 16), (9001, 512), (20003, 2048)):
            x = rows_of(name, 2, columns).to(torch.bfloat16 if half else torch.float32)
            x = torch.nn.functional.pad(x, (3, 2), value=1e30)[:, 3:-2]
            lens = torch.tensor([columns, columns - columns // 7], dtype=torch.int32)
            got = choose(library, x, k, lens, cluster)
            assert torch.equal(got, index_ops.topk_select(x, k, lens)), (name, columns)


def test_a_guess_that_lets_through_too_few_or_too_many_is_corrected(tmp_path: Path) -> None:
    """Vectors that no sample meets hold what matters: the threshold is found by bisection."""
    library = on_cpu(selection.program(False, 1), tmp_path)
    columns = 40960
    x = torch.linspace(-1, 1, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(1))][None]
    sampled = torch.zeros(columns // 4, dtype=torch.bool)
    for n in range(512):
        at = n * (columns // 4) // 512
        stride = columns // 4 // 512
        sampled[at + ((n * 2654435761 & 0xFFFFFFFF) >> 16) % stride] = True
    seen = sampled.repeat_interleave(4)
    for value in (-2.0, 2.0):  # far below, then far above everything else
        y = torch.where(seen, value + x * 1e-3, x)
        lens = torch.tensor([columns], dtype=torch.int32)
        assert torch.equal(choose(library, y, 512, lens, 1), index_ops.topk_select(y, 512, lens))


def test_short_rows_end_in_minus_one(tmp_path: Path) -> None:
    library = on_cpu(selection.program(False, 1), tmp_path)
    got = choose(library, torch.ones(3, 5), 8, torch.tensor([0, 1, 5], dtype=torch.int32), 1)
    assert got.tolist() == [list(range(n)) + [-1] * (8 - n) for n in (0, 1, 5)]


@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("half", [False, True])
def test_topk_stays_in_registers(half: bool, cluster: int) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(selection.program(half, cluster).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 512 * 2 <= REGISTERS


def test_topk_fits_shared_memory() -> None:
    assert selection.shared_bytes(selection.MOST_COLUMNS) <= SHARED_OF_BLOCK
    assert 2 * (selection.shared_bytes(65536) + 1024) <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [(1, 65536, 8), (16, 65536, 8), (40, 65536, 4), (128, 65536, 2), (256, 65536, 1), (1, 8192, 2), (1, 70, 1)],
)
def test_few_rows_are_shared_by_many_blocks(rows: int, columns: int, blocks: int) -> None:
    assert selection.blocks_of_row(rows, columns, 132) == blocks
