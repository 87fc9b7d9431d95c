"""Chat requests to prompts, in the exact bytes DeepSeek-V4.1-Flash was trained on.

Owns the prompt's wording and which parts of it are control tokens. Everything a caller supplies (contents, tool
schemas, tool results, arguments) is ordinary text, whatever it spells, so nobody can forge a turn. Not owned: sampling
options and other request fields, fetching images, and reading the answer (`output_parser.py`).

Source: the published `deepseek-recipe` encoder's prompts (18 of them are `tests/models/data/chat_cases.json`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer.models.deepseek_v41_flash.chat_request import (
    TASKS,
    ChatError,
    read_arguments,
    read_effort,
    read_functions,
    read_list,
    read_mapping,
    read_messages,
    read_response_schema,
    read_string,
    read_task,
    to_json,
)
from deepinfer.ops.show import shown

__all__ = ["ChatError", "ChatPrompt", "Segment", "TokenEncoder", "encode_chat"]

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"

_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_TOOLS_HEAD = """\n
## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), \
you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_CONTROL_IN_PROTOCOL = re.compile(f"({DSML}|{THINK}|{END_THINK})")
_USER_ROLES = ("user", "developer", "tool")
_JOIN = "\n\n"


class TokenEncoder(Protocol):
    """What turns a prompt into ids; `deepinfer.core.tokenizer.Tokenizer` is one."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of ordinary text."""

    def token_to_id(self, text: str) -> int | None:
        """Id of a control token by its text."""


@dataclass(frozen=True)
class Segment:
    """A stretch of prompt: exactly one control token, or ordinary text between two of them."""

    text: str
    is_control: bool


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt.

    Attributes:
        segments: the prompt in order; no two neighbours are both ordinary text, none is empty.
        images: the image parts as the request gave them, one per image token, in order.
        starts_in_reasoning: whether the model's next token belongs to its reasoning.
    """

    segments: list[Segment] = field(default_factory=list)
    images: list[Mapping[str, Any]] = field(default_factory=list)
    starts_in_reasoning: bool = False

    @property
    def text(self) -> str:
        """The prompt as one string, control tokens spelled out."""
        return "".join(segment.text for segment in self.segments)

    @property
    def num_images(self) -> int:
        """How many image tokens the prompt holds; one spelled in a text does not count."""
        return len(self.images)

    def to_ids(self, tokenizer: TokenEncoder) -> list[int]:
        """Token ids, cut only where control tokens stand; the beginning-of-sentence token is already among them.

        Raises:
            ChatError: the vocabulary lacks a control token of this prompt, so it is not a V4.1 vocabulary.
        """
        ids: list[int] = []
        for segment in self.segments:
            if not segment.is_control:
                ids += tokenizer.encode(segment.text, parse_special=False)
                continue
            token_id = tokenizer.token_to_id(segment.text)
            if token_id is None:
                raise ChatError("tokenizer", f"has no token {segment.text}, which this prompt needs")
            ids.append(token_id)
        return ids


def encode_chat(
    request: Mapping[str, Any],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> ChatPrompt:
    """Render a chat request (`messages`, `tools`, `response_format`, `thinking`, `reasoning_effort`, `task`).

    In thinking mode a request without tools loses the reasoning of every assistant turn that something follows, be it
    only the header of a new turn; with tools nothing is lost.

    Args:
        request: the request body; other fields are ignored. `thinking` is on, at effort 75, unless it says otherwise.
        add_generation_prompt: whether to end with the header of a new assistant turn. None means yes, unless the
            final message is continued.
        continue_final_message: whether to leave the final assistant message open. Without content its reasoning is
            what stays open.

    Raises:
        ChatError: a field is missing, of the wrong type or has an unknown value, the two flags are both set, or the
            final message is not one that can be continued.
    """
    if add_generation_prompt and continue_final_message:
        raise ChatError("continue_final_message", "excludes add_generation_prompt: a message is continued or begun")
    generate = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    effort = read_effort(request)
    task = read_task(request, generate)
    functions = read_functions(request.get("tools"))
    schema = read_response_schema(request.get("response_format"))
    messages = read_messages(request, may_end_in_calls=not generate)
    if continue_final_message:
        _check_continuable(*messages[-1])

    out = _Writer()
    out.control(BOS)
    has_system = messages[0][1]["role"] == "system"
    if has_system or effort is not None or functions or schema is not None:
        out.control(SYSTEM)
        out.text("" if effort is None else _EFFORT_LINE.format(effort))
        if has_system:
            place, message = messages.pop(0)
            out.content(message.get("content"), place)
        if functions:
            out.protocol(_TOOLS_HEAD)
            out.text("\n".join(functions) + _TOOLS_TAIL)
        out.text("" if schema is None else _RESPONSE_FORMAT + schema)

    previous = "system"
    reasoning_open = False
    for number, (place, message) in enumerate(messages, 1):
        role = message["role"]
        if role == "assistant":
            is_final = number == len(messages) and not generate
            keep_reasoning = effort is not None and (bool(functions) or is_final)
            reasoning_open = _assistant(out, message, place, keep_reasoning, is_final and continue_final_message)
        elif role in _USER_ROLES:
            if previous in _USER_ROLES:
                out.text(_JOIN)
            else:
                out.control(USER)
            out.text("<tool_result>" if role == "tool" else "")
            out.content(message.get("content"), place)
            out.text("</tool_result>" if role == "tool" else "")
        else:
            out.control(SYSTEM)
            out.content(message.get("content"), place)
        previous = role

    if generate and task in (None, "action"):
        out.control(ASSISTANT)
        out.control(END_THINK if effort is None else THINK)
    if task is not None:
        out.control(TASKS[task])
    starts_in_reasoning = reasoning_open or (generate and task is None and effort is not None)
    return ChatPrompt(out.segments, out.images, starts_in_reasoning)


class _Writer:
    """Collects segments and keeps ordinary text between two control tokens in one piece."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.images: list[Mapping[str, Any]] = []

    def control(self, token: str) -> None:
        self.segments.append(Segment(token, True))

    def text(self, text: str) -> None:
        if not text:
            return
        if self.segments and not self.segments[-1].is_control:
            text = self.segments.pop().text + text
        self.segments.append(Segment(text, False))

    def protocol(self, text: str) -> None:
        """Text of the prompt format itself, whose control tokens are real ones."""
        for index, piece in enumerate(_CONTROL_IN_PROTOCOL.split(text)):
            if index % 2:
                self.control(piece)
            else:
                self.text(piece)

    def content(self, content: Any, place: str, *, images: bool = True) -> None:
        """A message's content: a string, or text and image parts."""
        place = f"{place}.content"
        if isinstance(content, str):
            self.text(content)
            return
        for index, part in enumerate(read_list(content, place, "a string or a list of parts")):
            if index:
                self.text(_JOIN)
            kind = read_mapping(part, f"{place}[{index}]").get("type")
            if kind == "text":
                self.text(read_string(part.get("text"), f"{place}[{index}].text"))
            elif kind in ("image_url", "image") and images:
                self.control(IMAGE)
                self.images.append(part)
            else:
                known = "'text', 'image_url' or 'image'" if images else "'text' in an assistant message"
                raise ChatError(f"{place}[{index}].type", f"expected {known}, got {shown(kind)}")


