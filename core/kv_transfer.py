"""Exporting and importing stored prefixes: between an engine's pools and `KVBundle`.

The base of KV tiers, of prefill and decode in different engines, and of balancing. Only what the prefix index holds is
exported, and an import only adds to it: requests find it like anything else that is stored, or it is given up like
anything else. So neither has to do with requests that run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.caches import CacheStore
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import KVTransferError
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.kv_bundle import KVBundle, KVLayout
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.transfer import send
from deepinfer.models.interface import ModelInfo, RecordSpec
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.registry import OpTable
from deepinfer.ops.shaping import put_rows
from deepinfer.ops.show import shown

_STAGING_BYTES = 64 << 20  # moved at once, so that a long prefix needs little memory beside the pools


def read_token_ids(source: Sequence[int]) -> Int32Array:
    """Token ids that a caller gave, [num_tokens] int32.

    Raises:
        KVTransferError: they are something else.
    """
    try:
        ids = np.array(source)
    except ValueError:  # lists of several lengths
        ids = np.array(None)
    bounds = np.iinfo(np.int32)
    if ids.ndim != 1 or (
        ids.size and not (ids.dtype.kind in "iu" and bounds.min <= ids.min() <= ids.max() <= bounds.max)
    ):
        raise KVTransferError(f"what to export is a live request's id or a list of token ids, not {shown(source)}")
    return ids.astype(np.int32)


class KVTransfer:
    """Moves stored prefixes of one engine.

    Args:
        blocks: who holds which block.
        caches: their records.
        ops: the engine's op table.
        info: of the model.
        config: validated settings.
    """

    def __init__(
        self, blocks: KVBlockManager, caches: CacheStore, ops: OpTable, info: ModelInfo, config: EngineConfig
    ) -> None:
        self._blocks = blocks
        self._caches = caches
        self._runtime = ops.context.runtime
        self._gather_rows = ops.bind(gather_rows)
        self._put_rows = ops.bind(put_rows)
        self.layout = _layout_of(blocks, caches, info, config)

    def export(self, token_ids: Int32Array, salt: int) -> KVBundle:
        """The longest stored prefix of some tokens from which a sequence can continue exactly.

        Waits for the device. Nothing changes, and nothing is held back for the bundle.

        Args:
            token_ids: [num_tokens] int32.
            salt: from `prefix_salt`.

        Raises:
            KVTransferError: nothing of these tokens is stored, or not with the window pages to continue it.
        """
        ids, page_ids = self._blocks.pool.stored_prefix(token_ids, salt)
        if not ids.size:
            raise KVTransferError(
                f"nothing to export: of these {len(token_ids)} tokens no block of {self.layout.block_size} is stored "
                "with the window pages behind it; run a request that begins with them, with prefix_caching on"
            )
        tokens = token_ids[: len(ids) * self.layout.block_size].copy()
        places = np.flatnonzero(page_ids).astype(np.int32)
        return KVBundle(
            self.layout,
            salt,
            tokens,
            self._blocks.pool.prefix_keys(tokens, salt),
            self._read(self._caches.blocks, ids),
            self._read(self._caches.pages, page_ids[places]),
            places,
        )

    def store(self, bundle: KVBundle) -> int:
        """Store a bundle's prefix for later requests; blocks and pages that are stored already stay as they are.

        Where memory is short, what only the index holds is given up for it, least recently used first.

        Returns:
            Tokens of the bundle that are stored now: all, unless the hash of one of its blocks is taken.

        Raises:
            KVTransferError: it belongs to another model, layout or numerics, it is damaged, or nothing is stored here.
            OutOfBlocksError: running requests hold too much; nothing is stored.
        """
        self._check(bundle)
        has_page = np.zeros(len(bundle.blocks) * self.layout.pages_per_block, np.int32)
        has_page[bundle.page_places] = 1
        block_ids, page_ids = self._blocks.import_prefix(bundle.token_ids, bundle.salt, has_page)
        try:
            self._write(self._caches.blocks, block_ids, bundle.blocks)
            self._write(
                self._caches.pages, page_ids[bundle.page_places[bundle.page_places < len(page_ids)]], bundle.pages
            )
        except Exception:
            new = [*np.flatnonzero(block_ids), *np.flatnonzero(page_ids) // self.layout.pages_per_block]
            if new:  # entered, but not written
                self._blocks.pool.forget_prefix(bundle.token_ids, bundle.salt, int(min(new)))
            raise
        return len(block_ids) * self.layout.block_size

    def _check(self, bundle: KVBundle) -> None:
        differences = bundle.layout.differences(self.layout)
        if differences:
            raise KVTransferError(f"the bundle is of another engine: {'; '.join(differences)}")
        keys = self._blocks.pool.prefix_keys(bundle.token_ids, bundle.salt)
        if not keys.size and len(bundle.blocks):
            raise KVTransferError("this engine stores no prefixes; set prefix_caching")
        if not np.array_equal(keys, bundle.keys):
            place = int(np.flatnonzero(keys != bundle.keys)[0])
            raise KVTransferError(f"the bundle is damaged: the hash of block {place} does not belong to its token ids")

    def _read(self, pool: Tensor, ids: Int32Array) -> Tensor:
        """Rows of a pool, [n, row bytes] on the host."""
        rows = torch.empty((len(ids), pool.shape[1]), dtype=torch.uint8)
        for part in self._parts(pool, len(ids)):
            there = self._gather_rows(pool, send(self._runtime, ids[part]))
            rows[part] = self._runtime.to_host(there)
        return rows

    def _write(self, pool: Tensor, ids: Int32Array, rows: Tensor) -> None:
        """Write rows to a pool; an id of 0 is not written, nor is what has no id."""
        places = np.flatnonzero(ids)
        for part in self._parts(pool, len(places)):
            values = self._runtime.to_device(rows[torch.from_numpy(places[part])])
            self._put_rows(pool, send(self._runtime, ids[places[part]]), values)

    def _parts(self, pool: Tensor, count: int) -> list[slice]:
        size = max(1, _STAGING_BYTES // max(pool.shape[1], 1))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _layout_of(blocks: KVBlockManager, caches: CacheStore, info: ModelInfo, config: EngineConfig) -> KVLayout:
    spec = caches.spec
    rounded = [name for name, on in (("activations", config.rounds_activations), ("records", config.kv_rounding)) if on]
    numerics = f"{config.dtype}, {' and '.join(rounded) or 'nothing'} rounded"
    if config.replay != "off":
        numerics += ", prompts cut"  # window pages lack records of decoder layers
    return KVLayout(
        model=f"{info.name} {info.vocab_size} {info.fingerprint}".strip(),
        numerics=numerics,
        block_size=blocks.pool.block_size,
        window_page=blocks.pool.window_page,
        window=spec.window,
        block_records=tuple(map(_record, spec.block_records)),
        window_records=tuple(map(_record, spec.window_records)),
        block_bytes=caches.blocks.shape[1],
        page_bytes=caches.pages.shape[1],
    )


def _record(record: RecordSpec) -> str:
    return f"{record.name} {record.format.tag} 1/{record.ratio}"
