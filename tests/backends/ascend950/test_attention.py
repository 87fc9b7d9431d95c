"""Sparse attention beside the conformance suite: the model's dimensions, many units, exact keys, seeded mistakes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from deepinfer.backends.ascend950 import attention, budget, twin_build
from deepinfer.backends.ascend950.launch import Measured, Program, TwinFault, recording
from deepinfer.conformance.compare import compare
from deepinfer.ops import attention as attention_ops
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.cases.common import cache_of, scattered_slots
from deepinfer.ops.formats import CacheFormat, CacheKind, PagedCache

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


def _arguments(
    rows: int,
    *,
    heads: int = 64,
    dim: int = 512,
    window: int = 128,
    topk: int | None = 512,
    kinds: tuple[CacheKind, CacheKind] = ("fp8", "fp4"),
    dtype: torch.dtype = torch.bfloat16,
    missing: float = 0.1,
) -> dict[str, Any]:
    gen = Generator().manual_seed(rows + heads + dim)
    caches = [cache_of(gen, kind, dim, 12, 32, poison="nan") for kind in kinds]
    slots = [scattered_slots(gen, rows, width or 0, caches[0].num_slots, 32, missing) for width in (window, topk)]
    return {
        "q": torch.randn(rows, heads, dim, generator=gen).to(dtype),
        "window_cache": caches[0],
        "window_slots": slots[0],
        "kv_cache": None if topk is None else caches[1],
        "kv_slots": None if topk is None else slots[1],
        "softmax_scale": dim**-0.5,
        "attn_sink": torch.randn(heads, generator=gen),
    }


def _conforms(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    got = attention.sparse_attn(**args)
    assert compare(got, attention_ops.sparse_attn.reference(**args), attention_ops.ATTENTION).failures == []
    return got


def _launched(args: dict[str, Any]) -> tuple[str, Measured]:
    with recording(run=True) as made:
        attention.sparse_attn(**args)
    (launch,) = made
    assert launch.measured is not None
    return launch.kernel.entry, launch.measured


@pytest.mark.parametrize("kinds", [("fp8", "fp4"), ("fp8", "fp8")])
def test_the_models_dimensions(kinds: tuple[CacheKind, CacheKind]) -> None:
    _conforms(_arguments(2, kinds=kinds))


def test_keys_that_fill_neither_tiles_nor_groups_at_the_models_dimensions() -> None:
    _conforms(_arguments(1, window=127, topk=900, missing=0.4))


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("shape", [(4, 64, 130, 400), (70, 128, 9, 330), (33, 64, 300, None), (64, 256, 3, 0)])
def test_units_share_cores(
    shape: tuple[int, int, int, int | None], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    monkeypatch.setattr(attention, "CUBE_CORES", 2)
    heads, dim, window, topk = shape
    _conforms(_arguments(5, heads=heads, dim=dim, window=window, topk=topk))


def test_a_rows_bits_are_its_own() -> None:
    args = _arguments(7, heads=16, dim=64, window=70, topk=400)
    o, lse = attention.sparse_attn(**args)
    for start, stop in ((0, 1), (2, 5), (6, 7)):
        part = {name: args[name][start:stop] for name in ("q", "window_slots", "kv_slots")}
        got = attention.sparse_attn(**(args | part))
        assert torch.equal(got[0], o[start:stop]) and torch.equal(got[1], lse[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_without_keys_is_zero_whatever_its_query_holds(dtype: torch.dtype) -> None:
    args = _arguments(3, heads=4, dim=64, window=9, topk=70, dtype=dtype)
    args["q"][1] = torch.nan
    args["window_slots"][1], args["kv_slots"][1] = -1, -1
    o, lse = _conforms(args)
    assert (o[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert (o[0] != 0).any() and (o[2] != 0).any()


def test_strided_queries_and_lists_over_transposed_memory() -> None:
    args = _arguments(5, heads=6, dim=64, window=20, topk=70)
    args["q"] = args["q"].transpose(0, 1).contiguous().transpose(0, 1)
    args["window_slots"] = args["window_slots"].t().contiguous().t()
    args["kv_slots"] = torch.cat((args["kv_slots"], args["kv_slots"]), dim=1)[:, :70]
    _conforms(args)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_keys_on_the_cube_are_exact(kind: CacheKind) -> None:
    """A row with one key, a zero query and no sink gives the key's own values."""
    gen = Generator().manual_seed(5)
    fmt = CacheFormat(kind, 64)
    data = torch.randint(0, 256, (16, 8 * fmt.record_bytes), generator=gen).to(torch.uint8)
    records = data.view(128, fmt.record_bytes)
    codes, scales = records[:, : fmt.code_bytes], records[:, fmt.code_bytes :]
    if kind == "fp8":
        codes[codes & 127 == 127] = 0  # NaN: a NaN key is a NaN row
        scales[scales > 240] = 240
        scales[::5] = 0
    else:
        scales[scales & 127 == 127] = 1
    cache = PagedCache(data, fmt, 8)
    slots = torch.arange(128).int()[:, None]
    q = torch.zeros(128, 1, 64, dtype=torch.bfloat16)
    o, lse = attention.sparse_attn(q, cache, slots, None, None, 1.0, torch.tensor([-torch.inf]))
    assert torch.equal(o[:, 0], kv_ops.kv_gather.reference(cache, slots[:, 0], torch.bfloat16))
    assert (lse == 0).all()


