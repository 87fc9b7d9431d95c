"""e2m1 weights in the order in which a warpgroup MMA of e4m3 operands holds its first operand.

Blocks, rows and scales are those of `packing.py`. A column of a block is
`64 part + 32 group + 16 upper + 4 quarter + byte`; thread `32 warp + 8 high + 4 low + quarter` reads words
`2 group + upper` of four bytes, in each the code of row `pair` 0 below that of row 1: as they are, spread to e4m3, they
are the operand over 32 columns.

For the bfloat16 MMA the same words hold 16 columns, evens first: that operand's columns 2 q and 2 q + 1 are 4 q and
4 q + 2 here, and its columns 8 + 2 q and 9 + 2 q are 4 q + 1 and 4 q + 3. So its tokens come in the order of
`evens_first`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90.packing import BLOCK, fits, matrices, pack_scales
from deepinfer.ops.formats import QTensor

NARROW: Final = "wgmma_e4m3"


def fits_narrow(weight: QTensor) -> bool:
    """Whether a weight can be packed so: e2m1 in whole blocks, with scales that the bfloat16 MMA takes too."""
    return weight.fmt == "mxfp4" and fits(weight)


def pack_narrow(weight: QTensor) -> QTensor:
    """[..., N, K] canonical to this layout, in new memory; one matrix at a time, so little else is needed.

    Args:
        weight: one that `fits_narrow`.
    """
    depth = weight.shape[-1]
    data = torch.empty_like(weight.data, memory_format=torch.contiguous_format)
    for codes, to in zip(matrices(weight.data), matrices(data), strict=True):
        values = torch.stack((codes & 15, codes >> 4), -1)
        axes = values.reshape(-1, 2, 4, 4, 2, 2, depth // BLOCK, 2, 2, 2, 4, 4)
        # axes: 0 block of rows, half, warp, high, pair, low, 6 block of K, part, group, upper, 10 quarter, byte
        ordered = axes.permute(0, 6, 1, 7, 2, 3, 5, 10, 8, 9, 11, 4)
        to.view(-1).copy_((ordered[..., 0] | ordered[..., 1] << 4).reshape(-1))
    return QTensor(data, pack_scales(weight), weight.fmt, NARROW)


def evens_first(x: Tensor) -> Tensor:
    """[R, K] with every 16 columns as 0, 2, .., 14, 1, 3, .., 15, as a view [R, K / 16, 2, 8]; K a multiple of 16."""
    return x.view(x.shape[0], -1, 8, 2).transpose(2, 3)
