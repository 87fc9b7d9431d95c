"""The engine: takes requests, runs steps until none is left, gives back one result per request.

A step is: the scheduler chooses rows, the executor runs them, the sampler draws, results are recorded. What a request
does wrong becomes its own error; others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from deepinfer.core.collector import StepCollector
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine_parts import build_parts
from deepinfer.core.errors import KVTransferError, RequestError
from deepinfer.core.features import check_features, check_prompt_options
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import ToolGrammar
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.kv_blocks import prefix_salt
from deepinfer.core.kv_bundle import KVBundle
from deepinfer.core.kv_transfer import read_token_ids
from deepinfer.core.launched_step import LaunchedStep
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.replay import ReplayMode
from deepinfer.core.request import Request
from deepinfer.core.request_endings import RequestEndings
from deepinfer.core.request_intake import RequestIntake
from deepinfer.core.sampler import derive_seed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.speculation import SpeculationStats
from deepinfer.core.stats import EngineStats
from deepinfer.core.step_cost import CycleCost
from deepinfer.core.step_launcher import StepLauncher
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import Model
from deepinfer.ops.outputs import StepArenas
from deepinfer.ops.registry import OpTable


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
        parts = build_parts(model, config, ops)
        self.blocks, self.max_len, self.executor = parts.blocks, parts.max_len, parts.executor
        self.scheduler, self.sampler, self.is_async = parts.scheduler, parts.sampler, parts.is_async
        self._replay, self._reuses, self._transfer = parts.replay, parts.reuses, parts.transfer
        self._drafting, self._runner = parts.drafting, parts.runner
        self._guards_launch = self.is_async and config.sync_guard
        self._permitted_before = self._runtime.sync_guard.permitted.copy()
        self._arenas = StepArenas(self._runtime)
        self._in_flight: LaunchedStep | None = None
        self._recorder = OutputRecorder(model.info.eos_token_ids, tokenizer)
        self._intake = RequestIntake(parts, model.info, config, self._recorder, tokenizer, grammars, tool_grammar)
        self._requests = self._intake.requests
        self._ordinal = 0
        self._stats = EngineStats(
            num_blocks=self.blocks.pool.num_blocks, is_async=self.is_async, sync_reason=parts.sync_reason
        )
        self._stats.graph_reason = parts.graph_reason
        self._endings = RequestEndings(self._intake, self.scheduler, self.blocks, self._recorder, self._stats)
        self._launcher = StepLauncher(parts, ops, self._arenas, self._stats)
        self._collector = StepCollector(
            self._runtime,
            self.sampler,
            self._recorder,
            self.blocks,
            self._drafting,
            parts.table,
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
        self._intake.check_prompt(ids)
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
        self._intake.queue(request)
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
            self._in_flight = None
            self._launcher.forget()
            self._endings.fail_live(error)
            raise

    def _step(self) -> list[RequestOutput]:
        changed: list[RequestOutput] = []
        start = time.perf_counter()
        if self._intake.num_compiling:
            is_idle = not (self.scheduler.has_work or self._in_flight is not None or self._endings.results)
            for choices in self._intake.admit_compiled(waits=is_idle):
                self._endings.end_all(choices)
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
        ended = self._endings.take_results()
        if not ended:
            return changed
        return list({id(output): output for output in ended + changed}.values())

    def prepare_form(self, spec: StructuredOutput) -> None:
        """Do now, in any thread, what queueing a request of this form would spend time on; it is kept.

        Raises:
            RequestError: the form cannot be had.
        """
        self._intake.prepare_form(spec)

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
            return self._transfer.export(read_token_ids(source), prefix_salt(cache_salt))
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
        return self.scheduler.has_work or bool(
            self._endings.results or self._intake.num_compiling or self._in_flight is not None
        )

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; its result comes with the next step.

        Returns:
            False when no such request is live.
        """
        choices = self._requests.get(request_id)
        if choices is None:
            return False
        self._endings.finish_all(choices, "abort")
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
        self._stats.num_compiling = self._intake.num_compiling
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
        self._in_flight = None
        self._launcher.forget()
        self._intake.close()
        self._runtime.synchronize()

    def _launch(self) -> LaunchedStep | None:
        return self._launcher.launch()

    def _collect(self, launched: LaunchedStep) -> list[RequestOutput]:
        """Record what a launched step brought, and free what has ended."""
        collected = self._collector.collect(launched, self._endings.fail_all)
        for request in collected.ended:
            self._endings.end(request)
        return collected.outputs
