"""An integer model whose text depends on every record it is given back, so that one wrong record shows.

It keeps what V4.1 keeps: window records of an early and a late layer, block records at ratio 1 and 2, an open group for
ratio 2, and an n-gram history. A record is a 64-bit hash, stored as the bits of two floats. Each layer hashes what it
reads back through tables, pages and slots, so records depend on the whole sequence before them, and a stale, missing or
foreign one changes the logits of all rows that see it. Integer sums have no order, so chunks, batches and rollbacks
change nothing, and `expected_logits` gives the truth without an engine.

It computes on the host, with no arithmetic but wrapping integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.models.interface import Caches, CacheSpec, Draft, ModelInfo, RecordSpec, StateSpec, StepBatch, Tap
from deepinfer.ops.formats import CacheFormat, PagedCache

Int64Array = NDArray[np.int64]
IntArray = NDArray[np.integer[Any]]

RATIO: Final = 2
EARLY, LATE, PAIRS, TOKENS, OPEN = "window.early", "window.late", "pairs", "tokens", "open_group"
_RECORD: Final = CacheFormat("f32", 2)  # 8 bytes: one 64-bit hash

_ODD: Final = np.int64(-0x61C8864680B583EB)  # the golden ratio, odd
_MIX: Final = np.int64(-0x40A7B892E31B1A47)
_LEVELS: Final = 10  # bits of a logit: ties happen in about one row of thirty


class HashModel:
    """A model whose logits are a hash of all it reads back.

    Args:
        vocab_size: ids run from 0 to `vocab_size` - 1.
        window: positions a query sees in its window, itself included.
        ngram: tokens a row's first hash looks at, itself included.
        eos_token_ids: where generation stops.
        max_position: longest sequence.
        nan_every: one row in about this many has only NaN for logits; 0 for none.
    """

    def __init__(
        self,
        vocab_size: int = 64,
        *,
        window: int = 8,
        ngram: int = 3,
        eos_token_ids: tuple[int, ...] = (),
        max_position: int = 1 << 16,
        nan_every: int = 0,
    ) -> None:
        self.info = ModelInfo("hash", vocab_size, max_position, eos_token_ids)
        self.cache_spec = CacheSpec(
            block_records=(RecordSpec(PAIRS, _RECORD, RATIO), RecordSpec(TOKENS, _RECORD)),
            window_records=(RecordSpec(EARLY, _RECORD), RecordSpec(LATE, _RECORD)),
            states=(StateSpec(OPEN, RATIO, 1),),
            window=window,
            ngram=ngram,
        )
        self.draft: Draft | None = None
        self._nan_every = nan_every
        self._back = np.arange(window)
        self._pools: WeakKeyDictionary[Caches, dict[str, _Records]] = WeakKeyDictionary()
        self._vocab = _mixed(np.arange(1, vocab_size + 1) * _ODD)

    def expected_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """What an engine without fault gets for a sequence, computed from the tokens alone.

        Args:
            token_ids: at least one.

        Returns:
            [len, vocab] float32; row i belongs to the token after `token_ids[i]`.
        """
        ids = np.asarray(token_ids, np.int64)
        position = np.arange(len(ids))
        context = np.full(self.cache_spec.ngram - 1 + len(ids), -1, np.int64)
        context[self.cache_spec.ngram - 1 :] = ids
        early = _mixed(self._ngrams(context, position + self.cache_spec.ngram - 1) + position * _ODD)
        window = self._seen(early)
        gate = _mixed(window)
        pairs = _pair(gate[0:-1:2], gate[1::2])
        total = np.concatenate(([0], _tagged(pairs).cumsum()))[(position + 1) // RATIO]
        tokens = _mixed(window - total)
        total += _tagged(tokens).cumsum()
        late = _mixed(total - window)
        return self._logits(_mixed(total ^ self._seen(late)))

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Write the records of all rows, read back what they see, and hash it."""
        rows = _Rows.of(batch)
        windows = _Window(batch, rows, self._back)
        tables = batch.block_tables.numpy()
        pools = self._pools.get(caches)
        if pools is None:
            pools = self._pools[caches] = {n: _Records(caches.records(n)) for n in (EARLY, LATE, PAIRS, TOKENS)}

        early = _mixed(self._row_ngrams(rows) + rows.position * _ODD)
        pools[EARLY].write(rows.window_slots, early)
        window = windows.read(pools[EARLY])
        gate = _mixed(window)
        pairs = _pair(_previous(gate, rows, caches.state(OPEN)), gate)
        total = pools[PAIRS].exchange(tables, rows, batch.ratio_slots[RATIO], pairs, RATIO)
        tokens = _mixed(window - total)
        total += pools[TOKENS].exchange(tables, rows, batch.ratio_slots[1], tokens, 1)
        late = _mixed(total - window)
        pools[LATE].write(rows.window_slots, late)
        final = _mixed(total ^ windows.read(pools[LATE]))
        if tap is not None:
            tap("final", torch.from_numpy(final))
        return torch.from_numpy(self._logits(final[batch.logits_rows.numpy()]))

    def _logits(self, final: Int64Array) -> NDArray[np.float32]:
        words = final[:, None] ^ self._vocab
        words *= _MIX
        logits = (words.view(np.uint64) >> np.uint64(64 - _LEVELS)).astype(np.float32)
        logits *= np.float32(8 / (1 << _LEVELS))
        if self._nan_every:
            logits[final % self._nan_every == 0] = np.nan
        return logits

    def _seen(self, records: Int64Array) -> Int64Array:
        """Sum of the tagged records that each position's window holds."""
        total: Int64Array = np.concatenate((np.zeros(self.cache_spec.window, np.int64), _tagged(records).cumsum()))
        return total[self.cache_spec.window :] - total[: len(records)]

    def _ngrams(self, context: Int64Array, at: IntArray) -> Int64Array:
        """Hash of the tokens that end at places `at` of `context`."""
        code: Int64Array = context[at]
        for back in range(1, self.cache_spec.ngram):
            code *= _MIX
            code += context[at - back]
        return code

    def _row_ngrams(self, rows: _Rows) -> Int64Array:
        """Hash of each row's newest tokens, those before the step from the history."""
        before = rows.history.shape[1]
        context = np.empty(len(rows.ids) + before * len(rows.starts), np.int64)
        begin = rows.starts + np.arange(0, before * len(rows.starts), before) if before else rows.starts
        at = np.arange(before, before + len(rows.ids)) + rows.place * before
        context[at] = rows.ids
        for back in range(before):
            context[begin + (before - 1 - back)] = rows.history[:, back]
        return self._ngrams(context, at)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch without padding and without sequences that have no row, as arrays."""

    ids: IntArray  # [T]
    position: Int64Array  # [T]
    seq: IntArray  # [T] index into the batch's tables
    place: IntArray  # [T] index into the three below
    starts: IntArray  # [S] first row
    state_slots: Int64Array  # [S]
    history: IntArray  # [S, ngram - 1]
    window_slots: IntArray  # [T]

    @classmethod
    def of(cls, batch: StepBatch) -> _Rows:
        bounds = batch.cu_seqlens_q.numpy()
        count = int(bounds[-1])
        starts, state_slots, history = bounds[:-1], batch.state_slots.numpy(), batch.history.numpy()
        seq = place = batch.row_to_seq.numpy()[:count]
        live = starts < bounds[1:]
        if not live.all():
            starts, state_slots, history = starts[live], state_slots[live], history[live]
            place = (live.cumsum() - 1)[seq]
        return cls(
            batch.input_ids.numpy()[:count],
            batch.positions.numpy()[:count].astype(np.int64),
            seq,
            place,
            starts,
            state_slots.astype(np.int64),
            history,
            batch.window_slots.numpy()[:count],
        )


class _Records:
    """The records of one kind as one flat array of hashes over the engine's own memory."""

    def __init__(self, cache: PagedCache) -> None:
        data = cache.data
        flat = data.as_strided(((data.shape[0] - 1) * data.stride(0) + data.shape[1],), (1,))
        self.words: Int64Array = flat.numpy().view(np.int64)
        self.stride = np.int64(data.stride(0) // 8)  # words from one page to the next
        self._per_page = cache.records
        self._grow(64)

    def write(self, slots: IntArray, values: Int64Array) -> None:
        """Store a record per slot; -1 stores nothing."""
        page = slots // self._per_page
        self.words[slots + page * (self.stride - self._per_page)] = values

    def exchange(self, tables: IntArray, rows: _Rows, slots: Tensor, values: Int64Array, ratio: int) -> Int64Array:
        """Store the entries that rows complete; return per row the sum of all tagged entries it may see."""
        targets = slots.numpy()[: len(values)]
        if ratio > 1:
            closed = (targets >= 0).nonzero()[0]
            targets, values = targets[closed], values[closed]
        self.write(targets, values)
        visible = (rows.position + 1) // ratio
        count = int(visible.max()) if len(visible) else 0
        if count > len(self._tag):
            self._grow(2 * count)
        place = tables.take(self._column[:count], 1) * self.stride
        place += self._offset[:count]
        total = np.zeros((len(tables), count + 1), np.int64)
        entries = self.words.take(place)
        entries ^= self._tag[:count]
        np.add.accumulate(entries, 1, out=total[:, 1:])
        return total[rows.seq, visible]

    def _grow(self, count: int) -> None:
        """Remember where the first `count` entries of a sequence are, and their tags."""
        entry = np.arange(count)
        self._column, self._offset = np.divmod(entry, self._per_page)
        self._tag = entry * _ODD


class _Window:
    """Where each row finds the records of its window."""

    def __init__(self, batch: StepBatch, rows: _Rows, back: IntArray) -> None:
        position = rows.position[:, None] - back
        self._seen = position >= 0
        position *= self._seen
        page = position // batch.window_page
        self._offset = position - page * batch.window_page
        page -= batch.window_first_page.numpy()[rows.seq][:, None]
        self._page = batch.window_tables.numpy()[rows.seq[:, None], page].astype(np.int64)
        self._tag = position * _ODD

    def read(self, records: _Records) -> Int64Array:
        """Sum of the tagged records in each row's window."""
        place = self._page * records.stride
        place += self._offset
        values = records.words.take(place)
        values ^= self._tag
        values *= self._seen
        return np.asarray(np.add.reduce(values, 1))


def _previous(gate: Int64Array, rows: _Rows, state: Tensor) -> Int64Array:
    """The value of the token before each row, from the rows or from the open group, which takes the newest."""
    slots, ring, _, _ = state.shape
    words = state.view(slots, ring * 2).numpy().view(np.int64).reshape(-1)
    base = rows.state_slots * ring
    before = np.empty_like(gate)
    before[1:] = gate[:-1]
    before[rows.starts] = words[base + (rows.position[rows.starts] - 1) % ring]
    words[base[rows.place] + rows.position % ring] = gate  # where rows share a place, the last one stays
    return before


def _mixed(value: Int64Array) -> Int64Array:
    """A hash of each number."""
    value = value * _MIX
    value ^= value >> 29
    return value


def _tagged(records: Int64Array) -> Int64Array:
    """Records made unlike those of other places, so that a sum of them knows their order."""
    return records ^ np.arange(len(records)) * _ODD


def _pair(first: Int64Array, second: Int64Array) -> Int64Array:
    return _mixed(first ^ second * _ODD)
