"""The CPU quantisers bit for bit: all codes, all midpoints, edges of the number range, and groups with faults."""

import math

import pytest
import torch

from deepinfer.backends.cpu import BACKEND
from deepinfer.ops import quant
from deepinfer.ops.formats import GROUP, QTensor

BACKEND.load()
IMPLEMENTATIONS = {i.op.name: i for i in BACKEND.implementations}
FORMATS = ("mxfp8", "mxfp4", "nvfp4")


def run(op, *args):
    return IMPLEMENTATIONS[op.name].bind({}, None).run(*args)


def same(x, fmt):
    """Codes and scales of x are those of the reference, and so are the values read back."""
    got, want = run(quant.quantize, x, fmt), quant.quantize(x, fmt)
    assert got.fmt == fmt and got.layout == "canonical"
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.data, want.data)
    for dtype in (torch.float32, torch.bfloat16):
        bits_equal(run(quant.dequantize, got, dtype), quant.dequantize(want, dtype))
    return got


def bits_equal(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    width = torch.int32 if got.dtype == torch.float32 else torch.int16
    fine = ~want.isnan()
    assert torch.equal(got.view(width)[fine], want.view(width)[fine])


def groups_with(values, fmt, top):
    """Each value in a group of its own, whose largest magnitude is `top` and sets the scale."""
    x = torch.zeros(len(values), GROUP[fmt])
    x[:, 0], x[:, 3] = values, top
    return x


def all_bits(step=1):
    """float32 numbers spread over every exponent, both signs, subnormals, Inf and NaN."""
    return torch.arange(-(2**31), 2**31, 2**31 // (step * 2**14), dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_with_every_scale_reads_back_its_value(fmt) -> None:
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    bytes_ = torch.arange(256, dtype=torch.uint8)
    if fmt == "mxfp8":
        codes = QTensor(bytes_.expand(256, 256).contiguous(), scales.expand(256, 8).contiguous(), fmt)
    else:
        columns = 512 // GROUP[fmt]
        codes = QTensor(bytes_.expand(256, 256).contiguous(), scales.expand(256, columns).contiguous(), fmt)
    for dtype in (torch.float32, torch.bfloat16):
        bits_equal(run(quant.dequantize, codes, dtype), quant.dequantize(codes, dtype))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_value_is_a_fixed_point(fmt) -> None:
    if fmt == "mxfp8":
        values = quant.e4m3_value(torch.arange(256, dtype=torch.uint8))
        values, top = values[values.isfinite()], 448.0
    else:
        values, top = quant.e2m1_value(torch.arange(16, dtype=torch.uint8)), 6.0
    for exponent in (-8, -1, 0, 3):
        scale = 2.0**exponent
        x = groups_with(values * scale, fmt, top * scale)
        got = same(x, fmt)
        assert torch.equal(run(quant.dequantize, got, torch.float32), x)


@pytest.mark.parametrize("fmt", FORMATS)
def test_midpoints_and_their_neighbours_round_to_even(fmt) -> None:
    if fmt == "mxfp8":
        values = quant.e4m3_value(torch.arange(127, dtype=torch.uint8))
        top = 448.0
    else:
        values, top = torch.tensor(quant.E2M1), 6.0
    middle = (values[1:] + values[:-1]) / 2
    up = torch.nextafter(middle, torch.tensor(math.inf))
    down = torch.nextafter(middle, torch.tensor(0.0))
    for sign in (1, -1):
        for exponent in (-20, -3, 0, 5):
            x = torch.cat((middle, up, down)) * sign * 2.0**exponent
            same(groups_with(x, fmt, top * 2.0**exponent), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_at_powers_of_two_and_beside_them(fmt) -> None:
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    for factor in (1.0, 6.0, 448.0, 2688.0):
        tops = (powers.double() * factor).clamp(max=3.4e38).float()
        near = (tops, torch.nextafter(tops, torch.tensor(math.inf)), torch.nextafter(tops, torch.tensor(0.0)))
        same(groups_with(torch.ones(3 * len(tops)), fmt, torch.cat(near)), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_from_the_whole_range(fmt, dtype) -> None:
    x = all_bits()
    x = x[: len(x) // 96 * 96].reshape(-1, 96)
    same(x.to(dtype), fmt)  # neighbours share an exponent
    mixed = x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))].reshape(-1, 96)
    same(mixed.nan_to_num(1.0).clamp(-1e30, 1e30).to(dtype), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_faulty_group_reads_back_as_nan_and_no_other_does(fmt, bad) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    x[2, 37] = bad
    values = run(quant.dequantize, same(x, fmt), torch.float32)
    group = slice(37 // GROUP[fmt] * GROUP[fmt], (37 // GROUP[fmt] + 1) * GROUP[fmt])
    assert values[2, group].isnan().all()
    values[2, group] = 0
    assert values.isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_keep_their_signs(fmt) -> None:
    x = torch.tensor([0.0, -0.0] * 48)[None]
    assert torch.equal(run(quant.dequantize, same(x, fmt), torch.float32).signbit(), x.signbit())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("width", [2, 14, 16, 30, 32, 34, 62, 160])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_ragged_widths_and_few_rows(fmt, width, rows) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3
    same(x, fmt)
    same(x.bfloat16()[None], fmt)
