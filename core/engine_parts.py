"""What an engine is made of, sized for its model, its settings and its device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from deepinfer.core.cache_sizes import CacheSizes, reuses_prefixes
from deepinfer.core.caches import CacheStore
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError
from deepinfer.core.executor import Executor, StepLimits
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.kv_transfer import KVTransfer
from deepinfer.core.replay import Replay
from deepinfer.core.request_table import RequestTable
from deepinfer.core.runner import StepRunner
from deepinfer.core.sampler import Sampler
from deepinfer.core.scheduler import Scheduler
from deepinfer.core.speculation import Drafting, DraftSchedule
from deepinfer.core.step_graphs import make_graphs, may_capture
from deepinfer.models.interface import Model
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.registry import OpTable

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine.

    Attributes:
        replay: which rows of a prompt run again, and where.
        reuses: requests may start from stored prefixes.
        blocks: who holds which KV memory.
        max_len: tokens that a request may reach.
        transfer: takes prefixes out, and enters those of other engines.
        executor: runs the model.
        table: the running requests.
        scheduler: the queues.
        sampler: parameters by slot, and the sampling ops.
        drafting: None without speculation.
        runner: launches steps.
        is_async: a step is launched before the one in front of it is collected.
        sync_reason: why not, where that was asked for; "" otherwise.
        graph_reason: what `make_graphs` says of captured steps.
    """

    replay: Replay
    reuses: bool
    blocks: KVBlockManager
    max_len: int
    transfer: KVTransfer
    executor: Executor
    table: RequestTable
    scheduler: Scheduler
    sampler: Sampler
    drafting: Drafting | None
    runner: StepRunner
    is_async: bool
    sync_reason: str
    graph_reason: str


def build_parts(model: Model, config: EngineConfig, ops: OpTable) -> EngineParts:
    """Make the parts of an engine; takes the memory of its caches.

    Args:
        model: bound to its ops.
        config: validated settings.
        ops: the model's own table.

    Raises:
        ConfigError: a setting that only model and device together can judge.
    """
    runtime = ops.context.runtime
    spec = model.cache_spec
    replay = Replay(config, model.info, spec.replay)
    max_len = config.max_model_len or model.info.max_position
    if max_len > model.info.max_position:
        raise ConfigError(f"max_model_len {max_len} exceeds the model's {model.info.max_position} positions")
    max_rows, num_drafts = config.max_num_batched_tokens, _block_of_drafts(model, config)
    reuses = reuses_prefixes(spec, config)
    sizes = CacheSizes.of(
        spec,
        config,
        runtime,
        max_len=max_len,
        num_drafts=num_drafts,
        most_replayed=replay.most_replayed,
        scratch_bytes=_draft_scratch_bytes(model, num_drafts, min(config.max_num_seqs, max_rows)),
        captures=may_capture(config, runtime),
    )
    num_blocks, num_seqs, lookahead = sizes.num_blocks, sizes.num_slots, sizes.lookahead
    blocks = KVBlockManager(
        num_blocks,
        config.block_size,
        num_window_pages=sizes.num_window_pages,
        window_page=config.window_page,
        window=spec.window,
        num_slots=num_seqs,
        prefix_caching=reuses,
        max_replay=replay.most_replayed,
    )
    longest = min(max_len, num_blocks * config.block_size)
    caches = CacheStore(
        spec,
        runtime,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_window_pages=sizes.num_window_pages,
        window_page=config.window_page,
        num_slots=num_seqs,
        max_rollback=lookahead,
    )
    limits = StepLimits(max_rows, num_seqs, longest, lookahead)
    transfer = KVTransfer(blocks, caches, ops, model.info, config)
    executor = Executor(model, caches, blocks, runtime, limits)
    rows_with_logits = max(1, min(512, (1 << 26) // model.info.vocab_size))
    table = RequestTable(num_seqs, model.info.vocab_size, model.info.eos_token_ids)
    scheduler = Scheduler(blocks, table, num_seqs, max_rows, rows_with_logits, drafts=num_drafts > 0)
    sampler = Sampler(ops, num_slots=num_seqs)
    drafting = _make_drafting(model, config, ops, caches, sampler, table, num_drafts, num_seqs)
    runner = StepRunner(executor, sampler, ops, drafting, replay, table)
    asynchronous = config.async_scheduling
    is_async = runtime.capabilities.asynchronous if asynchronous is None else asynchronous
    ops.bind(copy_blocks)  # bound at the first copy otherwise; the table has to be complete here
    sync_reason = ""
    if is_async and ops.through_host:
        few = ", ".join(ops.through_host[:6]) + (", ..." if len(ops.through_host) > 6 else "")
        sync_reason = f"{len(ops.through_host)} ops run on references, for which the host waits in a step: {few}"
        _LOG.warning("steps are not asynchronous on backend %s: %s", ops.backend.name, sync_reason)
        is_async = False
    runner.graphs, graph_reason = make_graphs(
        config, ops, executor, sampler, drafting, table, limits, sizes.graph_bytes
    )
    if drafting is not None:
        drafting.cost.overlaps = is_async and runtime.capabilities.asynchronous
    return EngineParts(
        replay,
        reuses,
        blocks,
        longest,
        transfer,
        executor,
        table,
        scheduler,
        sampler,
        drafting,
        runner,
        is_async,
        sync_reason,
        graph_reason,
    )


def _block_of_drafts(model: Model, config: EngineConfig) -> int:
    """Most drafts of a step; 0 without speculation.

    Raises:
        ConfigError: speculation is asked for, and the model has no draft.
    """
    if config.speculation == "off":
        return 0
    draft = model.draft
    if draft is None:
        raise ConfigError(f"speculation={config.speculation!r} needs a draft, and {model.info.name} has none loaded")
    return min(config.num_drafts or draft.num_tokens, draft.num_tokens)


def _make_drafting(
    model: Model,
    config: EngineConfig,
    ops: OpTable,
    caches: CacheStore,
    sampler: Sampler,
    table: RequestTable,
    num_drafts: int,
    num_seqs: int,
) -> Drafting | None:
    if num_drafts == 0 or model.draft is None:
        return None
    return Drafting(
        model.draft,
        caches,
        sampler,
        ops,
        schedule=DraftSchedule(
            num_drafts,
            adaptive=config.draft_schedule == "adaptive",
            rejection=config.speculation == "rejection",
            temperatures=_confidence_temperatures(config, model.draft.num_tokens),
        ),
        table=table,
        max_seqs=num_seqs,
        max_rows=config.max_num_batched_tokens,
    )


def _confidence_temperatures(config: EngineConfig, num_tokens: int) -> tuple[float, ...]:
    """One for each draft of a block, or none where all are 1.

    Raises:
        ConfigError: there are neither one nor as many as drafts.
    """
    given = config.confidence_temperature
    if len(given) not in (1, num_tokens):
        raise ConfigError(
            f"confidence_temperature has {len(given)} values; a draft of {num_tokens} tokens takes 1 or as many"
        )
    return () if set(given) == {1.0} else given * (num_tokens // len(given))


def _draft_scratch_bytes(model: Model, num_drafts: int, num_seqs: int) -> int:
    """Device memory that drafting for so many sequences takes, learnt by taking it once."""
    if num_drafts == 0 or model.draft is None:
        return 0
    return model.draft.new_scratch(num_seqs).data.nbytes
