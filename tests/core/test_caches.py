"""The device side of KV memory: pools cut into records, without overlap and without waste that matters."""

import pytest
import torch

from deepinfer.backends.cpu.runtime import CpuRuntime
from deepinfer.core.caches import CacheStore, pool_row_bytes
from deepinfer.core.errors import ConfigError
from deepinfer.models.interface import CacheSpec, RecordSpec, StateSpec
from deepinfer.ops.formats import CacheFormat
from deepinfer.testing.workloads import cpu_ops

SPEC = CacheSpec(
    block_records=(
        RecordSpec("pairs", CacheFormat("fp4", 64), 2),
        RecordSpec("keys", CacheFormat("index", 32), 2),
        RecordSpec("tokens", CacheFormat("f32", 3)),
    ),
    window_records=(RecordSpec("window", CacheFormat("fp8", 32)), RecordSpec("late", CacheFormat("f32", 1))),
    states=(StateSpec("open", 2, 5), StateSpec("wide", 4, 8)),
    window=8,
)


def store(spec=SPEC, **changes):
    sizes = {"num_blocks": 3, "block_size": 8, "num_window_pages": 5, "window_page": 4, "num_slots": 2}
    return CacheStore(spec, CpuRuntime(), **(sizes | changes))


def test_every_record_has_its_place_and_row_zero_comes_on_top() -> None:
    caches = store()
    shapes = {name: (caches.records(name).data.shape[0], caches.records(name).records) for name in ("pairs", "keys")}
    assert shapes == {"pairs": (4, 4), "keys": (4, 4)}
    assert (caches.records("tokens").records, caches.records("tokens").num_slots) == (8, 32)
    assert (caches.records("window").records, caches.records("window").num_slots) == (4, 24)
    assert caches.records("late").format == CacheFormat("f32", 1)


def test_records_do_not_overlap_and_fill_rows_of_one_pool() -> None:
    caches = store()
    for value, name in enumerate(("pairs", "keys", "tokens"), 1):
        caches.records(name).data.fill_(value)
    assert [int(caches.records(name).data.unique()) for name in ("pairs", "keys", "tokens")] == [1, 2, 3]
    counts = [int((caches.blocks == value).sum()) for value in (1, 2, 3)]
    assert counts == [4 * r.format.record_bytes * 8 // r.ratio for r in SPEC.block_records]
    assert not caches.pages.any()


def test_records_of_a_row_start_on_cache_lines() -> None:
    caches = store()
    for name in ("pairs", "keys", "tokens"):
        assert caches.records(name).data.storage_offset() % 64 == 0
        assert caches.records(name).data.stride() == (caches.blocks.shape[1], 1)
    assert caches.blocks.shape[1] % 64 == caches.pages.shape[1] % 64 == 0


def test_a_block_is_one_run_of_bytes_that_can_be_copied_without_the_model() -> None:
    caches = store()
    caches.records("tokens").data[1] = 7
    caches.records("pairs").data[1] = 9
    caches.copy(cpu_ops(), "block", [1], [3])
    assert (caches.records("tokens").data[3] == 7).all() and (caches.records("pairs").data[3] == 9).all()
    assert not caches.blocks[[0, 2]].any()
    caches.records("window").data[[2, 4]] = torch.tensor([[5], [6]], dtype=torch.uint8)
    caches.copy(cpu_ops(), "page", [2, 4], [1, 5])
    assert torch.equal(caches.pages[[1, 5]], caches.pages[[2, 4]]) and not caches.pages[3].any()


def test_copying_a_state_copies_all_open_groups() -> None:
    caches = store()
    for name in ("open", "wide"):
        caches.state(name)[1] = torch.randn_like(caches.state(name)[1])
    caches.copy(cpu_ops(), "state", [1], [2])
    assert all(torch.equal(caches.state(name)[2], caches.state(name)[1]) for name in ("open", "wide"))


def test_states_hold_a_group_and_what_a_rollback_takes_back() -> None:
    caches = store(max_rollback=3)
    assert caches.state("open").shape == (3, 5, 2, 5) and caches.state("wide").shape == (3, 7, 2, 8)
    assert caches.state("open").dtype == torch.float32


def test_bytes_are_those_of_pools_and_states() -> None:
    caches = store()
    assert caches.num_bytes == caches.blocks.numel() + caches.pages.numel() + 4 * 3 * (2 * 2 * 5 + 4 * 2 * 8)
    per_block = [(r, 8 // r.ratio) for r in SPEC.block_records]
    assert caches.blocks.shape[1] == pool_row_bytes(per_block) >= SPEC.block_bytes(8)
    assert pool_row_bytes(per_block) < SPEC.block_bytes(8) + 64 * len(per_block)


def test_a_model_without_records_has_empty_pools() -> None:
    caches = store(CacheSpec())
    assert caches.num_bytes == 0 and caches.blocks.shape == (4, 0)


def test_a_block_that_splits_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size 9 is not a multiple of compress ratio 2 of pairs"):
        store(block_size=9, window_page=3)


def test_all_of_it_comes_from_the_pool_of_its_name() -> None:
    runtime = CpuRuntime()
    sizes = {"num_blocks": 3, "block_size": 8, "num_window_pages": 5, "window_page": 4, "num_slots": 2}
    caches = CacheStore(SPEC, runtime, **sizes)
    stats = runtime.pools()["kv_cache"]
    assert stats.allocated_bytes == caches.num_bytes > 0
    del caches
    assert runtime.pools()["kv_cache"].allocated_bytes == 0
