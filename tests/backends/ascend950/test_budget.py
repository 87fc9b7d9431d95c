"""Budgets are complete, fit the machine, and agree with what the twin counts when a kernel runs at full stretch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.backends.ascend950 import (
    budget,
    experts,
    linear,
    merge,
    mhc,
    moves,
    norm,
    quant,
    rope,
    sampling,
    swiglu,
)
from deepinfer.backends.ascend950.budget import Budget
from deepinfer.backends.ascend950.launch import Measured, recording
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.moe import DispatchHandle
from deepinfer.ops.quant import quantize

KINDS = {"bf16": torch.bfloat16, "f32": torch.float32}


def _random(*shape: int, kind: str = "f32") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(KINDS[kind])


def _codes(*shape: int, fmt: QuantFormat = "mxfp8") -> QTensor:
    return quantize.reference(_random(*shape), fmt)


def _rotate(kind: str) -> None:
    # two tasks for the core, so that both versions of each buffer are touched
    rope.rope(_random(1, 32, 640, kind=kind), torch.tensor([3], dtype=torch.int32), _random(8, 128))


def _move() -> None:
    moves.move_rows(*(torch.zeros(65, 2 * 65536, dtype=torch.uint8) for _ in range(2)))


def _cast(kind: str, to: str) -> None:
    moves.embedding(_random(3, 16384, kind=kind), torch.arange(65).remainder(3).int(), KINDS[to])


def _many(*shape: int, kind: str) -> torch.Tensor:
    """More rows than there are cores, so that a core has two tasks."""
    return _random(65, *shape, kind=kind)


def _mix(kind: str) -> None:
    mhc.mhc_prenorm_mix(_random(8, 4, 256, kind=kind), _random(24, 1024), 1e-6)


def _swiglu(kind: str, fmt: QuantFormat | None) -> None:
    swiglu.swiglu_quant(_many(4096, kind=kind), _many(4096, kind=kind), 10.0, None, fmt)


def _merge(kind: str) -> None:
    merge.attn_merge(_random(32, 1, 128, 512), _random(32, 1, 128), KINDS[kind])


def _filters(top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(1), torch.full((1,), top_k, dtype=torch.int32), torch.ones(1), torch.zeros(1)


def _draw() -> None:
    one = torch.ones(1, dtype=torch.int32)
    sampling.sample(_random(1, 12288), *_filters(0), one.long(), one, one)


def _rank() -> None:
    sampling.logprobs_of(_random(1, 64), torch.arange(1024, dtype=torch.int32).remainder(64)[None])


def _dispatch(tokens: int, k: int, width: int) -> None:
    ids = torch.arange(tokens * k).remainder(384).view(tokens, k)
    experts.ep_dispatch(_random(tokens, width), ids, _random(tokens, k), 384)


def _combine() -> None:
    handle = DispatchHandle(torch.arange(65, dtype=torch.int32)[:, None].repeat(1, 2))
    experts.ep_combine(_many(8192, kind="f32"), handle, None, torch.float32)


FULL_STRETCH: dict[str, Callable[[], Any]] = {
    "filter_rows": lambda: sampling.process_logits(_random(1, 12288), *_filters(5900)),
    "draw_rows": _draw,
    "rank_rows": _rank,
    "place_choices": lambda: _dispatch(128, 128, 8),  # choices of two stretches
    "send_rows": lambda: _dispatch(65, 1, 24576),
    "combine_rows": _combine,
    "norm_rows_f32": lambda: norm.rms_norm_quant(_many(8192, kind="f32"), _random(8192), 1e-6, "nvfp4"),
    "norm_rows_bf16": lambda: norm.rms_norm_quant(_many(8192, kind="bf16"), _random(8192), 1e-6, "nvfp4"),
    "move_rows_kernel": _move,
    "widen_rows_kernel": lambda: _cast("bf16", "f32"),
    "narrow_rows_kernel": lambda: _cast("f32", "bf16"),
    "swiglu_bf16_f32_kernel": lambda: swiglu.swiglu_then_quant(
        _many(4096, kind="bf16"), _many(4096, kind="bf16"), 10.0, None, "mxfp4"
    ),
    "swiglu_bf16_bf16_kernel": lambda: _swiglu("bf16", None),
    "swiglu_f32_f32_kernel": lambda: _swiglu("f32", None),
    **{f"rope_{kind}_kernel": lambda kind=kind: _rotate(kind) for kind in KINDS},
    **{f"mix_streams_{kind}_kernel": lambda kind=kind: _mix(kind) for kind in KINDS},
    **{f"swiglu_{kind}_mxfp8_kernel": lambda kind=kind: _swiglu(kind, "mxfp8") for kind in KINDS},
    **{f"merge_{kind}_kernel": lambda kind=kind: _merge(kind) for kind in KINDS},
    **{
        f"weigh_streams_{kind}_kernel": lambda kind=kind: mhc.mhc_apply(_many(4, 1024, kind=kind), _random(65, 4))
        for kind in KINDS
    },
    **{
        f"average_streams_{kind}_kernel": lambda kind=kind: mhc.stream_mean(_many(4, 1024, kind=kind)) for kind in KINDS
    },
    **{
        f"write_streams_{kind}_{m}_kernel": lambda kind=kind, m=m: mhc.mhc_post(
            _many(1024, kind=kind), _many(m, 1024, kind=kind), _random(65, m), _random(65, m, m)
        )
        for kind in KINDS
        for m in (2, 4)
    },
    **{
        f"dequantize_{fmt}_{kind}_kernel": lambda fmt=fmt, kind=kind: quant.dequantize(
            _codes(65, 2048, fmt=fmt), KINDS[kind]
        )
        for fmt in ("mxfp8", "mxfp4", "nvfp4")
        for kind in KINDS
    },
}


def _measure(kernel: str, run: Callable[[], Any]) -> Measured:
    with recording(run=True) as launches:
        run()
    found = [launch.measured for launch in launches if launch.kernel.entry == kernel]
    assert found and found[0] is not None, f"the workload launched {[launch.kernel.entry for launch in launches]}"
    return found[0]


def test_every_kernel_has_a_budget_and_every_budget_a_kernel() -> None:
    assert set(budget.budgets()) == set(budget.kernel_entries())


def test_plans_fit_the_local_memories() -> None:
    assert {name: plan.overflows() for name, plan in budget.budgets().items() if plan.overflows()} == {}


def test_a_plan_that_does_not_fit_is_named() -> None:
    plan = Budget("big", "unit", "simt", 1.0, ub=220 << 10, l0c=(256 << 10) + 1)
    assert plan.overflows() == ["ub", "l0c"], "SIMT functions leave 216 KB of the unified buffer"


@pytest.mark.parametrize("kernel", FULL_STRETCH)
def test_planned_bytes_are_those_that_the_twin_sees_touched(kernel: str) -> None:
    plan, measured = budget.budgets()[kernel], _measure(kernel, FULL_STRETCH[kernel])
    for name in ("ub", "l1", "l0a", "l0b", "l0c"):
        planned, touched = getattr(plan, name), measured.highest[name.upper()]
        # the last register of a buffer may be half used, and lowering rounds buffers up to whole blocks
        assert planned * 0.98 - 256 <= touched <= planned + 256, (
            f"{kernel}: {name} planned {planned}, touched {touched}"
        )


def test_a_product_stays_inside_its_plan_and_fills_its_stages() -> None:
    plan = budget.budgets()["product_mx"]
    run = lambda: linear.linear_mx(_codes(128, 1536), _codes(512, 1536), torch.bfloat16)  # noqa: E731
    highest = _measure("product_mx", run).highest
    assert all(highest[name.upper()] <= getattr(plan, name) for name in ("ub", "l1", "l0a", "l0b", "l0c"))
    assert highest["L1"] > plan.l1 * 0.9 and highest["L0A"] == plan.l0a, "two stages of each are in use"


def test_share_is_one_where_memory_is_slowest_and_less_where_it_is_not() -> None:
    free = Budget("k", "u", "vector", moved=1e6)
    busy = Budget("k", "u", "vector", moved=1e6, vector=1e6)
    assert free.share("950PR") == 1 and free.bound("950PR") == "memory"
    assert busy.bound("950PR") == "vector"
    assert busy.share("950PR") == pytest.approx((1e6 / 1.6e12) / (1e6 / (64 * 1.65e9)))


def test_share_of_the_cube_counts_what_keeps_it_waiting() -> None:
    plan = Budget("k", "u", "mix", moved=0, macs=4096 * 800, cube_waits=200)
    assert plan.share_of_cube == pytest.approx(0.8)


def test_json_has_a_row_per_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kernel"] for row in rows} == set(budget.kernel_entries())
    assert all(0 < row["share_950DT"] <= 1 for row in rows)


def test_table_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main([]) == 0
    text = capsys.readouterr().out
    assert all(kernel in text for kernel in budget.kernel_entries())
