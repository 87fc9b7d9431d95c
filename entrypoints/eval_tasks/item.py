"""One question with its answer, and the rule that accepts answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Language = Literal["en", "zh"]
Form = Literal["text", "json", "calls"]


@dataclass(frozen=True)
class Call:
    """A tool call: its name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class Said(Protocol):
    """A call as an engine reports it: arguments are the text of a JSON object."""

    @property
    def name(self) -> str:
        """Of the tool."""
        ...

    @property
    def arguments(self) -> str:
        """Text of a JSON object."""
        ...


@dataclass(frozen=True)
class Answer:
    """What a right answer says.

    Attributes:
        content: the text; the JSON of one object where the item's form is "json"; "" beside calls.
        reasoning: a thinking section that leads to it, for training; None where the item does not think.
        calls: tool calls in order.
    """

    content: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Item:
    """A question that a rule can judge.

    Attributes:
        task: the family it belongs to.
        language: of question and answer.
        question: the user's message.
        answer: a right answer.
        form: how answers are compared: letter by letter, as JSON values, or as calls.
        tools: function schemas as OpenAI writes them.
        atoms: the words, names and numbers that decide the answer; all of one split.
    """

    task: str
    language: Language
    question: str
    answer: Answer
    form: Form = "text"
    tools: tuple[Mapping[str, Any], ...] = ()
    atoms: tuple[str, ...] = field(default=(), repr=False)

    @property
    def request(self) -> dict[str, Any]:
        """The chat request that asks it."""
        thinks = self.answer.reasoning is not None
        request: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.question}],
            "thinking": {"type": "enabled" if thinks else "disabled"},
        }
        if thinks:
            request["reasoning_effort"] = "low"
        if self.tools:
            request["tools"] = list(self.tools)
        return request

    @property
    def answered_request(self) -> dict[str, Any]:
        """The same conversation with its right answer, for training."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
        if self.answer.reasoning is not None:
            message["reasoning_content"] = self.answer.reasoning
        if self.answer.calls:
            message["tool_calls"] = [
                {"id": f"call_{n}", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for n, call in enumerate(self.answer.calls)
            ]
        request = self.request
        return {**request, "messages": [*request["messages"], message]}

    def accepts(self, content: str, calls: Sequence[Said] = ()) -> bool:
        """Whether an answer is right; how it reasoned is not judged."""
        if self.form == "calls":
            return content == "" and [_read(call) for call in calls] == [
                (call.name, dict(call.arguments)) for call in self.answer.calls
            ]
        if calls:
            return False
        if self.form == "json":
            found = _parse(content)
            return isinstance(found, dict) and _exact(found) == _exact(json.loads(self.answer.content))
        return content == self.answer.content


def _read(call: Said) -> tuple[str, Any]:
    return call.name, _parse(call.arguments)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _exact(value: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Values with their types: 1, 1.0 and true differ."""
    return {key: (type(item).__name__, item) for key, item in value.items()}
