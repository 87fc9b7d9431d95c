"""Corrections of a step beyond conformance: more rows than there are threads, lists whose entries lie apart."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from deepinfer.backends.ascend950 import step
from deepinfer.ops import step as step_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

WRITTEN = ("input_ids", "positions", "seq_lens", "window_slots", "ratio_slots")


def _draw(gen: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=gen).int()


def _step(num_seqs: int, rows_each: int, padding: int = 0) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(num_seqs)
    rows = num_seqs * rows_each
    previous = torch.randperm(num_seqs, generator=gen).int()
    previous[::5] = -1
    return {
        "input_ids": _draw(gen, 0, 100, rows + padding),
        "positions": (torch.arange(rows + padding) % rows_each + 40).int(),
        "seq_lens": torch.full((num_seqs,), 40 + rows_each, dtype=torch.int32),
        "window_slots": _draw(gen, -1, 50, rows + padding),
        "ratio_slots": _draw(gen, -1, 50, 2, rows + padding),
        "cu_seqlens_q": torch.arange(0, rows + 1, rows_each).int(),
        "row_to_seq": torch.cat((torch.arange(num_seqs).repeat_interleave(rows_each), torch.zeros(padding))).int(),
        "previous": previous,
        "planned": torch.full((num_seqs,), 3, dtype=torch.int32),
        "accepted": _draw(gen, 1, 4, num_seqs),
        "sampled_ids": _draw(gen, 0, 100, num_seqs),
        "draft_ids": _draw(gen, 0, 100, num_seqs, 2),
        "block_tables": _draw(gen, 1, 900, num_seqs, 8),
        "block_size": 8,
        "window_tables": _draw(gen, 1, 900, num_seqs, 14),
        "window_first_page": torch.full((num_seqs,), 2, dtype=torch.int32),
        "window_page": 4,
        "ratios": (1, 4),
    }


def _both(arguments: dict[str, Any]) -> None:
    """Run the kernels on `arguments` and the reference on copies, and compare what they wrote."""
    expected = {name: value.clone() if name in WRITTEN else value for name, value in arguments.items()}
    step.advance_step(**arguments)
    step_ops.advance_step.reference(**expected)
    for name in WRITTEN:
        assert torch.equal(arguments[name], expected[name]), name


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_more_rows_than_threads(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    _both(_step(num_seqs=5700, rows_each=3))  # 64 cores of 256 threads take 16,384


def test_lists_with_entries_apart() -> None:
    arguments = _step(num_seqs=9, rows_each=3, padding=4)
    for name in WRITTEN:
        apart = torch.full((*arguments[name].shape, 3), -7, dtype=torch.int32)
        apart[..., 1] = arguments[name]
        arguments[name] = apart[..., 1]
    _both(arguments)
    assert arguments["input_ids"]._base is not None and (arguments["input_ids"]._base[:, [0, 2]] == -7).all()


def test_a_step_of_padding_alone_is_left_as_it_is() -> None:
    arguments = _step(num_seqs=2, rows_each=1)
    arguments["cu_seqlens_q"] = torch.zeros(3, dtype=torch.int32)
    before = {name: arguments[name].clone() for name in WRITTEN}
    step.advance_step(**arguments)
    assert all(torch.equal(arguments[name], before[name]) for name in WRITTEN)


def test_history_of_more_sequences_than_threads() -> None:
    gen, count = torch.Generator().manual_seed(3), 17000
    previous = torch.randperm(count, generator=gen).int()
    previous[::7] = -1
    lists = {
        "previous": previous,
        "tokens": _draw(gen, 0, 1000, 3 * count),
        "starts": (torch.arange(count) * 3).int(),
        "num_emitted": _draw(gen, 1, 4, count),
        "last_rows": (torch.arange(count) * 2 + 1).int(),
        "last_seqs": torch.arange(count).int(),
        "last_input_ids": _draw(gen, 0, 1000, 2 * count),
        "last_cu_seqlens_q": (torch.arange(count + 1) * 2).int(),
        "last_history": _draw(gen, -1, 1000, count, 3),
    }
    histories = [torch.full((count, 3), -1, dtype=torch.int32) for _ in range(2)]
    step.advance_history(histories[0], **lists)
    step_ops.advance_history.reference(histories[1], **lists)
    assert torch.equal(histories[0], histories[1])
