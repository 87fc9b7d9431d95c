"""KV memory bookkeeping: who holds which block and window page, and what is refused when none is left.

Device-free on purpose: a block id is an integer, so every policy here can be tested without an accelerator. The
bookkeeping that is hot lives in `core._native`; here are its defaults, its sizing rules and its errors. Which sequence
runs, waits or is preempted is the scheduler's business.
"""

import hashlib
import math
from typing import Literal, NamedTuple

from deepinfer.core._native import KVPool, PoolExhaustedError
from deepinfer.core.errors import ConfigError, OutOfBlocksError, RequestError
from deepinfer.core.step_buffers import Int32Array
from deepinfer.ops.show import shown

DEFAULT_BLOCK_SIZE = 128
DEFAULT_WINDOW_PAGE = 32
DEFAULT_WINDOW = 128
DEFAULT_NUM_SLOTS = 256
DEFAULT_PAGE_INTERVAL = 4096
_NO_LIMIT = 2**31 - 1


class KVCopy(NamedTuple):
    """Device memory to copy before the next step: ids of blocks or window pages, or compressor state slots."""

    kind: Literal["block", "page", "state"]
    src: int
    dst: int


class PrefixMatch(NamedTuple):
    """The stored prefix that a sequence would start from.

    Attributes:
        num_tokens: its length, a multiple of the block size.
        num_idle_blocks: its blocks that no sequence holds; adopting them leaves so many fewer free.
    """

    num_tokens: int
    num_idle_blocks: int


NO_MATCH = PrefixMatch(0, 0)


