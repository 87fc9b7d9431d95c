"""The device side of KV memory: two pools of bytes and the open groups, with a view per record kind.

One allocation holds all blocks and one holds all window pages, a row per block or page, so that a block is one
contiguous run of bytes: it can be copied, exported or evicted without knowing the model. Which row belongs to whom is
the business of `core.kv_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.models.interface import CacheSpec, RecordSpec, StateSpec
from deepinfer.ops.formats import PagedCache
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import Runtime

POOL = "kv_cache"
"""Name of the memory pool that all of it comes from."""
_ALIGN = 64  # bytes; records of every kind start on a cache line


class CacheStore:
    """Pools and states of one engine; implements `models.interface.Caches`.

    Args:
        spec: what the model keeps.
        runtime: where memory comes from.
        num_blocks: usable blocks; row 0, the hole, comes on top.
        block_size: tokens per block; a multiple of every ratio.
        num_window_pages: usable pages; row 0 comes on top.
        window_page: tokens per page.
        num_slots: sequences; state slot 0, that of padding, comes on top.
        max_rollback: computed tokens that a rollback may take back; open groups keep that much more.

    Raises:
        ConfigError: `block_size` is not a multiple of a ratio.
    """

    def __init__(
        self,
        spec: CacheSpec,
        runtime: Runtime,
        *,
        num_blocks: int,
        block_size: int,
        num_window_pages: int,
        window_page: int,
        num_slots: int,
        max_rollback: int = 0,
    ) -> None:
        for record in spec.block_records:
            if block_size % record.ratio:
                raise ConfigError(
                    f"block_size {block_size} is not a multiple of compress ratio {record.ratio} of {record.name}"
                )
        self.spec = spec
        self.blocks, block_views = _pool(
            runtime, num_blocks + 1, [(r, block_size // r.ratio) for r in spec.block_records]
        )
        self.pages, page_views = _pool(runtime, num_window_pages + 1, [(r, window_page) for r in spec.window_records])
        self._records = block_views | page_views
        self._states = {
            s.name: runtime.pool(POOL).zeros(state_shape(s, num_slots, max_rollback), torch.float32)
            for s in spec.states
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools and states."""
        states = sum(s.numel() * s.element_size() for s in self._states.values())
        return self.blocks.numel() + self.pages.numel() + states

    def records(self, name: str) -> PagedCache:
        """The records of that name."""
        return self._records[name]

    def state(self, name: str) -> Tensor:
        """The open groups of that name."""
        return self._states[name]

    def copy(self, ops: OpTable, kind: str, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy blocks, pages or state slots on the device; `kind` is "block", "page" or "state"."""
        copier = ops.bind(copy_blocks)
        pools = {"block": [self.blocks], "page": [self.pages], "state": list(self._states.values())}[kind]
        send = ops.context.runtime.to_device
        src = send(torch.tensor(sources, dtype=torch.int32))
        dst = send(torch.tensor(destinations, dtype=torch.int32))
        for pool in pools:
            copier(pool, src, dst)


def state_shape(state: StateSpec, num_slots: int, max_rollback: int) -> tuple[int, int, int, int]:
    """Of the open groups of one kind; slot 0, that of padding, comes on top."""
    return num_slots + 1, state.ratio + max_rollback, 2, state.width


def pool_row_bytes(records: Sequence[tuple[RecordSpec, int]]) -> int:
    """Bytes of one block or page, alignment included."""
    return sum(_aligned(count * record.format.record_bytes) for record, count in records)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _pool(
    runtime: Runtime, rows: int, records: Sequence[tuple[RecordSpec, int]]
) -> tuple[Tensor, dict[str, PagedCache]]:
    pool = runtime.pool(POOL).zeros((rows, pool_row_bytes(records)), torch.uint8)
    views, offset = {}, 0
    for record, count in records:
        used = count * record.format.record_bytes
        views[record.name] = PagedCache(pool[:, offset : offset + used], record.format, count)
        offset += _aligned(used)
    return pool, views
