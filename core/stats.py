"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.core.speculation import SpeculationStats


@dataclass
class EngineStats:
    """Counters since the engine was made, and what runs now.

    Attributes:
        prefix_query_tokens: tokens of requests that were admitted, or resumed, and may start from stored KV.
        prefix_hit_tokens: those of them that were stored.
        is_async: steps are planned while the one before runs.
        sync_reason: why they are not, where the device or a setting asks for it; empty otherwise.
        num_graphs: graphs that were captured; a decode step is up to three.
        graph_bytes: device memory that results in graphs take.
        num_graph_steps: steps that ran as graphs.
        num_eager_steps: the others, by the reason why they did not; empty where nothing is captured at all.
        graph_reason: why nothing is captured, or nothing any more; empty otherwise.
        num_compiling: requests that wait for a grammar; they are not among `num_waiting`.
        num_grammar_steps: steps with rows that a grammar masked. Their requests waited for the step before.
        num_masked_rows: such rows.
        num_illegal_drafts: drafts that a grammar forbade, and that were rejected for it.
        num_host_waits: times that drafts or logits were brought to the host, for requests that shape their rows.
        permitted_waits: with steps that are launched ahead, waits inside a launch by the reason that was given for
            them (`deepinfer.ops.sync_guard`); any other wait there is an error.
        speculation: what became of drafts; None without speculation.
        prefix_misses: admissions without a hit by cause: `no_block` (nothing stored begins alike), `no_pages` (it does,
            but its window is gone), `too_short` (no full block before the last token), `disabled`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_compiling: int = 0
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
    permitted_waits: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    is_async: bool = False
    sync_reason: str = ""
    num_graphs: int = 0
    graph_bytes: int = 0
    num_graph_steps: int = 0
    num_eager_steps: dict[str, int] = field(default_factory=dict)
    graph_reason: str = ""
    num_grammar_steps: int = 0
    num_masked_rows: int = 0
    num_illegal_drafts: int = 0
