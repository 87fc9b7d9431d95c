"""Reading a chat request: every field checked once, with errors that name the place.

Nothing here knows how a prompt is spelled; `chat.py` renders what these functions return.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.ops.show import shown

EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = 75
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
ROLES = ("system", "user", "assistant", "tool", "developer")


class ChatError(ValueError):
    """A chat request that cannot be rendered; the message begins with the place at fault and says what would fit."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place


def read_arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    """A call's arguments as an object; a text that is no JSON object stays as it is, under the name `arguments`."""
    if isinstance(arguments, Mapping):
        return arguments
    text = read_string(arguments, place)
    try:
        parsed = json.loads(text)
        to_json(parsed, place)  # NaN and 1e999 get through loads
    except (ValueError, RecursionError):
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": text}


def read_effort(request: Mapping[str, Any]) -> int | None:
    """The effort number, or None in chat mode. A wrong effort is refused in either."""
    thinking = request.get("thinking")
    kind = "enabled" if thinking is None else read_mapping(thinking, "thinking").get("type")
    if kind not in ("enabled", "disabled"):
        raise ChatError("thinking.type", f"expected 'enabled' or 'disabled', got {shown(kind)}")
    effort = request.get("reasoning_effort")
    if effort is None:
        number = DEFAULT_EFFORT
    elif isinstance(effort, str) and effort in EFFORTS:
        number = EFFORTS[effort]
    elif isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        number = effort
    else:
        names = ", ".join(map(repr, EFFORTS))
        hint = "; to turn thinking off use thinking.type 'disabled'" if effort == "none" else ""
        raise ChatError("reasoning_effort", f"expected {names} or an integer from 1 to 100, got {shown(effort)}{hint}")
    return number if kind == "enabled" else None


def read_task(request: Mapping[str, Any], generate: bool) -> str | None:
    """The task name, or None; a task asks for an answer, so it needs `generate`."""
    task = request.get("task")
    if task is None:
        return None
    if not isinstance(task, str) or task not in TASKS:
        raise ChatError("task", f"expected one of {', '.join(TASKS)}, got {shown(task)}")
    if not generate:
        raise ChatError("task", "needs a generation prompt: it asks for a new answer")
    return task


def read_functions(tools: Any) -> list[str]:
    """The tool schemas, one line of JSON each, with the three keys the model knows."""
    lines = []
    for index, tool in enumerate(read_list(tools, "tools", "a list of tools") if tools is not None else ()):
        kind = read_mapping(tool, f"tools[{index}]").get("type", "function")
        if kind != "function":
            raise ChatError(f"tools[{index}].type", f"expected 'function', got {shown(kind)}")
        place = f"tools[{index}].function"
        function = read_mapping(tool.get("function"), place)
        name = read_string(function.get("name"), f"{place}.name")
        if not name:
            raise ChatError(f"{place}.name", "must not be empty")
        description = function.get("description")
        parameters = function.get("parameters")
        schema = {
            "name": name,
            "description": "" if description is None else read_string(description, f"{place}.description"),
            "parameters": {} if parameters is None else read_mapping(parameters, f"{place}.parameters"),
        }
        lines.append(to_json(schema, place))
    return lines


def read_response_schema(response_format: Any) -> str | None:
    """The JSON shown to the model, or None for free text."""
    if response_format is None:
        return None
    kind = read_mapping(response_format, "response_format").get("type")
    if kind in ("text", "structural_tag"):  # tags are free text with places that have a form: nothing to tell the model
        return None
    if kind == "json_object":
        return to_json({"type": "json_object"}, "response_format")
    if kind != "json_schema":
        kinds = "'text', 'json_object', 'json_schema' or 'structural_tag'"
        raise ChatError("response_format.type", f"expected {kinds}, got {shown(kind)}")
    place = "response_format.json_schema"
    schema = read_mapping(response_format.get("json_schema"), place).get("schema")
    return to_json(read_mapping(schema, f"{place}.schema"), f"{place}.schema")


def read_messages(request: Mapping[str, Any], *, may_end_in_calls: bool) -> list[tuple[str, Mapping[str, Any]]]:
    """The messages with the place each came from, tool results moved into the order of their calls.

    System messages without content are left out, so that they neither open a section nor part two user messages.
    """
    pending = []
    for index, message in enumerate(read_list(request.get("messages"), "messages", "a list of messages")):
        role = read_mapping(message, f"messages[{index}]").get("role")
        if role not in ROLES:
            raise ChatError(f"messages[{index}].role", f"expected one of {', '.join(ROLES)}, got {shown(role)}")
        if role != "system" or not _is_empty(message.get("content")):
            pending.append((f"messages[{index}]", message))
    if not pending:
        raise ChatError("messages", "expected at least one message that is no empty system message")

    ordered: list[tuple[str, Mapping[str, Any]]] = []
    while pending:
        place, message = pending.pop(0)
        ordered.append((place, message))
        if message["role"] == "tool":
            raise ChatError(f"{place}.role", "a tool message must follow an assistant message with tool_calls")
        calls = message.get("tool_calls")
        if message["role"] != "assistant" or not calls:
            continue
        call_ids: list[str] = []
        for index, call in enumerate(read_list(calls, f"{place}.tool_calls", "a list of calls")):
            where = f"{place}.tool_calls[{index}]"
            call_id = read_string(read_mapping(call, where).get("id"), f"{where}.id")
            if call_id in call_ids:
                raise ChatError(f"{where}.id", f"{shown(call_id)} is taken by an earlier call")
            call_ids.append(call_id)
        if not pending and may_end_in_calls:
            break
        results: dict[str, tuple[str, Mapping[str, Any]]] = {}
        while pending and pending[0][1]["role"] == "tool":
            where, result = pending.pop(0)
            call_id = read_string(result.get("tool_call_id"), f"{where}.tool_call_id")
            if call_id not in call_ids or call_id in results:
                problem = "was already answered" if call_id in results else f"is none of {', '.join(call_ids)}"
                raise ChatError(f"{where}.tool_call_id", f"{shown(call_id)} {problem}")
            results[call_id] = (where, result)
        unanswered = [call_id for call_id in call_ids if call_id not in results]
        if unanswered:
            problem = f"tool messages must follow that answer every call; missing: {', '.join(unanswered)}"
            raise ChatError(f"{place}.tool_calls", problem)
        ordered += [results[call_id] for call_id in call_ids]
    return ordered


def to_json(value: Any, place: str) -> str:
    """One line of JSON as the model knows it: `, ` and `: ` between items, non-ASCII kept."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(place, f"expected a JSON value: {error}") from error


def read_mapping(value: Any, place: str) -> Mapping[str, Any]:
    """`value` if it is an object."""
    if not isinstance(value, Mapping):
        raise ChatError(place, f"expected an object, got {_kind(value)}")
    return value


def read_list(value: Any, place: str, wanted: str) -> Sequence[Any]:
    """`value` if it is a list; `wanted` says what belongs at `place`."""
    if not isinstance(value, list | tuple):
        raise ChatError(place, f"expected {wanted}, got {_kind(value)}")
    return value


def read_string(value: Any, place: str) -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise ChatError(place, f"expected a string, got {_kind(value)}")
    return value


def _is_empty(content: Any) -> bool:
    if isinstance(content, list | tuple) and len(content) == 1 and isinstance(content[0], Mapping):
        return content[0].get("type") == "text" and content[0].get("text") == ""
    return content in ("", [], ())


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
