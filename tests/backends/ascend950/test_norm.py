"""Norm and quantiser kernels beyond conformance: the largest width, blocks in the other order, in-place results."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepinfer.backends.ascend950 import norm
from deepinfer.ops import norm as norm_ops
from deepinfer.ops import quant as quant_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_widest_row_fits(dtype: torch.dtype, order: str) -> None:
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8192, generator=gen).to(dtype)
    weight = torch.randn(8192, generator=gen).bfloat16()
    expected = norm_ops.rms_norm(x.double(), weight.double(), 1e-6)
    y = norm.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(y.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_codes_of_strided_rows_are_exact(fmt: str, order: str) -> None:
    gen = torch.Generator().manual_seed(2)
    wide = torch.randn(5, 3 * 320, generator=gen) * torch.logspace(-6, 6, 5)[:, None]
    x = wide[:, 320:640]
    codes, expected = norm.quantize(x, fmt), quant_ops.quantize(x, fmt)
    assert torch.equal(codes.data, expected.data)
    assert torch.equal(codes.scale, expected.scale)


def test_a_row_has_the_same_bits_in_any_batch(order: str) -> None:
    x = torch.randn(70, 257, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = norm.rms_norm(x, None, 1e-20)
    alone = torch.cat([norm.rms_norm(x[i : i + 1], None, 1e-20) for i in (0, 1, 63, 64, 69)])
    assert torch.equal(whole[[0, 1, 63, 64, 69]].view(torch.int16), alone.view(torch.int16))
