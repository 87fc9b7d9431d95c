"""One request inside the engine: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
from deepinfer.core.sampling_params import SamplingParams


@dataclass
class Request:
    """A request from submission to its end.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: the prompt.
        params: validated sampling parameters.
        seed: 64-bit seed of its draws.
        max_len: tokens it may reach, prompt included.
        output: what the caller sees; updated in place.
        chunk_size: most rows of one step, None for the engine's budget.
        decode_from: position from which known tokens run one at a time; for `LLM.logits`.
        return_logits: keep logits of every prompt position.
        use_prefix: may start from stored KV, and stores its own; never where logits of prompt positions are kept.
        prefix_salt: only requests of equal salt share KV.
        seq: handle in the block manager while it runs, 0 otherwise.
        num_computed: positions whose records are stored.
        num_tokens: known tokens, prompt and outputs.
        planned_computed: `num_computed` once the steps in flight are done, if all their drafts are accepted.
        planned_tokens: `num_tokens` then.
        num_drafts: drafts that its next step may verify; they are on the device.
        draw: its place among the draws of the newest step, -1 when it was not in it.
        num_prompt_rows_planned: prompt positions whose logits are kept once the steps in flight are done.
        epoch: counts preemptions; what a step in flight brings for an older epoch is dropped.
        sampling_slot: the handle its sampling parameters were last set for.
        detokenizer: None without a tokenizer.
        prompt_logits: parts of the prompt's logits so far.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    output: RequestOutput
    chunk_size: int | None = None
    decode_from: int | None = None
    return_logits: bool = False
    use_prefix: bool = False
    prefix_salt: int = 0
    seq: int = 0
    num_computed: int = 0
    num_tokens: int = 0
    planned_computed: int = 0
    planned_tokens: int = 0
    num_drafts: int = 0
    draw: int = -1
    num_prompt_rows_planned: int = 0
    epoch: int = 0
    sampling_slot: int = 0
    detokenizer: IncrementalDetokenizer | None = None
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
            outputs=[CompletionOutput()],
            seed=seed,
            timings=RequestTimings(arrival=time.monotonic()),
        )
        if params.logprobs is not None:
            output.outputs[0].logprobs = []
            output.outputs[0].cumulative_logprob = 0.0
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
        return self.output.outputs[0]

    @property
    def num_prompt_rows_wanted(self) -> int:
        """Prompt positions whose logits are kept, from position 0 on."""
        if self.return_logits:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) - 1 if self.params.prompt_logprobs is not None else 0

    @property
    def num_prompt_rows_done(self) -> int:
        """Prompt positions whose logits have been kept already; a resumed request does not repeat them."""
        if self.return_logits:
            return sum(len(part) for part in self.prompt_logits)
        return len(self.output.prompt_logprobs) - 1 if self.output.prompt_logprobs is not None else 0

    def next_rows(self, budget: int) -> int:
        """Rows it would run in a step with `budget` rows left; 0 when it must wait for the steps in flight."""
        rows = min(self.planned_tokens - self.planned_computed, budget)
        if rows == 1 and self.planned_tokens > len(self.prompt_token_ids):
            room = min(
                self.params.max_tokens - self.num_planned_outputs, self.max_len - self.planned_tokens, budget
            )
            return min(1 + self.num_drafts, room)
        rows = min(rows, self.chunk_size or budget)
        if self.decode_from is not None:
            rows = min(rows, max(self.decode_from - self.planned_computed, 1))
        return rows

    @property
    def num_planned_outputs(self) -> int:
        """Generated tokens once the steps in flight are done, if all their drafts are accepted."""
        return self.planned_tokens - len(self.prompt_token_ids)

    def start_from(self, num_stored: int) -> None:
        """Begin to run, behind so many tokens that are stored already."""
        self.num_computed = self.planned_computed = num_stored
        if self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = num_stored

    def forget_plans(self) -> None:
        """Back to what is known: after a preemption, when nothing is computed."""
        self.num_computed = self.planned_computed = 0
        self.planned_tokens = self.num_tokens
        self.num_drafts, self.draw, self.sampling_slot = 0, -1, 0
        self.num_prompt_rows_planned = self.num_prompt_rows_done
        self.epoch += 1

    def add_logprob(self, token_id: int, entry: dict[int, Logprob]) -> None:
        """Record the logprobs of a generated token."""
        completion = self.completion
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token_id].logprob
