"""The host arrays that describe one step, and the views of them that a step uses.

Owns memory and its shape; the native module fills it, and the executor copies it to the device. Arrays are made once,
at the largest size a step may have, so that writing a step allocates no array and pinned memory can stand behind them.
An engine that plans a step while the one before is still being copied needs two of these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.core._native import KVPool, StepArrays

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One step, as int32 views that the next `StepBuffers.write` overwrites.

    Views hold the padding that was asked for: `[rows]` is the padded number of rows, `[seqs]` of sequences. Padding is
    0, but -1 in slots and history and the total in `cu_seqlens_q`.

    Attributes:
        num_rows: rows without padding.
        num_seqs: sequences without padding.
        input_ids: [rows] token ids.
        positions: [rows] positions within the sequence.
        row_to_seq: [rows] index of the row's sequence within the step.
        window_slots: [rows] where the row's window record goes, `page_id * window_page + offset`.
        slots: by ratio, [rows] where the compressed entry that the row closes goes; -1 where it closes none.
        cu_seqlens_q: [seqs + 1] prefix sums of `query_lens`.
        seq_lens: [seqs] length with cache, this step's rows included.
        query_lens: [seqs] rows of this step.
        state_slots: [seqs] compressor state slot; padding has the dummy, 0.
        window_first_page: [seqs] page index (position // window_page) of column 0 of `window_tables`.
        history: [seqs, ngram - 1] token ids before the first row, nearest first; -1 before the start.
        block_tables: [seqs, max_blocks] block ids up to `seq_lens`, then 0.
        block_table_lens: [seqs] entries in use.
        window_tables: [seqs, max_window_pages] page ids from `window_first_page` up to `seq_lens`, then 0.
        window_table_lens: [seqs] entries in use.
    """

    num_rows: int
    num_seqs: int
    input_ids: Int32Array
    positions: Int32Array
    row_to_seq: Int32Array
    window_slots: Int32Array
    slots: Mapping[int, Int32Array]
    cu_seqlens_q: Int32Array
    seq_lens: Int32Array
    query_lens: Int32Array
    state_slots: Int32Array
    window_first_page: Int32Array
    history: Int32Array
    block_tables: Int32Array
    block_table_lens: Int32Array
    window_tables: Int32Array
    window_table_lens: Int32Array


class StepBuffers:
    """Arrays for steps of up to `max_rows` rows of `max_seqs` sequences."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
        max_window_pages: int,
        ratios: Sequence[int] = (),
        ngram: int = 1,
        zeros: Callable[[tuple[int, ...]], Int32Array] | None = None,
    ) -> None:
        """Make the arrays.

        Args:
            max_rows: rows of a step, padding included.
            max_seqs: sequences of a step, padding included.
            max_blocks: blocks of a sequence, `KVBlockManager.blocks_for` of its longest length.
            max_window_pages: window pages of a sequence, `KVBlockManager.max_window_pages` of its most rows.
            ratios: tokens per compressed entry, one for each kind of record in the global blocks.
            ngram: longest n-gram of the model; `history` has one column less.
            zeros: makes one zeroed, C-contiguous int32 array of a shape; a runtime passes pinned memory.

        Raises:
            ValueError: a size is negative, a ratio is below 1, or `zeros` gave another kind of array.
        """
        make = zeros or _zeros
        self._row_arrays = {name: make((max_rows,)) for name in _ROW_ARRAYS}
        self._slots = {ratio: make((max_rows,)) for ratio in ratios}
        self._seq_arrays = {name: make((max_seqs,)) for name in _SEQ_ARRAYS}
        self._seq_arrays["history"] = make((max_seqs, ngram - 1))
        self._seq_arrays["block_tables"] = make((max_seqs, max_blocks))
        self._seq_arrays["window_tables"] = make((max_seqs, max_window_pages))
        self._cu_seqlens_q = make((max_seqs + 1,))
        self._native = StepArrays(
            **self._row_arrays,
            **self._seq_arrays,
            slots=list(self._slots.items()),
            cu_seqlens_q=self._cu_seqlens_q,
        )
        # Slicing every array costs more than writing a small step, and decode steps repeat their shape.
        self._shape = (0, 0, 0, 0)
        self._views = self._view(*self._shape)

    def write(
        self,
        pool: KVPool,
        seqs: Int32Array,
        query_lens: Int32Array,
        *,
        starts: Int32Array | None = None,
        pad_rows: int = 0,
        pad_seqs: int = 0,
    ) -> StepMetadata:
        """Write one step: the next `query_lens[i]` tokens of each sequence `seqs[i]`.

        Args:
            pool: who holds the sequences.
            seqs: [num_seqs] int32 handles, each once.
            query_lens: [num_seqs] int32. Positions must be reserved; tokens must be known unless `starts` is given.
            starts: [num_seqs] int32 positions of the first rows; by default what is computed. Tokens that are not known
                yet are 0, and -1 in history.
            pad_rows: least number of rows in the views, as a captured graph wants.
            pad_seqs: least number of sequences in the views.

        Raises:
            ValueError: names the array that is too small, its shape and the shape needed, or the sequence that cannot
                run. The views of the step before are untouched.
            OverflowError: the pool's slots do not fit int32.
        """
        num_seqs = len(seqs)
        num_rows = pool.write_step(seqs, query_lens, self._native, max(pad_rows, 0), max(pad_seqs, 0), starts)
        shape = num_rows, num_seqs, max(num_rows, pad_rows), max(num_seqs, pad_seqs)
        if shape != self._shape:
            self._views, self._shape = self._view(*shape), shape
        return self._views

    def _view(self, num_rows: int, num_seqs: int, rows: int, padded: int) -> StepMetadata:
        return StepMetadata(
            num_rows=num_rows,
            num_seqs=num_seqs,
            slots={ratio: array[:rows] for ratio, array in self._slots.items()},
            cu_seqlens_q=self._cu_seqlens_q[: padded + 1],
            **{name: array[:rows] for name, array in self._row_arrays.items()},
            **{name: array[:padded] for name, array in self._seq_arrays.items()},
        )


_ROW_ARRAYS = ("input_ids", "positions", "row_to_seq", "window_slots")
_SEQ_ARRAYS = (
    "seq_lens",
    "query_lens",
    "state_slots",
    "window_first_page",
    "block_table_lens",
    "window_table_lens",
)


def _zeros(shape: tuple[int, ...]) -> Int32Array:
    return np.zeros(shape, dtype=np.int32)
