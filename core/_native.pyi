"""Host hot paths in C++: block and page pools, sequences, step metadata, draft lengths. Sources: `core/native/`.

Arrays are C-contiguous, and int32 where nothing else is said; anything else is a ValueError that names the array, never
a silent conversion. A call that raises has changed nothing. A pool is not thread safe: bulk calls release the GIL, so
one thread at a time may use it.
"""

from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

_Int32Array = NDArray[np.int32]
_Copy = tuple[Literal["block", "page", "state"], int, int]

class PrefixStats(TypedDict):
    """What sequences opened so far found in the prefix index.

    Attributes:
        queries: sequences opened with `use_prefix`.
        hits: those that started from a stored prefix.
        query_tokens: tokens of all queries.
        hit_tokens: tokens that need not be computed again.
        pageless_tokens: tokens whose blocks were stored, but not the window pages to continue from them.
        missed_no_block: misses because the first block is not stored.
        missed_no_pages: misses because blocks are stored, but window pages of none of their boundaries.
        missed_too_short: misses because no block is full before the last token.
        disabled: sequences opened without the index.
        evicted_blocks: entries given up for memory.
        evicted_pages: window pages given up for memory.
        held_blocks: blocks in the index now, those that sequences hold as well included.
        held_pages: window pages in the index now.
    """

    queries: int
    hits: int
    query_tokens: int
    hit_tokens: int
    pageless_tokens: int
    missed_no_block: int
    missed_no_pages: int
    missed_too_short: int
    disabled: int
    evicted_blocks: int
    evicted_pages: int
    held_blocks: int
    held_pages: int