class KVBlockManager:
    """The engine's KV memory: sequences, and the blocks and window pages they hold.

    A sequence is named by its handle, 1..num_slots. Its life is `open`, then per step `reserve`, the step itself and
    `commit`, and in the end `free`. Not thread safe.

    Attributes:
        pool: the native pool, for bulk calls and for `StepBuffers.write`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        num_window_pages: int | None = None,
        window_page: int | None = None,
        window: int = DEFAULT_WINDOW,
        num_slots: int = DEFAULT_NUM_SLOTS,
        prefix_caching: bool = False,
        page_interval: int = DEFAULT_PAGE_INTERVAL,
        max_replay: int = 0,
    ) -> None:
        """Make the bookkeeping of an empty cache.

        Args:
            num_blocks: blocks in the global group; block 0, the hole, is not counted.
            block_size: tokens in a block.
            num_window_pages: pages in the window group; by default as many tokens as the blocks hold.
            window_page: tokens in a page; by default 32, or the largest divisor it shares with `block_size`.
            window: positions a query sees, itself included.
            num_slots: sequences that may be open at once.
            prefix_caching: keep full blocks for sequences with equal tokens, until their memory is needed.
            page_interval: window pages before every multiple of so many tokens are kept longer than others.
            max_replay: the largest `replay` that `open` will be given.

        Raises:
            ConfigError: a size is out of range, or `window_page` does not divide `block_size`.
        """
        if window_page is None:
            window_page = math.gcd(DEFAULT_WINDOW_PAGE, max(block_size, 1))
        if num_window_pages is None:
            num_window_pages = num_blocks * (block_size // max(window_page, 1))
        try:
            self.pool = KVPool(
                num_blocks=num_blocks,
                block_size=block_size,
                num_window_pages=num_window_pages,
                window_page=window_page,
                window=window,
                num_slots=num_slots,
            )
            if prefix_caching:
                self.pool.enable_prefix(page_interval)
        except (ValueError, OverflowError) as error:
            raise ConfigError(str(error)) from error
        self._max_replay = max_replay + self.pool.window_page - 1 if max_replay else 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; those kept for later sequences are given up when needed."""
        return self.pool.num_free_blocks

    @property
    def num_free_pages(self) -> int:
        """Window pages that no sequence holds, counted as blocks are."""
        return self.pool.num_free_pages

    @property
    def num_free_slots(self) -> int:
        """Sequences that can still be opened."""
        return self.pool.num_free_slots

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds."""
        return -(-num_tokens // self.pool.block_size)

    def max_window_pages(self, num_rows: int) -> int:
        """The most window pages that a sequence holds while a step runs `num_rows` of its rows.

        Held are the rows and the window - 1 positions before them, or all that run again, at worst starting on the
        last token of a page.
        """
        span = max(self.pool.window - 1, self._max_replay) + max(num_rows, 1)
        return (span + self.pool.window_page - 2) // self.pool.window_page + 1

    def match(
        self, token_ids: Int32Array, salt: int = 0, *, max_stored: int | None = None, replay: int = 0
    ) -> PrefixMatch:
        """The stored prefix that `open` would start from, without the last token at least; it is not counted.

        Args:
            token_ids: [num_tokens] int32.
            salt: as for `open`, and so are the others.
            max_stored: limit.
            replay: rows.
        """
        return PrefixMatch(*self.pool.match(token_ids, salt, _limit(max_stored), replay))

    def open(
        self,
        token_ids: Int32Array,
        salt: int = 0,
        *,
        use_prefix: bool = False,
        max_stored: int | None = None,
        replay: int = 0,
    ) -> int:
        """Start a sequence of these tokens and return its handle.

        It holds no memory yet, or that of a stored prefix: `pool.num_computed` tells how long that is.

        Args:
            token_ids: [num_tokens] int32.
            salt: from `prefix_salt`; only sequences of equal salt share memory.
            use_prefix: start from a stored prefix, and store what is computed.
            max_stored: longest prefix to start from with its window pages; None for any.
            replay: above 0, start from a longer one without them where that saves rows. At least so many of its last
                tokens (`pool.num_replayed`) run again for their window records; `commit` comes behind them, and what
                follows is not stored.

        Raises:
            OutOfBlocksError: no sequence slot is free.
        """
        try:
            return self.pool.open(token_ids, salt, use_prefix, _limit(max_stored), replay)
        except PoolExhaustedError as error:
            raise OutOfBlocksError(str(error)) from error

    def reserve(self, seq: int, end: int) -> None:
        """Hold memory for all positions below `end`.

        Raises:
            OutOfBlocksError: too few blocks or window pages are free; nothing is taken.
        """
        if self.pool.reserve(seq, end):
            return
        blocks, pages = self.pool.blocks_needed(seq, end), self.pool.pages_needed(seq, end)
        if blocks > self.num_free_blocks:
            raise OutOfBlocksError(
                f"need {_count(blocks, 'block')} for {_count(end, 'token')}, {self.num_free_blocks} free"
            )
        raise OutOfBlocksError(
            f"need {_count(pages, 'window page')} for {_count(end, 'token')}, {self.num_free_pages} free"
        )

    def reserve_many(self, seqs: Int32Array, ends: Int32Array) -> int:
        """Reserve in order up to the first sequence that cannot; those before it keep what they got.

        Args:
            seqs: [num_seqs] int32 handles.
            ends: [num_seqs] int32 positions to hold memory below.

        Returns:
            The index of the sequence that failed, or `len(seqs)`.
        """
        return self.pool.reserve_many(seqs, ends)

    def commit(self, seqs: Int32Array, new_computed: Int32Array) -> None:
        """Say that the records of positions below `new_computed[i]` are stored; frees pages behind the window.

        Args:
            seqs: [num_seqs] int32 handles, each once.
            new_computed: [num_seqs] int32, each reserved and not below what was committed before.
        """
        self.pool.commit(seqs, new_computed)

    def fork(self, seq: int) -> tuple[int, list[KVCopy]]:
        """Open a second sequence with the same tokens and records, sharing full blocks and pages.

        Returns:
            The new handle, and the copies to make on the device before the next step.

        Raises:
            OutOfBlocksError: no slot, or no memory for the tail; nothing is changed.
        """
        try:
            child, copies = self.pool.fork(seq)
        except PoolExhaustedError as error:
            raise OutOfBlocksError(str(error)) from error
        return child, [KVCopy(*copy) for copy in copies]

    def import_prefix(self, token_ids: Int32Array, salt: int, has_page: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Enter a prefix that another engine computed; see `KVPool.import_prefix`. Its records are to be written next.

        Raises:
            OutOfBlocksError: sequences hold too much; nothing is entered.
        """
        try:
            return self.pool.import_prefix(token_ids, salt, has_page)
        except PoolExhaustedError as error:
            raise OutOfBlocksError(str(error)) from error

    def quarantine(self, seq: int) -> None:
        """Distrust what a sequence computed: no later sequence starts from it, and it stores nothing more."""
        self.pool.quarantine(seq)

    def free(self, seq: int) -> None:
        """End a sequence and free all it holds."""
        self.pool.close(seq)


def prefix_salt(cache_salt: str | None) -> int:
    """The 64-bit salt of a request's `cache_salt`; 0 where it has none.

    Raises:
        RequestError: it is no string.
    """
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError("invalid_parameter", f"cache_salt is {shown(cache_salt)}; it must be a string")
    if not cache_salt:
        return 0
    data = cache_salt.encode(errors="surrogatepass")  # JSON may spell half a pair
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _limit(max_stored: int | None) -> int:
    return _NO_LIMIT if max_stored is None else max_stored


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
