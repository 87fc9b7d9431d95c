"""Taking requests in: what is refused, what holds an answer to its form, and who waits for a grammar."""

from __future__ import annotations

import time
from typing import NamedTuple

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine_parts import EngineParts
from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.compiler import GrammarJob
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import GrammarSource, ToolGrammar
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.request import Request
from deepinfer.core.shapers import FixedShape, ShapingContext, make_shaper
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import ModelInfo

_COMPILE_WAIT_SECONDS = 0.05
"""How long a step with nothing to run waits for a grammar: short, so that an abort is heeded soon."""


class _Compile(NamedTuple):
    """A grammar that a request waits for, and until when it waits for a worker to take it."""

    job: GrammarJob
    until: float


class RequestIntake:
    """The way into one engine.

    Args:
        parts: of the engine.
        info: of its model.
        config: validated settings.
        recorder: begins answers.
        tokenizer: for text; None gives ids only.
        grammars: structured output of this vocabulary, shared with others; None for its own.
        tool_grammar: the model family's way to write calls of tools, where `grammars` is None.

    Attributes:
        requests: the choices of every live request, by its id.
    """

    def __init__(
        self,
        parts: EngineParts,
        info: ModelInfo,
        config: EngineConfig,
        recorder: OutputRecorder,
        tokenizer: Tokenizer | None,
        grammars: GrammarService | None,
        tool_grammar: ToolGrammar | None,
    ) -> None:
        self.requests: dict[str, list[Request]] = {}
        self._compiling: dict[str, _Compile] = {}
        self._scheduler, self._blocks, self._max_len = parts.scheduler, parts.blocks, parts.max_len
        self._masks = parts.runner.shaping.grammar
        self._vocab_size = info.vocab_size
        self._recorder = recorder
        self._shaping = ShapingContext(info.vocab_size, info.eos_token_ids, tokenizer)
        self._grammars, self._owns_grammars = grammars, grammars is None
        if grammars is None and tokenizer is not None:
            self._grammars = GrammarService(
                tokenizer,
                info.vocab_size,
                info.eos_token_ids,
                num_workers=config.grammar_workers,
                timeout=config.grammar_timeout,
                queue_timeout=config.grammar_queue_timeout,
                cache_bytes=config.grammar_cache_bytes,
                tool_grammar=tool_grammar,
            )

    @property
    def num_compiling(self) -> int:
        """Requests that wait for a grammar."""
        return len(self._compiling)

    def check_prompt(self, ids: list[int]) -> None:
        """Refuse a prompt that cannot run here.

        Raises:
            RequestError: it is empty or too long, or an id is none of the vocabulary.
        """
        vocab, pool = self._vocab_size, self._blocks.pool
        if not ids:
            raise RequestError("empty_prompt", "the prompt has no token; give at least one")
        if len(ids) > self._max_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens; this engine takes {self._max_len} "
                f"(max_model_len and the KV cache of {pool.num_blocks} blocks of {pool.block_size})",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise RequestError(
                "token_out_of_range", f"prompt_token_ids[{ids.index(bad)}] is {bad}; ids run from 0 to {vocab - 1}"
            )

    def queue(self, request: Request) -> None:
        """Take a checked request, all its choices at once; it is scheduled when it needs no grammar any more."""
        params = request.params
        choices = [request, *(request.new_sibling(choice) for choice in range(1, params.n))]
        source = self._constrain(choices) if params.structured_output is not None else None
        for choice in choices:
            others = () if choice.grammar is None else (choice.grammar,)
            choice.shaper = make_shaper(params, request.prompt_token_ids, self._shaping, *others)
            choice.waits = choice.shaper is not None and not isinstance(choice.shaper, FixedShape)
            self._recorder.start(choice)
        self.requests[request.request_id] = choices
        if source is None:
            self._schedule(choices)
        else:
            assert self._grammars is not None and params.structured_output is not None, "there is a source"
            job = self._grammars.submit(params.structured_output, source)
            self._compiling[request.request_id] = _Compile(job, time.monotonic() + self._grammars.queue_timeout)

    def prepare_form(self, spec: StructuredOutput) -> None:
        """Do now, in any thread, what queueing a request of this form would spend time on; it is kept.

        Raises:
            RequestError: the form cannot be had.
        """
        if self._grammars is not None:
            self._grammars.source(spec)

    def _constrain(self, choices: list[Request]) -> GrammarSource:
        """Give all choices of a request that must have a form what holds them to it.

        Raises:
            RequestError: the form cannot be had.
        """
        spec, params = choices[0].params.structured_output, choices[0].params
        assert spec is not None and self._grammars is not None, "checked by core.features"
        source = self._grammars.source(spec)
        for choice in choices:
            choice.grammar = self._grammars.shaper(
                spec,
                self._masks,
                choice.prompt_token_ids,
                stop_token_ids=params.stop_token_ids,
                min_tokens=params.min_tokens,
            )
        return source

    def admit_compiled(self, *, waits: bool) -> list[list[Request]]:
        """Queue the requests whose grammars are there.

        Args:
            waits: wait a little for one.

        Returns:
            The choices of requests whose grammars cannot be had; they have failed, and are to be ended.
        """
        if self._grammars is None or not self._compiling:
            return []
        failed = []
        if waits:
            self._grammars.compiler.wait([wait.job for wait in self._compiling.values()], _COMPILE_WAIT_SECONDS)
        now = time.monotonic()
        for request_id, (job, until) in list(self._compiling.items()):
            if not job.is_done and not (job.is_queued and now >= until):
                continue
            choices = self.requests[request_id]
            if job.grammar is None:
                error = job.error or _no_worker(self._grammars.queue_timeout)
                for choice in choices:
                    self._recorder.fail(choice, error)
                failed.append(choices)
                continue
            del self._compiling[request_id]
            for choice in choices:
                assert choice.grammar is not None, "given when the request was queued"
                choice.grammar.start(job.grammar)
            self._schedule(choices)
        return failed

    def cancel(self, request_id: str) -> bool:
        """Wait no more for a request's grammar; False where it does not wait for one, and so is in a queue."""
        wait = self._compiling.pop(request_id, None)
        if wait is not None and self._grammars is not None:
            self._grammars.compiler.cancel(wait.job)
        return wait is not None

    def close(self) -> None:
        """Take no more requests."""
        if self._owns_grammars and self._grammars is not None:
            self._grammars.close()

    def _schedule(self, choices: list[Request]) -> None:
        """Queue the choices of a request, those but the first behind its prompt."""
        request = choices[0]
        if len(request.prompt_token_ids) > 1:
            request.siblings = choices[1:]
            choices = choices[:1]
        for choice in choices:
            self._scheduler.add(choice)


def _no_worker(seconds: float) -> RequestError:
    return RequestError(
        "grammar_queue_timeout",
        f"no worker was free for this request's grammar within {seconds:g} s, since others were compiling; ask again "
        "later, or raise grammar_workers or grammar_queue_timeout",
    )
