"""The Cube path of the twin against PyTorch: every way in, every type of product, every way out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import Program

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

KERNELS = Program(Path(__file__).parent / "cube_kernels.asc")
_PLAIN = "a, b, c!, m: i64, k: i64, n: i64"
PLAIN = {
    dtype: KERNELS.kernel(f"mmad_{name}", f"{_PLAIN}, loads: i64", "cube")
    for name, dtype in {
        "bf16": torch.bfloat16,
        "half": torch.float16,
        "float": torch.float32,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }.items()
}
SATURATED = KERNELS.kernel("mmad_saturated", _PLAIN, "cube")
STEPS = KERNELS.kernel("mmad_steps", "a, b, bias, c!, m: i64, k: i64, n: i64, step: i64", "cube")
SCALED = {
    name: KERNELS.kernel(f"mmad_mx_{name}", "a, sa, b, sb, c!, m: i64, k: i64, n: i64", "cube")
    for name in ("e4m3", "e5m2", "e2m1", "e1m2")
}
STORES = {
    name: KERNELS.kernel(f"store_{name}", _PLAIN, "cube")
    for name in ("bf16", "half", "relu", "scaled", "e4m3", "columns", "nz", "nz_split", "two")
}
DUAL = KERNELS.kernel("store_dual", f"{_PLAIN}, dual: i64", "mix")
THROUGH = KERNELS.kernel("through_l1", "in, out!, rows: i64, blocks: i64", "mix")
ALIGN = KERNELS.kernel("align_l1", "in, out!, bursts: i64, length: i64, mode: i64, total: i64", "mix")

ROWS, TRANSPOSED, COLUMNS = 0, 1, 2


def _values(gen: torch.Generator, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    wide = torch.randn(rows, k, generator=gen) * 2
    return (wide * 20).round().to(dtype) if dtype == torch.int8 else wide.to(dtype)


def _turned(x: Tensor) -> Tensor:
    """The transpose in memory of its own; by bytes, since not every dtype can be moved."""
    return x.view(torch.uint8).reshape(*x.shape, -1).transpose(0, 1).contiguous().view(x.dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize(
    ("loads", "m", "k", "n"),
    [
        (ROWS, 5, 33, 7),
        (ROWS, 48, 96, 80),
        (ROWS, 1, 32, 200),
        (TRANSPOSED, 32, 64, 64),
        (TRANSPOSED, 64, 40, 32),
        (COLUMNS, 20, 40, 50),
        (COLUMNS, 33, 17, 9),
    ],
)
def test_products_of_every_type_and_load(dtype: torch.dtype, loads: int, m: int, k: int, n: int) -> None:
    gen = torch.Generator().manual_seed(m + k)
    a, b = _values(gen, m, k, dtype), _values(gen, n, k, dtype)
    c = torch.full((m, n), -7, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    x, w = (a, b) if loads == ROWS else (_turned(a), _turned(b))
    PLAIN[dtype](1, x, w, c, m, k, n, loads)
    want = a.double() @ b.double().T
    if dtype == torch.int8:
        assert torch.equal(c.double(), want)
    else:
        torch.testing.assert_close(c.double(), want, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize(("m", "k", "n", "step"), [(64, 128, 80, 32), (16, 64, 16, 16), (33, 96, 48, 48)])
def test_sums_over_steps_from_a_bias_with_unit_flags(m: int, k: int, n: int, step: int) -> None:
    gen = torch.Generator().manual_seed(k)
    a, b = _values(gen, m, k, torch.bfloat16), _values(gen, n, k, torch.bfloat16)
    bias, c = torch.randn(n, generator=gen), torch.full((m, n), torch.nan)
    STEPS(1, a, b, bias, c, m, k, n, step)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T + bias.double(), rtol=2e-6, atol=1e-4)


def test_infinities_and_nan_pass_or_saturate() -> None:
    a = torch.ones(4, 16, dtype=torch.bfloat16)
    a[1, 3], a[2, 0] = torch.nan, torch.inf
    b = torch.full((16, 16), 2.0, dtype=torch.bfloat16)
    c = torch.zeros(4, 16)
    PLAIN[torch.bfloat16](1, a, b, c, 4, 16, 16, ROWS)
    assert c[1].isnan().all()
    assert (c[2] == torch.inf).all()
    assert (c[0] == 32).all()
    SATURATED(1, a, b, c, 4, 16, 16)
    assert (c[1] == 30).all(), "NaN counts as zero"
    assert (c[2] == torch.finfo(torch.float32).max).all()


def _codes(gen: torch.Generator, name: str, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes as the kernel takes them, and their values."""
    if name in ("e4m3", "e5m2"):
        values = (torch.randn(rows, k, generator=gen) * 3).to(
            getattr(torch, {"e4m3": "float8_e4m3fn"}.get(name, "float8_e5m2"))
        )
        return values.view(torch.uint8), values.double()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] if name == "e2m1" else [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75])
    nibbles = torch.randint(0, 16, (rows, k), generator=gen)
    signed = torch.where(nibbles >= 8, -1.0, 1.0) * table[nibbles & 7]
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8), signed.double()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("m", "k", "n"), [(16, 64, 16), (40, 128, 50), (1, 256, 33)])
def test_products_with_block_scales(name: str, m: int, k: int, n: int) -> None:
    gen = torch.Generator().manual_seed(k + m)
    (a, x), (b, w) = _codes(gen, name, m, k), _codes(gen, name, n, k)
    sa, sb = (torch.randint(120, 134, (rows, k // 32), generator=gen, dtype=torch.uint8) for rows in (m, n))
    c = torch.full((m, n), torch.nan)
    SCALED[name](1, a, sa, b, sb, c, m, k, n)
    want = (x * _factors(sa)) @ (w * _factors(sb)).T
    torch.testing.assert_close(c.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def _factors(scale: Tensor) -> Tensor:
    return torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


def test_a_scale_of_255_makes_its_row_nan_and_no_other() -> None:
    gen = torch.Generator().manual_seed(5)
    (a, _), (b, _) = _codes(gen, "e4m3", 20, 64), _codes(gen, "e4m3", 20, 64)
    scale = torch.full((20, 2), 127, dtype=torch.uint8)
    broken = scale.clone()
    broken[3, 1] = 255
    c = torch.zeros(20, 20)
    SCALED["e4m3"](1, a, broken, b, scale, c, 20, 64, 20)
    assert c[3].isnan().all()
    assert not torch.cat((c[:3], c[4:])).isnan().any()


@pytest.mark.parametrize(
    ("name", "dtype", "back"),
    [
        ("bf16", torch.bfloat16, lambda c, m, n: c),
        ("half", torch.float16, lambda c, m, n: c),
        ("relu", torch.float32, lambda c, m, n: c),
        ("columns", torch.float32, lambda c, m, n: c.reshape(n, m).T),
        ("nz", torch.float32, lambda c, m, n: c.reshape(n // 16, m, 16).transpose(0, 1).reshape(m, n)),
        ("nz_split", torch.float32, lambda c, m, n: c.reshape(n // 8, m, 8).transpose(0, 1).reshape(m, n)),
        ("two", torch.float32, lambda c, m, n: c.reshape(2, m, n // 2).transpose(0, 1).reshape(m, n)),
        ("scaled", torch.bfloat16, lambda c, m, n: c),
        ("e4m3", torch.float8_e4m3fn, lambda c, m, n: c),
    ],
)
@pytest.mark.parametrize(("m", "n"), [(16, 32), (40, 64), (7, 96)])
def test_ways_out_of_l0c(
    name: str, dtype: torch.dtype, back: Callable[[Tensor, int, int], Tensor], m: int, n: int
) -> None:
    gen = torch.Generator().manual_seed(m)
    a, b = _values(gen, m, 32, torch.bfloat16), _values(gen, n, 32, torch.bfloat16)
    exact = torch.full((m, n), torch.nan)
    PLAIN[torch.bfloat16](1, a, b, exact, m, 32, n, ROWS)
    c = torch.zeros(m, n, dtype=dtype)
    STORES[name](1, a, b, c, m, 32, n)
    want = exact.relu() if name == "relu" else (exact * 0.375 if name in ("scaled", "e4m3") else exact)
    assert torch.equal(back(c, m, n).float(), want.to(dtype).float())


@pytest.mark.parametrize("dual", [0, 1, 2])
def test_results_reach_the_vector_cores(dual: int) -> None:
    gen = torch.Generator().manual_seed(1)
    a, b = _values(gen, 24, 32, torch.bfloat16), _values(gen, 64, 32, torch.bfloat16)
    c = torch.full((24, 64), torch.nan)
    DUAL(1, a, b, c, 24, 32, 64, dual)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=2e-6, atol=1e-4)


def test_bytes_pass_from_one_vector_core_to_the_other_through_l1() -> None:
    sent = torch.randint(0, 256, (7 * 3 * 32,), dtype=torch.uint8)
    arrived = torch.zeros_like(sent)
    THROUGH(1, sent, arrived, 7, 3)
    assert torch.equal(arrived, sent)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bursts_are_filled_up_to_whole_blocks(mode: int) -> None:
    sent = torch.arange(3 * 48, dtype=torch.uint8).reshape(3, 48)
    arrived = torch.zeros(256, dtype=torch.uint8)
    ALIGN(1, sent, arrived, 3, 48, mode, 256)
    rest = torch.full((256,), 0x5A, dtype=torch.uint8)
    if mode == 1:
        want = torch.cat((sent.flatten(), torch.full((16,), 0xA5, dtype=torch.uint8), rest))
    else:
        pad = sent[:, :1].expand(3, 16) if mode == 0 else torch.full((3, 16), 0xA5, dtype=torch.uint8)
        want = torch.cat((torch.cat((pad[:, :4], sent, pad[:, 4:]) if mode == 2 else (sent, pad), 1).flatten(), rest))
    assert torch.equal(arrived, want[:256])
