"""How large an engine's caches are: pages and slots follow from the settings, blocks take the memory that is left."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core.caches import pool_row_bytes, state_shape
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.graph_memory import GRAPH_BYTES, GRAPH_SHARE
from deepinfer.models.interface import CacheSpec
from deepinfer.ops.runtime import Runtime


@dataclass(frozen=True)
class CacheSizes:
    """Numbers that the caches of one engine are made with.

    Attributes:
        num_blocks: usable blocks.
        num_window_pages: usable window pages, so many that only blocks can run out.
        num_slots: sequences that run at once.
        lookahead: tokens that steps in flight may plan beyond what turns out to be accepted.
        graph_bytes: device memory that is left to results of captured steps.
        fixed_bytes: device memory of all caches but the blocks.
        block_bytes: device memory of a block.
    """

    num_blocks: int
    num_window_pages: int
    num_slots: int
    lookahead: int
    graph_bytes: int
    fixed_bytes: int
    block_bytes: int

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        config: EngineConfig,
        runtime: Runtime,
        *,
        max_len: int,
        num_drafts: int,
        most_replayed: int,
        scratch_bytes: int,
        captures: bool = False,
    ) -> CacheSizes:
        """Settle the sizes.

        Args:
            spec: what the model keeps.
            config: validated settings.
            runtime: whose memory it is.
            max_len: tokens of the longest sequence.
            num_drafts: most drafts of a step.
            most_replayed: rows that may run again behind a stored prefix.
            scratch_bytes: device memory that the draft will take beside.
            captures: decode steps may be captured.

        Raises:
            ConfigError: not even one block fits; says what takes how much.
        """
        page, block = config.window_page, config.block_size
        max_rows = config.max_num_batched_tokens
        num_slots = min(config.max_num_seqs, max_rows)
        lookahead = 2 * (num_drafts + 1)
        reach = max(spec.window + lookahead, most_replayed)
        pages_per_seq = -(-(reach + page) // page) + 1
        # Enough for every sequence's window and the rows of two steps on top (pages behind the window are freed when a
        # step is collected, and one may be in flight by then).
        num_pages = num_slots * pages_per_seq + -(-2 * max_rows // page) + num_slots
        if reuses_prefixes(spec, config):
            extra = config.prefix_window_pages
            num_pages += num_slots * pages_per_seq if extra is None else extra
        block_bytes = pool_row_bytes([(r, block // r.ratio) for r in spec.block_records])
        page_bytes = (num_pages + 1) * pool_row_bytes([(r, page) for r in spec.window_records])
        state_bytes = sum(_bytes_of(state_shape(s, num_slots, lookahead)) for s in spec.states)
        fixed = page_bytes + state_bytes + scratch_bytes
        num_blocks, graph_bytes = config.num_kv_blocks, GRAPH_BYTES if captures else 0
        if num_blocks is None:
            free = runtime.memory_info().free_bytes
            graph_bytes = min(graph_bytes, int(free * GRAPH_SHARE))
            budget = config.kv_memory_bytes
            if budget is None:
                budget = int(free * config.memory_utilization) - graph_bytes
            useful = num_slots * -(-max_len // block)  # more than all sequences could ever fill
            num_blocks = min(useful, (budget - fixed) // (block_bytes or 1) - 1)  # block 0 takes memory as well
            if num_blocks < 1:
                raise ConfigError(
                    f"no KV block fits: of {budget} bytes to use, {page_bytes} go to {num_pages} window pages, "
                    f"{state_bytes} to compressor states, {scratch_bytes} to the draft, and a block of {block} tokens "
                    f"takes {block_bytes}, the unused block 0 as well; lower max_num_seqs, max_num_batched_tokens or "
                    "prefix_window_pages, or allow more memory"
                )
        return cls(num_blocks, num_pages, num_slots, lookahead, graph_bytes, fixed, block_bytes)


def reuses_prefixes(spec: CacheSpec, config: EngineConfig) -> bool:
    """Whether requests start from stored KV; without records, as a puppet may be, there is nothing to start from."""
    return config.prefix_caching and bool(spec.block_records or spec.window_records)


def _bytes_of(shape: tuple[int, ...]) -> int:
    count = 4  # float32
    for size in shape:
        count *= size
    return count
