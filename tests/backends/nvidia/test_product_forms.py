"""A row of a product has the same bits however many rows come with it, on a Hopper GPU: all forms add in one order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90.packing import pack
from deepinfer.ops.formats import QTensor, QuantFormat

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def codes(gen: torch.Generator, *shape: int, fmt: QuantFormat) -> QTensor:
    """Random codes that are no NaN, scales near 1."""
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    data = torch.randint(0, 256, (*shape[:-1], width), generator=gen, device="cuda", dtype=torch.uint8)
    if fmt == "mxfp8":
        data.masked_fill_((data & 0x7F) == 0x7F, 0)
    scale = torch.randint(110, 122, (*shape[:-1], shape[-1] // 32), generator=gen, device="cuda", dtype=torch.uint8)
    return QTensor(data, scale, fmt)


def first_rows(x: QTensor, count: int) -> QTensor:
    return QTensor(x.data[:count], x.scale[:count], x.fmt)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k", "fmt"),
    [
        (5120, 8192, "mxfp8"),
        (4608, 5120, "mxfp8"),
        (1792, 5120, "mxfp8"),
        (5120, 2304, "mxfp4"),
        (16896, 1280, "mxfp8"),
        (4736, 640, "mxfp4"),
        (128, 384, "mxfp8"),
    ],
)
def test_rows_keep_their_bits(n: int, k: int, fmt: QuantFormat, out_dtype: torch.dtype) -> None:
    from deepinfer.backends.cuda_sm90.linear import linear_mx

    gen = torch.Generator("cuda").manual_seed(n)
    weight, x = codes(gen, n, k, fmt=fmt), codes(gen, 700, k, fmt="mxfp8")
    packed, acc = pack(weight), torch.randn(700, n, generator=gen, device="cuda")
    whole = linear_mx(x, packed, out_dtype, acc)
    exact = value(x) @ value(weight).t() + acc.double()
    assert (whole.double() - exact).norm() < 2.0**-8 * exact.norm()
    for rows in (1, 16, 64, 100, 128, 129, 144, 190, 250, 400):
        some = linear_mx(first_rows(x, rows), packed, out_dtype, acc[:rows])
        assert torch.equal(some, whole[:rows]), rows


@pytest.mark.parametrize("acc_dtype", [torch.bfloat16, torch.float32])
def test_sums_of_any_layout_are_added(acc_dtype: torch.dtype) -> None:
    from deepinfer.backends.cuda_sm90.linear import linear_mx

    gen = torch.Generator("cuda").manual_seed(2)
    weight, x = codes(gen, 256, 512, fmt="mxfp8"), codes(gen, 300, 512, fmt="mxfp8")
    acc = torch.randn(256, 600, generator=gen, device="cuda").to(acc_dtype)[:, ::2].t()
    found = linear_mx(x, pack(weight), torch.float32, acc)
    assert torch.equal(found, linear_mx(x, pack(weight), torch.float32, acc.float().contiguous()))
    exact = value(x) @ value(weight).t() + acc.double()
    assert (found.double() - exact).norm() < 2.0**-18 * exact.norm()


@pytest.mark.parametrize(("n", "k"), [(256, 640), (384, 5120), (4608, 128)])
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_rows_of_experts_keep_their_bits(n: int, k: int, fmt: QuantFormat) -> None:
    from deepinfer.backends.cuda_sm90.linear import moe_grouped_gemm

    gen = torch.Generator("cuda").manual_seed(n)
    counts = [0, 1, 143, 144, 145, 200, 0, 289, 130, 300, 121, 8]  # tiles of all widths, one or several of an expert
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    weight, x = codes(gen, len(counts), n, k, fmt=fmt), codes(gen, sum(counts), k, fmt="mxfp8")
    packed = pack(weight)
    whole = moe_grouped_gemm(
        x, packed, ends, torch.bfloat16, out=torch.full((len(x.data), n), torch.nan).cuda().bfloat16()
    )
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        mine, matrix = (
            QTensor(x.data[rows], x.scale[rows], x.fmt),
            QTensor(weight.data[expert], weight.scale[expert], fmt),
        )
        exact = value(mine) @ value(matrix).t()
        assert (whole[rows].double() - exact).norm() <= 2.0**-8 * exact.norm()
        for some in {min(count, limit) for limit in (1, 24, 100, 160)}:
            few = torch.zeros(len(counts), dtype=torch.int32, device="cuda")
            few[expert:] = some
            assert torch.equal(
                moe_grouped_gemm(first_rows(mine, some), packed, few, torch.bfloat16), whole[rows][:some]
            )
        start += count


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(384, 5120), (512, 5120), (128, 512), (4096, 1280)])
def test_rows_of_plain_products_keep_their_bits(n: int, k: int, out_dtype: torch.dtype) -> None:
    from deepinfer.backends.cuda_sm90.plain_products import linear_bf16

    gen = torch.Generator("cuda").manual_seed(n)
    weight, x = (torch.randn(r, k, generator=gen, device="cuda").to(torch.bfloat16) for r in (n, 9000))
    whole = linear_bf16(x, weight, out_dtype, 0.125)
    exact = x.double() @ weight.double().t() * 0.125
    assert (whole.double() - exact).norm() < 2.0**-8 * exact.norm()
    for rows in (1, 16, 64, 100, 128, 129, 144, 190, 300, 3000):
        assert torch.equal(linear_bf16(x[:rows], weight, out_dtype, 0.125), whole[:rows]), rows


def test_rows_of_grouped_products_keep_their_bits() -> None:
    from deepinfer.backends.cuda_sm90.linear import linear_grouped_o

    gen = torch.Generator("cuda").manual_seed(1)
    weight = codes(gen, 8, 1024, 4096, fmt="mxfp8")
    x = torch.randn(300, 8, 4096, generator=gen, device="cuda").to(torch.bfloat16)
    packed = pack(weight)
    whole = linear_grouped_o(x, packed)
    exact = torch.einsum("tgk,gnk->tgn", x.double(), value(weight))
    assert (whole.double() - exact).norm() < 2.0**-8 * exact.norm()
    for rows in (1, 17, 128, 129, 200):
        assert torch.equal(linear_grouped_o(x[:rows], packed), whole[:rows]), rows


def value(x: QTensor) -> Tensor:
    """What codes stand for, in float64."""
    if x.fmt == "mxfp8":
        codes = x.data.view(torch.float8_e4m3fn).double()
    else:
        size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=x.data.device)
        table = torch.cat((size, -size))
        codes = torch.stack((table[(x.data & 15).long()], table[(x.data >> 4).long()]), -1).flatten(-2)
    return (codes.unflatten(-1, (-1, 32)) * torch.exp2(x.scale.double() - 127)[..., None]).flatten(-2)
