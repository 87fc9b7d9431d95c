"""Sparse attention in CUDA C++ on the CPU thread by thread: all forms are the contract's, three with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cpu_programs import on_cpu
from cuda_on_cpu import FunctionOnCpu, map_words

from deepinfer.backends.cuda_sm90 import attention_forms, sparse_attn
from deepinfer.backends.cuda_sm90.attention_forms import Form, Pages
from deepinfer.conformance.compare import compare
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.cases.common import cache_of, normal, scattered_slots
from deepinfer.ops.quant import write_records

HEADS, DIM, RECORDS = 64, 512, 32
PROCESSORS = 2
Results = tuple[Tensor, Tensor]


def arguments(rows: int, window: int, topk: int, kind: str) -> dict[str, Any]:
    """Lists with holes and duplicates; row 1 is without keys, and row 0 has larger scores in its second list."""
    gen = torch.Generator().manual_seed(rows + window + topk)
    near = cache_of(gen, "fp8", DIM, 3, RECORDS, poison="nan")
    far = cache_of(gen, kind, DIM, 4, RECORDS, poison="nan") if topk else None  # type: ignore[arg-type]
    q = normal(gen, rows, HEADS, DIM)
    if far is not None:
        slots = torch.arange(RECORDS, far.num_slots)
        write_records(far, slots, normal(gen, len(slots), DIM) + 0.5)
        q[0] += 0.6
    return {
        "q": q.bfloat16(),
        "window_cache": near,
        "window_slots": scattered_slots(gen, rows, window, near.num_slots, RECORDS),
        "kv_cache": far,
        "kv_slots": None if far is None else scattered_slots(gen, rows, topk, far.num_slots, RECORDS),
        "softmax_scale": DIM**-0.5,
        "attn_sink": normal(gen, HEADS),
    }


def attention_on_cpu(folder: Path, patch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """Attention in a given form, with so many bytes of scratch, which hold no useful numbers."""

    def attention(device: int, pages: Pages, form: Form, parts: int = 0) -> FunctionOnCpu:
        clusters = {Form.FEW: attention_forms.BLOCKS_OF_ROW, Form.PARTS: parts}
        library = on_cpu(pages.program(form, parts), folder)
        return FunctionOnCpu(library, attention_forms.shared_bytes(form), clusters.get(form, 1))

    def helper(device: int, pages: Pages, entry: str) -> FunctionOnCpu:
        return FunctionOnCpu(on_cpu(pages.helper(entry), folder), attention_forms.MARKING_BYTES)

    patch.setattr(sparse_attn, "attention_function", attention)
    patch.setattr(sparse_attn, "helper_function", helper)
    patch.setattr(sparse_attn, "num_processors", lambda device: PROCESSORS)
    patch.setattr(sparse_attn, "tensor_map", lambda matrix, rows, columns: map_words(matrix, rows))

    def attend(form: Form, args: dict[str, Any], room: int = 1 << 20) -> Results:
        patch.setattr(sparse_attn, "choose_form", lambda *facts: form)
        out = torch.full_like(args["q"], torch.nan), torch.full(args["q"].shape[:2], torch.nan)
        scratch = torch.full((room,), 0xFF, dtype=torch.uint8)
        return sparse_attn.run(**args, out=out, scratch=scratch, invariant=form is not Form.PARTS)

    return attend


@pytest.fixture
def attend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    return attention_on_cpu(tmp_path, monkeypatch)


def failures(got: Results, args: dict[str, Any]) -> list[str]:
    return compare(got, attention_ops.sparse_attn.reference(**args), attention_ops.ATTENTION).failures


@pytest.mark.parametrize(
    ("rows", "window", "topk", "kind"),
    [
        (3, 70, 100, "fp4"),  # blocks with two rows and with one
        (1, 130, 400, "fp8"),  # more tiles than a cluster has blocks
        (2, 60, 0, "none"),  # a pair of tiles whose second is behind the list
    ],
)
def test_forms_agree_bit_for_bit(rows: int, window: int, topk: int, kind: str, attend: Callable[..., Results]) -> None:
    args = arguments(rows, window, topk, kind)
    o, lse = attend(Form.DIRECT, args)
    assert failures((o, lse), args) == []
    for form in (Form.FEW, Form.GATHERED):
        other, other_lse = attend(form, args)
        assert torch.equal(o, other), form
        assert torch.equal(lse, other_lse), form


@pytest.mark.parametrize(("rows", "window", "topk", "kind"), [(3, 70, 100, "fp4"), (1, 130, 400, "fp8")])
def test_parts_of_rows_are_merged(rows: int, window: int, topk: int, kind: str, attend: Callable[..., Results]) -> None:
    args = arguments(rows, window, topk, kind)
    assert failures(attend(Form.PARTS, args), args) == []


@pytest.mark.parametrize("records", [200, 20])
def test_records_are_gathered_where_they_fit(
    records: int, attend: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for those that are named though not for all, and for less; slots are marked in global memory one by one."""
    monkeypatch.setattr(sparse_attn, "MARKING_BYTES", 0)
    args = arguments(3, 70, 100, "fp4")
    o, lse = attend(Form.DIRECT, args)
    other, other_lse = attend(Form.GATHERED, args, room=(records + 1) << 10)
    assert torch.equal(o, other)
    assert torch.equal(lse, other_lse)
