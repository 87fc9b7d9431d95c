"""Sizes of caches: blocks take what is left when pages, states and the draft have what they need."""

from types import SimpleNamespace

import pytest

from deepinfer.backends.cpu.runtime import CpuRuntime
from deepinfer.core.cache_sizes import CacheSizes
from deepinfer.core.caches import CacheStore
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.errors import ConfigError
from deepinfer.core.graph_memory import GRAPH_BYTES
from deepinfer.models.interface import CacheSpec, RecordSpec, StateSpec
from deepinfer.ops.formats import CacheFormat
from deepinfer.testing import HashModel, NullModel
from deepinfer.testing.workloads import cpu_ops

SPEC = CacheSpec(
    block_records=(RecordSpec("pairs", CacheFormat("fp4", 64), 2), RecordSpec("tokens", CacheFormat("f32", 3))),
    window_records=(RecordSpec("window", CacheFormat("fp8", 512)), RecordSpec("late", CacheFormat("f32", 1))),
    states=(StateSpec("open", 2, 5), StateSpec("wide", 4, 8)),
    window=8,
)
SMALL = {"block_size": 8, "window_page": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16}


def sizes_of(free_bytes=1 << 30, spec=SPEC, scratch_bytes=0, max_len=1 << 16, captures=False, **settings):
    runtime = SimpleNamespace(memory_info=lambda: SimpleNamespace(free_bytes=free_bytes, total_bytes=free_bytes))
    config = EngineConfig(**(SMALL | settings))
    return config, CacheSizes.of(
        spec,
        config,
        runtime,
        max_len=max_len,
        num_drafts=2,
        most_replayed=0,
        scratch_bytes=scratch_bytes,
        captures=captures,
    )


def taken(config, sizes, spec=SPEC):
    """Bytes of caches of these sizes, as they are made."""
    caches = CacheStore(
        spec,
        CpuRuntime(),
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        num_window_pages=sizes.num_window_pages,
        window_page=config.window_page,
        num_slots=sizes.num_slots,
        max_rollback=sizes.lookahead,
    )
    return caches.num_bytes


@pytest.mark.parametrize("scratch_bytes", [0, 4096])
@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False}, {"prefix_window_pages": 100}])
@pytest.mark.parametrize("budget", [{"kv_memory_bytes": 1 << 20}, {"memory_utilization": 0.25}])
def test_blocks_take_all_that_is_left_and_no_more(budget, settings, scratch_bytes) -> None:
    config, sizes = sizes_of(1 << 22, scratch_bytes=scratch_bytes, **budget, **settings)
    total = taken(config, sizes) + scratch_bytes
    assert total <= 1 << 20 < total + sizes.block_bytes


def test_captured_steps_are_left_their_memory_unless_a_budget_is_named() -> None:
    config, plain = sizes_of(1 << 24, memory_utilization=0.25)
    _, beside = sizes_of(1 << 24, memory_utilization=0.25, captures=True)
    assert (plain.graph_bytes, beside.graph_bytes) == (0, 1 << 20)
    assert taken(config, beside) <= 3 << 20 < taken(config, beside) + beside.block_bytes
    _, named = sizes_of(1 << 24, kv_memory_bytes=1 << 22, captures=True)
    assert taken(config, named) > (1 << 22) - named.block_bytes and named.graph_bytes == 1 << 20
    _, large = sizes_of(1 << 40, captures=True)
    assert large.graph_bytes == GRAPH_BYTES


def test_no_more_blocks_than_all_sequences_could_fill() -> None:
    _, sizes = sizes_of(max_len=50)
    assert sizes.num_blocks == 3 * 7


def test_blocks_that_were_asked_for_are_taken_whatever_is_free() -> None:
    _, sizes = sizes_of(free_bytes=1, num_kv_blocks=12)
    assert sizes.num_blocks == 12


def test_what_leaves_no_room_is_named() -> None:
    _, sizes = sizes_of()
    with pytest.raises(
        ConfigError, match=rf"{sizes.num_window_pages} window pages, \d+ to compressor states, 77 to the"
    ):
        sizes_of(free_bytes=sizes.fixed_bytes, scratch_bytes=77)
    with pytest.raises(ConfigError, match="no KV block fits: of 5000 bytes to use"):
        sizes_of(kv_memory_bytes=5000)


def test_a_model_without_records_needs_no_memory() -> None:
    _, sizes = sizes_of(spec=CacheSpec(), max_len=64, kv_memory_bytes=1 << 12)
    assert (sizes.num_blocks, sizes.fixed_bytes, sizes.block_bytes) == (24, 0, 0)


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_engine_keeps_to_its_budget(drafts) -> None:
    model = NullModel(64, cache_spec=HashModel(64).cache_spec, max_position=1 << 14, num_drafts=drafts)
    config = EngineConfig(**SMALL, kv_memory_bytes=300_000, speculation="coupled" if drafts else "off")
    engine = Engine(model, config, cpu_ops())
    scratch = model.draft.new_scratch(3).data.nbytes if drafts else 0
    caches = engine.executor.caches
    assert caches.num_bytes + scratch <= 300_000 < caches.num_bytes + scratch + caches.blocks.shape[1]
    engine.close()
