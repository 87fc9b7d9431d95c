"""What the engine knows about a model: which caches it needs, and how to run a step.

`core` imports this file alone of `models/`, so a second model is a new folder and a puppet is a small class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from deepinfer.ops.formats import CacheFormat, PagedCache

Tap = Callable[[str, Tensor], None]
"""Called with the name and value of an intermediate tensor; used by tests and tools, never by the engine.

A later op may overwrite the value: keep a copy."""


@dataclass(frozen=True)
class RecordSpec:
    """One kind of record that a model stores per token, or per group of tokens.

    Attributes:
        name: unique within the model, e.g. `layers.2.kv`.
        format: what a record looks like.
        ratio: tokens per record; 1 for every token.
    """

    name: str
    format: CacheFormat
    ratio: int = 1


@dataclass(frozen=True)
class StateSpec:
    """The open group of a compressor: (gate, value) of the newest tokens, float32 [slots, ring, 2, width].

    Attributes:
        name: unique within the model.
        ratio: tokens per group.
        width: channels.
    """

    name: str
    ratio: int
    width: int


@dataclass(frozen=True)
class CacheSpec:
    """Everything that a model keeps between steps.

    Attributes:
        block_records: kept for every token, in blocks of the global group.
        window_records: kept for the last `window` tokens, in pages of the window group.
        states: open groups, one slot per sequence.
        window: positions a query sees in its window, itself included.
        ngram: tokens a row's hash looks at, itself included; 1 when it looks at none before it.
    """

    block_records: tuple[RecordSpec, ...] = ()
    window_records: tuple[RecordSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    window: int = 1
    ngram: int = 1

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compress ratios, ascending; 1 is always among them."""
        return tuple(sorted({1} | {r.ratio for r in self.block_records}))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all layers."""
        return sum(block_size // r.ratio * r.format.record_bytes for r in self.block_records)

    def page_bytes(self, window_page: int) -> int:
        """Bytes of one window page of `window_page` tokens over all layers."""
        return sum(window_page * r.format.record_bytes for r in self.window_records)


class Caches(Protocol):
    """Where a model finds its records and states, by the names of its `CacheSpec`."""

    def records(self, name: str) -> PagedCache:
        """The records of that name."""
        ...

    def state(self, name: str) -> Tensor:
        """The state of that name, [slots, ring, 2, width] float32."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """One step's rows: prefill chunks, decode rows and verify rows, packed; all tensors on the device.

    Attributes:
        input_ids: [T] int32.
        positions: [T] int32, index of each token in its sequence.
        row_to_seq: [T] int32, index into the sequences of this step.
        cu_seqlens_q: [S + 1] int32.
        seq_lens: [S] int32, tokens with this step's rows.
        block_tables: [S, max_blocks] int32; holes are 0.
        window_tables: [S, max_pages] int32; column c is page `window_first_page + c`.
        window_first_page: [S] int32.
        window_page: tokens per window page.
        window_slots: [T] int32, where each row's window records go.
        ratio_slots: per ratio, [T] int32: where the record goes that this row completes, -1 for none.
        state_slots: [S] int32.
        history: [S, ngram - 1] int32, tokens before the first row, newest first, -1 for none.
        logits_rows: [n] int32, rows whose logits are wanted.
        max_seq_len: host bound on `seq_lens`.
    """

    input_ids: Tensor
    positions: Tensor
    row_to_seq: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    window_tables: Tensor
    window_first_page: Tensor
    window_page: int
    window_slots: Tensor
    ratio_slots: Mapping[int, Tensor]
    state_slots: Tensor
    history: Tensor
    logits_rows: Tensor
    max_seq_len: int


@dataclass(frozen=True)
class ModelInfo:
    """Facts that requests are checked against.

    Attributes:
        name: architecture or puppet name.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        max_position: positions the model knows.
        eos_token_ids: generation stops at any of them.
        facts: free-form facts for tables and logs.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


class Vocabulary(Protocol):
    """What a model may ask of its tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to `vocab_size` - 1."""
        ...

    def raw_spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        ...

    def decode_single_with_special(self, token_id: int) -> str:
        """The text of the token on its own, control tokens included."""
        ...


class Model(Protocol):
    """A model bound to its ops and weights."""

    info: ModelInfo
    cache_spec: CacheSpec

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Run one step and return float32 logits [n, vocab] of `batch.logits_rows`.

        Records and states of all rows are written before it returns (or are ordered before later work of the stream).
        """
        ...
