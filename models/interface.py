"""What the engine knows about a model: which caches it needs, and how to run a step.

`core` imports this file alone of `models/`, so a second model is a new folder and a puppet is a small class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from deepinfer.ops.formats import CacheFormat, PagedCache

Tap = Callable[[str, Tensor], None]
"""Called with the name and value of an intermediate tensor; used by tests and tools, never by the engine.

A later op may overwrite the value: keep a copy."""

Choose = Callable[[int, Tensor], Tensor]
"""Called with a place i and the draft's logits [S, V] float32 of it; returns the drafts [S] int32, all on the device.

Place i is drafted token i of the block, the one i + 1 positions behind the anchor. A row that nothing can be chosen
from gives -1."""


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
class ReplaySpec:
    """How a model's prompts may be cut short: only the last rows of a prompt run in its later, decoder layers.

    Attributes:
        window: positions a query sees in its window, the least that may be kept.
        keep_tokens: rows of a prompt that are kept by default. They do not depend on what is loaded or drafted, so that
            answers do not either.
    """

    window: int
    keep_tokens: int


@dataclass(frozen=True)
class CacheSpec:
    """Everything that a model keeps between steps.

    Attributes:
        block_records: kept for every token, in blocks of the global group.
        window_records: kept for the last `window` tokens, in pages of the window group.
        states: open groups, one slot per sequence.
        window: positions a query sees in its window, itself included.
        ngram: tokens a row's hash looks at, itself included; 1 when it looks at none before it.
        replay: how prompts may be cut short; None for a model that always runs all rows in all layers.
    """

    block_records: tuple[RecordSpec, ...] = ()
    window_records: tuple[RecordSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    window: int = 1
    ngram: int = 1
    replay: ReplaySpec | None = None

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
        packed_ratio_slots: [ratios, T] int32, what `ratio_slots` are the rows of, in its order.
        state_slots: [S] int32.
        history: [S, ngram - 1] int32, tokens before the first row, newest first, -1 for none.
        logits_rows: [n] int32, rows whose logits are wanted; places in `decoder_rows` where that is given.
        max_seq_len: host bound on `seq_lens`.
        decoder_starts: [S] int32, the first position of each sequence that decoder layers see in their windows; None
            where no window reaches below it. Only for a model with `CacheSpec.replay`.
        decoder_rows: [n] int32 ascending, the rows that go on into the decoder layers, with `decoder_starts`; None for
            all. The others end behind the records that the first decoder layer stores for every token.
        fetched: what `HostFetch.fetch` gave for these rows, by layer; None where the pass fetches by itself.
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
    packed_ratio_slots: Tensor
    state_slots: Tensor
    history: Tensor
    logits_rows: Tensor
    max_seq_len: int
    decoder_starts: Tensor | None = None
    decoder_rows: Tensor | None = None
    fetched: Mapping[int, Tensor] | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Facts that requests are checked against.

    Attributes:
        name: architecture or puppet name.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        max_position: positions the model knows.
        eos_token_ids: generation stops at any of them.
        facts: free-form facts for tables and logs.
        fingerprint: names the weights: models of equal name and fingerprint store equal records; empty for a model
            without weights.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""


class Vocabulary(Protocol):
    """What a model may ask of its tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to `vocab_size` - 1."""
        ...

    @property
    def bos_token_id(self) -> int:
        """The token that begins a sequence."""
        ...

    @property
    def eos_token_id(self) -> int:
        """The token that ends one."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that pads."""
        ...

    def raw_spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        ...

    def decode_single_with_special(self, token_id: int) -> str:
        """The text of the token on its own, control tokens included."""
        ...


@dataclass(frozen=True)
class DraftBatch:
    """The sequences to draft for, right behind the step that stored everything before their anchors.

    An anchor is a sequence's newest token: sampled, but not run yet. All tensors are on the device. A padding sequence
    has anchor 0 at position 0 and any row of the tables.

    Attributes:
        anchor_ids: [S] int32; -1 (a row that could not be sampled) is legal and gives drafts that mean nothing.
        anchor_positions: [S] int32. Context records of all positions before it that the window holds are stored.
        seqs: [S] int32, the row of `window_tables` and `window_first_page` that belongs to each.
        window_tables: [N, max_pages] int32, as in `StepBatch`; they cover `CacheSpec.window` - 1 positions before the
            anchor, or all.
        window_first_page: [N] int32.
        window_page: tokens per window page.
        scratch: from `Draft.new_scratch`, for at least S sequences; no other draft of the stream is under way with it.
    """

    anchor_ids: Tensor
    anchor_positions: Tensor
    seqs: Tensor
    window_tables: Tensor
    window_first_page: Tensor
    window_page: int
    scratch: PagedCache


@dataclass(frozen=True)
class DraftOutput:
    """Drafted tokens, on the device.

    Attributes:
        tokens: [S, D] int32, always ids of the vocabulary: where nothing could be chosen, an arbitrary one.
        confidences: [S, D] float32 in (0, 1), how likely each is to be accepted, given those before it.
        logits: [S, D, V] float32 that each was chosen from; None when not asked for.
    """

    tokens: Tensor
    confidences: Tensor
    logits: Tensor | None = None


class Draft(Protocol):
    """The part of a model that guesses the next tokens. Its context records are written by `Model.forward`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a draft, D."""
        ...

    def new_scratch(self, num_seqs: int) -> PagedCache:
        """Device memory for the records of one block of each of `num_seqs` sequences."""
        ...

    def draft(
        self,
        batch: DraftBatch,
        caches: Caches,
        choose: Choose | None = None,
        *,
        temperatures: Sequence[float] = (),
        with_logits: bool = False,
        tap: Tap | None = None,
    ) -> DraftOutput:
        """Draft D tokens for each sequence.

        Args:
            batch: the sequences.
            caches: those of the forward pass; only context records are read, nothing is written.
            choose: how a token is taken from its logits; the best one, of equals the lowest id, by default.
            temperatures: [D], divide the logits of the confidences; empty for 1.
            with_logits: return the logits as well.
            tap: observer of intermediates, for tests.

        Raises:
            ValueError: `temperatures` has another length.
        """
        ...


class HostFetch(Protocol):
    """What a pass reads from tables in the host's memory, apart from the pass, so that the pass can be captured."""

    def look_up(self, batch: StepBatch) -> Tensor:
        """Which entries the rows of a step need; device work alone, which a graph may hold."""
        ...

    def fetch(self, entries: Tensor) -> Mapping[int, Tensor]:
        """Those entries on the device, for `StepBatch.fetched`; the host may wait for `entries`."""
        ...


@runtime_checkable
class ReadsHostTables(Protocol):
    """A model that may have tables in the host's memory."""

    @property
    def host_fetch(self) -> HostFetch | None:
        """How they are read; None when all of them are on the device."""
        ...


class Model(Protocol):
    """A model bound to its ops and weights."""

    info: ModelInfo
    cache_spec: CacheSpec

    @property
    def draft(self) -> Draft | None:
        """What speculates for this model; None when it has no draft, or it was not loaded."""
        ...

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Run one step and return float32 logits [n, vocab] of `batch.logits_rows`.

        Records and states of all rows are written before it returns (or are ordered before later work of the stream).
        """
        ...
