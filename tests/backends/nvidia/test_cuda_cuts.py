"""Cuts in CUDA C++: what they keep is what the contract keeps, on the CPU thread by thread; in registers on Hopper."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import cuts
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.backends.nvidia.filters import CUT_BYTES, Cuts, room_for_cuts
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops.cases import sampling as sampling_cases

SHARED_OF_MULTIPROCESSOR = 228 << 10
REGISTERS = 65536
LOWEST = -(1 << 31)
Filters = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def filters_of(rows: list[tuple[float, int, float, float]]) -> Filters:
    heat, most, mass, share = zip(*rows, strict=True)
    return torch.tensor(heat), torch.tensor(most, dtype=torch.int32), torch.tensor(mass), torch.tensor(share)


def find(
    library: ctypes.CDLL,
    blocks: int,
    logits: Tensor,
    filters: Filters,
    cu_seqlens: Tensor | None = None,
    *,
    want_total: bool = False,
) -> Cuts:
    rows, ids = logits.shape
    found = room_for_cuts(rows, torch.full((rows * CUT_BYTES,), 0x77, dtype=torch.uint8))
    params = cuts.params_of(found, logits, filters, cu_seqlens, want_total=want_total)
    assert library.params_bytes() == ctypes.sizeof(params)
    library.launch(ctypes.byref(params), rows * blocks, 1, blocks, cuts.THREADS, cuts.shared_bytes(ids, blocks))
    return found


def order_keys(scores: Tensor) -> Tensor:
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def kept_by(found: Cuts, scores: Tensor) -> Tensor:
    keys, ids = order_keys(scores), torch.arange(scores.shape[1])
    return (keys > found.key[:, None]) | ((keys == found.key[:, None]) & (ids <= found.limit[:, None]))


def check(found: Cuts, logits: Tensor, filters: Filters, *, want_total: bool = False) -> None:
    """Cuts keep what the contract keeps; of rows that are left alone they keep all."""
    heat = torch.where(filters[0] > 0, filters[0], 1.0)[:, None]
    scores = logits / heat
    usable = sampling_ops.usable_rows(logits, filters[0])
    assert torch.equal(found.usable.bool(), usable)
    drawn = usable & (filters[0] > 0)
    assert torch.equal(found.top[usable], scores[usable].amax(1))
    expected = sampling_ops.process_logits(logits, *filters)
    kept = kept_by(found, scores)
    assert torch.equal(kept[drawn] & (scores[drawn] > -torch.inf), expected[drawn] > -torch.inf)
    assert (found.key[~drawn] == LOWEST).all()
    assert (found.limit[~drawn] == logits.shape[1]).all()
    if want_total:
        weights = torch.where(kept, (scores - scores.amax(1, keepdim=True)).double().exp(), 0.0)
        assert torch.allclose(found.total[drawn].double(), weights.sum(1)[drawn], rtol=1e-6, atol=0)


PROFILES = [
    *sampling_cases._PROFILES,
    (1.0, 0, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (5.0, 0, 0.9999999, 0.0),
    (1e-3, 7, 0.9, 0.0),
    (1e-3, 900, 0.9, 0.0),
]
"""Temperature, top_k, top_p, min_p of rows: those of the contract's cases, and where cuts are nearly nothing or all."""


def dressed(name: str, rows: int, ids: int) -> Tensor:
    gen = torch.Generator().manual_seed(ids)
    x = 3 * torch.randn(rows, ids, generator=gen)
    if name == "equal":
        x = torch.full_like(x, -0.5)
    elif name == "two":
        x = torch.where(x < 2, 0.25, 0.5)
    elif name == "zeros":
        x = torch.where(x < 0, 0.0, -0.0)
    elif name == "tiny":
        x = x * 1e-40
    elif name == "ties":
        x = (x * 2).round() / 2
    elif name == "holes":
        x = x.masked_fill(x < 1, -torch.inf)
    elif name == "one":
        x = x.fill_(-torch.inf)
        x[:, ids // 2] = 3.0
    elif name == "broken":
        x[::3, ids - 1] = torch.nan
        x[1::3, 0] = torch.inf
        x[2::3] = -torch.inf
    return x


@pytest.mark.parametrize(("blocks", "ids"), [(1, 37), (1, 515), (2, 2050), (4, 2500)])
def test_cuts_on_the_cpu_keep_what_the_contract_keeps(blocks: int, ids: int, tmp_path: Path) -> None:
    library = on_cpu(cuts.program(blocks), tmp_path)
    filters = filters_of(PROFILES)
    for name in ("plain", "equal", "two", "zeros", "tiny", "ties", "holes", "one", "broken"):
        logits = dressed(name, len(PROFILES), ids)
        check(find(library, blocks, logits, filters), logits, filters)
    wide = torch.nn.functional.pad(dressed("ties", len(PROFILES), ids), (3, 2), value=1e30)[:, 3:-2]
    found = find(library, blocks, wide, filters, want_total=True)
    check(found, wide.contiguous(), filters, want_total=True)


def test_the_limit_is_the_id_of_the_last_tie_that_is_wanted(tmp_path: Path) -> None:
    library = on_cpu(cuts.program(2), tmp_path)
    ids = 3000
    logits = torch.full((4, ids), -3.0)
    logits[:, 5::100] = 1.0  # thirty of them, half in each block
    filters = filters_of([(1.0, 7, 1.0, 0.0), (1.0, 29, 1.0, 0.0), (1.0, 30, 1.0, 0.0), (1.0, 0, 0.2, 0.0)])
    found = find(library, 2, logits, filters)
    share = 1 / (30 + (ids - 30) * torch.tensor(-4.0).exp())
    assert found.limit.tolist() == [605, 2805, 2905, 5 + 100 * int(0.2 / share)]
    assert found.key.tolist() == [order_keys(torch.tensor([1.0])).item()] * 4


def test_rows_of_requests_take_the_filters_of_theirs(tmp_path: Path) -> None:
    library = on_cpu(cuts.program(1), tmp_path)
    bounds, owners = torch.tensor([0, 2, 2, 5], dtype=torch.int32), [0, 0, 2, 2, 2, 2]  # the last row is of none
    logits, filters = dressed("plain", 6, 200), filters_of([(1.0, 3, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.5, 9, 0.7, 0.0)])
    found = find(library, 1, logits, filters, bounds)
    check(found, logits, tuple(t[owners] for t in filters))


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_cuts_stay_in_registers(blocks: int) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(cuts.program(blocks).compile("sm_90a"))
    assert local_bytes == 0
    assert registers * cuts.THREADS * 3 <= REGISTERS


def test_a_multiprocessor_has_room_for_parts_of_three_rows() -> None:
    assert cuts.blocks_of_row(129280) == 8
    assert 3 * (cuts.shared_bytes(129280, 8) + 1024) <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(("ids", "blocks"), [(1, 1), (8192, 1), (8193, 2), (32000, 4), (129280, 8), (1 << 20, 8)])
def test_long_rows_are_shared_by_many_blocks(ids: int, blocks: int) -> None:
    assert cuts.blocks_of_row(ids) == blocks


@pytest.mark.parametrize(("ids", "fits"), [(262144, True), (1 << 20, False)])
def test_rows_too_long_for_a_cluster_take_the_triton_form(ids: int, fits: bool) -> None:
    logits = torch.empty(2, ids, device="meta")
    assert cuts._fits(logits, filters_of(PROFILES[:2]), None) is fits
    assert not cuts._fits(logits.half(), filters_of(PROFILES[:2]), None)
