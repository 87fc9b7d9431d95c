"""Completions to messages: reasoning, content and tool calls out of the model's text.

Reads text in which the tokens `</think>` and `｜DSML｜` are visible and every other control token is not; decoding that
way is the caller's part (`VISIBLE_TOKENS`). The parse undoes `chat.py`: what it returns renders to the same prompt text
again, so nothing is trimmed but the separator before a calls block. Whole texts go through the streaming parser, and
how a text is cut into pieces makes no difference. Call ids are the server's business.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from deepinfer.models.deepseek_v41_flash.chat import DSML, END_THINK

VISIBLE_TOKENS = (END_THINK, DSML)

_BLOCK_STARTS = (f"<{DSML} calls>", f"<{DSML}calls>")
_MAX_SEPARATOR = 2  # newlines between content and a calls block
_END_PARAMETER = re.compile(f"</{DSML} ?parameter>")
# Names hold no U+FF5C, so an open tag never reaches over the next one and more text cannot change a match; and tags
# are bounded, so that what a model babbles between them need not be kept.
_NAME = r'name="([^｜\n]{0,256}?)"'
_MAX_TAG = 512
_IN_BLOCK = re.compile(rf"<{DSML} ?invoke {_NAME}\s{{0,8}}>|</{DSML} ?calls>")
_IN_INVOKE = re.compile(rf'<{DSML} ?parameter {_NAME}(?:\s{{1,8}}string="(\w{{0,16}})")?\s{{0,8}}>|</{DSML} ?invoke>')
_WRAPPERS = ("arguments", "input")


@dataclass(frozen=True)
class ToolCall:
    """A finished call: the tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class OutputDelta:
    """What one piece of text added to the message; calls appear when they are complete."""

    reasoning_content: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning_content or self.content or self.tool_calls)


@dataclass(frozen=True)
class ParsedMessage:
    """A whole assistant message.

    Attributes:
        reasoning_content: the reasoning, or None where the completion did not start in it.
        content: the answer, "" if there is none.
        tool_calls: complete calls in order.
        reasoning_truncated: whether the text ended inside the reasoning, so that there is no answer.
        calls_truncated: whether a calls block was opened and not closed; a call cut short is left out.
    """

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_truncated: bool = False
    calls_truncated: bool = False


def parse_completion(
    text: str, thinking: bool, *, tools: Iterable[Mapping[str, Any]] | None = None, parse_calls: bool = True
) -> ParsedMessage:
    """Parse a whole completion; see `OutputParser` for the arguments."""
    parser = OutputParser(thinking, tools=tools, parse_calls=parse_calls)
    parser.feed(text)
    parser.finish()
    return parser.message()


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()
    INVOKE = auto()
    PARAMETER = auto()
    DONE = auto()


