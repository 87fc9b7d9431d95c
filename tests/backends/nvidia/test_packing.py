"""The packed order of weights is the one that the kernel's threads read (`test_wide_products.py`: all of it)."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.backends.cuda_sm90.packing import LAYOUT, fits, pack
from deepinfer.ops.formats import QTensor, QuantFormat

CODE_BYTES = {"mxfp8": 16384, "mxfp4": 8192}
PLACES = {
    "mxfp4": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11)),
    "mxfp8": ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)),
}
"""Bits of the codes that share 16 bits, each code's lowest first."""


def weight(fmt: QuantFormat, *shape: int, largest_scale: int = 120) -> QTensor:
    gen = torch.Generator().manual_seed(3)
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    data = torch.randint(0, 256, (*shape[:-1], width), generator=gen, dtype=torch.uint8)
    scale = torch.randint(0, largest_scale + 1, (*shape[:-1], shape[-1] // 32), generator=gen, dtype=torch.uint8)
    return QTensor(data, scale, fmt)


def code(w: QTensor, row: int, column: int) -> int:
    if w.fmt == "mxfp8":
        return int(w.data[row, column])
    return int(w.data[row, column // 2]) >> (4 * (column % 2)) & 15


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_each_thread_finds_its_operand(fmt: QuantFormat) -> None:
    w = weight(fmt, 256, 256)
    p = pack(w)
    assert (p.layout, p.shape, p.scale.shape) == (LAYOUT, w.shape, w.scale.shape)
    data, scale = p.data.view(-1), p.scale.view(-1)
    extra = 120 if fmt == "mxfp8" else 126
    for block_row, block_column in itertools.product(range(2), range(2)):
        block = 2 * block_row + block_column
        codes = data[block * CODE_BYTES[fmt] :]
        for half, warp, lane, part, step in itertools.product(range(2), (0, 3), (0, 7, 18, 31), range(2), range(4)):
            thread = 32 * warp + lane
            high, low, quarter = lane >> 3, lane >> 2 & 1, lane & 3
            for pair, upper, odd in itertools.product(range(2), range(2), range(2)):
                row = 128 * block_row + 64 * half + 16 * warp + 4 * high + 2 * pair + low
                column = 128 * block_column + 64 * part + 16 * step + 8 * upper + 2 * quarter + odd
                if fmt == "mxfp8":
                    word = 8192 * half + (2 * part + step // 2) * 2048 + 16 * thread + 4 * (2 * (step % 2) + upper)
                    places = PLACES[fmt][pair]
                else:
                    word = 4096 * half + part * 2048 + 16 * thread + 4 * step
                    places = PLACES[fmt][2 * upper + pair]
                half_word = int(codes[word + 2 * odd]) | int(codes[word + 2 * odd + 1]) << 8
                found = sum((half_word >> bit & 1) << i for i, bit in enumerate(places))
                assert found == code(w, row, column), (row, column)
                at = block * 512 + 256 * half + 64 * warp + 8 * (lane >> 2) + 2 * (2 * part + step // 2) + pair
                assert int(scale[at]) == int(w.scale[row, column // 32]) + extra


def test_experts_stay_the_first_axis() -> None:
    w = weight("mxfp4", 4, 128, 256)
    p, source = pack(w), torch.tensor([2, 0, 2])
    chosen = pack(QTensor(w.data[source], w.scale[source], w.fmt))
    assert torch.equal(chosen.data, p.data[source])
    assert torch.equal(chosen.scale, p.scale[source])


@pytest.mark.parametrize(("fmt", "largest"), [("mxfp8", 134), ("mxfp4", 128)])
def test_scales_out_of_range_stay_canonical(fmt: QuantFormat, largest: int) -> None:
    w = weight(fmt, 128, 128)
    w.scale[5, 1] = largest
    assert fits(w)
    w.scale[5, 1] = largest + 1
    assert not fits(w)


@pytest.mark.parametrize("shape", [(64, 128), (128, 96), (0, 128, 128)])
def test_ragged_shapes_stay_canonical(shape: tuple[int, ...]) -> None:
    assert not fits(weight("mxfp8", *shape))


def test_packed_weights_are_not_packed_again() -> None:
    assert not fits(pack(weight("mxfp8", 128, 128)))
