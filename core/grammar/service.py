"""Structured output for one engine, or for several with the same vocabulary: from a request's wish to a shaper.

A request waits, outside of the scheduler's queues, until its grammar is compiled; others go on meanwhile.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Sequence
from typing import Final

from deepinfer.core.grammar import matching
from deepinfer.core.grammar.compiler import GrammarCompiler, GrammarJob
from deepinfer.core.grammar.gates import gate_of
from deepinfer.core.grammar.kept import Kept
from deepinfer.core.grammar.masks import GrammarMasks
from deepinfer.core.grammar.shaper import GrammarShaper
from deepinfer.core.grammar.source import GrammarSource, ToolGrammar, source_of
from deepinfer.core.grammar.spec import StructuredOutput, StructuredOutputError
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.tokenizer import Tokenizer

SOURCE_BYTES: Final = 64 << 20
"""Requests' forms to keep, each with its grammar or why there is none."""


class GrammarService:
    """Grammars of one vocabulary. Nothing is imported, and no process started, before the first one is asked for.

    Args:
        tokenizer: the model's.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        eos_token_ids: the model's own ends.
        num_workers: grammars that compile at a time.
        timeout: seconds that one may take, where the request does not say.
        queue_timeout: seconds that a request may wait for a free worker.
        cache_bytes: most bytes of grammars to keep.
        tool_grammar: the model family's way to write calls; None for none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        num_workers: int = 1,
        timeout: float = 20.0,
        queue_timeout: float = 600.0,
        cache_bytes: int = 1 << 30,
        tool_grammar: ToolGrammar | None = None,
    ) -> None:
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size, eos_token_ids)
        self.compiler = GrammarCompiler(self.vocabulary, num_workers, cache_bytes)
        self.queue_timeout = queue_timeout
        self._timeout = timeout
        self._tool_grammar = tool_grammar
        # many requests ask for one form, and one that is refused ahead of the steps is asked for again between them
        self._sources: Kept[bytes, GrammarSource | StructuredOutputError] = Kept(SOURCE_BYTES)
        self._lock = threading.Lock()

    def source(self, spec: StructuredOutput) -> GrammarSource:
        """What a request's grammar is compiled from. Any thread may ask; the last sources and refusals are kept.

        Raises:
            RequestError: the library is not installed, or the form cannot be had; the message names the place.
        """
        matching.require()
        key = pickle.dumps(spec)
        with self._lock:
            known = self._sources.get(key)
        if known is None:
            known = self._read(spec)
            text = known.text if isinstance(known, GrammarSource) else known.message
            with self._lock:
                self._sources.put(key, known, sys.getsizeof(key) + sys.getsizeof(text))
        if isinstance(known, StructuredOutputError):
            raise StructuredOutputError(known.message)  # an error of each request's own, with its own traceback
        return known

    def submit(self, spec: StructuredOutput, source: GrammarSource) -> GrammarJob:
        """Ask for a grammar; the job tells when it is there."""
        return self.compiler.submit(source, self._timeout if spec.timeout is None else spec.timeout)

    def shaper(
        self,
        spec: StructuredOutput,
        masks: GrammarMasks,
        prompt_token_ids: Sequence[int],
        *,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> GrammarShaper:
        """The shaper of one answer, which its grammar starts once it is there.

        Args:
            spec: validated.
            masks: of the engine.
            prompt_token_ids: the prompt.
            stop_token_ids: the request's own ends. Those that are text stay text to the grammar.
            min_tokens: no end before so many tokens, unless the grammar leaves nothing else.

        Raises:
            StructuredOutputError: an id is outside the vocabulary, or nothing could end the answer.
        """
        eos = self.vocabulary.eos_token_ids
        stops = (*eos, *(token for token in stop_token_ids if self.vocabulary.is_control(token) and token not in eos))
        if not stops:
            raise StructuredOutputError(
                "structured_output needs a control token that ends the answer, and the model has none; name one in "
                "stop_token_ids"
            )
        return GrammarShaper(
            masks,
            stop_token_ids=stops,
            ends=(*eos, *(token for token in stop_token_ids if token not in eos)),
            min_tokens=min_tokens,
            gate=gate_of(spec, prompt_token_ids, self.vocabulary, stops),
        )

    def close(self) -> None:
        """Stop all compiling."""
        self.compiler.close()

    def _read(self, spec: StructuredOutput) -> GrammarSource | StructuredOutputError:
        try:
            return source_of(spec, self.vocabulary, self._tool_grammar)
        except StructuredOutputError as refused:
            return refused
