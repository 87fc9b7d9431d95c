"""Engram layers: n-gram rows hashed once per step, fetched and gated layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.linear import Linear, Numerics, Rows, place
from deepinfer.models.deepseek_v41_flash.step import StepContext
from deepinfer.models.deepseek_v41_flash.weights import EngramWeights
from deepinfer.models.interface import StepBatch
from deepinfer.ops.engram import engram_fetch, engram_gate, engram_hash, engram_ngrams
from deepinfer.ops.registry import OpTable


class EngramHash:
    """Row ids of all Engram layers for the rows of a step."""

    def __init__(self, ops: OpTable, config: TextConfig, constants: EngramConstants) -> None:
        self.layers = tuple(config.engram_layer_ids)
        self._token_map, self._multipliers = place(ops, constants.token_map), place(ops, constants.multipliers)
        self._primes, self._offsets = place(ops, constants.primes), place(ops, constants.offsets)
        self._pad = config.engram_pad_token_id
        self._ngrams = ops.bind(engram_ngrams, n=config.engram_max_ngram_size)
        self._hash = ops.bind(engram_hash, n=config.engram_max_ngram_size)

    def __call__(self, step: StepContext) -> Mapping[int, Tensor]:
        """Layer to [T, columns] int32 row ids."""
        rows = self.rows(step.batch)
        step.observe("engram_rows", rows)
        return {layer: rows[i] for i, layer in enumerate(self.layers)}

    def rows(self, batch: StepBatch) -> Tensor:
        """[L, T, columns] int32 row ids of all Engram layers."""
        ngrams = self._ngrams(
            batch.input_ids,
            batch.row_to_seq,
            batch.cu_seqlens_q,
            batch.history,
            self._token_map,
            self._pad,
            None,
            None,
        )
        return self._hash(ngrams, self._multipliers, self._primes, self._offsets)


class Engram:
    """The injection of one Engram layer."""

    def __init__(self, ops: OpTable, config: TextConfig, weights: EngramWeights, numerics: Numerics) -> None:
        self.eps = config.rms_norm_eps
        self._dtype = numerics.dtype
        self._table, self._device = weights.table, ops.context.runtime.device
        self._wkv = Linear(ops, weights.wkv, numerics)
        self._q_weight = place(ops, weights.q_weight.float())
        self._k_weight = place(ops, weights.k_weight.float())
        self._fetch = ops.bind(engram_fetch, width=config.engram_head_dim)
        self._gate = ops.bind(engram_gate, streams=config.hc_mult, hidden=config.hidden_size)

    @property
    def is_on_host(self) -> bool:
        """The table is in the host's memory, and that is not the device's."""
        return self._table.device != self._device

    def fetch(self, rows: Tensor) -> Tensor:
        """[T, columns] row ids to [T, columns * width] values of the table."""
        return self._fetch(self._table, rows, self._dtype)

    def __call__(self, h: Tensor, values: Tensor) -> Tensor:
        """[T, M, H] streams and what `fetch` gave to new streams."""
        kv = self._wkv(Rows(values))
        return self._gate(h, kv, self._q_weight, self._k_weight, self.eps)


class EngramFetch:
    """Fetches for all Engram layers before a pass; implements `models.interface.HostFetch`.

    Args:
        hashes: row ids of all layers.
        layers: the Engram of each.
    """

    def __init__(self, hashes: EngramHash, layers: Mapping[int, Engram]) -> None:
        self._hashes, self._layers = hashes, layers

    def look_up(self, batch: StepBatch) -> Tensor:
        """[L, T, columns] int32 row ids."""
        return self._hashes.rows(batch)

    def fetch(self, entries: Tensor) -> Mapping[int, Tensor]:
        """Layer to [T, columns * width] values."""
        return {layer: self._layers[layer].fetch(entries[i]) for i, layer in enumerate(self._hashes.layers)}
