"""Sampling kernels beyond conformance: rows of several stretches, cuts with and without a list, rows in any batch."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import sampling, twin_build
from deepinfer.backends.ascend950.launch import Program, TwinFault
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops import verification as verification_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import gumbel, random_words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

VOCABULARY = 30001
"""Three stretches, the last of which ends in half a register."""


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


def _logits(rows: int, ids: int = VOCABULARY, spread: float = 1.0, seed: int = 1) -> Tensor:
    return torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * spread


def _filters(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    return {
        "temperature": torch.full((rows,), temperature),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32),
        "top_p": torch.full((rows,), top_p),
        "min_p": torch.full((rows,), min_p),
    }


def _keys(rows: int) -> dict[str, Any]:
    index = torch.arange(rows, dtype=torch.int32)
    return {"seeds": 2**62 + 7919 * index.long(), "output_index": index * 1000, "choice": index % 3}


@pytest.mark.parametrize(
    ("spread", "top_k", "top_p", "min_p"),
    [
        pytest.param(4.0, 0, 0.9, 0.0, id="nucleus of few ids"),
        pytest.param(0.1, 0, 0.8, 0.0, id="nucleus of too many ids for a list"),
        pytest.param(4.0, 50, 1.0, 0.0, id="few best"),
        pytest.param(4.0, 20000, 1.0, 0.0, id="more best than a list holds"),
        pytest.param(0.1, 20000, 0.7, 0.0, id="nucleus of these"),
        pytest.param(4.0, 5000, 0.999, 1e-4, id="all three"),
        pytest.param(0.1, 29000, 1.0, 0.9, id="fewer left than asked for"),
    ],
)
def test_cuts_of_long_rows(spread: float, top_k: int, top_p: float, min_p: float, order: str) -> None:
    logits = _logits(2, spread=spread)
    args = {"logits": logits, **_filters(2, 0.8, top_k, top_p, min_p)}
    scores, expected = sampling.process_logits(**args), sampling_ops.process_logits(**args)
    assert torch.equal(scores.isfinite(), expected.isfinite())
    assert 0 < int(expected.isfinite().sum(1).min()) < VOCABULARY, "the filters have something to do"
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)
    keys = _keys(2)
    assert sampling_ops.best_gap(**args, **keys).min() > sampling_ops.MIN_GAP
    assert torch.equal(sampling.sample(**args, **keys), sampling_ops.sample(**args, **keys))


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        pytest.param(13000, 1.0, id="ties of the second stretch, streamed"),
        pytest.param(100, 1.0, id="ties of the first stretch, streamed"),
        pytest.param(0, 0.6, id="mass of ties"),
        pytest.param(25000, 0.9, id="one after the other"),
    ],
)
def test_ties_go_to_lower_ids(top_k: int, top_p: float) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, ::2] = -0.0
    args = {"logits": logits, **_filters(2, 1.0, top_k, top_p, 0.0)}
    scores = sampling.process_logits(**args)
    assert torch.equal(scores, sampling_ops.process_logits(**args))
    kept = int(scores[0].isfinite().sum())
    assert 0 < kept < VOCABULARY and bool(scores[:, :kept].isfinite().all())


def test_ties_within_a_list_go_to_lower_ids() -> None:
    logits = torch.full((1, VOCABULARY), -20.0)
    best = torch.tensor([5, 11, 9000, 12287, 12288, 24576, 30000])
    logits[0, best] = 3.0
    for args in (_filters(1, 1.0, 5, 1.0, 0.0), _filters(1, 1.0, 0, 0.7, 0.0)):
        scores = sampling.process_logits(logits, **args)
        assert torch.equal(scores[0].isfinite().nonzero()[:, 0], best[:5])


def test_every_id_has_its_own_word(order: str) -> None:
    """With equal scores the token is where the Gumbel is largest, so one wrong word in any place can show."""
    rows = 40
    keys = _keys(rows)
    logits = torch.zeros(rows, VOCABULARY)
    noise = gumbel(random_words(**keys, purpose=1, num_ids=VOCABULARY, anchor=keys["output_index"]))
    drawn = sampling.sample(logits, **_filters(rows, 1.0, 0, 1.0, 0.0), **keys, purpose=1, anchor=keys["output_index"])
    top = noise.topk(2, dim=1)
    settled = top.values[:, 0] - top.values[:, 1] > sampling_ops.MIN_GAP
    assert settled.sum() > rows - 3
    assert torch.equal(drawn[settled], top.indices[settled, 0].int())
    assert set((drawn % 4).tolist()) == {0, 1, 2, 3} and int(drawn.max()) > 2 * 12288


def test_a_row_draws_the_same_token_in_any_batch(order: str) -> None:
    rows = 70
    logits, keys = _logits(rows, 300, 3.0), _keys(rows)
    filters = _filters(rows, 0.9, 40, 0.95, 0.01)
    whole = sampling.sample(logits, **filters, **keys)
    alone = [
        sampling.sample(logits[i : i + 1], **{n: v[i : i + 1] for n, v in {**filters, **keys}.items()})
        for i in (0, 1, 63, 64, 69)
    ]
    assert torch.equal(whole[[0, 1, 63, 64, 69]], torch.cat(alone))


@pytest.mark.parametrize("num_top", [3, 20])
def test_best_ids_of_long_rows(num_top: int, order: str) -> None:
    logits = (_logits(3, spread=4.0) * 4).round() / 4  # ties all over
    logits[1, 2:] = -math.inf
    logits[2, 30000] = math.nan
    tokens = torch.tensor([29999, 1, 5], dtype=torch.int32)
    got = sampling.token_logprobs(logits, tokens, num_top)
    for part, expected in zip(got, sampling_ops.token_logprobs(logits, tokens, num_top), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_more_ids_than_are_stored_together() -> None:
    logits = _logits(2, 70)
    ids = torch.randint(-1, 71, (2, 1500), generator=torch.Generator().manual_seed(3)).int()
    got, expected = sampling.logprobs_of(logits, ids), shaping_ops.logprobs_of(logits, ids)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_drafts_of_long_rows(mode: str, order: str) -> None:
    lengths = torch.tensor([0, 3, 0, 4, 1])
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    rows, requests = int(bounds[-1]), len(lengths)
    logits = _logits(rows + 2, spread=3.0)  # two rows belong to nobody
    draft_logits = logits + _logits(rows + 2, seed=2)
    drafts = logits.argmax(1).int()
    drafts[rows - 2] = VOCABULARY + 3
    args: dict[str, Any] = {
        **{"logits": logits, "cu_seqlens": bounds, "draft_ids": drafts, "mode": mode, "draft_logits": draft_logits},
        **_filters(requests, 0.1, 30, 0.95, 0.0),
        **_keys(requests),
    }
    got, expected = sampling.verify(**args), verification_ops.verify(**args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert int(got[0].max()) > 1, "some draft is kept"


def test_nobody_asks_for_tokens() -> None:
    empty = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.int32)
    num_emitted, tokens = sampling.verify(
        _logits(3, 8),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        *(empty, none, empty, empty, none.long(), none, none),
    )
    assert num_emitted.shape == (0,) and tokens.tolist() == [-1, -1, -1]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(OpArgumentError, match=r"logits is torch.bfloat16; .* float32"):
        sampling.process_logits(_logits(1, 8).bfloat16(), **_filters(1, 1.0, 0, 1.0, 0.0))
    with pytest.raises(OpArgumentError, match="needs draft_logits"):
        sampling.verify(
            logits=_logits(1, 8),
            cu_seqlens=torch.tensor([0, 1]).int(),
            draft_ids=torch.zeros(1).int(),
            **_filters(1, 1.0, 0, 1.0, 0.0),
            **_keys(1),
            mode="rejection",
        )


def test_results_stored_too_early_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (twin_build.KERNELS / "sampling.asc").read_text()
    wait, store = "asc_sync_wait(PIPE_V, PIPE_MTE3, slot);", "store_row(out + number * ids + first, scores, count);"
    assert text.count(f"{wait}\n      {store}") == 1
    mutated = tmp_path / "mutated.asc"
    mutated.write_text(text.replace(f"{wait}\n      {store}", f"{store}\n      {wait}"))
    kernel = Program(mutated).kernel(
        "filter_rows", "logits, temperature, top_k, top_p, min_p, out!, rows: i64, pitch: i64, ids: i32"
    )
    monkeypatch.setattr(sampling, "_FILTER", kernel)
    with pytest.raises(TwinFault, match="before the write of pipe V"):
        sampling.process_logits(_logits(1, 64), **_filters(1, 1.0, 3, 1.0, 0.0))
