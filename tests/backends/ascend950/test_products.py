"""Products beside the conformance suite: the model's depths, many tiles, edges of the formats, both block orders."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import linear
from deepinfer.backends.ascend950.launch import recording
from deepinfer.conformance.compare import compare
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.quant import quantize

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


def _quantised(gen: torch.Generator, *shape: int, fmt: QuantFormat) -> QTensor:
    flat = quantize.reference(torch.randn(shape, generator=gen).reshape(-1, shape[-1]), fmt)
    return QTensor(flat.data.view(*shape[:-1], -1), flat.scale.view(*shape[:-1], -1), fmt)


def _conforms(got: Any, want: Any) -> None:
    assert compare(got, want, linear_ops.PRODUCT).failures == []


@pytest.mark.parametrize(
    ("name", "n", "k"), [("up and gate", 4608, 5120), ("down", 5120, 2304), ("a rank's down", 5120, 288)]
)
def test_experts_at_the_models_dimensions(name: str, n: int, k: int) -> None:
    gen = torch.Generator().manual_seed(k)
    counts = (0, 3) if k == 288 else (3,)
    x, weight = _quantised(gen, sum(counts) + 1, k, fmt="mxfp8"), _quantised(gen, len(counts), n, k, fmt="mxfp4")
    psum = torch.tensor(counts).cumsum(0).int()
    run = linear.moe_grouped_gemm_odd if k % 64 else linear.moe_grouped_gemm
    got = run(x, weight, psum, torch.bfloat16)
    _conforms(got[:3], moe_ops.moe_grouped_gemm.reference(x, weight, psum, torch.bfloat16)[:3])


@pytest.mark.parametrize(("n", "k"), [(1792, 5120), (4096, 1280), (512, 8192)])
def test_dense_products_at_the_models_depths(n: int, k: int) -> None:
    gen = torch.Generator().manual_seed(n)
    x, weight = _quantised(gen, 5, k, fmt="mxfp8"), _quantised(gen, n, k, fmt="mxfp8")
    _conforms(linear.linear_mx(x, weight, torch.bfloat16), linear_ops.linear_mx.reference(x, weight, torch.bfloat16))


def test_groups_of_heads_at_the_models_dimensions() -> None:
    gen = torch.Generator().manual_seed(8)
    x, weight = torch.randn(3, 8, 4096, generator=gen).bfloat16(), _quantised(gen, 8, 64, 4096, fmt="mxfp8")
    _conforms(linear.linear_grouped_o(x, weight), linear_ops.linear_grouped_o.reference(x, weight))


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_more_tiles_than_cores_in_either_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    gen = torch.Generator().manual_seed(2)
    counts = (130, 0, 257, 1, 64)
    x, weight = _quantised(gen, sum(counts), 128, fmt="mxfp8"), _quantised(gen, len(counts), 700, 128, fmt="mxfp4")
    psum = torch.tensor(counts).cumsum(0).int()
    got = linear.moe_grouped_gemm(x, weight, psum, torch.float32)
    _conforms(got, moe_ops.moe_grouped_gemm.reference(x, weight, psum, torch.float32))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_a_rows_bits_are_its_own(kind: QuantFormat) -> None:
    gen = torch.Generator().manual_seed(4)
    x, weight = _quantised(gen, 200, 1088, fmt="mxfp8"), _quantised(gen, 96, 1088, fmt=kind)
    whole = linear.linear_mx(x, weight, torch.float32)
    for start, stop in ((0, 1), (7, 24), (127, 130), (199, 200)):
        assert torch.equal(linear.linear_mx(x[start:stop], weight, torch.float32), whole[start:stop])


def _every_code(kind: QuantFormat) -> QTensor:
    """[8, 32] or [8, 64]: each code under scales from the smallest to 2^113, the largest that every kernel takes."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    if kind == "mxfp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # a weight holds no NaN
    scale = torch.tensor([0, 1, 64, 126, 127, 128, 200, 240], dtype=torch.uint8)[:, None]
    return QTensor(codes, scale.repeat(1, 1 if kind == "mxfp8" else 2), kind)


def _unit(x: str, depth: int, exponent: int) -> Tensor | QTensor:
    """The unit matrix times 2^exponent, so that a product is one value of the weight."""
    if x == "mxfp8":
        ones = torch.zeros(depth, depth, dtype=torch.uint8).fill_diagonal_(0x38)
        return QTensor(ones, torch.full((depth, depth // 32), 127 + exponent, dtype=torch.uint8), "mxfp8")
    return (torch.eye(depth) * 2.0**exponent).to(torch.bfloat16 if x == "bf16" else torch.float32)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("x", ["mxfp8", "bf16", "f32"])
def test_every_code_of_a_weight_is_exact(kind: QuantFormat, x: str) -> None:
    weight = _every_code(kind)
    depth = weight.shape[1]
    run = linear.linear_mx_odd if depth % 64 else linear.linear_mx
    for exponent in (0, -110, 100):
        got = run(_unit(x, depth, exponent), weight, torch.float32).double()
        values = _decoded(weight).T
        want = values * 2.0**exponent
        # below, the vector units may take a value or a factor for zero; above, float32 ends
        normal = ((values.abs() >= 2.0**-118) & (want.abs() >= 2.0**-118) & (want.abs() < 2.0**127)) | (want == 0)
        assert torch.equal(got[normal], want[normal])
        assert int((normal & (want != 0)).sum()) > 100


def _decoded(weight: QTensor) -> Tensor:
    if weight.fmt == "mxfp8":
        values = weight.data.view(torch.float8_e4m3fn).double()
    else:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        nibbles = torch.stack((weight.data & 15, weight.data >> 4), -1).flatten(-2).long()
        values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    return values * torch.exp2(weight.scale.double() - 127).repeat_interleave(32, 1)


def test_launches_move_each_weight_once_and_stay_in_their_memories() -> None:
    gen = torch.Generator().manual_seed(6)
    x, weight = _quantised(gen, 16, 1024, fmt="mxfp8"), _quantised(gen, 256, 1024, fmt="mxfp4")
    with recording(run=True) as launches:
        linear.linear_mx(x, weight, torch.float32)
    (launch,) = launches
    assert launch.measured is not None
    assert launch.measured.highest["UB"] <= 248 * 1024
    assert launch.measured.highest["L1"] <= 512 * 1024
    tiles = 256 // 64
    moved = weight.data.numel() + weight.scale.numel() + tiles * (x.data.numel() + x.scale.numel())
    assert launch.measured.bytes["MTE2"] == moved
    assert launch.measured.cube_cycles == 1 * (256 // 16) * (1024 // 32)


def test_a_pair_that_no_kernel_multiplies_is_named() -> None:
    gen = torch.Generator().manual_seed(7)
    with pytest.raises(OpArgumentError, match="no kernel multiplies mxfp8 by bf16"):
        linear.moe_grouped_gemm(
            _quantised(gen, 4, 64, fmt="mxfp8"), torch.ones(1, 8, 64).bfloat16(), torch.tensor([4]).int(), torch.float32
        )
