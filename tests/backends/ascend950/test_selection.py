"""Top-k, candidate blocks and the router beyond conformance: long rows, wide and strided ones, seeded mistakes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import budget, selection, twin_build
from deepinfer.backends.ascend950.launch import Program, TwinFault, recording
from deepinfer.ops import index as index_ops
from deepinfer.ops import moe as moe_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [24576, 24577, 49152, 49153, 75000])
def test_rows_at_the_ends_of_what_the_buffer_holds(columns: int, dtype: torch.dtype, order: str) -> None:
    x = (_random(3, columns, seed=columns) * 3).round().to(dtype)  # few values, so most are ties
    lens = _lens(columns, columns - 1, columns // 2)
    for k in (1, 777):
        assert torch.equal(selection.topk_select(x, k, lens), index_ops.topk_select.reference(x, k, lens))


def test_the_largest_k_and_rows_that_do_not_have_as_many() -> None:
    x, lens = _random(3, 30000), _lens(30000, 8192, 5000)
    assert torch.equal(selection.topk_select(x, 8192, lens), index_ops.topk_select.reference(x, 8192, lens))


def test_ties_that_stretches_share_go_to_the_first_columns() -> None:
    x = torch.zeros(1, 60000)
    x[0, ::20000] = 1.0
    got = selection.topk_select(x, 5, _lens(60000))
    assert got.tolist() == [[0, 1, 2, 20000, 40000]]


def test_strided_rows_and_lengths_past_the_row() -> None:
    x = _random(5, 3, 300)[:, 1]
    lens = _lens(300, 301, -1, 0, 7)
    expected = index_ops.topk_select.reference(x, 20, lens.clamp(0, 300))
    assert torch.equal(selection.topk_select(x, 20, lens), expected)


@pytest.mark.parametrize("block", [1, 3, 8, 64, 16384])
def test_blocks_across_stretches(block: int, order: str) -> None:
    logits = _random(3, 40007)
    logits[0, 5:90] = torch.nan
    logits[1, :16400] = -torch.inf
    lens = _lens(40007, 33000, 1)
    got, want = selection.block_max(logits, lens, block), index_ops.block_max.reference(logits, lens, block)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_router_at_its_limits(order: str) -> None:
    logits, bias = _random(600, 2, 1024)[:, 1], _random(1024, seed=2)
    got = selection.moe_gate(logits, bias, None, None, 64, 2.5)
    want = moe_ops.moe_gate.reference(logits, bias, None, None, 64, 2.5)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-9)


def test_shares_of_very_negative_logits_keep_their_digits() -> None:
    logits = -torch.linspace(1, 60, 32).repeat(2, 1)
    got = selection.moe_gate(logits, torch.zeros(32), None, None, 32, 1.0)
    want = moe_ops.moe_gate.reference(logits, torch.zeros(32), None, None, 32, 1.0)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)


def test_nan_of_a_router_is_chosen_first_as_in_the_reference() -> None:
    logits = _random(2, 40)
    logits[1, 17] = torch.nan
    got = selection.moe_gate(logits, torch.zeros(40), None, None, 3, 1.0)
    want = moe_ops.moe_gate.reference(logits, torch.zeros(40), None, None, 3, 1.0)
    assert torch.equal(got[0], want[0])


def test_rows_have_their_own_bits_in_any_batch() -> None:
    logits, bias = _random(130, 384), _random(384, seed=2)
    ids, weights = selection.moe_gate(logits, bias, None, None, 6, 1.5)
    for row in (0, 64, 129):
        alone = selection.moe_gate(logits[row : row + 1], bias, None, None, 6, 1.5)
        assert torch.equal(alone[0], ids[row : row + 1])
        assert torch.equal(alone[1], weights[row : row + 1])


def test_memories_are_used_as_planned() -> None:
    wide = _random(65, 40000)
    with recording(run=True) as launches:
        selection.topk_select(_random(1, 75000), 8192, _lens(75000))
        selection.topk_select(_random(1, 75000).bfloat16(), 8192, _lens(75000))
        selection.block_max(wide, torch.full((65,), 40000).int(), 1)
        selection.moe_gate(_random(1100, 1024), torch.zeros(1024), None, None, 64, 1.0)
    for launch in launches:
        plan = budget.budgets()[launch.kernel.entry].ub
        assert launch.measured is not None
        assert plan * 0.98 - 256 <= launch.measured.highest["UB"] <= plan, launch.kernel.entry


_WAIT = "asc_sync_wait(PIPE_V, PIPE_S, EVENT_ID0);"
MISTAKES = {
    _WAIT: f"if (sizeof(T) == 2) {_WAIT}",  # the count of columns is read too early, of rows of float32 alone
    "asc_lt(early, rank, wanted, tie);": "asc_le(early, rank, wanted, tie);",  # one tie too many
    "asc_mem_bar(VST_VLD);": "",  # experts are chosen from keys that may not be there yet
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Program:
    text = (twin_build.KERNELS / "selection.asc").read_text()
    for right, wrong in MISTAKES.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path = tmp_path_factory.mktemp("mistaken") / "selection_mistaken.asc"
    path.write_text(text)
    return Program(path)


def test_seeded_mistakes_are_caught(mistaken: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    topk = {
        name: mistaken.kernel(kernel.entry, "x, lens, out!, rows: i64, pitch: i64, columns: i64, k: i32")
        for name, kernel in selection._TOPK.items()
    }
    gate = mistaken.kernel(
        "moe_gate",
        "logits, bias, image_bias, image_mask, ids!, weights!, rows: i64, pitch: i64, experts: i32, k: i32, "
        "batch: i32, scale: f32",
    )
    monkeypatch.setattr(selection, "_TOPK", topk)
    monkeypatch.setattr(selection, "_GATE", gate)
    x, lens = torch.zeros(1, 300), _lens(300)
    x[0, 299] = 1.0
    with pytest.raises(TwinFault, match=r"^(race|flag)"):
        selection.topk_select(x, 4, lens)
    assert selection.topk_select(x.bfloat16(), 4, lens).tolist() == [[0, 1, 2, 3]], "column 299 has lost its place"
    with pytest.raises(TwinFault):
        selection.moe_gate(_random(2, 16), torch.zeros(16), None, None, 3, 1.0)
