"""The engine: takes requests, runs steps until none is left, gives back one result per request.

A step is: the scheduler chooses rows, the executor runs them, the sampler draws, results are recorded. What a request
does wrong becomes its own error; others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from deepinfer.core.caches import CacheStore, pool_row_bytes
from deepinfer.core.collector import StepCollector
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.executor import Executor, StepLimits
from deepinfer.core.features import check_features, check_prompt_options
from deepinfer.core.kv_blocks import KVBlockManager, prefix_salt
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.replay import Replay, ReplayMode
from deepinfer.core.request import Request
from deepinfer.core.runner import Drawn, LaunchedStep, StepRunner
from deepinfer.core.sampler import Sampler, derive_seed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.scheduler import Scheduler
from deepinfer.core.shapers import FixedShape, ShapingContext, make_shaper
from deepinfer.core.speculation import Drafting, LengthPolicy, SpeculationStats
from deepinfer.core.stats import EngineStats
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import Model
from deepinfer.ops.registry import OpTable


class Engine:
    """One model, its caches and its queues.

    Args:
        model: bound to its ops.
        config: validated settings.
        ops: the table the sampler binds from; the model's own.
        tokenizer: for text; None gives ids only.

    Raises:
        ConfigError: a setting that only model and device together can judge.
    """

    def __init__(self, model: Model, config: EngineConfig, ops: OpTable, tokenizer: Tokenizer | None = None) -> None:
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
        num_seqs = min(config.max_num_seqs, max_rows)
        num_blocks = config.num_kv_blocks or self._num_blocks_that_fit(max_len, num_seqs)
        page = config.window_page
        # Tokens that steps in flight may plan beyond what turns out to be accepted.
        lookahead = 2 * (self._block_of_drafts() + 1)
        reach = max(spec.window + lookahead, self._replay.most_replayed)
        pages_per_seq = -(-(reach + page) // page) + 1
        # Enough for every sequence's window and the rows of two steps on top (pages behind the window are freed when a
        # step is collected, and one may be in flight by then), so that only blocks can run out.
        num_pages = num_seqs * pages_per_seq + -(-2 * max_rows // page) + num_seqs
        # A model that keeps no records here, as a puppet does, has nothing that another request could start from.
        self._reuses = config.prefix_caching and bool(spec.block_records or spec.window_records)
        if self._reuses:
            extra = config.prefix_window_pages
            num_pages += num_seqs * pages_per_seq if extra is None else extra
        self.blocks = KVBlockManager(
            num_blocks,
            config.block_size,
            num_window_pages=num_pages,
            window_page=page,
            window=spec.window,
            max_rollback=lookahead,
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
            num_window_pages=num_pages,
            window_page=page,
            num_slots=num_seqs,
            max_rollback=lookahead,
        )
        limits = StepLimits(max_rows, num_seqs, self.max_len, lookahead)
        self.executor = Executor(model, caches, self.blocks, self._runtime, limits)
        rows_with_logits = max(1, min(512, (1 << 26) // model.info.vocab_size))
        self.scheduler = Scheduler(self.blocks, num_seqs, max_rows, rows_with_logits)
        self.sampler = Sampler(ops, num_slots=num_seqs)
        self._drafting = self._make_drafting(caches, num_seqs)
        self._runner = StepRunner(self.executor, self.sampler, ops, self._drafting, self._replay)
        asynchronous = config.async_scheduling
        self.is_async = self._runtime.capabilities.asynchronous if asynchronous is None else asynchronous
        self._in_flight: LaunchedStep | None = None
        self._drawn: Drawn | None = None
        self._drew: list[Request] = []
        self._recorder = OutputRecorder(model.info.eos_token_ids, tokenizer)
        self._shaping = ShapingContext(model.info.vocab_size, model.info.eos_token_ids, tokenizer)
        self._requests: dict[str, list[Request]] = {}
        self._ended: list[RequestOutput] = []
        self._ordinal = 0
        self._stats = EngineStats(num_blocks=num_blocks)
        self._collector = StepCollector(
            self._runtime, self.sampler, self._recorder, self.blocks, self._drafting, self._stats, model.info.vocab_size
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
    ) -> None:
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
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, self._ordinal if seed_key is None else seed_key)
        self._ordinal += 1
        request = Request.new(request_id, ids, params, seed, self.max_len, prompt)
        request.chunk_size, request.decode_from, request.return_logits = chunk_size, decode_from, return_logits
        request.use_prefix = use_prefix and self._reuses and request.num_prompt_rows_wanted == 0
        request.prefix_salt = prefix_salt(cache_salt)
        self._replay.begin(request, replay, keep_tokens)
        self._queue(request)

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
            return self._step()
        except Exception as error:
            self._fail_live(error)
            raise

    def _step(self) -> list[RequestOutput]:
        changed: list[RequestOutput] = []
        start = time.perf_counter()
        launched = self._launch()
        if self.is_async:
            finished, self._in_flight = self._in_flight, launched
        else:
            finished = launched
        if finished is not None:
            changed.extend(self._collect(finished))
            if self._drafting is not None:
                plan = finished.plan
                context = int(plan.starts.sum())
                seconds = time.perf_counter() - start - self._drafting.take_seconds()
                self._drafting.policy.cost.observe(int(plan.query_lens.sum()), context, seconds)
        ended, self._ended = self._ended, []
        return list({id(output): output for output in ended + changed}.values())

    def _fail_live(self, error: Exception) -> None:
        """End all live requests after a step that failed half-way: nothing it planned or stored is to be trusted."""
        self._in_flight, self._drawn, self._drew = None, None, []
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

    def has_unfinished(self) -> bool:
        """Requests are live, or results have not been fetched yet."""
        return self.scheduler.has_work or bool(self._ended) or self._in_flight is not None

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

    def stats(self) -> EngineStats:
        """Counters so far."""
        self._stats.num_running = len(self.scheduler.running)
        self._stats.num_waiting = len(self.scheduler.waiting)
        self._stats.num_preemptions = self.scheduler.num_preemptions
        self._stats.num_free_blocks = self.blocks.num_free_blocks
        self._stats.num_host_waits = self._collector.num_draft_waits + self._runner.shaping.num_host_waits
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
        self._in_flight, self._drawn, self._drew = None, None, []
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
            rejection=self.config.speculation == "rejection",
            policy=LengthPolicy(num_drafts, self.config.draft_schedule == "adaptive"),
            max_seqs=num_seqs,
        )

    def _num_blocks_that_fit(self, max_len: int, num_seqs: int) -> int:
        """Blocks that memory allows, and no more than all sequences could ever fill."""
        spec, size = self.model.cache_spec, self.config.block_size
        per_block = pool_row_bytes([(r, size // r.ratio) for r in spec.block_records]) or 1
        info = self._runtime.memory_info()
        budget = self.config.kv_memory_bytes or int(info.free_bytes * self.config.memory_utilization)
        useful = num_seqs * -(-max_len // size)
        fits = min(useful, budget // per_block)
        if fits < 1:
            raise ConfigError(f"no KV block fits: a block of {size} tokens takes {per_block} bytes, {budget} to use")
        return fits

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
        """Queue a checked request: all its choices, those but the first behind its prompt."""
        params = request.params
        choices = [request, *(request.new_sibling(choice) for choice in range(1, params.n))]
        for choice in choices:
            choice.shaper = make_shaper(params, request.prompt_token_ids, self._shaping)
            choice.waits = choice.shaper is not None and not isinstance(choice.shaper, FixedShape)
            self._recorder.start(choice)
        self._requests[request.request_id] = choices
        if len(request.prompt_token_ids) > 1:
            request.siblings = choices[1:]
            choices = choices[:1]
        for choice in choices:
            self.scheduler.add(choice)

    def _launch(self) -> LaunchedStep | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        for kind in ("block", "page", "state"):
            copies = [(copy.src, copy.dst) for copy in plan.copies if copy.kind == kind]
            if copies:
                self.executor.caches.copy(self._ops, kind, *zip(*copies, strict=True))
        launched = self._runner.launch(plan, self._drawn)
        now = time.monotonic()
        for request, count in zip(plan.requests, plan.query_lens.tolist(), strict=True):
            request.planned_computed += count
            if request.output.timings.scheduled is None:
                request.output.timings.scheduled = now
                self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        if self._drawn is not None:
            for request in self._drew:
                request.draw = -1
                if not request.waits:
                    request.num_drafts = 0  # they were in the step that is forgotten now
        self._drawn, self._drew = launched.drawn, launched.draws
        next_drafts = self._drafting.length if self._drafting is not None else 0
        for place, (request, drafts) in enumerate(zip(launched.draws, launched.num_drafts, strict=True)):
            request.planned_tokens += drafts + 1
            # Who waits is planned again when this step is collected, with drafts that the host has seen.
            request.draw = -1 if request.waits else place
            request.num_drafts = 0 if request.waits else next_drafts
        return launched

    def _collect(self, launched: LaunchedStep) -> list[RequestOutput]:
        """Record what a launched step brought, and free what has ended."""
        touched = self._collector.collect(launched, self._fail_all)
        for request in touched:
            if request.completion.finish_reason is not None:
                self._end(request)
        return list({id(request.output): request.output for request in touched}.values())

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
        held = [sibling for request in choices for sibling in request.siblings]  # they are in no queue
        for sibling in held:
            choices.remove(sibling)
        for request in list(choices):
            request.siblings = []
            self._end(request)
        self._ended.append(output)

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        choices = self._requests[request.request_id]
        choices.remove(request)
        if choices:
            return
        del self._requests[request.request_id]
        if request.return_logits and request.prompt_logits:
            request.output.prompt_logits = torch.cat(request.prompt_logits)
        self._stats.num_finished += 1
