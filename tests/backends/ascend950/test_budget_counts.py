"""Plans of row kernels are what the twin counts: instructions of one more unit of work, and bytes of local memories."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.backends.ascend950 import compress, engram, kv_store, norm, vision
from deepinfer.backends.ascend950.budget import budgets
from deepinfer.backends.ascend950.launch import Measured, recording
from deepinfer.ops.cases.common import cache_of, rotary
from deepinfer.ops.formats import CacheKind
from deepinfer.ops.quant import quantize

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

KINDS = {"bf16": torch.bfloat16, "f32": torch.float32}


def _random(*shape: int, kind: str = "f32") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(KINDS[kind])


def _norm(units: int, kind: str) -> Any:
    return norm.rms_norm_quant(_random(units, 5120, kind=kind), _random(5120), 1e-6, "mxfp8")


def _store(units: int, kind: str, records: CacheKind = "fp8", dim: int = 512) -> Any:
    cache = cache_of(torch.Generator().manual_seed(1), records, dim, 5, 32)
    rows, positions = _random(units, dim, kind=kind), torch.zeros(units, dtype=torch.int32)
    slots = torch.arange(32, 32 + units).int()
    return kv_store.kv_norm_rope_store(rows, _random(dim), 1e-6, positions, rotary(4, 64), cache, slots)


def _pool(units: int, kind: str, ratio: int = 2, dim: int = 512) -> Any:
    rows = ratio * units
    state, slot = torch.zeros(2, 128, 2, dim), torch.tensor([1], dtype=torch.int32)
    lists = (torch.arange(rows).int(), torch.zeros(rows, dtype=torch.int32), torch.tensor([0, rows]).int())
    return compress.kv_compress(_random(rows, dim), _random(rows, dim), state, slot, *lists, ratio, KINDS[kind])


def _fetch(units: int, stored: str, made: str, width: int = 256) -> Any:
    table = quantize.reference(_random(50, width), "mxfp8") if stored == "mxfp8" else _random(50, width, kind=stored)
    rows = torch.arange(units * 24).remainder(50).view(units, 24).int()
    return engram.engram_fetch(table, rows, KINDS[made])


def _gate(units: int, kind: str) -> Any:
    weight = _random(4, 5120, kind="bf16")
    return engram.engram_gate(
        _random(units, 4, 5120, kind=kind), _random(units, 25600, kind=kind), weight, weight, 1e-6
    )


def _attend(units: int, kind: str) -> Any:
    # an image of one tile of keys each, so that units are tiles
    rows, ends = _random(units * 128, 1, 64, kind=kind), torch.arange(0, units * 128 + 1, 128).int()
    return vision.vision_attn(rows, rows, rows, ends, 0.125)


WORK: dict[str, Callable[[int], Any]] = {
    **{f"norm_rows_{kind}": lambda n, kind=kind: _norm(n, kind) for kind in KINDS},
    **{f"store_records_{kind}": lambda n, kind=kind: _store(n, kind) for kind in KINDS},
    **{f"pool_rows_{kind}": lambda n, kind=kind: _pool(n, kind) for kind in KINDS},
    **{f"gate_rows_{kind}": lambda n, kind=kind: _gate(n, kind) for kind in KINDS},
    **{
        f"fetch_{stored}_{made}": lambda n, stored=stored, made=made: _fetch(n, stored, made)
        for stored in ("mxfp8", *KINDS)
        for made in KINDS
    },
    "attend_patches_bf16": lambda n: _attend(n, "bf16"),
}


FULL_STRETCH: dict[str, Callable[[], Any]] = {
    **{f"store_records_{kind}": lambda kind=kind: _store(65, kind, "fp4", 1024) for kind in KINDS},
    **{f"pool_rows_{kind}": lambda kind=kind: _pool(65, kind, 1, 8192) for kind in KINDS},
    "keep_rows": lambda: _pool(65, "f32", 1, 8192),
    **{f"gate_rows_{kind}": lambda kind=kind: _gate(2, kind) for kind in KINDS},
    **{f"fetch_{kind}_{kind}": lambda kind=kind: _fetch(44, kind, kind, 512) for kind in KINDS},
    "fetch_mxfp8_bf16": lambda: _fetch(44, "mxfp8", "bf16", 512),
    **{f"attend_patches_{kind}": lambda kind=kind: _attend(33, kind) for kind in KINDS},
}


def _measure(kernel: str, run: Callable[[], Any]) -> Measured:
    with recording(run=True) as launches:
        run()
    found = [launch.measured for launch in launches if launch.kernel.entry == kernel]
    assert found[0] is not None
    return found[0]


def _count(kernel: str, units: int) -> int:
    return _measure(kernel, lambda: WORK[kernel](units)).instructions["V"]


@pytest.mark.parametrize("kernel", WORK)
def test_planned_instructions_are_those_of_one_more_unit(kernel: str) -> None:
    # every core has a unit already, so that what it does once is in both counts
    more = _count(kernel, 65) - _count(kernel, 64)
    assert budgets()[kernel].vector == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize("kernel", FULL_STRETCH)
def test_planned_memories_are_those_touched_at_full_stretch(kernel: str) -> None:
    plan, measured = budgets()[kernel], _measure(kernel, FULL_STRETCH[kernel])
    for name in ("ub", "l1", "l0a", "l0b", "l0c"):
        # the last register or fractal of a buffer may be half used
        assert getattr(plan, name) == pytest.approx(measured.highest[name.upper()], rel=0.02, abs=256), name
