"""Engram layers: n-gram rows hashed once per step, fetched and gated layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.linear import Linear, Numerics, Rows, place
from deepinfer.models.deepseek_v41_flash.step import StepContext
from deepinfer.models.deepseek_v41_flash.weights import EngramWeights
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
        batch = step.batch
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
        rows = self._hash(ngrams, self._multipliers, self._primes, self._offsets)
        step.observe("engram_rows", rows)
        return {layer: rows[i] for i, layer in enumerate(self.layers)}


class Engram:
    """The injection of one Engram layer."""

    def __init__(self, ops: OpTable, config: TextConfig, weights: EngramWeights, numerics: Numerics) -> None:
        self.eps = config.rms_norm_eps
        self._dtype = numerics.dtype
        self._table = weights.table
        self._wkv = Linear(ops, weights.wkv, numerics)
        self._q_weight = place(ops, weights.q_weight.float())
        self._k_weight = place(ops, weights.k_weight.float())
        self._fetch = ops.bind(engram_fetch, width=config.engram_head_dim)
        self._gate = ops.bind(engram_gate, streams=config.hc_mult, hidden=config.hidden_size)

    def __call__(self, h: Tensor, rows: Tensor) -> Tensor:
        """[T, M, H] streams and [T, columns] row ids to new streams."""
        kv = self._wkv(Rows(self._fetch(self._table, rows, self._dtype)))
        return self._gate(h, kv, self._q_weight, self._k_weight, self.eps)
