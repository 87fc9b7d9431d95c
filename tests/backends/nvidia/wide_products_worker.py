"""Products that read packed weights, interpreted, against the form for canonical ones; raises where they differ."""

from __future__ import annotations

import torch
from many_rows_worker import changed

from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.registry import find_emulated


def codes(gen: torch.Generator, *shape: int, fmt: QuantFormat) -> QTensor:
    """Random codes that are no NaN."""
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    data = torch.randint(0, 256, (*shape[:-1], width), generator=gen, dtype=torch.uint8)
    if fmt == "mxfp8":
        data.masked_fill_((data & 0x7F) == 0x7F, 0)
    scale = torch.randint(100, 128, (*shape[:-1], shape[-1] // 32), generator=gen, dtype=torch.uint8)
    return QTensor(data, scale, fmt)


def main() -> None:
    """All that a packing holds; then each of a matrix, of groups and of experts, through the ops' own functions."""
    find_emulated("cuda_sm90")  # before any kernel is imported
    from deepinfer.backends.cuda_sm90 import linear, narrow_experts, wide_products
    from deepinfer.backends.cuda_sm90.packing import pack
    from deepinfer.backends.cuda_sm90.packing_narrow import pack_narrow
    from deepinfer.backends.nvidia import linear as canonical
    from deepinfer.ops.quant import dequantize

    gen = torch.Generator().manual_seed(0)
    single = torch.float32
    ends = torch.tensor([3, 3, 21], dtype=torch.int32)
    for fmt in ("mxfp8", "mxfp4"):
        whole = codes(gen, 256, 256, fmt=fmt)
        for packing in (pack, pack_narrow) if fmt == "mxfp4" else (pack,):
            with changed(wide_products, _ROWS=128):  # each tile of rows reads all codes again, which takes long here
                columns = wide_products.product(torch.eye(256), packing(whole), torch.full((256, 256), torch.nan))
            assert torch.equal(columns.t(), dequantize(whole, single)), (fmt, packing)

        matrix, experts = codes(gen, 256, 384, fmt=fmt), codes(gen, 3, 128, 256, fmt=fmt)
        x, acc = torch.randn(21, 384, generator=gen), torch.randn(21, 256, generator=gen)  # two tiles, one of 5 rows
        found = linear.linear_mx(x, pack(matrix), single, acc, out=torch.full((21, 256), torch.nan))
        assert torch.equal(found, canonical.linear_mx(x, matrix, single, acc)), fmt

        x = torch.randn(4, 3, 256, generator=gen)
        found = linear.linear_grouped_o(x, pack(experts), out=torch.full((4, 3, 128), torch.nan))
        assert torch.equal(found, canonical.linear_grouped_o(x, experts)), fmt

        x = torch.randn(21, 256, generator=gen)
        expected = canonical.moe_grouped_gemm(x, experts, ends, single)
        found = linear.moe_grouped_gemm(x, pack(experts), ends, single, out=torch.full((21, 128), torch.nan))
        assert torch.equal(found, expected), fmt
        if fmt == "mxfp4":
            many = pack_narrow(experts)
            found = narrow_experts.moe_grouped_gemm(x, many, ends, single, out=torch.full((21, 128), torch.nan))
            assert torch.equal(found, expected), fmt


if __name__ == "__main__":
    main()