def _assistant(out: _Writer, message: Mapping[str, Any], place: str, keep_reasoning: bool, is_open: bool) -> bool:
    """Write one assistant turn with its header; returns whether it ends inside its reasoning."""
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        read_string(reasoning, f"{place}.reasoning_content")
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    if content is None and not calls and not reasoning and not is_open:
        raise ChatError(f"{place}.content", "an assistant message needs content or tool_calls")

    out.control(ASSISTANT)
    if keep_reasoning:
        out.control(THINK)
        out.text(reasoning or "")
        if is_open and not content:
            return True
    out.control(END_THINK)
    if content is not None:
        out.content(content, place, images=False)
    if calls:
        _calls(out, calls, f"{place}.tool_calls")
    if not is_open:
        out.control(EOS)
    return False


def _calls(out: _Writer, calls: Sequence[Any], place: str) -> None:
    out.protocol(f"\n\n<{DSML} calls>\n")
    for index, call in enumerate(calls):
        where = f"{place}[{index}].function"
        function = read_mapping(call.get("function"), where)
        out.protocol(f'<{DSML} invoke name="')
        out.text(read_string(function.get("name"), f"{where}.name"))
        out.text('">\n')
        for number, (key, value) in enumerate(read_arguments(function.get("arguments"), f"{where}.arguments").items()):
            is_string = isinstance(value, str)
            out.protocol(("\n" if number else "") + f'<{DSML} parameter name="')
            out.text(f'{key}" string="{"true" if is_string else "false"}">')
            out.text(value if is_string else to_json(value, f"{where}.arguments"))
            out.protocol(f"</{DSML} parameter>")
        out.protocol(f"\n</{DSML} invoke>\n")
    out.protocol(f"</{DSML} calls>")


def _check_continuable(place: str, message: Mapping[str, Any]) -> None:
    if message["role"] != "assistant":
        problem = f"only an assistant message can be continued, the final one is {message['role']!r}"
        raise ChatError(f"{place}.role", problem)
    if message.get("tool_calls"):
        raise ChatError(f"{place}.tool_calls", "a message that ends in tool calls cannot be continued")
