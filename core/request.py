"""One request inside the engine: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from deepinfer.core.answer_text import AnswerText, LazyText
from deepinfer.core.grammar.shaper import GrammarShaper
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
from deepinfer.core.request_table import RequestTable
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.shaping import RowShaper
from deepinfer.core.step_buffers import Int32Array


@dataclass(eq=False)
class Request:
    """A request from submission to its end; one of several answers to a prompt is a request of its own.

    While it runs, its counters are in the engine's `RequestTable`; while it waits, nothing is computed or planned.

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
        grammar: the part of it that holds the answer to a form; None where it may have any.
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
        table: where its counters are while it runs.
        num_prompt_rows_planned: prompt positions whose logits are kept once the steps in flight are done.
        text: makes its text token by token; None without stop strings, or without a tokenizer.
        lazy_text: makes its text when somebody reads it; None with stop strings, or without a tokenizer.
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
    grammar: GrammarShaper | None = None
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
    table: RequestTable | None = None
    num_prompt_rows_planned: int = 0
    text: AnswerText | None = None
    lazy_text: LazyText | None = None
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
            prompt_token_ids=list(prompt_token_ids),  # the caller's, who may change it while the request runs
            outputs=[CompletionOutput(index) for index in range(params.n)],
            seed=seed,
            timings=RequestTimings(arrival=time.monotonic()),
        )
        if params.wants_logprobs:
            for completion in output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return cls(request_id, prompt_token_ids, params, seed, max_len, output)

    def __post_init__(self) -> None:
        """Find the answer in progress: looking it up costs more than a step may spend on a request."""
        self.completion: CompletionOutput = self.output.outputs[self.choice]

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and outputs."""
        return len(self.prompt_token_ids) + len(self.completion.token_ids)

    @property
    def num_computed(self) -> int:
        """Positions whose records are stored."""
        return int(self.table.num_computed[self.seq]) if self.table is not None else 0

    @property
    def planned_computed(self) -> int:
        """`num_computed` once the steps in flight are done, if all their drafts are accepted."""
        return int(self.table.planned_computed[self.seq]) if self.table is not None else 0

    @property
    def planned_tokens(self) -> int:
        """`num_tokens` then."""
        return int(self.table.planned_tokens[self.seq]) if self.table is not None else self.num_tokens

    @property
    def num_drafts(self) -> int:
        """Drafts that its next step may verify; they are on the device."""
        return int(self.table.num_drafts[self.seq]) if self.table is not None else 0

    @property
    def token_ids(self) -> Int32Array:
        """A copy of all known tokens, [num_tokens] int32."""
        return np.array(self.prompt_token_ids + self.completion.token_ids, dtype=np.int32)

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

    def run(
        self, table: RequestTable, blocks: KVBlockManager, seq: int, num_stored: int, num_replayed: int = 0
    ) -> None:
        """Begin to run, behind so many tokens that are stored already, the last `num_replayed` of them once more."""
        self.seq = seq
        table.bind(self, num_stored - num_replayed, num_stored if num_replayed else 0)
        if not table.is_recorded_by_token[seq]:
            self.take_ids_from(blocks)
        if num_replayed:
            self.output.approximate = True
        if self.output.num_cached_tokens is None:
            self.output.num_cached_tokens = num_stored - num_replayed

    def take_ids_from(self, blocks: KVBlockManager) -> None:
        """Let the answer's ids grow by those that the block manager is told of, while it runs."""
        seq, num_prompt = self.seq, len(self.prompt_token_ids)
        self.completion.take_ids_from(lambda have: blocks.pool.tokens(seq, num_prompt + have).tolist())

    def stop(self) -> None:
        """Run no more; what the block manager holds for it is still to be freed."""
        assert self.table is not None, "it runs"
        self.completion.take_ids_from(None)
        self.table.release(self)

    def give_way(self) -> None:
        """Stop, to be resumed from what is known: nothing is computed."""
        self.stop()
        self.drafts = []
        self.num_prompt_rows_planned = self.num_prompt_rows_done
        self.output.timings.num_preemptions += 1

    def add_logprob(self, token_id: int, entry: dict[int, Logprob]) -> None:
        """Record the logprobs of a generated token."""
        completion = self.completion
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token_id].logprob
