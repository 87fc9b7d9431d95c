"""Products in CUDA C++ on the CPU thread by thread: the contract's, in every form, with bits that no tile shows in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cpu_programs import on_cpu
from cuda_on_cpu import FunctionOnCpu, map_words

from deepinfer.backends.cuda_sm90 import plain_products, products
from deepinfer.backends.cuda_sm90.linear import linear_grouped_o, linear_mx, moe_grouped_gemm
from deepinfer.backends.cuda_sm90.packing import pack
from deepinfer.backends.cuda_sm90.packing_narrow import evens_first, pack_narrow
from deepinfer.conformance.compare import compare
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.cases.common import normal, quantised
from deepinfer.ops.formats import QTensor, QuantFormat

N, K = 256, 384
LONG = 2048
"""A depth for which stages are filled again while products go on, and parts of K have several blocks."""
Form = products.Form | plain_products.PlainForm


class Device:
    """What kernels run on instead of a device: one multiprocessor, unless a test says otherwise.

    Attributes:
        launched: forms, in turn.
        processors: few of them mean wide forms, and blocks with several tiles.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.launched: list[Form] = []
        self.processors = 1
        for module in (products, plain_products):
            patch.setattr(module, "_function", self._function)
            patch.setattr(module, "num_processors", lambda index: self.processors)
            patch.setattr(module, "tensor_map", lambda matrix, rows, columns: map_words(matrix, rows))

    def _function(self, device: int, form: Form) -> FunctionOnCpu:
        self.launched.append(form)
        cluster = form.split if isinstance(form, products.Form) or form.cluster else 1
        return FunctionOnCpu(on_cpu(form.program(), self.folder), form.shared_bytes, cluster)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(tmp_path, monkeypatch)


def failures(got: Tensor, want: Tensor) -> list[str]:
    return compare(got, want, linear_ops.PRODUCT).failures


def operands(rows: int, fmt: QuantFormat, *shape: int) -> tuple[Tensor, QTensor]:
    gen = torch.Generator().manual_seed(rows)
    weight = quantised(gen, *shape, fmt=fmt, scale=shape[-1] ** -0.5)
    return normal(gen, rows, shape[-1], dtype=torch.bfloat16), weight


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_rows_of_dense_products_keep_their_bits(fmt: QuantFormat, device: Device) -> None:
    """Several tiles a block and a ragged last one; few rows by halves, which for e4m3 are read ahead."""
    x, weight = operands(201, fmt, N, K)
    packed = pack(weight)
    acc = normal(torch.Generator().manual_seed(1), N, 402, dtype=torch.bfloat16)[:, ::2].t()
    out = torch.full((202, N), torch.nan, dtype=torch.bfloat16)
    whole = linear_mx(x, packed, torch.bfloat16, acc, out=out[:201])
    assert failures(whole, linear_ops.linear_mx.reference(x, weight, torch.bfloat16, acc)) == []
    assert out[201].isnan().all()
    device.processors = 99
    few = linear_mx(x[3:8].clone(), packed, torch.float32, acc[3:8].float())
    assert torch.equal(few.bfloat16(), whole[3:8])
    assert [(form.tokens, form.groups) for form in device.launched] == [(128, 2), (8, 1)]
    assert [form.ahead for form in device.launched] == [False, fmt == "mxfp8"]


def test_stages_that_are_read_ahead_come_again(device: Device) -> None:
    x, weight = operands(5, "mxfp8", 128, LONG)
    device.processors = 99
    got = linear_mx(x, pack(weight), torch.bfloat16)
    assert failures(got, linear_ops.linear_mx.reference(x, weight, torch.bfloat16)) == []
    form = device.launched[0]
    assert isinstance(form, products.Form) and form.ahead and form.stages < LONG // 128


@pytest.mark.parametrize(("fmt", "depth", "parts"), [("mxfp8", 256, 2), ("mxfp4", 384, 3)])
def test_blocks_sum_parts_of_k(fmt: QuantFormat, depth: int, parts: int, device: Device) -> None:
    x, weight = operands(5, fmt, N, depth)
    got = linear_mx(x, pack(weight), torch.bfloat16, invariant=False)
    assert failures(got, linear_ops.linear_mx.reference(x, weight, torch.bfloat16)) == []
    assert device.launched[0].split == parts


