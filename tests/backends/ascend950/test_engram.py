"""Engram kernels beyond conformance: wide tables, special scales, weights of both types, host tables, many rows."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepinfer.backends.ascend950 import engram
from deepinfer.ops import engram as engram_ops
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import quantize

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


def _random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [512, 256, 33, 1])
@pytest.mark.parametrize("kind", ["mxfp8", "bf16", "f32"])
def test_rows_of_any_width_are_fetched_exactly(kind: str, width: int, order: str) -> None:
    plain = _random(40, width)
    table = (
        quantize.reference(plain, "mxfp8")
        if kind == "mxfp8"
        else plain.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    )
    rows = torch.randint(0, 40, (90, 3), generator=torch.Generator().manual_seed(2)).int()
    for dtype in (torch.float32, torch.bfloat16):
        got = engram.engram_fetch(table, rows, dtype)
        assert torch.equal(got, engram_ops.engram_fetch.reference(table, rows, dtype))


def test_every_code_under_the_smallest_scale_and_that_of_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(3, 1)
    scales = torch.tensor([0, 1, 255], dtype=torch.uint8).repeat_interleave(8)[:, None]
    table, rows = QTensor(codes, scales, "mxfp8"), torch.arange(24).int()[:, None]
    got = engram.engram_fetch(table, rows, torch.float32)
    want = engram_ops.engram_fetch.reference(table, rows, torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("fmt", ["plain", "mxfp8"])
def test_rows_of_a_host_table_are_brought_in_the_order_they_are_asked_for(fmt: str) -> None:
    plain = _random(30, 64)
    table = quantize.reference(plain, "mxfp8") if fmt == "mxfp8" else plain
    rows = torch.tensor([[3, 29, 3], [0, 1, 7]], dtype=torch.int32)
    brought, order_of = engram.bring_rows(table, rows)
    assert brought.shape == (6, 64) and order_of.dtype == torch.int32
    got = engram.engram_fetch(brought, order_of, torch.float32)
    assert torch.equal(got, engram_ops.engram_fetch.reference(table, rows, torch.float32))


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_weights_may_differ_in_type(kinds: tuple[torch.dtype, torch.dtype], order: str) -> None:
    h, kv = _random(67, 2, 200), _random(67, 600, seed=2)
    q, k = _random(2, 200, seed=3).to(kinds[0]), _random(2, 200, seed=4).to(kinds[1])
    got = engram.engram_gate(h, kv, q, k, 1e-20)
    torch.testing.assert_close(got, engram_ops.engram_gate.reference(h, kv, q, k, 1e-20), rtol=1e-5, atol=1e-5)


def test_a_broken_row_breaks_no_other_and_a_blocked_one_stays() -> None:
    h, kv = _random(5, 4, 96).bfloat16(), _random(5, 480, seed=2).bfloat16()
    h[1, 2, 7], kv[2, 0] = torch.nan, torch.inf
    weight, blocked = torch.ones(4, 96), torch.tensor([False, False, False, True, False])
    got = engram.engram_gate(h, kv, weight, weight, 1e-20, blocked)
    want = engram_ops.engram_gate.reference(h, kv, weight, weight, 1e-20, blocked)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5, equal_nan=True)
    assert torch.equal(got[3], h[3])


def test_hashes_of_more_tokens_than_there_are_threads(order: str) -> None:
    gen = torch.Generator().manual_seed(5)
    grams = torch.randint(0, 99092, (400, 4), generator=gen).int()
    multipliers = torch.randint(-(2**62), 2**62, (2, 4), generator=gen) * 2 + 1
    primes = torch.randint(15_000_000, 17_000_000, (2, 24), generator=gen)
    offsets = primes.cumsum(1) - primes
    got = engram.engram_hash(grams, multipliers, primes, offsets)
    assert torch.equal(got, engram_ops.engram_hash.reference(grams, multipliers, primes, offsets))


def test_a_row_before_an_image_in_the_rows_is_not_shut_by_another_sequence() -> None:
    # two sequences of one row, the first inside an image: the second one's own history is open
    lists = {"input_ids": [4, 5], "row_to_seq": [0, 1], "cu_seqlens_q": [0, 1, 2], "token_map": list(range(9, -1, -1))}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}
    history, blocked = torch.tensor([[6], [7]], dtype=torch.int32), torch.tensor([True, False])
    arguments = (*tensors.values(),)
    got = engram.engram_ngrams(*arguments[:3], history, arguments[3], 0, blocked, torch.zeros(2, 1, dtype=torch.bool))
    assert got.tolist() == [[9, 9], [4, 2]]
