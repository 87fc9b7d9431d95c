"""Turning sampled ids into results: stop rules, text, logprobs, timings.

Works on one request at a time and touches nothing but its output, so one request's fault stays its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import FinishReason, Logprob
from deepinfer.core.request import Request
from deepinfer.core.sampler import TokenLogprobs
from deepinfer.core.tokenizer import Tokenizer


class OutputRecorder:
    """Stop rules and text of one engine.

    Args:
        eos_token_ids: the model's own ends.
        tokenizer: None leaves all text empty.
    """

    def __init__(self, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer

    def start(self, request: Request) -> None:
        """Prepare a request that was just accepted."""
        if self._tokenizer is not None:
            request.detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                request.params.skip_special_tokens,
                prompt_tail_ids=request.prompt_token_ids[-4:],
            )

    def add_token(self, request: Request, token_id: int) -> None:
        """Record one sampled token and end the request where a stop rule says so; -1 is a row that has no draw."""
        if token_id < 0:
            position = request.num_tokens
            self.fail(
                request,
                RequestError(
                    "numerical_error",
                    f"the logits for position {position} are not finite (NaN or Inf), so no token can be drawn; "
                    "the tokens before it are kept",
                ),
            )
            return
        completion, params = request.completion, request.params
        timings = request.output.timings
        if timings.first_token is None:
            timings.first_token = time.monotonic()
        completion.token_ids.append(token_id)
        request.num_tokens += 1
        reason: FinishReason | None = None
        stop_id: int | None = None
        if token_id in self._eos and not params.ignore_eos:
            reason = "stop"
        elif token_id in params.stop_token_ids:
            reason, stop_id = "stop", token_id
        elif len(completion.token_ids) >= params.max_tokens or request.num_tokens >= request.max_len:
            reason = "length"
        if request.detokenizer is not None and reason != "stop":
            completion.text += request.detokenizer.feed((token_id,))  # the stop token itself leaves no text
        if reason is not None:
            completion.stop_reason = stop_id
            self.finish(request, reason)

    def add_logprobs(self, request: Request, token_id: int, logprobs: TokenLogprobs, row: int) -> None:
        """Record the logprobs of a token that was just added."""
        request.add_logprob(token_id, self._entry(token_id, logprobs, row, request.params.logprobs or 0))

    def add_prompt_logprobs(self, request: Request, targets: Sequence[int], logprobs: TokenLogprobs) -> None:
        """Record the logprobs of the next prompt tokens, in order."""
        entries = request.output.prompt_logprobs
        if entries is None:
            raise AssertionError("prompt logprobs were not asked for")
        count = request.params.prompt_logprobs or 0
        entries.extend(self._entry(token, logprobs, row, count) for row, token in enumerate(targets))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Close a request's result."""
        completion = request.completion
        if request.detokenizer is not None:
            completion.text += request.detokenizer.finish()
        completion.finish_reason = reason
        request.output.finished = True
        request.output.timings.finished = time.monotonic()

    def fail(self, request: Request, error: RequestError) -> None:
        """Close a request's result with an error; what it produced stays."""
        request.output.error = error
        self.finish(request, "error")

    def _entry(self, token_id: int, logprobs: TokenLogprobs, row: int, count: int) -> dict[int, Logprob]:
        entry = {token_id: self._logprob(token_id, float(logprobs.logprob[row]), int(logprobs.rank[row]))}
        for place in range(min(count, logprobs.top_ids.shape[1])):
            other = int(logprobs.top_ids[row, place])
            if other != token_id:
                entry[other] = self._logprob(other, float(logprobs.top_logprobs[row, place]), place + 1)
        return entry

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.decode((token_id,), skip_special_tokens=False) if self._tokenizer is not None else None
        return Logprob(value, rank, text)
