"""One request inside the engine: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from torch import Tensor

from deepinfer.core.answer_text import AnswerText
from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.shaping import RowShaper


@dataclass(eq=False)
class Request:
    """A request from submission to its end; one of several answers to a prompt is a request of its own.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: the prompt.
        params: validated sampling parameters.
        seed: 64-bit seed of its draws.
        max_len: tokens it may reach, prompt included.
        output: what the caller sees; updated in place. All choices share it.
        choice: which answer to the prompt this is.
        siblings: other choices that will start from this one's KV, once all of the prompt but its last token is stored.
        shaper: changes its logits; None when nothing does.
        waits: its shaper looks at tokens, so it is planned again only when they are known, and so are its drafts.
        drafts: where it waits, the drafts that its next step may verify.
        chunk_size: most rows of one step, None for the engine's budget.
        decode_from: position from which known tokens run one at a time; for `LLM.logits`.
        return_logits: keep logits of every prompt position.
        use_prefix: may start from stored KV, and stores its own; never where logits of prompt positions are kept.
        prefix_salt: only requests of equal salt share KV.
        decoder_start: first position whose row runs in the decoder layers (`core.replay`); 0 runs all rows in them.
        max_stored: longest stored prefix whose window pages it may start from; None for any.
        replay_tokens: rows to run again behind a longer stored prefix without window pages; 0 to use none such.
        seq: handle in the block manager while it runs, 0 otherwise.
        num_computed: positions whose records are stored.
        replay_end: while it is below, rows run again for their window records alone.
        num_tokens: known tokens, prompt and outputs.
        planned_computed: `num_computed` once the steps in flight are done, if all their drafts are accepted.
        planned_tokens: `num_tokens` then.
        num_drafts: drafts that its next step may verify; they are on the device.
        draw: its place among the draws of the newest step, -1 when it was not in it.
        num_prompt_rows_planned: prompt positions whose logits are kept once the steps in flight are done.
        epoch: counts preemptions; what a step in flight brings for an older epoch is dropped.
        sampling_slot: the handle its sampling parameters were last set for.
        text: makes its text; None without a tokenizer.
        prompt_logits: parts of the prompt's logits so far.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    output: RequestOutput
    choice: int = 0
    siblings: list[Request] = field(default_factory=list)
    shaper: RowShaper | None = None
    waits: bool = False
    drafts: list[int] = field(default_factory=list)
    chunk_size: int | None = None
    decode_from: int | None = None
    return_logits: bool = False
    use_prefix: bool = False
    prefix_salt: int = 0
    decoder_start: int = 0
    max_stored: int | None = None
    replay_tokens: int = 0
    seq: int = 0
    num_computed: int = 0
    replay_end: int = 0
    num_tokens: int = 0
    planned_computed: int = 0
    planned_tokens: int = 0
    num_drafts: int = 0
    draw: int = -1
    num_prompt_rows_planned: int = 0
    epoch: int = 0
    sampling_slot: int = 0
    text: AnswerText | None = None
    prompt_logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def new(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        max_len: int,
        prompt: str | None,
    ) -> Request:
        """A request that has not run."""
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
            seed=seed,
            timings=RequestTimings(arrival=time.monotonic()),
        )
        if params.wants_logprobs:
            for completion in output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return cls(
            request_id,
            prompt_token_ids,
            params,
            seed,
            max_len,
            output,
            num_tokens=len(prompt_token_ids),
            planned_tokens=len(prompt_token_ids),
        )

    @property
    def completion(self) -> CompletionOutput:
        """The answer in progress."""
        return self.output.outputs[self.choice]

    def new_sibling(self, choice: int) -> Request:
        """Another choice of a request that was not queued yet."""
        return replace(self, choice=choice, siblings=[], drafts=[], prompt_logits=[])

    @property
    def may_generate(self) -> bool:
        """Whether it asks for tokens and its prompt leaves room for one."""
        return self.params.max_tokens > 0 and len(self.prompt_token_ids) < self.max_len

    @property
    def num_prompt_rows_wanted(self) -> int:
        """Where the prompt positions whose logits are kept end."""
        if self.choice > 0:
            return 0  # the first choice keeps them for all
        if self.return_logits:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) - 1 if self.params.prompt_logprobs is not None else 0

    @property
    def num_prompt_rows_done(self) -> int:
        """The first prompt position whose logits are still to be kept; a resumed request does not repeat others."""
        if self.return_logits:
            return self.decoder_start + sum(len(part) for part in self.prompt_logits)
        return len(self.output.prompt_logprobs) - 1 if self.output.prompt_logprobs is not None else 0

    def next_rows(self, budget: int) -> int:
        """Rows it would run in a step with `budget` rows left; 0 when it must wait for the steps in flight."""
        if self.waits and self.planned_tokens > self.num_tokens:
            return 0
        rows = min(self.planned_tokens - self.planned_computed, budget)
        if self.siblings:
            rows = min(rows, len(self.prompt_token_ids) - 1 - self.planned_computed)
        if rows == 1 and self.planned_tokens > len(self.prompt_token_ids):
            room = min(self.params.max_tokens - self.num_planned_outputs, self.max_len - self.planned_tokens, budget)
            return min(1 + self.num_drafts, room)
        rows = min(rows, self.chunk_size or budget)
        if self.decode_from is not None:
            rows = min(rows, max(self.decode_from - self.planned_computed, 1))
        return rows

    @property
    def num_planned_outputs(self) -> int:
        """Generated tokens once the steps in flight are done, if all their drafts are accepted."""
        return self.planned_tokens - len(self.prompt_token_ids)

    def start_from(self, num_stored: int, num_replayed: int = 0) -> None:
        """Begin to run, behind so many tokens that are stored already, the last `num_replayed` of them once more."""
        self.num_computed = self.planned_computed = num_stored - num_replayed
        self.replay_end = num_stored if num_replayed else 0
        if num_replayed:
            self.output.approximate = True
        if self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = self.num_computed

    def forget_plans(self) -> None:
        """Back to what is known: after a preemption, when nothing is computed."""
        self.num_computed = self.planned_computed = self.replay_end = 0
        self.planned_tokens = self.num_tokens
        self.num_drafts, self.draw, self.sampling_slot = 0, -1, 0
        self.drafts = []
        self.num_prompt_rows_planned = self.num_prompt_rows_done
        self.epoch += 1

    def add_logprob(self, token_id: int, entry: dict[int, Logprob]) -> None:
        """Record the logprobs of a generated token."""
        completion = self.completion
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token_id].logprob
