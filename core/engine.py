"""The engine: takes requests, runs steps until none is left, gives back one result per request.

A step is: the scheduler chooses rows, the executor runs them, the sampler draws, results are recorded. What a request
does wrong becomes its own error; others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.core.caches import CacheStore, pool_row_bytes
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.executor import Executor, StepLimits
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.core.sampler import Sampler, derive_seed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.scheduler import Scheduler, StepPlan
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import Model
from deepinfer.ops.registry import OpTable


@dataclass
class EngineStats:
    """Counters since the engine was made, and what runs now."""

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0


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
        max_len = config.max_model_len or model.info.max_position
        if max_len > model.info.max_position:
            raise ConfigError(f"max_model_len {max_len} exceeds the model's {model.info.max_position} positions")
        max_rows = config.max_num_batched_tokens
        num_seqs = min(config.max_num_seqs, max_rows)
        num_blocks = config.num_kv_blocks or self._num_blocks_that_fit(max_len, num_seqs)
        page = config.window_page
        pages_per_seq = -(-(spec.window + page) // page) + 1
        # Enough for every sequence's window and one step's rows on top, so that only blocks can run out.
        num_pages = num_seqs * pages_per_seq + -(-max_rows // page) + num_seqs
        self.blocks = KVBlockManager(
            num_blocks,
            config.block_size,
            num_window_pages=num_pages,
            window_page=page,
            window=spec.window,
            num_slots=num_seqs,
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
        )
        limits = StepLimits(max_rows, num_seqs, self.max_len)
        self.executor = Executor(model, caches, self.blocks, self._runtime, limits)
        rows_with_logits = max(1, min(512, (1 << 26) // model.info.vocab_size))
        self.scheduler = Scheduler(self.blocks, num_seqs, max_rows, rows_with_logits)
        self.sampler = Sampler(ops, num_slots=num_seqs)
        self._recorder = OutputRecorder(model.info.eos_token_ids, tokenizer)
        self._requests: dict[str, Request] = {}
        self._ended: list[RequestOutput] = []
        self._ordinal = 0
        self._stats = EngineStats(num_blocks=num_blocks)

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

        Raises:
            RequestError: the request cannot be served; nothing was queued.
        """
        if request_id in self._requests:
            raise RequestError("duplicate_request_id", f"a request with id {request_id!r} is live; choose another id")
        ids = [int(t) for t in prompt_token_ids]
        self._check_prompt(ids)
        params.validate(self.model.info.vocab_size)
        for name, value in (("chunk_size", chunk_size), ("decode_from", decode_from)):
            if value is not None and value < 1:
                raise RequestError("invalid_parameter", f"{name} is {value}; it must be at least 1")
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, self._ordinal if seed_key is None else seed_key)
        self._ordinal += 1
        request = Request.new(request_id, ids, params, seed, self.max_len, prompt)
        request.chunk_size, request.decode_from, request.return_logits = chunk_size, decode_from, return_logits
        self._recorder.start(request)
        self._requests[request_id] = request
        self.scheduler.add(request)

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            The results that changed: of requests that got a token, scored their prompt, or ended. They are the live
            objects, updated by later steps until `finished`.
        """
        changed, self._ended = self._ended, []
        plan = self.scheduler.plan()
        if plan is None:
            return changed
        now = time.monotonic()
        meta = self.executor.plan(plan.seqs, plan.query_lens)
        rows, sampled, scored = self._rows_wanted(plan)
        logits = self.executor.run(meta, rows)
        self._advance(plan, now)
        if scored:
            self._score_prompts(scored, logits[len(sampled) :])
        if sampled:
            self._sample(sampled, logits[: len(sampled)])
        self._stats.num_steps += 1
        for request in plan.requests:
            if request.completion.finish_reason is None and request.num_computed == request.num_tokens:
                self._recorder.finish(request, "length")  # nothing to sample: max_tokens=0, or logits only
            if request.completion.finish_reason is not None:
                self._end(request)
                changed.append(request.output)
        finished = {id(o) for o in changed}
        changed.extend(r.output for r in sampled if id(r.output) not in finished)
        return changed

    def has_unfinished(self) -> bool:
        """Requests are live, or results have not been fetched yet."""
        return self.scheduler.has_work or bool(self._ended)

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; its result comes with the next step.

        Returns:
            False when no such request is live.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._recorder.finish(request, "abort")
        self._end(request)
        self._ended.append(request.output)
        return True

    def stats(self) -> EngineStats:
        """Counters so far."""
        self._stats.num_running = len(self.scheduler.running)
        self._stats.num_waiting = len(self.scheduler.waiting)
        self._stats.num_preemptions = self.scheduler.num_preemptions
        self._stats.num_free_blocks = self.blocks.num_free_blocks
        return self._stats

    def close(self) -> None:
        """Abort what is left; the engine takes no more requests."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._runtime.synchronize()

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

    def _rows_wanted(self, plan: StepPlan) -> tuple[np.ndarray, list[Request], list[tuple[Request, int, int]]]:
        """Rows whose logits this step needs: sampled ones first, then prompt positions of (request, first, count)."""
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        last = (starts + plan.query_lens - 1).astype(np.int32)
        take, sampled, scored, prompt_rows = [], [], [], []
        for i, (request, count) in enumerate(zip(plan.requests, plan.query_lens.tolist(), strict=True)):
            if request.num_computed + count == request.num_tokens and request.params.max_tokens > 0:
                take.append(i)
                sampled.append(request)
            wanted = request.num_prompt_rows_wanted
            if wanted:
                first = max(request.num_prompt_rows_done, request.num_computed)
                end = min(wanted, request.num_computed + count)
                if first < end:
                    scored.append((request, first, end - first))
                    offset = int(starts[i]) - request.num_computed
                    prompt_rows.append(np.arange(first + offset, end + offset, dtype=np.int32))
        rows = np.concatenate([last[take], *prompt_rows]) if prompt_rows else last[take]
        return rows.astype(np.int32, copy=False), sampled, scored

    def _advance(self, plan: StepPlan, now: float) -> None:
        stats, computed = self._stats, []
        for request, count in zip(plan.requests, plan.query_lens.tolist(), strict=True):
            if request.output.timings.scheduled is None:
                request.output.timings.scheduled = now
                stats.num_prompt_tokens += len(request.prompt_token_ids)
            request.num_computed += count
            computed.append(request.num_computed)
        self.blocks.commit(plan.seqs, np.array(computed, dtype=np.int32))

    def _score_prompts(self, scored: list[tuple[Request, int, int]], logits: torch.Tensor) -> None:
        start = 0
        for request, first, count in scored:
            part = logits[start : start + count]
            start += count
            if request.return_logits:
                request.prompt_logits.append(self._runtime.to_host(part).clone())
            else:
                targets = request.prompt_token_ids[first + 1 : first + 1 + count]
                wanted = request.params.prompt_logprobs or 0
                logprobs = self.sampler.logprobs(part, targets, wanted)
                self._recorder.add_prompt_logprobs(request, targets, logprobs)

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Draw one token per request, record it, and make it known to those that go on."""
        slots = np.fromiter((r.seq for r in requests), dtype=np.int32, count=len(requests))
        index = np.fromiter((len(r.completion.token_ids) for r in requests), dtype=np.int32, count=len(requests))
        for request in requests:
            if request.sampling_slot != request.seq:  # admitted, for the first time or again
                self.sampler.set_slot(request.seq, request.params, request.seed)
                request.sampling_slot = request.seq
        tokens = self.sampler.sample(logits, slots, index)
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None and tokens[i] >= 0]
        if wanted:
            most = max(requests[i].params.logprobs or 0 for i in wanted)
            logprobs = self.sampler.logprobs(logits[wanted], tokens[wanted], most)
        going_on = []
        for i, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
            self._recorder.add_token(request, token)
            self._stats.num_generated_tokens += token >= 0
            if request.completion.finish_reason is None:
                going_on.append(i)
        for row, i in enumerate(wanted):
            self._recorder.add_logprobs(requests[i], int(tokens[i]), logprobs, row)
        if going_on:
            self.blocks.pool.append(slots[going_on], tokens[going_on])

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        if request.return_logits and request.prompt_logits:
            request.output.prompt_logits = torch.cat(request.prompt_logits)
        self._stats.num_finished += 1