# codes of fp4 have no NaN
@pytest.mark.parametrize(("kind", "place"), [("fp8", "code"), ("fp8", "scale"), ("fp4", "scale")])
def test_a_nan_in_a_record_reaches_its_rows_alone(kind: CacheKind, place: str) -> None:
    args = _arguments(2, heads=2, dim=64, window=3, topk=None, kinds=(kind, "fp4"))
    args["window_slots"] = torch.tensor([[40, -1, 50], [41, 51, -1]], dtype=torch.int32)
    cache: PagedCache = args["window_cache"]
    record = cache.data.view(-1, cache.format.record_bytes)[40]
    record[0 if place == "code" else cache.format.code_bytes] = 255 if place == "scale" and kind == "fp8" else 0x7F
    o, _ = _conforms(args)
    assert o[0].isnan().all() and o[1].isfinite().all()


def test_what_the_cube_does_not_take_goes_to_threads() -> None:
    shape: dict[str, Any] = {"heads": 9, "dim": 48, "window": 5, "topk": 40}
    plain = _arguments(2, **(shape | {"kinds": ("f32", "f32")}))
    assert _launched(plain)[0] == "attend_bf16"
    _conforms(plain)
    wide = _arguments(2, **(shape | {"dim": 64, "dtype": torch.float32}))
    assert _launched(wide)[0] == "attend_f32"
    _conforms(wide)
    assert _launched(_arguments(2, **(shape | {"dim": 64})))[0] == "attend_cube"


def test_the_plan_is_what_the_twin_counts_and_leaves_the_cube_four_fifths_busy() -> None:
    plan = budget.budgets()["attend_cube"]
    entry, measured = _launched(_arguments(1, missing=0.0))
    assert entry == "attend_cube"
    assert measured.cube_cycles == plan.cube_cycles
    assert measured.instructions["V"] == pytest.approx(plan.vector, rel=0.01)
    assert measured.bytes["MTE2"] == pytest.approx(plan.moved - 64 * 512 * 2, rel=0.01)
    assert {name: measured.highest[name.upper()] for name in ("ub", "l1", "l0a", "l0b", "l0c")} == {
        name: getattr(plan, name) for name in ("ub", "l1", "l0a", "l0b", "l0c")
    }
    assert plan.share_of_cube >= 0.8


_MISTAKES = {
    1: "if (stage == 0 && turn >= kRing) asc_sync_intra_wait(PIPE_MTE3, kTileFree);",
    2: "asc_sync_intra_wait(PIPE_V, kScoresReady);",
    3: "asc_sync_wait(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);\n  asc_set_gm2l1_nz_para(1, 1, kTile, 0);",
    4: "if (last && group.number > 0) wait_both(PIPE_FIX, kSumsTaken);",
    5: "wait_both(PIPE_MTE1, kWeightsReady);",
    6: "asc_sync_wait(PIPE_MTE3, PIPE_V, stage);\n    if (list.kind",
}
"""A statement that a mistake leaves out, by the number of the mistake."""
_KINDS = {"race", "flag", "poison"}


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The kernel with its headers in one text, whose last argument chooses a mistake."""
    parts = ("attention", "cores", "attention_cube", "attention_records", "attention_softmax", "attention_vector")
    text = "".join((twin_build.KERNELS / f"{part}.h").read_text() for part in parts)
    inlined = {"#pragma once", *(f'#include "{part}.h"' for part in parts)}
    lines = [line for line in text.splitlines() if line not in inlined]
    text = "\n".join(lines).replace('#include "records.h"', '#include "records.h"\nstatic int32_t mistake;')
    for number, statement in _MISTAKES.items():
        first, _, rest = statement.partition("\n")
        assert text.count(statement) == 1, f"mistake {number} is about a statement that is not there once"
        text = text.replace(statement, f"if (mistake != {number}) {{ {first} }}" + ("\n" + rest if rest else ""))
    text += """
extern "C" __global__ __mix__(1, 2) void attend_seeded(ATTENTION_PARAMETERS, int32_t number) {
  asc_init();
  mistake = number;
  if ASC_IS_AIC {
    cube_side(ATTENTION);
  } else {
    vector_side(ATTENTION);
  }
}
"""
    path: Path = tmp_path_factory.mktemp("seeded") / "attention_seeded.asc"
    path.write_text(text)
    return Program(path)


@pytest.mark.parametrize("number", [0, *_MISTAKES])
def test_a_kernel_that_leaves_out_a_wait_is_caught(
    seeded: Program, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN", "checked")
    if not seeded.kernels:
        seeded.kernel("attend_seeded", attention._ATTENTION + ", mistake: i32", "mix")
    args = _arguments(3, heads=4, dim=64, window=70, topk=500)
    with recording() as made:
        attention.sparse_attn(**args)
    (launch,) = made
    if number == 0:
        seeded.kernels[0](1, *launch.args, number)
        want = attention_ops.sparse_attn.reference(**args)
        assert compare(launch.args[:2], want, attention_ops.ATTENTION).failures == []
        return
    with pytest.raises(TwinFault) as caught:
        seeded.kernels[0](1, *launch.args, number)
    assert caught.value.kind in _KINDS, str(caught.value)
