"""The engine: takes requests, runs steps until none is left, gives back one result per request.

A step is: the scheduler chooses rows, the executor runs them, the sampler draws, results are recorded. What a request
does wrong becomes its own error; others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from deepinfer.core.cache_sizes import CacheSizes, reuses_prefixes
from deepinfer.core.caches import CacheStore
from deepinfer.core.collector import StepCollector
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, KVTransferError, RequestError
from deepinfer.core.executor import Executor, StepLimits
from deepinfer.core.features import check_features, check_prompt_options
from deepinfer.core.grammar.compiler import GrammarJob
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import GrammarSource, ToolGrammar
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.kv_blocks import KVBlockManager, prefix_salt
from deepinfer.core.kv_bundle import KVBundle
from deepinfer.core.kv_transfer import KVTransfer
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.replay import Replay, ReplayMode
from deepinfer.core.request import Request
from deepinfer.core.request_table import RequestTable
from deepinfer.core.runner import Drawn, LaunchedStep, StepRunner
from deepinfer.core.sampler import Sampler, derive_seed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.scheduler import Scheduler, StepPlan
from deepinfer.core.shapers import FixedShape, ShapingContext, make_shaper
from deepinfer.core.speculation import Drafting, DraftSchedule, SpeculationStats
from deepinfer.core.stats import EngineStats
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_cost import CycleCost
from deepinfer.core.step_graphs import make_graphs
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import Model
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.outputs import StepArenas
from deepinfer.ops.registry import OpTable

_LOG = logging.getLogger(__name__)
_COMPILE_WAIT_SECONDS = 0.05
"""How long a step with nothing to run waits for a grammar: short, so that an abort is heeded soon."""


class Engine:
    """One model, its caches and its queues.

    Args:
        model: bound to its ops.
        config: validated settings.
        ops: the table the sampler binds from; the model's own.
        tokenizer: for text; None gives ids only.
        grammars: structured output of this vocabulary, shared with others; None for its own.
        tool_grammar: the model family's way to write calls of tools, where `grammars` is None.

    Raises:
        ConfigError: a setting that only model and device together can judge.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        ops: OpTable,
        tokenizer: Tokenizer | None = None,
        *,
        grammars: GrammarService | None = None,
        tool_grammar: ToolGrammar | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._ops = ops
        self._runtime = ops.context.runtime
        spec = model.cache_spec
        self._replay = Replay(config, model.info, spec.replay)
        max_len = config.max_model_len or model.info.max_position
        if max_len > model.info.max_position:
            raise ConfigError(f"max_model_len {max_len} exceeds the model's {model.info.max_position} positions")
        max_rows = config.max_num_batched_tokens
        self._reuses = reuses_prefixes(spec, config)
        sizes = CacheSizes.of(
            spec,
            config,
            self._runtime,
            max_len=max_len,
            num_drafts=self._block_of_drafts(),
            most_replayed=self._replay.most_replayed,
            scratch_bytes=self._draft_scratch_bytes(min(config.max_num_seqs, max_rows)),
        )
        num_blocks, num_seqs, lookahead = sizes.num_blocks, sizes.num_slots, sizes.lookahead
        self.blocks = KVBlockManager(
            num_blocks,
            config.block_size,
            num_window_pages=sizes.num_window_pages,
            window_page=config.window_page,
            window=spec.window,
            num_slots=num_seqs,
            prefix_caching=self._reuses,
            max_replay=self._replay.most_replayed,
        )
        self.max_len = min(max_len, num_blocks * config.block_size)
        caches = CacheStore(
            spec,
            self._runtime,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_window_pages=sizes.num_window_pages,
            window_page=config.window_page,
            num_slots=num_seqs,
            max_rollback=lookahead,
        )
        limits = StepLimits(max_rows, num_seqs, self.max_len, lookahead)
        self._transfer = KVTransfer(self.blocks, caches, ops, model.info, config)
        self.executor = Executor(model, caches, self.blocks, self._runtime, limits)
        rows_with_logits = max(1, min(512, (1 << 26) // model.info.vocab_size))
        self._table = RequestTable(num_seqs, model.info.vocab_size, model.info.eos_token_ids)
        self.scheduler = Scheduler(self.blocks, self._table, num_seqs, max_rows, rows_with_logits)
        self.sampler = Sampler(ops, num_slots=num_seqs)
        self._drafting = self._make_drafting(caches, num_seqs)
        self._runner = StepRunner(self.executor, self.sampler, ops, self._drafting, self._replay, self._table)
        asynchronous = config.async_scheduling
        self.is_async = self._runtime.capabilities.asynchronous if asynchronous is None else asynchronous
        ops.bind(copy_blocks)  # bound at the first copy otherwise; the table has to be complete here
        sync_reason = ""
        if self.is_async and ops.through_host:
            few = ", ".join(ops.through_host[:6]) + (", ..." if len(ops.through_host) > 6 else "")
            sync_reason = f"{len(ops.through_host)} ops run on references, for which the host waits in a step: {few}"
            _LOG.warning("steps are not asynchronous on backend %s: %s", ops.backend.name, sync_reason)
            self.is_async = False
        self._runner.graphs, graph_reason = make_graphs(
            config, ops, self.executor, self.sampler, self._drafting, self._table, limits
        )
        if self._drafting is not None:
            self._drafting.cost.overlaps = self.is_async and self._runtime.capabilities.asynchronous
        self._guards_launch = self.is_async and config.sync_guard
        self._permitted_before = self._runtime.sync_guard.permitted.copy()
        self._arenas = StepArenas(self._runtime)
        self._in_flight: LaunchedStep | None = None
        self._drawn: Drawn | None = None
        self._drew: Int32Array = np.zeros(0, np.int32)
        self._recorder = OutputRecorder(model.info.eos_token_ids, tokenizer)
        self._shaping = ShapingContext(model.info.vocab_size, model.info.eos_token_ids, tokenizer)
        self._grammars, self._owns_grammars = grammars, grammars is None
        if grammars is None and tokenizer is not None:
            self._grammars = GrammarService(
                tokenizer,
                model.info.vocab_size,
                model.info.eos_token_ids,
                num_workers=config.grammar_workers,
                timeout=config.grammar_timeout,
                cache_bytes=config.grammar_cache_bytes,
                tool_grammar=tool_grammar,
            )
        self._compiling: dict[str, GrammarJob] = {}
        self._requests: dict[str, list[Request]] = {}
        self._ended: list[RequestOutput] = []
        self._ordinal = 0
        self._stats = EngineStats(num_blocks=num_blocks, is_async=self.is_async, sync_reason=sync_reason)
        self._stats.graph_reason = graph_reason
        self._collector = StepCollector(
            self._runtime,
            self.sampler,
            self._recorder,
            self.blocks,
            self._drafting,
            self._table,
            self._stats,
            model.info.vocab_size,
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        seed_key: int | str | None = None,
        chunk_size: int | None = None,
        decode_from: int | None = None,
        return_logits: bool = False,
        use_prefix: bool = True,
        cache_salt: str | None = None,
        replay: ReplayMode | None = None,
        keep_tokens: int | None = None,
    ) -> RequestOutput:
        """Check a request and queue it.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: at least one id of the vocabulary.
            params: how to sample; `max_tokens=0` scores the prompt only.
            prompt: its text, for the result.
            seed_key: names the request where it has no seed of its own; by default its ordinal in this engine.
            chunk_size: most rows of one step.
            decode_from: position from which prompt tokens run one at a time.
            return_logits: keep the logits of all prompt positions in the result.
            use_prefix: start from stored KV of an equal prefix, and store this request's own. Requests that want logits
                or logprobs of prompt positions never do.
            cache_salt: only requests of equal salt share KV.
            replay: in place of the engine's setting, which applies to requests that score no prompt position. With
                `return_logits` the result has the logits of the rows that are kept.
            keep_tokens: in place of the engine's setting.

        Returns:
            The live result: the object that `step` gives back.

        Raises:
            RequestError: the request cannot be served; nothing was queued.
        """
        if request_id in self._requests:
            raise RequestError("duplicate_request_id", f"a request with id {request_id!r} is live; choose another id")
        ids = [int(t) for t in prompt_token_ids]
        self._check_prompt(ids)
        params.validate(self.model.info.vocab_size)
        check_features(params, has_tokenizer=self._recorder.has_tokenizer)
        if return_logits and params.n > 1:
            raise RequestError("invalid_parameter", f"return_logits gives those of the prompt, once; n is {params.n}")
        check_prompt_options(chunk_size=chunk_size, decode_from=decode_from, keep_tokens=keep_tokens, replay=replay)
        salt = prefix_salt(cache_salt)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, self._ordinal if seed_key is None else seed_key)
        self._ordinal += 1
        request = Request.new(request_id, ids, params, seed, self.max_len, prompt)
        request.chunk_size, request.decode_from, request.return_logits = chunk_size, decode_from, return_logits
        request.use_prefix = use_prefix and self._reuses and request.num_prompt_rows_wanted == 0
        request.prefix_salt = salt
        self._replay.begin(request, replay, keep_tokens)
        self._queue(request)
        return request.output

    def step(self) -> list[RequestOutput]:
        """Launch a step and collect a finished one: the same one, or with asynchronous scheduling the one before.

        Returns:
            The results that changed: of requests that got tokens, scored their prompt, or ended. They are the live
            objects, updated by later steps until `finished`.

        Raises:
            Exception: whatever the model or the device raised. Every live request has ended with the error
                `engine_error`, which the next call gives back, and what they held is free; new requests may be tried.
        """
        try:
            with self._ops.outputs.taken_from(self._arenas.new):
                changed = self._step()
            if not self.has_unfinished():
                self._arenas.clear()
            return changed
        except Exception as error:
            self._fail_live(error)
            raise

    def _step(self) -> list[RequestOutput]:
        changed: list[RequestOutput] = []
        start = time.perf_counter()
        if self._compiling:
            self._admit_compiled()
        with self._runtime.sync_guard.forbid("the launch of a step") if self._guards_launch else nullcontext():
            launched = self._launch()
        if self.is_async:
            finished, self._in_flight = self._in_flight, launched
        else:
            finished = launched
        if finished is not None:
            changed.extend(self._collect(finished))
            if self._drafting is not None and finished.marks is not None:
                self._drafting.observe_times(
                    finished.marks,
                    finished.plan.query_lens,
                    finished.plan.starts,
                    len(finished.draws) if finished.num_drafted else 0,
                    cycle=time.perf_counter() - start,
                    waited=finished.waited,
                )
        ended, self._ended = self._ended, []
        if not ended:
            return changed
        return list({id(output): output for output in ended + changed}.values())

    def _fail_live(self, error: Exception) -> None:
        """End all live requests after a step that failed half-way: nothing it planned or stored is to be trusted."""
        self._in_flight, self._drawn = None, None
        self.scheduler.drop_copies()
        what = f"{type(error).__name__}: {error}"
        fault = RequestError("engine_error", f"a step failed and took this request with it: {what}")
        for choices in list(self._requests.values()):
            for request in choices:
                if request.seq:
                    self.blocks.quarantine(request.seq)
                if request.completion.finish_reason is None:
                    self._recorder.fail(request, fault)
            self._end_all(choices)

    def export_blocks(self, source: str | Sequence[int], *, cache_salt: str | None = None) -> KVBundle:
        """Copy what is stored of a prefix to the host, for another engine of the same model and settings.

        That is the longest prefix from which a request can continue exactly: whole blocks, and window pages that are
        held of them. Waits for the device; requests that run do not notice.

        Args:
            source: the id of a live request, for what it has computed so far; or token ids.
            cache_salt: of the requests that stored them; a live request has its own.

        Raises:
            KVTransferError: no such request is live, or nothing is stored that could be continued.
        """
        if not isinstance(source, str):
            return self._transfer.export(np.array(source, dtype=np.int32), prefix_salt(cache_salt))
        choices = self._requests.get(source)
        if choices is None:
            raise KVTransferError(f"no request {source!r} is live; export a finished one by its token ids")
        return self._transfer.export(choices[0].token_ids, choices[0].prefix_salt)

    def import_blocks(self, bundle: KVBundle) -> int:
        """Store a prefix that another engine computed; requests that begin with it, and have its salt, start from it.

        Where memory is short, stored prefixes that no request holds are given up for it, least recently used first.

        Returns:
            Tokens of it that are stored now.

        Raises:
            KVTransferError: it belongs to another model, record layout or numerics, or is damaged; nothing changed.
            OutOfBlocksError: running requests hold too much; nothing changed.
        """
        return self._transfer.store(bundle)

    def has_unfinished(self) -> bool:
        """Requests are live, or results have not been fetched yet."""
        return self.scheduler.has_work or bool(self._ended or self._compiling) or self._in_flight is not None

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; its result comes with the next step.

        Returns:
            False when no such request is live.
        """
        choices = self._requests.get(request_id)
        if choices is None:
            return False
        for request in choices:
            self._recorder.finish(request, "abort")
        self._end_all(choices)
        return True

    @property
    def speculation(self) -> SpeculationStats | None:
        """Acceptance of drafts so far; None without speculation."""
        return self._drafting.stats if self._drafting is not None else None

    @property
    def step_cost(self) -> CycleCost | None:
        """What steps were found to cost, by which drafts are scheduled; None without speculation."""
        return self._drafting.cost if self._drafting is not None else None

    def stats(self) -> EngineStats:
        """Counters so far."""
        self._stats.num_running = len(self.scheduler.running)
        self._stats.num_waiting = len(self.scheduler.waiting)
        self._stats.num_compiling = len(self._compiling)
        self._stats.num_preemptions = self.scheduler.num_preemptions
        self._stats.num_free_blocks = self.blocks.num_free_blocks
        self._stats.num_host_waits = self._collector.num_draft_waits + self._runner.shaping.num_host_waits
        masks = self._runner.shaping.grammar
        self._stats.num_grammar_steps, self._stats.num_masked_rows = masks.num_steps, masks.num_rows
        self._stats.num_illegal_drafts = masks.num_illegal_drafts
        if self._runner.graphs is not None:
            self._runner.graphs.report(self._stats)
        self._stats.permitted_waits = dict(self._runtime.sync_guard.permitted - self._permitted_before)
        self._stats.speculation = replace(self.speculation) if self.speculation is not None else None
        prefix = self.blocks.pool.prefix_stats()
        self._stats.prefix_query_tokens, self._stats.prefix_hit_tokens = prefix["query_tokens"], prefix["hit_tokens"]
        self._stats.prefix_misses = {
            "no_block": prefix["missed_no_block"],
            "no_pages": prefix["missed_no_pages"],
            "too_short": prefix["missed_too_short"],
            "disabled": prefix["disabled"],
        }
        return self._stats

    def close(self) -> None:
        """Abort what is left; the engine takes no more requests."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._in_flight, self._drawn = None, None
        if self._owns_grammars and self._grammars is not None:
            self._grammars.close()
        self._runtime.synchronize()

    def _block_of_drafts(self) -> int:
        """Most drafts of a step; 0 without speculation.

        Raises:
            ConfigError: speculation is asked for, and the model has no draft.
        """
        if self.config.speculation == "off":
            return 0
        draft = self.model.draft
        if draft is None:
            raise ConfigError(
                f"speculation={self.config.speculation!r} needs a draft, and {self.model.info.name} has none loaded"
            )
        return min(self.config.num_drafts or draft.num_tokens, draft.num_tokens)

    def _make_drafting(self, caches: CacheStore, num_seqs: int) -> Drafting | None:
        num_drafts = self._block_of_drafts()
        if num_drafts == 0 or self.model.draft is None:
            return None
        return Drafting(
            self.model.draft,
            caches,
            self.sampler,
            self._ops,
            schedule=DraftSchedule(
                num_drafts,
                adaptive=self.config.draft_schedule == "adaptive",
                rejection=self.config.speculation == "rejection",
                temperatures=self._confidence_temperatures(self.model.draft.num_tokens),
            ),
            table=self._table,
            max_seqs=num_seqs,
            max_rows=self.config.max_num_batched_tokens,
        )

    def _confidence_temperatures(self, num_tokens: int) -> tuple[float, ...]:
        """One for each draft of a block, or none where all are 1.

        Raises:
            ConfigError: there are neither one nor as many as drafts.
        """
        given = self.config.confidence_temperature
        if len(given) not in (1, num_tokens):
            raise ConfigError(
                f"confidence_temperature has {len(given)} values; a draft of {num_tokens} tokens takes 1 or as many"
            )
        return () if set(given) == {1.0} else given * (num_tokens // len(given))

    def _draft_scratch_bytes(self, num_seqs: int) -> int:
        """Device memory that drafting for so many sequences takes, learnt by taking it once."""
        if self._block_of_drafts() == 0 or self.model.draft is None:
            return 0
        return self.model.draft.new_scratch(num_seqs).data.nbytes

    def _check_prompt(self, ids: list[int]) -> None:
        vocab = self.model.info.vocab_size
        if not ids:
            raise RequestError("empty_prompt", "the prompt has no token; give at least one")
        if len(ids) > self.max_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens; this engine takes {self.max_len} "
                f"(max_model_len and the KV cache of {self.blocks.pool.num_blocks} blocks of {self.config.block_size})",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise RequestError(
                "token_out_of_range", f"prompt_token_ids[{ids.index(bad)}] is {bad}; ids run from 0 to {vocab - 1}"
            )

    def _queue(self, request: Request) -> None:
        """Take a checked request, all its choices at once; it is scheduled when it needs no grammar any more."""
        params = request.params
        choices = [request, *(request.new_sibling(choice) for choice in range(1, params.n))]
        source = self._constrain(choices) if params.structured_output is not None else None
        for choice in choices:
            others = () if choice.grammar is None else (choice.grammar,)
            choice.shaper = make_shaper(params, request.prompt_token_ids, self._shaping, *others)
            choice.waits = choice.shaper is not None and not isinstance(choice.shaper, FixedShape)
            self._recorder.start(choice)
        self._requests[request.request_id] = choices
        if source is None:
            self._schedule(choices)
        else:
            assert self._grammars is not None and params.structured_output is not None, "there is a source"
            self._compiling[request.request_id] = self._grammars.submit(params.structured_output, source)

    def prepare_form(self, spec: StructuredOutput) -> None:
        """Do now, in any thread, what queueing a request of this form would spend time on; it is kept.

        Raises:
            RequestError: the form cannot be had.
        """
        if self._grammars is not None:
            self._grammars.source(spec)

    def _constrain(self, choices: list[Request]) -> GrammarSource:
        """Give all choices of a request that must have a form what holds them to it.

        Raises:
            RequestError: the form cannot be had.
        """
        spec, params = choices[0].params.structured_output, choices[0].params
        assert spec is not None and self._grammars is not None, "checked by core.features"
        source = self._grammars.source(spec)
        for choice in choices:
            choice.grammar = self._grammars.shaper(
                spec,
                self._runner.shaping.grammar,
                choice.prompt_token_ids,
                stop_token_ids=params.stop_token_ids,
                min_tokens=params.min_tokens,
            )
        return source

    def _admit_compiled(self) -> None:
        """Queue the requests whose grammars are there; with nothing else to do, wait a little for one."""
        assert self._grammars is not None, "something compiles"
        if not (self.scheduler.has_work or self._in_flight is not None or self._ended):
            self._grammars.compiler.wait(list(self._compiling.values()), _COMPILE_WAIT_SECONDS)
        for request_id, job in [item for item in self._compiling.items() if item[1].is_done]:
            choices = self._requests[request_id]
            if job.grammar is None:
                for choice in choices:
                    assert job.error is not None, "a job that is done has one or the other"
                    self._recorder.fail(choice, job.error)
                self._end_all(choices)
                continue
            del self._compiling[request_id]
            for choice in choices:
                assert choice.grammar is not None, "given when the request was queued"
                choice.grammar.start(job.grammar)
            self._schedule(choices)

    def _schedule(self, choices: list[Request]) -> None:
        """Queue the choices of a request, those but the first behind its prompt."""
        request = choices[0]
        if len(request.prompt_token_ids) > 1:
            request.siblings = choices[1:]
            choices = choices[:1]
        for choice in choices:
            self.scheduler.add(choice)

    def _launch(self) -> LaunchedStep | None:
        if self._drafting is not None:
            self._drafting.allot(self.scheduler.running_seqs())
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self._arenas.begin_step()
        for kind in ("block", "page", "state"):
            copies = [(copy.src, copy.dst) for copy in plan.copies if copy.kind == kind]
            if copies:
                self.executor.caches.copy(self._ops, kind, *zip(*copies, strict=True))
        self._begin(plan)
        launched = self._runner.launch(plan, self._drawn)
        table = self._table
        table.planned_computed[plan.seqs] += plan.query_lens
        if self._drawn is not None:
            table.draw[self._drew] = -1
            table.num_drafts[self._drew[~table.waits[self._drew]]] = 0  # they were in the step that is forgotten now
        slots = plan.seqs[launched.places]
        waits = table.waits[slots]
        self._drawn, self._drew = launched.drawn, slots
        table.planned_tokens[slots] += launched.num_drafts + 1
        # Who waits is planned again when this step is collected, with drafts that the host has seen.
        next_drafts = min(launched.num_drafted, self._drafting.num_drafts) if self._drafting is not None else 0
        table.draw[slots] = np.where(waits, -1, np.arange(len(slots), dtype=np.int32))
        table.num_drafts[slots] = np.where(waits, 0, next_drafts)
        return launched

    def _begin(self, plan: StepPlan) -> None:
        """Prepare the requests whose first step this is, since they were admitted."""
        new = np.flatnonzero(self._table.is_new[plan.seqs])
        for place in new.tolist():
            request = plan.requests[place]
            self.sampler.set_slot(request.seq, request.params, request.seed, request.choice)
            if request.output.timings.scheduled is None:
                request.output.timings.scheduled = time.monotonic()
                self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        self._table.is_new[plan.seqs[new]] = False

    def _collect(self, launched: LaunchedStep) -> list[RequestOutput]:
        """Record what a launched step brought, and free what has ended."""
        collected = self._collector.collect(launched, self._fail_all)
        for request in collected.ended:
            self._end(request)
        return collected.outputs

    def _fail_all(self, request: Request, fault: RequestError) -> None:
        """End all answers to a prompt that the model has no numbers for, and distrust what it stored."""
        choices = self._requests[request.request_id]
        for choice in choices:
            self._recorder.fail(choice, fault)
            if choice.seq:
                self.blocks.quarantine(choice.seq)
        self._end_all(choices)

    def _end_all(self, choices: list[Request]) -> None:
        """Free what unfinished choices of a request hold; its result comes with the next step."""
        output = choices[0].output
        job = self._compiling.pop(output.request_id, None)
        if job is not None and self._grammars is not None:
            self._grammars.compiler.cancel(job)
        held = [sibling for request in choices for sibling in request.siblings]  # they are in no queue
        for sibling in held:
            choices.remove(sibling)
        for request in list(choices):
            request.siblings = []
            self._end(request, is_queued=job is None)
        self._ended.append(output)

    def _end(self, request: Request, *, is_queued: bool = True) -> None:
        if is_queued:
            self.scheduler.finish(request)
        choices = self._requests[request.request_id]
        choices.remove(request)
        if choices:
            return
        del self._requests[request.request_id]
        if request.return_logits and request.prompt_logits:
            request.output.prompt_logits = torch.cat(request.prompt_logits)
        self._stats.num_finished += 1
