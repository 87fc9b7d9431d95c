"""The order of e2m1 weights for e4m3 products is the one that the kernel's threads read, in both of its forms."""

from __future__ import annotations

import itertools

import torch

from deepinfer.backends.cuda_sm90.packing import pack
from deepinfer.backends.cuda_sm90.packing_narrow import NARROW, evens_first, fits_narrow, pack_narrow
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.quant import e2m1_value


def weight(*shape: int, fmt: QuantFormat = "mxfp4") -> QTensor:
    gen = torch.Generator().manual_seed(5)
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    data = torch.randint(0, 256, (*shape[:-1], width), generator=gen, dtype=torch.uint8)
    scale = torch.randint(0, 128, (*shape[:-1], shape[-1] // 32), generator=gen, dtype=torch.uint8)
    return QTensor(data, scale, fmt)


def code(w: QTensor, row: int, column: int) -> int:
    return int(w.data[row, column // 2]) >> (4 * (column % 2)) & 15


def threads() -> list[tuple[int, int, int]]:
    """Half, warp and lane of some threads."""
    return list(itertools.product(range(2), (0, 3), (0, 7, 18, 31)))


def words_of(w: QTensor, block: int, half: int, warp: int, lane: int, part: int) -> list[int]:
    """The four words that a thread reads for 64 columns of a block."""
    start = block * 8192 + 4096 * half + 2048 * part + 16 * (32 * warp + lane)
    data = w.data.reshape(-1)[start : start + 16].tolist()
    return [int.from_bytes(bytes(data[4 * i : 4 * i + 4]), "little") for i in range(4)]


def row_of(block_row: int, half: int, warp: int, lane: int, pair: int) -> int:
    return 128 * block_row + 64 * half + 16 * warp + 4 * (lane >> 3) + 2 * pair + (lane >> 2 & 1)


def test_threads_find_their_operand_of_e4m3_products() -> None:
    w = weight(256, 256)
    p = pack_narrow(w)
    for (half, warp, lane), block_row, part, group in itertools.product(threads(), range(2), range(2), range(2)):
        words = words_of(p, 2 * block_row, half, warp, lane, part)
        for upper, byte in itertools.product(range(2), range(4)):
            v = words[2 * group + upper]
            spread = ((v << 4 & 0x80808080) | (v << 2 & 0x1C1C1C1C), (v & 0x80808080) | (v >> 2 & 0x1C1C1C1C))
            column = 64 * part + 32 * group + 16 * upper + 4 * (lane & 3) + byte
            for pair in range(2):
                e4m3 = torch.tensor([spread[pair] >> 8 * byte & 255], dtype=torch.uint8).view(torch.float8_e4m3fn)
                nibble = code(w, row_of(block_row, half, warp, lane, pair), column)
                assert float(e4m3) == float(e2m1_value(torch.tensor(nibble, dtype=torch.uint8))) / 64


def test_threads_find_their_operand_of_bfloat16_products_with_evens_first() -> None:
    w = weight(256, 128)
    p = pack_narrow(w)
    order = evens_first(torch.arange(128)[None]).reshape(-1).tolist()
    for (half, warp, lane), block_row, part, step in itertools.product(threads(), range(2), range(2), range(4)):
        v = words_of(p, block_row, half, warp, lane, part)[step]
        for upper, pair, odd in itertools.product(range(2), range(2), range(2)):
            nibble = v >> (16 * odd + 8 * upper + 4 * pair) & 15
            column = order[64 * part + 16 * step + 8 * upper + 2 * (lane & 3) + odd]
            assert nibble == code(w, row_of(block_row, half, warp, lane, pair), column)


def test_scales_stand_where_the_other_order_has_them() -> None:
    w = weight(256, 384)
    p = pack_narrow(w)
    assert (p.layout, p.shape, p.scale.shape) == (NARROW, w.shape, w.scale.shape)
    assert torch.equal(p.scale, pack(w).scale)


def test_what_does_not_fit() -> None:
    assert fits_narrow(weight(128, 128))
    assert not fits_narrow(weight(128, 128, fmt="mxfp8"))
    assert not fits_narrow(weight(128, 96))
    assert not fits_narrow(pack_narrow(weight(128, 128)))
