"""Quantised weights in the order in which a warpgroup MMA holds its first operand.

A block is 128 rows by 128 of K: codes of 8192 (e2m1) or 16384 (e4m3) bytes, and 512 bytes of scales; blocks of a row of
blocks follow one another along K. Inside, a row is `64 half + 16 warp + 4 high + 2 pair + low` and a column is
`64 part + 16 step + 8 upper + 2 quarter + odd`; thread `32 warp + 8 high + 4 low + quarter` multiplies with rows
`pair` 0 and 1 and reads 16 contiguous bytes at a time. Scales carry the power of two that the kernel's decoding leaves
out. Codes and scales keep their shapes, so experts stay the first axis. Of e2m1, 16 bits hold the codes of `pair` and
`upper`, their bits spread so that most reach their places in a bfloat16 by one shift:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code   0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2      (code 2 upper + pair)
    its    s  1  0  s  s  2  s  2  1  0  2  1  0  2  1  0      (s its sign, else the bit of its magnitude)

Of e4m3 likewise those of `pair`:

    code   0  1  1  1  1  0  0  0  0  0  0  0  1  1  1  1
    its    s  6  5  4  s  6  5  4  3  2  1  0  3  2  1  0
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.ops.formats import QTensor

LAYOUT: Final = "wgmma"
BLOCK: Final = 128
_LEFT_OUT: Final = {"mxfp8": 120, "mxfp4": 126}
"""Exponent of the power of two by which decoded codes are too small."""
_LARGEST: Final = 254


def fits(weight: QTensor) -> bool:
    """Whether a weight can be packed: whole blocks, and scales that stay in range. Reads the scales on the host."""
    extra = _LEFT_OUT.get(weight.fmt)
    if extra is None or weight.layout != "canonical":
        return False
    rows, depth = weight.shape[-2:]
    if rows % BLOCK or depth % BLOCK or weight.scale.numel() == 0:
        return False
    return int(weight.scale.max()) <= _LARGEST - extra


def pack(weight: QTensor) -> QTensor:
    """[..., N, K] canonical to the packed layout, in new memory; one matrix at a time, so little else is needed.

    Args:
        weight: one that `fits`.
    """
    data, depth = _new(weight.data), weight.shape[-1]
    for codes, to in zip(matrices(weight.data), matrices(data), strict=True):
        to.view(-1).copy_((_pack_bytes if weight.fmt == "mxfp8" else _pack_pairs)(codes, depth).reshape(-1))
    return QTensor(data, pack_scales(weight), weight.fmt, LAYOUT)


def pack_scales(weight: QTensor) -> Tensor:
    """Scales of a canonical weight in the packed order, in new memory."""
    packed, depth = _new(weight.scale), weight.shape[-1]
    for scales, to in zip(matrices(weight.scale), matrices(packed), strict=True):
        ordered = scales.reshape(-1, 2, 4, 4, 2, 2, depth // BLOCK, 4).permute(0, 6, 1, 2, 3, 5, 7, 4)
        to.view(-1).copy_((ordered + _LEFT_OUT[weight.fmt]).reshape(-1))
    return packed


def matrices(x: Tensor) -> list[Tensor]:
    """The matrices of a weight's codes or scales: of experts one each."""
    return [x] if x.dim() == 2 else list(x.unbind(0))


def _new(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# axes: 0 block of rows, half, warp, high, pair, low, 6 block of K, part, step, upper, 10 quarter, odd;
# a step of e4m3 is split in two, since four of its words are half of a part


def _pack_bytes(codes: Tensor, depth: int) -> Tensor:
    axes = codes.reshape(-1, 2, 4, 4, 2, 2, depth // BLOCK, 2, 2, 2, 2, 4, 2)
    c0, c1 = axes.permute(4, 0, 6, 1, 7, 8, 2, 3, 5, 11, 9, 10, 12)
    low = (c0 & 15) << 4 | (c1 & 15)
    high = (c0 & 128) | (c0 & 112) >> 4 | (c1 & 112) | (c1 & 128) >> 4
    return torch.stack((low, high), -1)


def _pack_pairs(codes: Tensor, depth: int) -> Tensor:
    both = codes.reshape(-1, 2, 4, 4, 2, 2, depth // BLOCK, 2, 4, 2, 4)
    values = torch.stack((both & 15, both >> 4), -1)
    # four codes that share 16 bits, in the order of the registers that they go to: pair by pair, then upper
    c0, c1, c2, c3 = (values[:, :, :, :, pair, :, :, :, :, upper] for upper in (0, 1) for pair in (0, 1))
    high = (c0 & 8) << 4 | (c3 & 3) << 5 | (c1 & 8) << 1 | (c3 & 12) | (c2 & 8) >> 2 | (c0 & 4) >> 2
    low = (c0 & 3) << 6 | (c1 & 7) << 3 | (c2 & 7)
    return torch.stack((low, high), -1).permute(0, 5, 1, 6, 2, 3, 4, 8, 7, 9, 10)