def forecast_drafts(
    confidences: NDArray[np.float32],
    seqs: _Int32Array,
    coefficients: NDArray[np.float64],
    stand_in: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """How likely drafts are kept up to each place, never rising along a row.

    The signal of a place is the product of the row's confidences up to it, each held to 0..1; the forecast is
    `constant + slope * signal`, held to 0..1 and to that of the place before.

    Args:
        confidences: [S, D] float32, by handle.
        seqs: [R] int32, rows of it.
        coefficients: [2, D] float64: constant and slope.
        stand_in: [S, D] float32, used for a place's own confidence in its own signal.

    Returns:
        [R, D] float32.

    Raises:
        ValueError: an array has another shape or dtype, or a handle has no row.
    """

def add_verified(
    confidences: NDArray[np.float32],
    seqs: _Int32Array,
    verified: _Int32Array,
    accepted: _Int32Array,
    sums: NDArray[np.float64],
    stand_in: NDArray[np.float32] | None = None,
) -> None:
    """Add verified drafts to sums by place.

    Args:
        confidences: as in `forecast_drafts`.
        seqs: [R] int32.
        verified: [R] int32, drafts that were verified.
        accepted: [R] int32, how many of them were kept.
        sums: [5, D] float64: drafts, signal, its square, kept - signal, and that times the signal.
        stand_in: as in `forecast_drafts`.

    Raises:
        ValueError: as `forecast_drafts`; `sums` is untouched.
    """

def enter_block(
    newest: NDArray[np.float32],
    recent: NDArray[np.float32],
    older: NDArray[np.float32],
    habit: NDArray[np.float32],
    usual: NDArray[np.float32],
    seqs: _Int32Array,
    confidences: NDArray[np.float32],
    habit_weight: float,
    usual_weight: float,
) -> None:
    """Enter a block of confidences for each handle into what is remembered of them; see `ConfidenceBook`.

    Args:
        newest: [S, D] float32, as are `recent`, `older` and `habit`, a row for each handle.
        recent: what was recent goes to `older`.
        older: see there.
        habit: moves towards the block.
        usual: [D] float32, moves towards the mean of all blocks.
        seqs: [R] int32, rows of those, each once.
        confidences: [R, D or more] float32; limited to 0 to 1, and NaN is 0.
        habit_weight: of the block.
        usual_weight: of the mean.

    Raises:
        ValueError: an array has another shape or dtype, or a handle has no row; nothing is changed.
    """

def add_reliability(
    confidences: NDArray[np.float32], verified: _Int32Array, accepted: _Int32Array, sums: NDArray[np.float64]
) -> None:
    """Add drafts whose predecessors were all kept to sums by how sure they were.

    Args:
        confidences: [R, D] float32, of each draft on its own.
        verified: [R] int32, drafts that were verified.
        accepted: [R] int32, how many of them were kept.
        sums: [3, B] float64, by bins of equal width from 0 to 1: drafts, those that were kept, their confidences.

    Raises:
        ValueError: an array has another shape or dtype; `sums` is untouched.
    """

def rank_drafts(
    gains: NDArray[np.float32], contexts: _Int32Array, row_price: float, context_price: float
) -> _Int32Array:
    """Flat indices of drafts by gain for price, highest first; equal ones (to 16 bits) in their own order.

    Args:
        gains: [R, D] float32, not negative, not rising along a row, so that a draft comes behind those before it.
        contexts: [R] int32, tokens before the drafts of each row.
        row_price: seconds of a row.
        context_price: seconds per token before it.

    Returns:
        [R * D] int32.

    Raises:
        ValueError: an array has another shape or dtype.
    """

def best_count(
    gains: NDArray[np.float32],
    contexts: _Int32Array,
    order: _Int32Array,
    most: int,
    other_rows: int,
    *,
    knots: NDArray[np.float64],
    seconds: NDArray[np.float64],
    context_price: float,
    draft_seconds: float,
    host_seconds: float,
    overlaps: bool,
) -> tuple[int, float]:
    """How many drafts, taken in `order`, give most tokens per second, the fewest of equals; and that rate.

    Args:
        gains: [R, D] float32, tokens that each draft brings.
        contexts: [R] int32.
        order: [R * D] int32.
        most: drafts to take at most.
        other_rows: rows of the step beside the R newest tokens and the drafts.
        knots: [K] float64 ascending, row counts; the curve ends at the last.
        seconds: [K] float64, of a step with so many rows; straight in between.
        context_price: seconds per row and token before it.
        draft_seconds: of drafting behind the step.
        host_seconds: of the host.
        overlaps: the slower of host and device counts; otherwise their sum.

    Raises:
        ValueError: an array has another shape or dtype, an index or `most` is out of range.
    """

class PoolExhaustedError(RuntimeError):
    """`open`, `fork` or `import_prefix` needs slots, blocks or pages that are not free."""

class KVPool:
    """Reference counted blocks and window pages, and the sequences that hold them.

    Ids run from 1; id 0 is the hole that padding points to, never allocated and not counted. Free lists are stacks, so
    equal calls give equal ids. Let the next query of a sequence stand at n = `num_computed`. It sees positions
    > n - window, so the first page held is `max(0, n - window + 1) // window_page`. A sequence never goes back.

    After `enable_prefix`, full blocks and their window pages stay findable by token ids when their sequences have
    ended. Those that no sequence holds count as free, and are given up, least recently used first, when others run out.
    What sequences share is never written: a sequence starts at a block boundary, behind all that it adopts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_window_pages: int,
        window_page: int,
        window: int,
        num_slots: int,
    ) -> None:
        """Make an empty pool.

        Args:
            num_blocks: blocks of the global group; ids 1..num_blocks.
            block_size: tokens in a block.
            num_window_pages: pages of the window group; ids 1..num_window_pages.
            window_page: tokens in a page; divides `block_size`.
            window: positions a query sees, itself included.
            num_slots: sequences that may be open at once; handles 1..num_slots. A handle is also the sequence's
                compressor state slot, 0 being that of padding.

        Raises:
            ValueError: a size is out of range, or `window_page` does not divide `block_size`.
            OverflowError: a window slot would not fit int32.
        """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_window_pages(self) -> int: ...
    @property
    def window_page(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those in the prefix index included."""

    @property
    def num_free_pages(self) -> int:
        """Window pages that no sequence holds, those in the prefix index included."""

    @property
    def num_free_slots(self) -> int: ...
    def is_open(self, seq: int) -> bool:
        """Whether `seq` is the handle of an open sequence. Every other method raises ValueError where it is not."""

    def num_tokens(self, seq: int) -> int:
        """Tokens known: prompt and outputs."""

    def num_computed(self, seq: int) -> int:
        """Positions, from 0, whose records are stored."""

    def num_replayed(self, seq: int) -> int:
        """Of these positions, those at their end whose rows are to run again, until the first `commit`."""

    def first_page(self, seq: int) -> int:
        """The page index (position // window_page) of the first window page held."""

    def tokens(self, seq: int, start: int = 0) -> _Int32Array:
        """A copy of the token ids from position `start` on; empty where there are none."""

    def blocks(self, seq: int) -> _Int32Array:
        """A copy of the block table; entry i holds positions from i * block_size."""

    def pages(self, seq: int) -> _Int32Array:
        """A copy of the window pages; entry i has page index `first_page + i`."""

    def enable_prefix(self, page_interval: int = 4096) -> None:
        """Keep what sequences with `use_prefix` compute, for sequences with equal tokens.

        Args:
            page_interval: window pages before every multiple of so many tokens outlast others, as those before the end
                of a prompt and before the newest boundary of a sequence do.

        Raises:
            ValueError: it is enabled already, or `page_interval` is below 1.
        """

    def match(
        self, token_ids: _Int32Array, salt: int = 0, max_stored: int = 2**31 - 1, replay: int = 0
    ) -> tuple[int, int]:
        """What `open(token_ids, salt, True, max_stored, replay)` would adopt; changes nothing and is not counted.

        Returns:
            The number of tokens, a multiple of `block_size` below `len(token_ids)`, and how many of its blocks no
            sequence holds: `num_free_blocks` falls by as many.
        """

    def open(
        self,
        token_ids: _Int32Array,
        salt: int = 0,
        use_prefix: bool = False,
        max_stored: int = 2**31 - 1,
        replay: int = 0,
    ) -> int:
        """Start a sequence of these tokens and return its handle.

        It holds no memory, unless `use_prefix` finds a stored prefix whose last window pages are stored as well: then
        it holds those, and `num_computed` is the length of that prefix. The last token is never part of it.

        Args:
            token_ids: prompt, and outputs so far where a sequence is resumed.
            salt: only sequences of equal salt share anything; 0 to 2**64 - 1.
            use_prefix: look the tokens up, and enter what is computed. Without `enable_prefix` it does nothing.
            max_stored: longest prefix to adopt with its window pages.
            replay: above 0, a longer prefix is adopted without its window pages where that saves rows. At least so many
                tokens at its end run again, from a page boundary on: `write_step` gives them window slots and no
                others, and the first `commit` comes when all of them have run. What follows is not entered.

        Raises:
            PoolExhaustedError: no free slot.
        """

    def close(self, seq: int) -> None:
        """Drop a sequence and all it holds; the handle is free again."""

    def append(self, seqs: _Int32Array, counts: _Int32Array, tokens: _Int32Array) -> None:
        """Append the next `counts[i]` of the packed `tokens` to sequence `seqs[i]`.

        Raises:
            ValueError: a sequence is named twice, a count is negative, or the counts do not add up to the tokens.
        """

    def blocks_needed(self, seq: int, end: int) -> int:
        """Blocks that `reserve(seq, end)` would take."""

    def pages_needed(self, seq: int, end: int) -> int:
        """Window pages that `reserve(seq, end)` would take."""

    def reserve(self, seq: int, end: int) -> bool:
        """Hold blocks for all positions below `end`, and window pages from `first_page` on. Takes all or nothing.

        Returns:
            Whether there was enough. `end` may exceed `num_tokens`: drafts need room before they are known.
        """

    def reserve_many(self, seqs: _Int32Array, ends: _Int32Array) -> int:
        """Reserve in order, stopping at the first sequence that cannot; those before it keep what they got.

        Returns:
            The index of the sequence that failed, or `len(seqs)`.
        """

    def commit(self, seqs: _Int32Array, new_computed: _Int32Array) -> None:
        """Say that records of positions below `new_computed[i]` are stored, and free pages behind the window.

        Blocks that are full now enter the prefix index. Where equal tokens are there already, theirs stay.

        Raises:
            ValueError: a value is below `num_computed`, above `num_tokens` or not reserved, or
                a sequence is named twice.
        """

    def quarantine(self, seq: int) -> None:
        """Distrust what a sequence computed: its prefix leaves the index with all that continues it.

        Sequences that share it keep their memory, and enter it again with the next block they fill. This one enters
        nothing any more.
        """

    def reset_prefix(self) -> None:
        """Empty the prefix index, as after a change of weights."""

    def stored_prefix(self, token_ids: _Int32Array, salt: int = 0) -> tuple[_Int32Array, _Int32Array]:
        """The longest stored prefix of `token_ids` that a sequence can continue exactly.

        Returns:
            [n] its blocks, and [n * block_size / window_page] the window pages that are held of them, 0 for none: all
            that a sequence behind it sees, and of those before what outlasts a shortage.
        """

    def prefix_keys(self, token_ids: _Int32Array, salt: int = 0) -> NDArray[np.uint64]:
        """The hash chain of the full blocks of `token_ids`; empty without `enable_prefix`."""

    def import_prefix(
        self, token_ids: _Int32Array, salt: int, has_page: _Int32Array
    ) -> tuple[_Int32Array, _Int32Array]:
        """Enter a prefix that another pool computed. The caller writes its records before any other call.

        What only the index holds is given up for it where memory is short, least recently used first.

        Args:
            token_ids: whole blocks.
            salt: as for `open`.
            has_page: [n * block_size / window_page], not 0 where a window page comes with it.

        Returns:
            The blocks and the window pages to write, as `stored_prefix` gives them, 0 for what is stored already or
            does not come. Fewer blocks where the hash key of the next one belongs to another prefix.

        Raises:
            ValueError: the index is not enabled, or a size does not fit.
            PoolExhaustedError: sequences hold too much; nothing is entered.
        """

    def forget_prefix(self, token_ids: _Int32Array, salt: int, first_block: int) -> None:
        """Take a prefix from its block of that place on out of the index, and all that continues it."""

    def prefix_stats(self) -> PrefixStats:
        """Counters of the prefix index; all but `disabled` are 0 when there is none."""

    def fork(self, seq: int) -> tuple[int, list[_Copy]]:
        """Open a second sequence with the same tokens and computed positions, sharing what is full.

        Returns:
            The new handle, and `(kind, src, dst)` copies to make on the device before the next step. Kind is "block"
            or "page" for a partially filled tail (ids), and "state" for the compressor's open group (slots).

        Raises:
            PoolExhaustedError: no free slot, or no block or page for the tail.
        """

    def check(self) -> None:
        """Audit: every id is free or referenced exactly as often as it is held, and no written tail is shared.

        Raises:
            RuntimeError: naming what is inconsistent. Always a defect of the pool.
        """

    def write_step(
        self,
        seqs: _Int32Array,
        query_lens: _Int32Array,
        out: StepArrays,
        pad_rows: int = -1,
        pad_seqs: int = -1,
        starts: _Int32Array | None = None,
    ) -> int:
        """Write the metadata of one step: rows starts[i] .. starts[i] + query_lens[i] - 1 of each sequence.

        Args:
            seqs: [num_seqs], handles, each once.
            query_lens: [num_seqs]. Positions must be reserved; tokens must be known unless `starts` is given.
            out: where to write.
            pad_rows: pad row arrays up to this many rows; negative pads each to its end.
            pad_seqs: the same for arrays with an entry per sequence.
            starts: [num_seqs] position of the first row, at least `num_computed - num_replayed`, the default. With
                steps in flight it lies beyond the tokens that are known: unknown ones are 0 in `input_ids` and -1 in
                `history`, for the device to fill in.

        Returns:
            The number of rows.

        Raises:
            ValueError: names the array, its shape and the shape needed, or the sequence that cannot run.
            OverflowError: the pool's slots of a ratio would not fit int32.
        """

class StepArrays:
    """The output arrays of `KVPool.write_step`, checked once. Keeps them alive.

    Args:
        input_ids: [rows] token ids; padding 0, as in the next two.
        positions: [rows] positions within the sequence.
        row_to_seq: [rows] index of the sequence within the step.
        window_slots: [rows] `page_id * window_page + offset`; padding -1.
        slots: pairs of a ratio and [rows] slots of the compressed entries that rows close, -1 where a row closes none.
            With records = block_size / ratio and entry j = position // ratio: block(j // records) * records +
            j % records, if ratio divides position + 1.
        cu_seqlens_q: [seqs + 1] prefix sums of query_lens; padding repeats the total.
        seq_lens: [seqs] num_computed + query_len; padding 0, as in the next three.
        query_lens: [seqs] rows of the sequence.
        state_slots: [seqs] compressor state slot, which is the handle.
        window_first_page: [seqs] page index of column 0 of `window_tables`.
        history: [seqs, k] the token k + 1 places before the sequence's first row; -1 before the start and in padding.
        block_tables: [seqs, max_blocks] the blocks up to seq_len, then 0.
        block_table_lens: [seqs] entries of each row in use. Also read: what lies past them is taken to be 0, so both
            arrays start as zeros and only `write_step` changes them.
        window_tables: [seqs, max_pages] the window pages up to seq_len, then 0.
        window_table_lens: [seqs] as block_table_lens.
    """

    def __init__(
        self,
        *,
        input_ids: _Int32Array,
        positions: _Int32Array,
        row_to_seq: _Int32Array,
        window_slots: _Int32Array,
        slots: list[tuple[int, _Int32Array]],
        cu_seqlens_q: _Int32Array,
        seq_lens: _Int32Array,
        query_lens: _Int32Array,
        state_slots: _Int32Array,
        window_first_page: _Int32Array,
        history: _Int32Array,
        block_tables: _Int32Array,
        block_table_lens: _Int32Array,
        window_tables: _Int32Array,
        window_table_lens: _Int32Array,
    ) -> None: ...