class OutputParser:
    """Parses a completion as it arrives.

    Lenient where models slip: a parameter without `string` attribute is JSON if it reads as JSON and text otherwise, a
    value announced as JSON that is none becomes text, a calls block inside the reasoning ends it, a `</think>` after
    the reasoning is dropped, and a lone parameter `arguments` or `input` that holds an object is taken for the
    arguments themselves. What stands between the tags of a calls block and after it is dropped.

    Args:
        thinking: whether the completion starts inside the reasoning (`ChatPrompt.starts_in_reasoning`).
        tools: the request's tools; a tool that declares a parameter called `arguments` or `input` keeps it.
        parse_calls: whether calls blocks are looked for; off, they are ordinary text.
    """

    def __init__(
        self, thinking: bool, *, tools: Iterable[Mapping[str, Any]] | None = None, parse_calls: bool = True
    ) -> None:
        self._thinking = thinking
        self._declared = _declared_parameters(tools or ())
        self._markers = (END_THINK, *(_BLOCK_STARTS if parse_calls else ()))
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._finished = False
        self._buffer = ""
        self._searched = 0  # buffer characters in which the awaited parameter end does not begin
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._calls_truncated = False
        self._invoke_name = ""
        self._parameter: tuple[str, str | None] = ("", None)
        self._arguments: dict[str, str] = {}

    def feed(self, text: str) -> OutputDelta:
        """Take the next piece of text and return what it settled; what could still be a marker is held back.

        Raises:
            RuntimeError: `finish` was called before.
        """
        if self._finished:
            raise RuntimeError("feed after finish: a parser serves one completion")
        before = self._marks()
        self._buffer += text
        while self._step():
            pass
        return self._since(before)

    def finish(self) -> OutputDelta:
        """End of the completion: return what was held back. Unfinished call markup is never shown as content."""
        before = self._marks()
        if not self._finished:
            self._finished = True
            rest, self._buffer = self._buffer, ""
            if self._state in (_State.REASONING, _State.CONTENT):
                marker = rest.lstrip("\n") if len(self._markers) > 1 else ""
                self._calls_truncated = marker.startswith(f"<{DSML}")
                self._emit(_before_block(rest[: -len(marker)]) if self._calls_truncated else rest)
            else:
                self._calls_truncated = self._state is not _State.DONE
        return self._since(before)

    def message(self) -> ParsedMessage:
        """Everything so far as one message; meant for after `finish`."""
        return ParsedMessage(
            reasoning_content="".join(self._reasoning) if self._thinking else None,
            content="".join(self._content),
            tool_calls=tuple(self._calls),
            reasoning_truncated=self._state is _State.REASONING and not self._calls_truncated,
            calls_truncated=self._calls_truncated,
        )

    def _step(self) -> bool:
        """Consume up to the next marker; False when more text is needed."""
        if self._state in (_State.REASONING, _State.CONTENT):
            return self._step_text()
        if self._state is _State.BLOCK:
            return self._step_block()
        if self._state is _State.INVOKE:
            return self._step_invoke()
        if self._state is _State.PARAMETER:
            return self._step_parameter()
        self._buffer = ""
        return False

    def _step_text(self) -> bool:
        found = [(at, marker) for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if not found:
            held = _held_length(self._buffer, self._markers)
            cut = len(self._buffer) - held
            self._emit(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        at, marker = min(found)
        opens_block = marker in _BLOCK_STARTS
        text = self._buffer[:at]
        self._emit(_before_block(text) if opens_block else text)
        self._buffer = self._buffer[at + len(marker) :]
        self._state = _State.BLOCK if opens_block else _State.CONTENT
        return True

    def _step_block(self) -> bool:
        match = self._take(_IN_BLOCK)
        if match is None:
            return False
        if match[1] is None:
            self._state = _State.DONE
        else:
            self._invoke_name, self._arguments, self._state = match[1], {}, _State.INVOKE
        return True

    def _step_invoke(self) -> bool:
        match = self._take(_IN_INVOKE)
        if match is None:
            return False
        if match[1] is None:
            self._calls.append(ToolCall(self._invoke_name, self._joined_arguments()))
            self._state = _State.BLOCK
        else:
            self._parameter, self._state = (match[1], match[2]), _State.PARAMETER
            self._searched = 0
        return True

    def _step_parameter(self) -> bool:
        match = _END_PARAMETER.search(self._buffer, self._searched)
        if match is None:
            # long values arrive in small pieces; only the last characters can begin the end tag
            self._searched = max(0, len(self._buffer) - len(f"</{DSML} parameter>"))
            return False
        name, kind = self._parameter
        self._arguments[name] = _json_value(self._buffer[: match.start()], kind)
        self._buffer = self._buffer[match.end() :]
        self._state = _State.INVOKE
        return True

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Find a tag, dropping it and all before it from the buffer."""
        match = pattern.search(self._buffer)
        self._buffer = self._buffer[-_MAX_TAG:] if match is None else self._buffer[match.end() :]
        return match

    def _joined_arguments(self) -> str:
        """The parameters as one JSON object, values in the model's own spelling."""
        if len(self._arguments) == 1:
            ((name, value),) = self._arguments.items()
            if name in _WRAPPERS and name not in self._declared.get(self._invoke_name, ()):
                inner = _load_json(value)
                if isinstance(inner, dict):
                    return value
                if isinstance(inner, str) and isinstance(_load_json(inner), dict):
                    return inner.strip()
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in self._arguments.items())
        return "{" + ", ".join(pairs) + "}"

    def _emit(self, text: str) -> None:
        if text:
            (self._reasoning if self._state is _State.REASONING else self._content).append(text)

    def _marks(self) -> tuple[int, int, int]:
        return len(self._reasoning), len(self._content), len(self._calls)

    def _since(self, marks: tuple[int, int, int]) -> OutputDelta:
        reasoning, content, calls = marks
        return OutputDelta(
            "".join(self._reasoning[reasoning:]), "".join(self._content[content:]), tuple(self._calls[calls:])
        )


def _held_length(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end may belong to a marker, or to the separator before a calls block."""
    partial = max(
        (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size])), default=0
    )
    before, begun = text[: len(text) - partial], text[len(text) - partial :]
    if any(marker.startswith(begun) for marker in markers if marker in _BLOCK_STARTS):
        return partial + len(before) - len(_before_block(before))
    return partial


def _before_block(text: str) -> str:
    """The text in front of a calls block without the newlines that part the two."""
    stripped = text.rstrip("\n")
    return text[: max(len(stripped), len(text) - _MAX_SEPARATOR)]


def _json_value(text: str, kind: str | None) -> str:
    """A parameter's value as JSON text. `kind` is its `string` attribute; None if it has none."""
    if kind != "true" and _load_json(text) is not _INVALID:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


_INVALID = object()


def _load_json(text: str) -> Any:
    """The value of a JSON text, or `_INVALID`. NaN and Infinity are no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _INVALID


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _declared_parameters(tools: Iterable[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    declared = {}
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        declared[str(function.get("name"))] = frozenset(properties)
    return declared
