"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters since the engine was made, and what runs now.

    Attributes:
        prefix_query_tokens: tokens of requests that were admitted, or resumed, and may start from stored KV.
        prefix_hit_tokens: those of them that were stored.
        num_host_waits: times that drafts or logits were brought to the host, for requests that shape their rows.
        prefix_misses: admissions without a hit by cause: `no_block` (nothing stored begins alike), `no_pages` (it does,
            but its window is gone), `too_short` (no full block before the last token), `disabled`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_misses: dict[str, int] = field(default_factory=dict)
    num_host_waits: int = 0
