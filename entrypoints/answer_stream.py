"""A chat answer taken apart while it grows.

The parser must see control tokens that the answer's text leaves out, and must not see what the text holds back because
a stop string may begin there. So each token is turned into text twice, as shown and as plain, and the shown one goes to
the parser once the plain one has come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.outputs import CompletionOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.chat_protocol import AnswerDelta, AnswerParser, FunctionCall, ParsedAnswer


class AnswerStream:
    """Follows one choice.

    Args:
        tokenizer: the engine's.
        parser: new.
        visible_ids: control tokens that the parser must see.
        params: the request's.
    """

    def __init__(
        self, tokenizer: Tokenizer, parser: AnswerParser, visible_ids: Collection[int], params: SamplingParams
    ) -> None:
        self._parser = parser
        self._has_text = params.detokenize
        self._plain = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._shown = IncrementalDetokenizer(tokenizer, keep_ids=visible_ids)
        self._held: deque[tuple[int, str]] = deque()  # per token, where its plain text ends, and its shown text
        self._num_out = 0  # characters of plain text that have come out
        self._num_passed = 0  # of those, characters of tokens that the parser has seen

    def feed(self, news: CompletionOutput) -> AnswerDelta:
        """Take the next tokens of the choice and their text.

        Args:
            news: what is new; its last piece has a finish reason.

        Returns:
            What it added to the message.
        """
        for token_id in news.token_ids:
            self._plain.feed((token_id,))
            self._held.append((self._plain.num_chars, self._shown.feed((token_id,))))
        self._num_out += len(news.text)
        text = self._settled()
        if news.finish_reason is None:
            return self._parser.feed(text)
        before, after = self._parser.feed(text + self._rest()), self._parser.finish()
        return _Delta(
            before.reasoning_content + after.reasoning_content,
            before.content + after.content,
            (*before.tool_calls, *after.tool_calls),
        )

    def message(self) -> ParsedAnswer:
        """Everything so far."""
        return self._parser.message()

    def _settled(self) -> str:
        """The text of tokens that have come out whole."""
        pieces = []
        while self._held and (self._held[0][0] <= self._num_out or not self._has_text):
            self._num_passed, text = self._held.popleft()
            pieces.append(text)
        return "".join(pieces)

    def _rest(self) -> str:
        """At the end, the text of what is held: up to where a stop string cut it, or all of it."""
        self._plain.finish()
        end = self._shown.finish()
        if self._has_text and self._num_out < self._plain.num_chars:
            return self._held[0][1][: self._num_out - self._num_passed] if self._held else ""
        return "".join(text for _, text in self._held) + end


@dataclass(frozen=True)
class _Delta:
    """Two pieces as one."""

    reasoning_content: str
    content: str
    tool_calls: Sequence[FunctionCall]
