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
        seq: handle in the block manager while it runs, 0 otherwise.
        num_computed: positions whose records are stored.
        num_tokens: known tokens, prompt and outputs.
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
    seq: int = 0
    num_computed: int = 0
    num_tokens: int = 0
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
            request_id, prompt_token_ids, params, seed, max_len, output, num_tokens=len(prompt_token_ids)
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
        """Rows it would run in a step with `budget` rows left."""
        rows = min(self.num_tokens - self.num_computed, budget, self.chunk_size or budget)
        if self.decode_from is not None:
            rows = min(rows, max(self.decode_from - self.num_computed, 1))
        return rows

    def add_logprob(self, token_id: int, entry: dict[int, Logprob]) -> None:
        """Record the logprobs of a generated token."""
        completion = self.completion
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token_id].logprob
