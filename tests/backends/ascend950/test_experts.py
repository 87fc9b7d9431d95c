"""Dispatch and combine beyond conformance: lists of several stretches, long rows, mixed types, seeded mistakes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import experts, twin_build
from deepinfer.backends.ascend950.launch import Program, TwinFault
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor
from deepinfer.ops.moe import DispatchHandle

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


def _routing(tokens: int, k: int, num_experts: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts, (tokens, k), generator=gen)
    return ids, torch.rand(tokens, k, generator=gen)


@pytest.mark.parametrize(
    ("tokens", "k", "num_experts"),
    [
        pytest.param(3000, 6, 384, id="three stretches of choices"),
        pytest.param(1024, 8, 5, id="one full stretch"),
        pytest.param(1025, 8, 5, id="one choice more"),
        pytest.param(40, 3, 1, id="one expert"),
        pytest.param(7, 2, 200, id="several experts for a core"),
        pytest.param(0, 4, 70, id="no tokens"),
    ],
)
def test_rows_are_grouped_in_order(tokens: int, k: int, num_experts: int, order: str) -> None:
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, weights = _routing(tokens, k, num_experts)
    rows, row_weights, psum, handle = experts.ep_dispatch(x, ids, weights, num_experts)
    expected_rows, expected_weights, expected_psum, expected = moe_ops.ep_dispatch(x, ids, weights, num_experts)
    assert torch.equal(psum, expected_psum) and torch.equal(handle.slot_to_row, expected.slot_to_row)
    end = int(psum[-1])
    assert isinstance(rows, Tensor) and isinstance(expected_rows, Tensor)
    assert torch.equal(rows[:end], expected_rows[:end]) and torch.equal(row_weights[:end], expected_weights[:end])


def test_codes_of_strided_rows_travel_with_their_scales(order: str) -> None:
    codes = torch.randint(0, 256, (9, 3, 64), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    x = QTensor(codes[:, 1], codes[:, 0, :2], "mxfp8")
    ids, weights = _routing(9, 2, 4)
    rows, _, psum, _ = experts.ep_dispatch(x, ids, weights, 4)
    expected, _, _, _ = moe_ops.ep_dispatch(x, ids, weights, 4)
    assert isinstance(rows, QTensor) and isinstance(expected, QTensor)
    end = int(psum[-1])
    assert torch.equal(rows.data[:end], expected.data[:end]) and torch.equal(rows.scale[:end], expected.scale[:end])


def test_a_row_longer_than_the_buffer() -> None:
    x = torch.randn(2, 60000, generator=torch.Generator().manual_seed(4))
    ids, weights = torch.tensor([[1, 0], [-1, 1]]), torch.ones(2, 2)
    rows, _, _, handle = experts.ep_dispatch(x, ids, weights, 2)
    assert isinstance(rows, Tensor)
    assert torch.equal(rows[:3], x[[0, 0, 1]]) and handle.slot_to_row.tolist() == [[1, 0], [-1, 2]]


@pytest.mark.parametrize("added", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_sums_of_mixed_types_and_long_rows(added: torch.dtype | None, out_dtype: torch.dtype, order: str) -> None:
    gen = torch.Generator().manual_seed(5)
    y = torch.randn(7, 8200, generator=gen).bfloat16()
    slots = torch.tensor([[6, 0, 3], [-1, -1, -1], [2, -1, 5]], dtype=torch.int32)
    bias = None if added is None else torch.randn(3, 8200, generator=gen).to(added)
    total = experts.ep_combine(y, DispatchHandle(slots), bias, out_dtype)
    assert torch.equal(total, moe_ops.ep_combine(y, DispatchHandle(slots), bias, out_dtype)), "sums in the same order"


def test_there_and_back_is_the_weighted_row(order: str) -> None:
    x = torch.randn(130, 40, generator=torch.Generator().manual_seed(6))
    ids = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4] for i in range(130)])
    rows, _, _, handle = experts.ep_dispatch(x, ids, torch.ones(130, 4), 9)
    assert isinstance(rows, Tensor)
    assert torch.equal(experts.ep_combine(rows, handle, None, torch.float32), ((x + x) + x) + x)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(OpArgumentError, match=r"float32 and bfloat16, got torch\.float64"):
        experts.ep_combine(torch.zeros(2, 4).double(), DispatchHandle(torch.zeros(1, 1).int()), None, torch.float32)


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        pytest.param(
            "PIPE_MTE2, PIPE_MTE3, slot);\n    asc_sync_wait(PIPE_MTE2, PIPE_MTE3, slot);",
            "PIPE_MTE2, PIPE_MTE3, slot);",
            "before the write of pipe MTE2",
            id="stored before it is loaded",
        ),
        pytest.param(
            "row * row_bytes + first", "(row + 1) * row_bytes + first", "past the end of 'rows'", id="one row too far"
        ),
    ],
)
def test_a_mistake_in_a_copy_is_found(
    right: str, wrong: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (twin_build.KERNELS / "experts.asc").read_text()
    assert text.count(right) == 1
    mutated = tmp_path / "mutated.asc"
    mutated.write_text(text.replace(right, wrong))
    kernel = Program(mutated).kernel("send_rows", "x, slots, rows!, tokens: i64, pitch: i64, row_bytes: i64, k: i32")
    monkeypatch.setattr(experts, "_SEND", kernel)
    with pytest.raises(TwinFault, match=words):
        experts.ep_dispatch(torch.randn(3, 8), torch.tensor([[0], [1], [0]]), torch.ones(3, 1), 2)
