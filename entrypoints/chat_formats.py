"""Which chat format goes with which architecture.

One line per model family, beside `deepinfer.models.registry`, which has one per loader; the format itself is in
`models/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.core.grammar.source import ToolGrammar
from deepinfer.entrypoints.chat_protocol import AnswerParser, ChatFormat, ParsedAnswer, RenderedChat


@dataclass(frozen=True)
class FunctionChatFormat:
    """A chat format made of a module's functions.

    Attributes:
        visible_tokens: control tokens that the parser must see.
        encode_chat: renders a request.
        parse_completion: takes an answer apart.
        new_parser: takes one apart as it arrives.
        tool_grammar: writes the grammar of calls.
    """

    visible_tokens: tuple[str, ...]
    encode_chat: Callable[..., RenderedChat]
    parse_completion: Callable[..., ParsedAnswer]
    new_parser: Callable[..., AnswerParser]
    tool_grammar: ToolGrammar | None = None


def chat_format(architecture: str) -> ChatFormat | None:
    """The chat format of a model by its `ModelInfo.name`; None where it has none here."""
    make = _FORMATS.get(architecture)
    return make() if make is not None else None


def _v41() -> ChatFormat:
    from deepinfer.models.deepseek_v41_flash.chat import encode_chat
    from deepinfer.models.deepseek_v41_flash.output_parser import VISIBLE_TOKENS, OutputParser, parse_completion
    from deepinfer.models.deepseek_v41_flash.tool_grammar import tool_grammar

    return FunctionChatFormat(VISIBLE_TOKENS, encode_chat, parse_completion, OutputParser, tool_grammar)


_FORMATS: dict[str, Callable[[], ChatFormat]] = {"DeepseekV41ForCausalLM": _v41}
