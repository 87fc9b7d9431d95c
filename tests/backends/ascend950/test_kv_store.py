"""Cache records beyond conformance: the widest row, channels that turn anywhere, rows without a slot, seeded faults."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch

from deepinfer.backends.ascend950 import kv_store, twin_build
from deepinfer.backends.ascend950.launch import Kernel, Program, TwinFault
from deepinfer.ops import kv as kv_ops
from deepinfer.ops.cases.common import cache_of, rotary
from deepinfer.ops.formats import CacheKind, PagedCache

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

SIGNATURE = (
    "x, weight, positions, table, slots, normed!, data!, rows: i64, pitch: i64, page_bytes: i64, width: i32, "
    "pairs: i32, records: i32, kind: i32, ratio: i32, weight_kind: i32, eps: f32"
)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _stored(
    kind: CacheKind, dim: int, rows: int, turned: int, dtype: torch.dtype
) -> tuple[PagedCache, PagedCache, torch.Tensor, torch.Tensor]:
    """A cache as the kernel and as the reference leaves it, and the normed rows of both."""
    gen = torch.Generator().manual_seed(dim + rows)
    x, weight = torch.randn(rows, dim, generator=gen).to(dtype), torch.randn(dim, generator=gen).bfloat16()
    positions = torch.randint(0, 90, (rows,), generator=gen).int()
    slots = (torch.randperm(rows, generator=gen) + 8).int()
    slots[1::4] = -1
    caches = tuple(cache_of(torch.Generator().manual_seed(1), kind, dim, rows // 8 + 2, 8) for _ in range(2))
    rest = (weight, 1e-20, positions, rotary(90, turned))
    got = kv_store.kv_norm_rope_store(x, *rest, caches[0], slots, 2)
    want = kv_ops.kv_norm_rope_store.reference(x, *rest, caches[1], slots, 2)
    return *caches, got, want


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("kind", ["fp8", "fp4", "f32"])
def test_records_of_the_model_by_more_rows_than_cores(
    kind: CacheKind, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    cache, expected, normed, want = _stored(kind, 512, 150, 64, torch.bfloat16)
    torch.testing.assert_close(normed, want, rtol=2**-7, atol=1e-6)
    bytes_off = (cache.data != expected.data).float().mean()
    assert bytes_off < 1e-3, "a bf16 ulp of the norm may move a code by one"


@pytest.mark.parametrize(("dim", "turned"), [(1024, 1024), (36, 6), (20, 2), (150, 140)])
def test_any_channels_may_turn(dim: int, turned: int) -> None:
    cache, expected, normed, want = _stored("f32", dim, 9, turned, torch.float32)
    torch.testing.assert_close(normed, want, rtol=1e-5, atol=1e-6)
    views = [c.data.view(torch.float32) for c in (cache, expected)]
    torch.testing.assert_close(*views, rtol=1e-5, atol=1e-6)


def test_an_index_key_without_a_slot_is_not_read() -> None:
    cache = cache_of(torch.Generator().manual_seed(1), "index", 128, 3, 8)
    before = cache.data.clone()
    keys, weight, table = torch.full((3, 128), torch.nan), torch.ones(128), torch.zeros(0, 64)
    # the table has no rows: looking an angle up would be a fault
    kv_store.index_k_store(keys, weight, 1e-6, _ints(5, 6, 7), table, cache, _ints(-1, -1, -1))
    assert torch.equal(cache.data, before)


def test_a_row_has_the_same_record_in_any_batch() -> None:
    gen = torch.Generator().manual_seed(3)
    x, weight, table = torch.randn(70, 128, generator=gen).bfloat16(), torch.ones(128), rotary(9, 64)
    caches = [cache_of(gen, "index", 128, 10, 8, empty=True) for _ in range(2)]
    positions, slots = torch.arange(70).remainder(9).int(), torch.arange(70).int() + 8
    kv_store.index_k_store(x, weight, 1e-6, positions, table, caches[0], slots)
    for row in reversed(range(70)):
        own = slice(row, row + 1)
        kv_store.index_k_store(x[own], weight, 1e-6, positions[own], table, caches[1], slots[own])
    assert torch.equal(caches[0].data[1:], caches[1].data[1:])


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel with two mistakes: no barrier before the rotation (eps 2), and sines a row too far (ratio 7)."""
    text = (twin_build.KERNELS / "kv_store.asc").read_text()
    for right, wrong in (
        ("asc_mem_bar(VST_VLD);\n  rotate(", "if (eps != 2.0f) asc_mem_bar(VST_VLD);\n  rotate("),
        ("load_row(sines, angles + pairs, pairs)", "load_row(sines, angles + (ratio == 7 ? 2 : 1) * pairs, pairs)"),
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    source = tmp_path_factory.mktemp("mistaken") / "kv_store.asc"
    source.write_text(text)
    return Program(source).kernel("store_records_f32", SIGNATURE)


@pytest.mark.parametrize(
    ("eps", "ratio", "words"),
    [(2.0, 1, "race: .*asc_mem_bar"), (1e-6, 7, "bounds: .*past the end of 'table'"), (1e-6, 1, None)],
)
def test_a_mistake_in_the_kernel_is_found(mistaken: Kernel, eps: float, ratio: int, words: str | None) -> None:
    cache = cache_of(torch.Generator().manual_seed(1), "fp8", 64, 2, 8)
    lists = (torch.ones(64), _ints(7), rotary(8, 16), _ints(9), torch.empty(1, 64), cache.data)
    sizes = (1, 64, cache.data.stride(0), 64, 8, 8, 1, ratio, 1)
    with nullcontext() if words is None else pytest.raises(TwinFault, match=words):
        mistaken(1, torch.randn(1, 64), *lists, *sizes, eps)
