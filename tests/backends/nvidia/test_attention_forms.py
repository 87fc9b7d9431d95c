"""Forms of sparse attention agree bit for bit, on a Hopper GPU; the contract's own cases say whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.backends.cuda_sm90 import attention_forms
from deepinfer.backends.cuda_sm90.attention_forms import Form
from deepinfer.ops.formats import CacheFormat, PagedCache

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
HEADS, DIM = 64, 512
ROOM = 64 << 20


def cache(kind: str, pages: int, records: int, gen: torch.Generator) -> PagedCache:
    """Records of random bytes; page 0, which holes point to, is NaN throughout."""
    fmt = CacheFormat(kind, DIM)  # type: ignore[arg-type]
    data = torch.randint(0, 120, (pages, records * fmt.record_bytes), generator=gen, device="cuda", dtype=torch.uint8)
    data[0] = 255
    return PagedCache(data, fmt, records)


def arguments(rows: int, window: int, topk: int, *, kind: str = "fp4", missing: float = 0.2) -> dict[str, Any]:
    gen = torch.Generator("cuda").manual_seed(rows + window + topk)
    near, far = cache("fp8", 40, 32, gen), cache(kind, 60, 64, gen) if topk else None

    def slots(of: PagedCache, columns: int) -> Tensor:
        some = torch.randint(of.records, of.num_slots, (rows, columns), generator=gen, device="cuda")
        gone = torch.rand(rows, columns, generator=gen, device="cuda") < missing
        return some.masked_fill(gone, -1).int()

    return {
        "q": torch.randn(rows, HEADS, DIM, generator=gen, device="cuda").to(torch.bfloat16),
        "window_cache": near,
        "window_slots": slots(near, window),
        "kv_cache": far,
        "kv_slots": None if far is None else slots(far, topk),
        "softmax_scale": DIM**-0.5,
        "attn_sink": torch.randn(HEADS, generator=gen, device="cuda"),
    }


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Run in a given form, with so many bytes of scratch, which hold NaN."""
    from deepinfer.backends.cuda_sm90 import sparse_attn

    def call(form: Form, args: dict[str, Any], room: int = ROOM) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(sparse_attn, "choose_form", lambda *facts: form)
        out = torch.empty_like(args["q"]).fill_(torch.nan), torch.full(args["q"].shape[:2], torch.nan, device="cuda")
        return sparse_attn.run(**args, out=out, scratch=torch.full((room,), 255, dtype=torch.uint8, device="cuda"))

    return call


@pytest.mark.parametrize(
    ("rows", "window", "topk", "kind"),
    [
        (1, 128, 512, "fp4"),
        (19, 128, 512, "fp4"),
        (300, 128, 512, "fp4"),
        (19, 128, 512, "fp8"),
        (19, 128, 0, "fp4"),
        (19, 100, 130, "fp4"),
        (19, 0, 70, "fp4"),
        (3, 1, 0, "fp4"),
        (300, 64, 0, "fp4"),  # a pair of tiles whose second is behind the list
        (300, 64, 70, "fp8"),
    ],
)
def test_forms_agree_bit_for_bit(
    rows: int, window: int, topk: int, kind: str, attend: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    args = arguments(rows, window, topk, kind=kind)
    o, lse = attend(Form.DIRECT, args)
    assert not o.isnan().any() and not lse.isnan().any()
    for form in (Form.FEW, Form.GATHERED):
        other, other_lse = attend(form, args)
        assert torch.equal(o.view(torch.int16), other.view(torch.int16)), form
        assert torch.equal(lse, other_lse), form


def test_more_records_than_scratch_holds(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args = arguments(300, 128, 512)
    o, lse = attend(Form.DIRECT, args)
    other, other_lse = attend(Form.GATHERED, args, room=1 << 20)
    assert torch.equal(o, other)
    assert torch.equal(lse, other_lse)


def test_more_slots_than_shared_memory_has_bits_for(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args = arguments(300, 128, 512)
    gen = torch.Generator("cuda").manual_seed(1)
    args["kv_cache"] = far = cache("fp4", attention_forms.MARKING_BYTES // 8 + 1, 64, gen)
    args["kv_slots"] = torch.randint(64, far.num_slots, (300, 512), generator=gen, device="cuda").int()
    o, lse = attend(Form.DIRECT, args)
    other, other_lse = attend(Form.GATHERED, args, room=256 << 20)
    assert torch.equal(o, other)
    assert torch.equal(lse, other_lse)


def test_rows_keep_their_bits_in_every_form(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args = arguments(1500, 128, 512, missing=0.0)
    o, lse = attend(Form.GATHERED, args)
    for form, rows in ((Form.FEW, slice(7, 20)), (Form.DIRECT, slice(900, 1333)), (Form.GATHERED, slice(3, 1203))):
        part = args | {name: args[name][rows] for name in ("q", "window_slots", "kv_slots")}
        some, some_lse = attend(form, part)
        assert torch.equal(o[rows], some), form
        assert torch.equal(lse[rows], some_lse), form


@pytest.mark.parametrize(("rows", "window", "topk"), [(1, 128, 512), (16, 128, 512), (44, 128, 512), (5, 100, 130)])
def test_parts_of_rows_are_merged(
    rows: int, window: int, topk: int, attend: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    from deepinfer.backends.cuda_sm90 import sparse_attn

    args = arguments(rows, window, topk)
    args["window_slots"][-1], args["kv_slots"][-1, 64:] = -1, -1  # parts without keys
    o, lse = attend(Form.DIRECT, args)
    out = torch.full_like(o, torch.nan), torch.full_like(lse, torch.nan)
    merged, merged_lse = sparse_attn.run(**args, out=out, invariant=False)
    assert torch.equal(merged, sparse_attn.run(**args, invariant=False)[0])
    assert (merged.float() - o.float()).norm() < 2.0**-8 * o.float().norm()
    assert torch.allclose(merged_lse, lse, atol=1e-4)


def test_a_repeat_gives_the_same_bits(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args = arguments(attention_forms.FEW_ROWS, 128, 512)
    o, _ = attend(Form.FEW, args)
    for _ in range(20):
        assert torch.equal(o, attend(Form.FEW, args)[0])
