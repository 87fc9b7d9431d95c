"""Turning sampled ids into results: stop rules, text, logprobs, timings.

Works on one request at a time and touches nothing but its output, so one request's fault stays its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from deepinfer.core.answer_text import AnswerText, LazyText
from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.errors import RequestError, as_request_error
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

    @property
    def has_tokenizer(self) -> bool:
        """Whether answers have text."""
        return self._tokenizer is not None

    def start(self, request: Request) -> None:
        """Prepare a request that was just accepted."""
        params = request.params
        if self._tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, params.skip_special_tokens, prompt_tail_ids=request.prompt_token_ids[-4:]
            )
            if params.stop:
                request.text = AnswerText(
                    detokenizer,
                    params.stop,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            else:
                request.lazy_text = LazyText(detokenizer, request.completion)
                request.completion.take_text_from(request.lazy_text)

    def note_first_token(self, request: Request) -> None:
        """Note when a request's first token came, unless that was noted before."""
        if request.output.timings.first_token is None:
            request.output.timings.first_token = time.monotonic()

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
        self.note_first_token(request)
        completion.token_ids.append(token_id)
        reason: FinishReason | None = None
        stopped_by: int | str | None = None
        if token_id in self._eos and not params.ignore_eos:
            reason = "stop"
        elif token_id in params.stop_token_ids:
            reason, stopped_by = "stop", token_id
        elif len(completion.token_ids) >= params.max_tokens or request.num_tokens >= request.max_len:
            reason = "length"
        if reason == "stop" and not params.include_stop_str_in_output:  # the stop token itself leaves no text
            if request.lazy_text is not None:
                request.lazy_text.leave_out_last()
        elif request.text is not None:
            completion.text += request.text.feed(token_id)
            if request.text.stopped_by is not None and reason != "stop":
                reason, stopped_by = "stop", request.text.stopped_by
        if reason is not None:
            completion.stop_reason = stopped_by
            self.finish(request, reason)

    def add_logprobs(self, request: Request, token_id: int, logprobs: TokenLogprobs, row: int) -> None:
        """Record the logprobs of a token that was just added."""
        params = request.params
        entry = self._entry(token_id, logprobs, row, params.logprobs or 0, params.detokenize)
        if logprobs.asked is not None and logprobs.asked_ranks is not None:
            for place, other in enumerate(params.logprob_token_ids or ()):
                value, rank = float(logprobs.asked[row, place]), int(logprobs.asked_ranks[row, place])
                entry.setdefault(other, self._logprob(other, value, rank, params.detokenize))
        request.add_logprob(token_id, entry)

    def add_prompt_logprobs(self, request: Request, targets: Sequence[int], logprobs: TokenLogprobs) -> None:
        """Record the logprobs of the next prompt tokens, in order."""
        entries = request.output.prompt_logprobs
        if entries is None:
            raise AssertionError("prompt logprobs were not asked for")
        count = request.params.prompt_logprobs or 0
        text = request.params.detokenize
        entries.extend(self._entry(token, logprobs, row, count, text) for row, token in enumerate(targets))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Close an answer, and with the last one the request's result."""
        completion = request.completion
        if request.text is not None:
            completion.text += request.text.finish()
        if request.lazy_text is not None:
            request.lazy_text.finish()
        completion.finish_reason = reason
        if all(other.finish_reason is not None for other in request.output.outputs):
            request.output.finished = True
            request.output.timings.finished = time.monotonic()

    def fail_if_nothing_is_allowed(self, request: Request, vocab_size: int) -> None:
        """Close an answer that no token was drawn for if its own masks are the reason: its numbers are sound."""
        if request.shaper is None:
            return
        try:
            shape = request.shaper.shape(())[0]
            allows_nothing = shape.allows_nothing(vocab_size)
        except Exception as error:  # a user's function: its fault is its own request's
            self.fail(request, as_request_error("logits_processor_failed", error))
            return
        if shape.forbids_what_it_forces:
            code, what = "no_token_allowed", "bad_words or min_tokens do"
            if request.grammar is not None:
                code, what = "grammar_violated", "the structured output does"
            place = len(request.completion.token_ids)
            self.fail(
                request,
                RequestError(
                    code, f"output token {place} was forced to be id {shape.forced}, which {what} not allow there"
                ),
            )
            return
        if not allows_nothing:
            return
        self.fail(
            request,
            RequestError(
                "no_token_allowed",
                f"no token is allowed at position {request.num_tokens}: what allowed_token_ids, bad_words, min_tokens "
                "and a grammar leave, taken together, is nothing",
            ),
        )

    def fail(self, request: Request, error: RequestError) -> None:
        """Close an answer with an error; what it produced stays. Of several answers, the first one's error is told."""
        failed = [c.index for c in request.output.outputs if c.finish_reason == "error"]
        if not failed or request.choice < min(failed):
            request.output.error = error
        self.finish(request, "error")

    def _entry(self, token_id: int, logprobs: TokenLogprobs, row: int, count: int, text: bool) -> dict[int, Logprob]:
        entry = {token_id: self._logprob(token_id, float(logprobs.logprob[row]), int(logprobs.rank[row]), text)}
        for place in range(min(count, logprobs.top_ids.shape[1])):
            other = int(logprobs.top_ids[row, place])
            if other not in (token_id, -1):  # -1 fills the places of a row that has no numbers
                entry[other] = self._logprob(other, float(logprobs.top_logprobs[row, place]), place + 1, text)
        return entry

    def _logprob(self, token_id: int, value: float, rank: int, with_text: bool) -> Logprob:
        if self._tokenizer is None or not with_text:
            return Logprob(value, rank)
        return Logprob(value, rank, self._tokenizer.decode((token_id,), skip_special_tokens=False))
