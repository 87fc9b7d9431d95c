"""Cache records in CUDA C++: right on the CPU thread by thread, and in registers on Hopper."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="the fallback of this kernel")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import kv
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.cases.common import rotary
from deepinfer.ops.formats import CacheFormat, CacheKind, PagedCache

REGISTERS = 65536
SHAPES: list[tuple[int, CacheKind]] = [(512, "fp8"), (512, "fp4"), (128, "index")]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize(("dim", "kind"), SHAPES)
def test_records_on_the_cpu_are_the_contracts(dim: int, kind: CacheKind, ratio: int, tmp_path: Path) -> None:
    """Slots of -1, ratios, several rows a lane, wide pages, rows of zeros, of tiny and of broken values."""
    assert kind in get_args(CacheKind)
    gen = torch.Generator().manual_seed(dim)
    library = on_cpu(kv.program(dim, kind, 64, 16), tmp_path)
    fmt, rows = CacheFormat(kind, dim), 43
    x = torch.randn(rows, dim, generator=gen).bfloat16()
    x[1], x[2, 0], x[3, 7] = 0.0, torch.nan, torch.inf
    x[4] *= 2.0**-60
    x[5, ::3] *= 2.0**12
    weight = torch.randn(dim, generator=gen)
    positions = torch.randint(0, 200, (rows,), generator=gen, dtype=torch.int32)
    slots = (torch.randperm(63, generator=gen)[:rows] + 1).int()
    slots[::4] = -1
    table = rotary(200, 64)
    wide = torch.full((4, 16 * fmt.record_bytes + 32), 0xA5, dtype=torch.uint8)
    pages = wide[:, :-32]
    want = PagedCache(pages.clone(), fmt, 16)
    normed_want = kv_ops.kv_norm_rope_store(x, weight, 1e-20, positions, table, want, slots, ratio)
    normed = torch.full_like(x, 7.0)
    params = kv._Params(
        x.data_ptr(),
        weight.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        pages.data_ptr(),
        slots.data_ptr(),
        normed.data_ptr(),
        x.stride(0),
        pages.stride(0),
        rows,
        2 * kv.rows_of_block(dim),
        ratio,
        kv.mask_of(ratio),
        1e-20,
    )
    assert library.params_bytes() == ctypes.sizeof(params)
    library.launch(ctypes.byref(params), 2, 1, 1, 128, 0)
    torch.testing.assert_close(normed, normed_want, rtol=2**-7, atol=1e-6, equal_nan=True)
    # codes of a group that is not finite are anything; a sum in another order moves a code by one at most, and seldom
    finite = ~torch.isin(torch.arange(rows), torch.tensor([2, 3])) & (slots >= 0)
    got = PagedCache(pages, fmt, 16)
    one, other = (kv_ops.kv_gather(cache, slots[finite], torch.float32) for cache in (got, want))
    assert ((one != other).float().mean() < 1e-3).item()
    for cache in (got, want):
        assert kv_ops.kv_gather(cache, slots[[2, 3]], torch.float32).isnan().any(1).tolist() == [True, True]
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots[slots >= 0].long()] = False
    left = [kv_ops.kv_gather(cache, untouched.nonzero()[:, 0].int(), torch.float32) for cache in (got, want)]
    assert torch.equal(left[0], left[1])
    assert (wide[:, -32:] == 0xA5).all()


@pytest.mark.parametrize(("dim", "kind"), SHAPES)
def test_stores_stay_in_registers(dim: int, kind: CacheKind) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(kv.program(dim, kind, 64, 64).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 128 * kv.RESIDENT <= REGISTERS
