"""Collecting a step: waits for what it drew, records it, and says what is known now.

The counterpart of `core.runner`, which launches without waiting. Between the two a request's plan is an upper bound;
here it becomes what really was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.request import Request
from deepinfer.core.runner import LaunchedStep
from deepinfer.core.sampler import Sampler, TokenLogprobs
from deepinfer.core.speculation import Drafting
from deepinfer.core.stats import EngineStats
from deepinfer.ops.runtime import Runtime


class StepCollector:
    """Records the steps of one engine.

    Args:
        runtime: the device.
        sampler: brings logprobs to the host.
        recorder: stop rules and text.
        blocks: is told what is stored.
        drafting: counts what was accepted; None without speculation.
        stats: the engine's counters.
        vocab_size: ids run from 0 to `vocab_size` - 1.
    """

    def __init__(
        self,
        runtime: Runtime,
        sampler: Sampler,
        recorder: OutputRecorder,
        blocks: KVBlockManager,
        drafting: Drafting | None,
        stats: EngineStats,
        vocab_size: int,
    ) -> None:
        self._runtime = runtime
        self._sampler = sampler
        self._recorder = recorder
        self._blocks = blocks
        self._drafting = drafting
        self._stats = stats
        self._vocab_size = vocab_size
        self.num_draft_waits = 0
        """Steps whose drafts were brought to the host."""

    def collect(self, launched: LaunchedStep, fail_all: Callable[[Request, RequestError], None]) -> list[Request]:
        """Wait for a launched step and record what it brought; requests preempted or ended since then are skipped.

        Args:
            launched: the step.
            fail_all: ends all answers to a prompt that cannot be scored.

        Returns:
            The requests that got something, or ended.
        """
        plan = launched.plan
        touched: list[Request] = []
        for request, epoch, first, count, logits in launched.scored:
            if request.epoch == epoch and request.completion.finish_reason is None:
                fault = self._score_prompt(request, first, count, logits)
                if fault is not None:
                    fail_all(request, fault)
        drawn = launched.drawn
        emitted: list[int] = []
        if drawn is not None:
            tokens = self._runtime.to_host(drawn.tokens).tolist()
            emitted = self._runtime.to_host(drawn.num_emitted).tolist()
            logprobs = self._sampler.fetch_logprobs(launched.logprobs) if launched.logprobs is not None else None
            drawn.planned, drawn.is_collected = drawn.num_emitted, True  # what follows is planned from what is known
        drafts_there = self._drafts_on_host(launched)
        seqs, computed = [], []
        taken_back: dict[int, int] = {}
        start = 0
        logprob_rows = iter(_starts([launched.num_drafts[i] + 1 for i in launched.logprob_of]))
        wants = set(launched.logprob_of)
        for i, (request, drafts) in enumerate(zip(launched.draws, launched.num_drafts, strict=True)):
            first_row = next(logprob_rows) if i in wants else -1
            if request.epoch == launched.draw_epochs[i] and request.completion.finish_reason is None:
                count = emitted[i]
                if self._drafting is not None:
                    self._drafting.record(drafts, count - 1)
                taken_back[id(request)] = drafts + 1 - count
                request.planned_computed -= drafts + 1 - count
                request.planned_tokens -= drafts + 1 - count
                fault = launched.faults.get(i)
                if fault is not None:
                    self._recorder.fail(request, fault)
                else:
                    emitted_here = tokens[start : start + count]
                    self._record(request, emitted_here, logprobs if i in wants else None, first_row)
                if drafts_there is not None and request.waits:
                    request.drafts = drafts_there[i]
                    request.num_drafts = len(request.drafts)
                touched.append(request)
            start += drafts + 1
        for request, epoch, count in zip(plan.requests, launched.epochs, plan.query_lens.tolist(), strict=True):
            if request.epoch != epoch or not request.seq:
                continue
            request.num_computed += count - taken_back.get(id(request), 0)
            is_scored = not request.may_generate and request.num_computed == request.num_tokens
            if is_scored and request.completion.finish_reason is None:
                self._recorder.finish(request, "length")  # nothing to sample
                touched.append(request)
            if request.completion.finish_reason != "error" and request.num_computed >= request.replay_end:
                # What a request computed up to its end may serve another; drafts behind a stop token are not its text.
                seqs.append(request.seq)
                computed.append(min(request.num_computed, request.num_tokens))
        if seqs:
            self._blocks.commit(np.array(seqs, dtype=np.int32), np.array(computed, dtype=np.int32))
        self._stats.num_steps += 1
        return touched

    def _drafts_on_host(self, launched: LaunchedStep) -> list[list[int]] | None:
        """The drafts of a step whose requests need to know them; None when none does.

        Rejection judges a draft by the logits it was drawn from, which are those of the step just before; who waits for
        the host comes too late for that and verifies none.
        """
        drawn = launched.drawn
        if drawn is None or drawn.draft_logits is not None or drawn.drafts.shape[1] == 0 or self._drafting is None:
            return None
        if not any(request.waits for request in launched.draws):
            return None
        self.num_draft_waits += 1
        drafts: list[list[int]] = self._runtime.to_host(drawn.drafts)[:, : self._drafting.length].tolist()
        return drafts

    def _record(self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, first_row: int) -> None:
        """Record emitted tokens up to a stop, and make them known to the block manager."""
        before = request.num_tokens
        for place, token in enumerate(tokens):
            if token < 0 and request.shaper is not None:
                self._recorder.fail_if_nothing_is_allowed(request, self._vocab_size)
                if request.completion.finish_reason is not None:
                    break
            self._recorder.add_token(request, token)
            if token >= 0:
                self._stats.num_generated_tokens += 1
                if request.shaper is not None:
                    self._accept(request, token)
                if logprobs is not None:
                    self._recorder.add_logprobs(request, token, logprobs, first_row + place)
            else:
                self._blocks.quarantine(request.seq)
            if request.completion.finish_reason is not None:
                break
        new = request.completion.token_ids[before - len(request.prompt_token_ids) :]
        self._blocks.pool.append_many(request.seq, np.array(new, dtype=np.int32))

    def _accept(self, request: Request, token: int) -> None:
        """Tell a request's shaper of a token; what it raises ends that request."""
        assert request.shaper is not None, "only called with one"
        try:
            request.shaper.accept((token,))
        except Exception as error:  # a user's code may raise anything
            if request.completion.finish_reason is None:
                self._recorder.fail(request, as_request_error("shaping_failed", error))

    def _score_prompt(self, request: Request, first: int, count: int, logits: torch.Tensor) -> RequestError | None:
        """Keep logits or logprobs of prompt positions, up to one that has none: then say what is wrong with it."""
        if request.return_logits:
            kept = self._runtime.to_host(logits).clone()
            request.prompt_logits.append(kept)
            bad = (~torch.isfinite(kept.amax(1))).nonzero()[:, 0].tolist()
        else:
            targets = request.prompt_token_ids[first + 1 : first + 1 + count]
            logprobs = self._sampler.logprobs(logits, targets, request.params.prompt_logprobs or 0)
            bad = np.isnan(logprobs.logprob).nonzero()[0].tolist()
            self._recorder.add_prompt_logprobs(request, targets[: bad[0]] if bad else targets, logprobs)
        if not bad:
            return None
        return RequestError(
            "numerical_error",
            f"the logits behind prompt position {first + bad[0]} are not finite (NaN or Inf), so the prompt cannot be "
            "scored; logprobs before it are kept",
        )


def _starts(widths: list[int]) -> list[int]:
    """First entry of each of several runs of these widths."""
    ends = np.cumsum(np.array(widths, dtype=np.int64))
    return [int(end) - width for end, width in zip(ends, widths, strict=True)]
