"""The library that matches tokens against grammars: xgrammar. But for the worker process nothing else of ours knows it.

It is an optional dependency, imported when the first grammar is needed; `require` says what to install.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from time import thread_time
from typing import Any, Final

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.step_buffers import Int32Array

SLOW_SECONDS: Final = 1e-3
"""A token that takes longer than this counts against its answer; ordinary ones take microseconds."""
MAX_SLOW_SECONDS: Final = 2.0
"""Processor time that the slow tokens of one answer may take in all: everybody waits for them."""


def require() -> None:
    """Make sure that grammars can be had.

    Raises:
        RequestError: the library is not installed.
    """
    if find_spec("xgrammar") is None:
        raise RequestError(
            "grammar_unavailable",
            "structured output needs the package xgrammar, which is not installed: pip install xgrammar",
        )


class CompiledGrammar:
    """A grammar that matchers are made of.

    Args:
        inner: the library's own.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_bytes = int(inner.memory_size_bytes)

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the grammar's start; once the grammar is complete these ids may come."""
        import xgrammar

        return Matcher(xgrammar.GrammarMatcher(self._inner, override_stop_tokens=list(stop_token_ids)))


class Loader:
    """Makes grammars of what the worker process wrote.

    Args:
        vocabulary: the worker's own.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        import xgrammar

        tokens, stops = vocabulary.token_bytes(), list(vocabulary.eos_token_ids)
        self._load = xgrammar.CompiledGrammar.deserialize_json
        self._info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=stops)

    def load(self, text: str) -> CompiledGrammar:
        """The grammar of a worker's answer."""
        return CompiledGrammar(self._load(text, self._info))


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._slow_seconds = 0.0

    def accept(self, token: int) -> bool:
        """Go on behind a token; False, and nothing has changed, where the grammar does not allow it."""
        began = thread_time()
        is_allowed = bool(self.inner.accept_token(token))
        taken = thread_time() - began
        if taken > SLOW_SECONDS:
            self._slow_seconds += taken
        return is_allowed

    @property
    def is_too_slow(self) -> bool:
        """Whether the grammar is so ambiguous that going on with it would hold up everybody else."""
        return self._slow_seconds > MAX_SLOW_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether a token that ends the answer was accepted: nothing may come behind it."""
        return bool(self.inner.is_terminated())


class MatcherBatch:
    """What several matchers do at once, in native code, on the calling thread."""

    def __init__(self) -> None:
        import xgrammar

        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    def fill(self, matchers: Sequence[Matcher], masks: Int32Array) -> None:
        """Write the mask of the next token of each matcher.

        Args:
            matchers: R, none of them over.
            masks: [R, ceil(vocab / 32)] int32; a set bit allows.
        """
        # Without row numbers: a list of them costs the library more than the masks.
        self._batch.batch_fill_next_token_bitmask([m.inner for m in matchers], masks)

    @staticmethod
    def accept(matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """Go on behind one token each; False for those, unchanged, whose grammar does not allow it."""
        # One call for all takes longer: each entry of what it returns is a call of its own.
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    def roll_back(self, matchers: Sequence[Matcher], counts: Sequence[int]) -> None:
        """Go back by so many tokens each."""
        self._batch.batch_rollback([m.inner for m in matchers], list(counts))
