"""The form that a request in OpenAI's or vLLM's words asks of its answer, as a `StructuredOutput`.

Read here once for conversations and batches: `response_format`, `tools` with `tool_choice`, `structured_outputs` and
its older spellings `guided_*`, and DeepInfer's `so_args`. Two of them at once are refused, as there is one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.spec import (
    StructuralTag,
    StructuredOutput,
    StructuredOutputError,
    ToolCalls,
    read_so_args,
)
from deepinfer.ops.show import shown

FORM_FIELDS: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
    "so_args",
)
"""Fields of a body, of a conversation or not, that are about form alone."""

_GUIDED: Final = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_RENAMED: Final = {"json": "json_schema"}
_OPTIONS: Final = (
    *("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "only_after_thinking"),
    *("max_whitespace", "timeout", "trigger_token_ids", "bound_token_id"),
)


def read_form(body: Mapping[str, Any], *, is_chat: bool) -> StructuredOutput | None:
    """The form that a body asks for; None for none.

    Args:
        body: of a request, or the options of a chat; None stands for a field that is not given.
        is_chat: whether tools and `response_format` are part of a conversation, rather than unknown.

    Raises:
        RequestError: a form that cannot be had, or two of them; the fields are named.
    """
    given = {name: body[name] for name in FORM_FIELDS if body.get(name) is not None}
    forms = {name: _form(name, value) for name, value in given.items()}
    response_format = _response_form(body.get("response_format"))
    if response_format is not None:
        forms["response_format"] = response_format
    if is_chat:
        calls = _calls_form(body)
        if calls is not None:
            forms["tools"] = calls
        elif body.get("tools") and forms and body.get("tool_choice") != "none":
            raise RequestError(
                "unsupported_parameter",
                f"{next(iter(forms))} cannot be combined with tools, whose calls have another form; set tool_choice to "
                "'none' or leave one of them out",
            )
    if len(forms) > 1:
        raise RequestError(
            "invalid_parameter", f"{' and '.join(sorted(forms))} both say what form the answer has; give one of them"
        )
    return next(iter(forms.values()), None)


def told_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as the model is told of it: without tools that it must not call, or a form it has no words for."""
    told = dict(request)
    if told.get("tool_choice") == "none":
        told["tools"] = None
    response_format = told.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type") == "structural_tag":
        told["response_format"] = None
    return told


def _form(name: str, value: Any) -> StructuredOutput:
    if name == "so_args":
        return read_so_args(value)
    if name == "structural_tag":
        return StructuredOutput(structural_tag=StructuralTag.read(value))
    if name in _GUIDED:
        return StructuredOutput(**{_GUIDED[name]: value})
    if not isinstance(value, Mapping):
        raise StructuredOutputError(f"{name} must be an object, got {shown(value)}")
    options: dict[str, Any] = {}
    for key, item in value.items():
        field = _RENAMED.get(key, key)
        if key == "disable_any_whitespace" and isinstance(item, bool):
            if item:
                options["max_whitespace"] = 0
        elif field not in _OPTIONS:
            raise StructuredOutputError(
                f"{name} has an unknown key {shown(key)}; keys are json, {', '.join(_OPTIONS)}, disable_any_whitespace"
            )
        elif item is not None:
            options[field] = StructuralTag.read(item) if field == "structural_tag" else item
    return StructuredOutput(**options)


def _response_form(value: Any) -> StructuredOutput | None:
    """The form of a `response_format`; what is wrong with one that is none is for the chat format to say."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind == "structural_tag":
        return StructuredOutput(structural_tag=StructuralTag.read(value))
    holder = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(holder, Mapping) or "schema" not in holder:
        raise StructuredOutputError(
            "response_format.type must be 'text', 'json_object', 'json_schema' (with json_schema.schema) or "
            f"'structural_tag', got {shown(value)}"
        )
    return StructuredOutput(json_schema=holder["schema"])


def _calls_form(body: Mapping[str, Any]) -> StructuredOutput | None:
    """The form of an answer that must call tools, or whose calls are strict; None where calls are left to the model."""
    tools, choice, parallel = body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls", True)
    parallel = True if parallel is None else parallel
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if choice.get("type") == "function" and isinstance(function, Mapping) else None
        named = True
        if not isinstance(choice, str) or choice in ("auto", "required"):
            raise StructuredOutputError(
                f"tool_choice names no tool: {shown(body['tool_choice'])}; it would be "
                '{"type": "function", "function": {"name": ...}}'
            )
    else:
        named = False
        if choice not in (None, "auto", "none", "required"):
            raise StructuredOutputError(
                f"tool_choice must be 'auto', 'none', 'required' or an object that names a tool, got {shown(choice)}"
            )
    if not isinstance(parallel, bool):
        raise StructuredOutputError(f"parallel_tool_calls must be true or false, got {shown(parallel)}")
    if not tools:
        if choice in (None, "auto", "none"):
            return None
        raise StructuredOutputError(f"tool_choice {shown(body['tool_choice'])} needs tools, and none are given")
    if choice == "none":
        return None
    if not named and choice != "required" and parallel and not _is_strict(tools):
        return None
    return StructuredOutput(tool_calls=ToolCalls(tools, choice or "auto", parallel))


def _is_strict(tools: Any) -> bool:
    """Whether a tool asks for arguments that are held to its schema."""
    if not isinstance(tools, list | tuple):
        return False
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)
