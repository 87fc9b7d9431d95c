"""Decode rows and scales in Triton's interpreter, against what codes stand for; run as a program, fails by raising."""

from __future__ import annotations

import torch

from deepinfer.ops.registry import find_emulated


def main() -> None:
    """Several shapes: one block of columns, many, and columns that fill no block."""
    find_emulated("cuda_sm90")  # before any kernel is imported
    from deepinfer.backends.cuda_sm90.packing_narrow import evens_first
    from deepinfer.backends.nvidia.decode import decode_rows, spread_scales
    from deepinfer.ops.formats import QTensor
    from deepinfer.ops.quant import dequantize

    gen = torch.Generator().manual_seed(0)
    for rows, depth in ((3, 128), (5, 2304), (2, 96)):
        data = torch.randint(0, 127, (rows, depth), generator=gen, dtype=torch.uint8)
        scale = torch.randint(100, 140, (rows, depth // 32), generator=gen, dtype=torch.uint8)
        x = QTensor(data, scale, "mxfp8")
        plain = decode_rows(x, torch.full((rows, depth), 7.0, dtype=torch.bfloat16))
        assert torch.equal(plain, dequantize(x, torch.float32).to(torch.bfloat16))
        ordered = decode_rows(x, torch.full((rows, depth), 7.0, dtype=torch.bfloat16), evens_first=True)
        assert torch.equal(ordered, evens_first(plain).reshape(rows, depth))
        if depth % 128 == 0:
            spread = spread_scales(scale, torch.full((depth // 128, rows + 8, 4), -1.0))
            powers = torch.exp2(scale.double() - 127).float()
            assert torch.equal(spread[:, :rows].permute(1, 0, 2).reshape(rows, -1), powers)
            assert bool((spread[:, rows:] == -1).all())


if __name__ == "__main__":
    main()
