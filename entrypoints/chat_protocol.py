"""What a model family's chat format offers: how conversations are written, and how answers are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from deepinfer.core.grammar.source import ToolGrammar
from deepinfer.core.tokenizer import Tokenizer


class RenderedChat(Protocol):
    """A conversation as a prompt."""

    @property
    def text(self) -> str:
        """The prompt as one string."""

    @property
    def num_images(self) -> int:
        """Image places in the prompt."""

    @property
    def starts_in_reasoning(self) -> bool:
        """Whether the answer begins inside the reasoning."""

    def to_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids."""


class FunctionCall(Protocol):
    """A call the model made."""

    @property
    def name(self) -> str:
        """The tool."""

    @property
    def arguments(self) -> str:
        """A JSON object as text."""


class ParsedAnswer(Protocol):
    """An answer taken apart."""

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning, None where the answer did not begin in it."""

    @property
    def content(self) -> str:
        """The answer itself."""

    @property
    def tool_calls(self) -> Sequence[FunctionCall]:
        """Complete calls."""

    @property
    def reasoning_truncated(self) -> bool:
        """Whether it ended inside the reasoning."""


class AnswerDelta(Protocol):
    """What a piece of an answer added."""

    @property
    def reasoning_content(self) -> str:
        """More reasoning, "" if none."""

    @property
    def content(self) -> str:
        """More of the answer, "" if none."""

    @property
    def tool_calls(self) -> Sequence[FunctionCall]:
        """Calls that are complete now."""


class AnswerParser(Protocol):
    """Takes an answer apart as it arrives."""

    def feed(self, text: str) -> AnswerDelta:
        """The next piece of the text; what may still turn out otherwise is held back."""

    def finish(self) -> AnswerDelta:
        """The end of the text: what was held back."""

    def message(self) -> ParsedAnswer:
        """Everything so far."""


class ChatFormat(Protocol):
    """A model family's way to write conversations, as its chat module offers it."""

    @property
    def visible_tokens(self) -> Collection[str]:
        """Control tokens that the parser must see in the text."""

    @property
    def tool_grammar(self) -> ToolGrammar | None:
        """The grammar of calls, for answers that are held to the tools' schemas; None where there is none."""

    def encode_chat(
        self,
        request: Mapping[str, Any],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Render a request; ValueError, its message beginning with the place at fault, when it cannot be."""

    def parse_completion(
        self, text: str, thinking: bool, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ParsedAnswer:
        """Take an answer apart; `thinking` says whether it began in the reasoning."""

    def new_parser(self, thinking: bool, *, tools: Sequence[Mapping[str, Any]] | None = None) -> AnswerParser:
        """The same, piece by piece."""
