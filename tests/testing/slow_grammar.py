"""Structured output written a second time: every token is tried by itself, from the start of the answer.

It shares with the engine what a grammar is compiled from, and nothing of how an answer is followed: no mask, no state
that goes on or back, no buffer, no worker process.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache
from typing import Any

from deepinfer.core.grammar.source import GrammarSource, ToolGrammar, source_of
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.tokenizer import Tokenizer


class SlowGrammar:
    """A `slow_oracle.SlowForm`.

    Args:
        spec: what the request asks for.
        tokenizer: the model's.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        eos: the model's own ends.
        prompt: the prompt.
        stop_token_ids: the request's own ends.
        tool_grammar: the model family's way to write calls.
    """

    def __init__(
        self,
        spec: StructuredOutput,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: Sequence[int],
        prompt: Sequence[int],
        stop_token_ids: Sequence[int] = (),
        tool_grammar: ToolGrammar | None = None,
    ) -> None:
        vocabulary = GrammarVocabulary(tokenizer, vocab_size, eos)
        self._spec = spec
        self._prompt = list(prompt)
        self._think, self._end_think = vocabulary.token_id("<think>"), vocabulary.token_id("</think>")
        self._stops = {*eos, *(t for t in stop_token_ids if vocabulary.is_control(t))}
        self._vocab_size = vocab_size
        tokens, source = tuple(vocabulary.token_bytes()), source_of(spec, vocabulary, tool_grammar)
        self._compiled = _compiled(tokens, tuple(eos), source)
        self._found: dict[tuple[int, ...], frozenset[int]] = {}

    def allowed(self, out: list[int]) -> Set[int] | None:
        """See `slow_oracle.SlowForm`."""
        spec = self._spec
        if spec.trigger_token_ids:
            begin = self._behind_trigger(out)
            return None if begin is None else self._next(out[begin:])
        everything = self._prompt + out
        markers = [place for place, token in enumerate(self._prompt) if token in (self._think, self._end_think)]
        thinks = bool(markers) and self._prompt[markers[-1]] == self._think
        if not (spec.only_after_thinking and thinks):
            return self._next(out)
        if self._end_think not in out:
            return set(range(self._vocab_size)) - self._stops
        return self._next(everything[len(self._prompt) + out.index(self._end_think) + 1 :])

    def forced(self, out: list[int]) -> int | None:
        """See `slow_oracle.SlowForm`."""
        spec = self._spec
        if spec.bound_token_id is None or self._behind_trigger(out) is not None or spec.bound_token_id not in out:
            return None
        return spec.trigger_token_ids[len(out) - 1 - out.index(spec.bound_token_id)]

    def _behind_trigger(self, out: list[int]) -> int | None:
        """Where the form begins: behind the first trigger, or the bound id and the trigger that follows it."""
        trigger, bound = list(self._spec.trigger_token_ids), self._spec.bound_token_id
        size = len(trigger)
        for end in range(1, len(out) + 1):
            if out[max(end - size, 0) : end] == trigger:
                return end
            if out[end - 1] == bound:
                return end + size if end + size <= len(out) else None
        return None

    def _next(self, inside: list[int]) -> frozenset[int]:
        key = tuple(inside)
        if key not in self._found:
            matcher = self._matcher(inside)
            found = set()
            for token in range(self._vocab_size):
                if matcher.accept_token(token):
                    found.add(token)
                    matcher = self._matcher(inside)
            self._found[key] = frozenset(found)
        return self._found[key]

    def _matcher(self, inside: list[int]) -> Any:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(self._stops))
        for token in inside:
            if not matcher.accept_token(token):
                raise AssertionError(f"the answer {inside} is not in the grammar")
        return matcher


@cache
def _compiled(tokens: tuple[bytes, ...], eos: tuple[int, ...], source: GrammarSource) -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo(list(tokens), vocab_size=len(tokens), stop_token_ids=list(eos))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return compiler.compile_regex(source.text) if source.kind == "regex" else compiler.compile_grammar(source.text)
