"""The draft's head beyond conformance: many rows and tiles, the widest ranks, strided tensors, every pair of types."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import budget, heads
from deepinfer.backends.ascend950.launch import recording
from deepinfer.conformance.compare import compare
from deepinfer.ops import heads as heads_ops
from deepinfer.ops.errors import OpArgumentError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, count: int) -> Tensor:
    return torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(3)).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "ids", "rank"), [(130, 4500, 40), (300, 257, 256), (1, 5000, 13), (17, 96, 1)])
def test_tiles_of_any_number(rows: int, ids: int, rank: int, dtype: torch.dtype, order: str) -> None:
    base, tokens = _random(rows, ids) * 4, _ids(ids, rows)
    embed, head = _random(ids, rank, seed=2).to(dtype), (_random(ids, rank, seed=4) * rank**-0.5).to(dtype)
    got = heads.markov_logits(base, tokens, embed, head)
    want = heads_ops.markov_logits.reference(base, tokens, embed, head)
    assert compare(got, want, heads_ops.markov_logits.tolerance).failures == []


def test_strided_base_and_tables() -> None:
    base, tokens = _random(4, 3, 200)[:, 1], _ids(200, 4)
    embed, head = _random(200, 64)[:, 10:30], _random(200, 90, seed=2)[:, 5:25]
    got = heads.markov_logits(base, tokens, embed, head)
    want = heads_ops.markov_logits.reference(base, tokens, embed, head)
    assert compare(got, want, heads_ops.markov_logits.tolerance).failures == []


def test_rows_have_their_own_bits_in_any_batch() -> None:
    base, tokens = _random(140, 300), _ids(300, 140)
    embed, head = _random(300, 256, seed=2).bfloat16(), _random(300, 256, seed=4).bfloat16()
    whole = heads.markov_logits(base, tokens, embed, head)
    for row in (0, 127, 128, 139):
        one = slice(row, row + 1)
        assert torch.equal(heads.markov_logits(base[one], tokens[one], embed, head), whole[one])


def test_a_head_is_read_once_and_memories_are_used_as_planned() -> None:
    for kind, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        base, tokens = _random(128, 8192), _ids(8192, 128)
        table = _random(8192, 256).to(dtype)
        with recording(run=True) as launches:
            heads.markov_logits(base, tokens, table, table)
        (launch,) = launches
        plan = budget.budgets()[f"markov_logits_{kind}"]
        assert launch.measured is not None
        row = 256 * table.element_size()
        assert launch.measured.bytes["MTE2"] == 8192 * row + 128 * 8192 * 4 + 32 * 128 * row, "tokens once per core"
        for name in ("ub", "l1", "l0a", "l0b", "l0c"):
            assert launch.measured.highest[name.upper()] == getattr(plan, name), name


def test_an_embedding_and_a_head_of_two_dtypes() -> None:
    base, tokens = _random(5, 70), _ids(70, 5)
    for kinds in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        embed, head = (_random(70, 24, seed=i).to(kind) for i, kind in enumerate(kinds))
        got = heads.markov_logits(base, tokens, embed, head)
        want = heads_ops.markov_logits.reference(base, tokens, embed, head)
        assert compare(got, want, heads_ops.markov_logits.tolerance).failures == []


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("proj", [torch.float32, torch.bfloat16])
def test_confidences_of_every_type(hidden: torch.dtype, embed: torch.dtype, proj: torch.dtype, order: str) -> None:
    x, table = _random(70, 2, 1001)[:, 1].to(hidden), _random(30, 21, seed=2).to(embed)
    vector = (_random(1, 1022, seed=4) * 0.03).to(proj)
    tokens = _ids(30, 70)
    got = heads.draft_confidence(x, tokens, table, vector, 0.7)
    want = heads_ops.draft_confidence.reference(x, tokens, table, vector, 0.7)
    assert compare(got, want, heads_ops.draft_confidence.tolerance).failures == []


def test_an_embedding_that_is_too_wide_is_named() -> None:
    with pytest.raises(OpArgumentError, match="up to 1024 values, got 1025"):
        heads.draft_confidence(torch.zeros(1, 8), _ids(4, 1), torch.zeros(4, 1025), torch.zeros(1, 1033), 1.0)