def test_groups_read_their_own_columns(device: Device) -> None:
    x, weight = operands(5, "mxfp8", 2, 128, 256)
    x = torch.stack((x, x.flip(0)), 1)
    got = linear_grouped_o(x, pack(weight))
    assert failures(got, linear_ops.linear_grouped_o.reference(x, weight)) == []


def experts_rows(counts: list[int], fmt: QuantFormat) -> tuple[Tensor, QTensor, Tensor]:
    return *operands(sum(counts), fmt, len(counts), 128, 256), torch.tensor(counts).cumsum(0).int()


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_rows_of_experts_keep_their_bits(fmt: QuantFormat, device: Device) -> None:
    """Experts without rows, tiles of all widths, several tiles of one expert; the same rows in tiles of eight."""
    counts = [0, 135, 3, 121, 0, 113, 200, 108]
    x, weight, ends = experts_rows(counts, fmt)
    packed = pack(weight)
    whole = moe_grouped_gemm(x, packed, ends, torch.bfloat16)
    assert failures(whole, moe_ops.moe_grouped_gemm.reference(x, weight, ends, torch.bfloat16)) == []
    few = torch.tensor([0, 4, 7, 7, 7, 7, 7, 7]).int()
    some = torch.cat((x[:4], x[135:138]))
    assert torch.equal(moe_grouped_gemm(some, packed, few, torch.bfloat16), torch.cat((whole[:4], whole[135:138])))
    assert [form.shorter for form in device.launched] == [4, 0]


def test_narrow_packing_gives_the_bits_of_the_other(device: Device) -> None:
    x, weight, ends = experts_rows([2, 0, 9, 1], "mxfp4")
    ordered, out = evens_first(x).reshape(x.shape), torch.full((12, 128), torch.nan, dtype=torch.bfloat16)
    products.multiply(ordered, pack_narrow(weight), out, row_ends=ends)
    assert torch.equal(out, moe_grouped_gemm(x, pack(weight), ends, torch.bfloat16))


def test_e4m3_products_over_experts(device: Device) -> None:
    _, weight, ends = experts_rows([2, 0, 9, 1], "mxfp4")
    x = quantised(torch.Generator().manual_seed(3), 12, 256, fmt="mxfp8")
    scales = torch.full((2, 12 + 16, 4), torch.nan)
    scales[:, :12] = torch.exp2(x.scale.float() - 127).view(12, 2, 4).transpose(0, 1)
    out = torch.full((12, 128), torch.nan, dtype=torch.bfloat16)
    products.multiply(x.data, pack_narrow(weight), out, row_ends=ends, token_scales=scales)
    assert failures(out, moe_ops.moe_grouped_gemm.reference(x, weight, ends, torch.bfloat16)) == []
    assert device.launched[0].eight


@pytest.mark.parametrize("depth", [K, LONG])
def test_rows_of_plain_products_keep_their_bits(depth: int, device: Device) -> None:
    """One block for all parts of K, of one step or two, with several tiles; a cluster of a block each."""
    gen = torch.Generator().manual_seed(4)
    x = normal(gen, 150, depth, dtype=torch.bfloat16)
    weight = normal(gen, N, depth, dtype=torch.bfloat16, scale=depth**-0.5)
    out = torch.full((151, N), torch.nan, dtype=torch.bfloat16)
    whole = plain_products.linear_bf16(x, weight, torch.bfloat16, 0.5, out=out[:150])
    assert failures(whole, linear_ops.linear_bf16.reference(x, weight, torch.bfloat16, 0.5)) == []
    assert out[150].isnan().all()
    few = plain_products.linear_bf16(x[:5], weight, torch.float32, 0.5)
    assert torch.equal(few.bfloat16(), whole[:5])
    assert [(form.groups, form.cluster) for form in device.launched] == [(2, False), (1, True)]
