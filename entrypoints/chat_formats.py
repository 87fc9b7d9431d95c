"""Which chat format goes with which architecture.

One line per model family, beside `deepinfer.models.registry`, which has one per loader; the format itself is in
`models/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.entrypoints.prompts import ChatFormat, ParsedAnswer, RenderedChat


@dataclass(frozen=True)
class FunctionChatFormat:
    """A chat format made of a module's functions.

    Attributes:
        visible_tokens: control tokens that the parser must see.
        encode_chat: renders a request.
        parse_completion: takes an answer apart.
    """

    visible_tokens: tuple[str, ...]
    encode_chat: Callable[..., RenderedChat]
    parse_completion: Callable[..., ParsedAnswer]


def chat_format(architecture: str) -> ChatFormat | None:
    """The chat format of a model by its `ModelInfo.name`; None where it has none here."""
    make = _FORMATS.get(architecture)
    return make() if make is not None else None


def _v41() -> ChatFormat:
    from deepinfer.models.deepseek_v41_flash.chat import encode_chat
    from deepinfer.models.deepseek_v41_flash.output_parser import VISIBLE_TOKENS, parse_completion

    return FunctionChatFormat(VISIBLE_TOKENS, encode_chat, parse_completion)


_FORMATS: dict[str, Callable[[], ChatFormat]] = {"DeepseekV41ForCausalLM": _v41}
