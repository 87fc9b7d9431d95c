"""Engram: n-grams, their rows, what stands there, and the gate into the streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from deepinfer.ops import engram
from op_work.work import CODE_BYTES, EPS, HIDDEN, STREAMS, Families, Maker, Work, phases

_NGRAM, _COLUMNS, _WIDTH = 4, 24, 256
_LAYERS = 2
_COMPRESSED = 99092
"""Ids that are left when the case and form of tokens is dropped."""


def hashes(make: Maker) -> Iterator[Work]:
    """Rows of the tables that tokens stand for."""
    vocabulary = make.sizes.vocabulary
    sizes = 16000057 + 2 * make.numbers(0, _LAYERS * _COLUMNS).long().reshape(_LAYERS, _COLUMNS)
    for rows, sequences, what in phases(make):
        each = rows // sequences
        args = {
            "input_ids": make.integers(0, vocabulary, rows),
            "row_to_seq": make.numbers(0, rows) // each,
            "cu_seqlens_q": make.numbers(0, sequences + 1) * each,
            "history": make.integers(0, vocabulary, sequences, _NGRAM - 1),
            "token_map": make.integers(0, _COMPRESSED, vocabulary),
            "pad_token_id": 2,
            "blocked": None,
            "history_blocked": None,
        }
        num_bytes = rows * 4.0 * (2 + 2 * _NGRAM) + sequences * 4.0 * _NGRAM
        yield Work(engram.engram_ngrams, what, [args], 0.0, num_bytes)
        args = {
            "ngrams": make.integers(0, _COMPRESSED, rows, _NGRAM),
            "multipliers": make.integers(1, 1 << 30, _LAYERS, _NGRAM).long() * (1 << 16) + 1,
            "primes": sizes,
            "offsets": sizes.cumsum(1) - sizes,
        }
        num_bytes = rows * 4.0 * (_NGRAM + _LAYERS * _COLUMNS)
        yield Work(engram.engram_hash, f"{rows} x {_LAYERS} layers x {_COLUMNS}", [args], 0.0, num_bytes)


def fetched(make: Maker) -> Iterator[Work]:
    """Rows of a table on the device, which is a part of the model's."""
    table = make.codes(make.sizes.table_rows, _WIDTH, fmt="mxfp8")
    for rows in (make.sizes.few, make.sizes.many):
        args = {
            "table": table,
            "rows": make.integers(0, make.sizes.table_rows, rows, _COLUMNS),
            "out_dtype": torch.bfloat16,
        }
        num_bytes = rows * _COLUMNS * (_WIDTH * (CODE_BYTES + 2) + 4)
        yield Work(engram.engram_fetch, f"{rows} x {_COLUMNS} rows of {_WIDTH}, mxfp8", [args], 0.0, num_bytes)


def gated(make: Maker) -> Iterator[Work]:
    """Values of the table into the streams."""
    for rows in (make.sizes.few, make.sizes.many):
        args = {
            "h": make.plain(rows, STREAMS, HIDDEN),
            "kv": make.plain(rows, (STREAMS + 1) * HIDDEN),
            "q_weight": make.single(STREAMS, HIDDEN),
            "k_weight": make.single(STREAMS, HIDDEN),
            "eps": EPS,
        }
        num_bytes = (3 * STREAMS + 1) * rows * HIDDEN * 2.0 + 8.0 * STREAMS * HIDDEN
        yield Work(engram.engram_gate, f"{rows} x {STREAMS} x {HIDDEN}", [args], 0.0, num_bytes)


FAMILIES: Final[Families] = {
    hashes: ("engram_ngrams", "engram_hash"),
    fetched: ("engram_fetch",),
    gated: ("engram_gate",),
}
