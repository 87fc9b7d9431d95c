"""What a request may ask of its answer's form: one of seven kinds, and when and how long.

Checked when the object is made, as far as that needs no vocabulary; `core.grammar.source` turns it into a grammar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from deepinfer.core.errors import RequestError
from deepinfer.ops.show import shown

MAX_TEXT: Final = 1 << 20
"""Most characters of a schema, a regular expression or a grammar: far above any that a person wrote."""
MAX_CHOICES: Final = 1 << 16
MAX_WHITESPACE: Final = 256

KINDS: Final = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag", "tool_calls")


class StructuredOutputError(RequestError, ValueError):
    """A structured output that cannot be had. Remedy: the message says what was wrong, and what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_structured_output", message)

    def __reduce__(self) -> tuple[type[StructuredOutputError], tuple[str]]:  # type: ignore[override]
        """Pickle by the one argument."""
        return type(self), (self.message,)


@dataclass(frozen=True)
class Tag:
    """A part of an answer that has a form of its own.

    Attributes:
        begin: text that opens it.
        schema: JSON schema of what stands inside.
        end: text that closes it.
    """

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True)
class StructuralTag:
    """Free text in which some beginnings oblige. Control tokens are spelled as the vocabulary spells them.

    Attributes:
        tags: the parts; the begin of each starts with exactly one trigger.
        triggers: texts behind which one of the tags that start so must follow.
        at_least_one: the answer begins with a tag.
        stop_after_first: the answer ends behind the first tag.
    """

    tags: Sequence[Tag]
    triggers: Sequence[str]
    at_least_one: bool = False
    stop_after_first: bool = False

    @classmethod
    def read(cls, value: object) -> StructuralTag:
        """From the JSON that vLLM and OpenAI-compatible servers take.

        Args:
            value: the object or its text: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or
                `{"format": {"type": "triggered_tags", "tags": [...], "triggers": [...]}}`.

        Raises:
            StructuredOutputError: it is none of these; the place is named.
        """
        value = _json(value, "structural_tag") if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise StructuredOutputError(f"structural_tag must be an object, got {shown(value)}")
        body = value
        if "format" in value:
            body = value["format"]
            kind = body.get("type") if isinstance(body, Mapping) else None
            if kind != "triggered_tags":
                raise StructuredOutputError(f"structural_tag.format.type must be 'triggered_tags', got {shown(kind)}")
        listed = "tags" if "tags" in body else "structures"
        tags = []
        for place, item in enumerate(_sequence(body.get(listed), f"structural_tag.{listed}")):
            where = f"structural_tag.{listed}[{place}]"
            if not isinstance(item, Mapping):
                raise StructuredOutputError(f"{where} must be an object, got {shown(item)}")
            tags.append(Tag(item.get("begin", ""), _tag_schema(item, where), item.get("end", "")))
        return cls(
            tags,
            _sequence(body.get("triggers"), "structural_tag.triggers"),
            body.get("at_least_one", False),
            body.get("stop_after_first", False),
        )

    def __post_init__(self) -> None:
        for name in ("tags", "triggers"):
            object.__setattr__(self, name, tuple(_sequence(getattr(self, name), f"structural_tag.{name}")))
        for name in ("at_least_one", "stop_after_first"):
            _boolean(getattr(self, name), f"structural_tag.{name}")
        for place, trigger in enumerate(self.triggers):
            _text(trigger, f"structural_tag.triggers[{place}]")
        for place, tag in enumerate(self.tags):
            where = f"structural_tag.tags[{place}]"
            if not isinstance(tag, Tag):
                raise StructuredOutputError(f"{where} must be a Tag, got {shown(tag)}")
            _text(tag.begin, f"{where}.begin")
            _text(tag.end, f"{where}.end")
            _schema(tag.schema, f"{where}.schema")
            matching = [trigger for trigger in self.triggers if tag.begin.startswith(trigger)]
            if len(matching) != 1:
                raise StructuredOutputError(
                    f"{where}.begin, {shown(tag.begin)}, must start with exactly one of the triggers, and does with "
                    f"{shown(matching)}"
                )


@dataclass(frozen=True)
class ToolCalls:
    """Calls of tools in the model family's own format, their arguments as strict as the tools' schemas.

    Attributes:
        tools: functions as OpenAI writes them: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: "auto" lets the model decide; "required" calls at least one; any other text is the one tool to call.
        parallel: several calls in one answer.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    parallel: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(_sequence(self.tools, "tool_calls.tools")))
        _boolean(self.parallel, "tool_calls.parallel")
        names: list[str] = []
        for place, tool in enumerate(self.tools):
            where = f"tool_calls.tools[{place}]"
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
                raise StructuredOutputError(f"{where} must be an object with a function's name, got {shown(tool)}")
            if function["name"] in names:
                raise StructuredOutputError(f"{where}: a tool called {shown(function['name'])} stands there already")
            names.append(function["name"])
        if self.choice not in ("auto", "required", *names):
            raise StructuredOutputError(
                f"tool_calls.choice must be 'auto', 'required' or a tool's name ({', '.join(names)}), "
                f"got {shown(self.choice)}"
            )


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form that an answer must have. Exactly one of the first seven fields is given.

    Attributes:
        json_schema: JSON that satisfies a schema: an object, its text, or True for any JSON value.
        json_object: True for any JSON object.
        regex: text that a regular expression matches as a whole.
        grammar: text of an EBNF grammar whose start is `root`. `Token("name")` or `Token(id)` is one control token.
        choice: one of these texts.
        structural_tag: free text with tags that have a form.
        tool_calls: calls of tools, as the model family writes them.
        only_after_thinking: where the prompt ends inside the reasoning the form begins behind it, and the model cannot
            end before; False holds the reasoning to the form as well.
        max_whitespace: most white space in a row between the tokens of JSON, 0 for compact JSON.
        timeout: seconds that compiling may take; None for the engine's `grammar_timeout`.
        trigger_token_ids: the form begins behind these generated ids; before them the text is free, and may end.
        bound_token_id: an id behind which the trigger is generated whatever the model says.

    Raises:
        StructuredOutputError: none or several kinds are given, or a value that it cannot have.
    """

    json_schema: Any = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: StructuralTag | None = None
    tool_calls: ToolCalls | None = None
    only_after_thinking: bool = True
    max_whitespace: int = 16
    timeout: float | None = None
    trigger_token_ids: Sequence[int] = ()
    bound_token_id: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise StructuredOutputError(f"structured_output must have exactly one of {', '.join(KINDS)}; it has {got}")
        kind = given[0]
        value = getattr(self, kind)
        if kind == "json_schema":
            object.__setattr__(self, kind, _json(value, kind) if isinstance(value, str) else value)
            _schema(self.json_schema, kind)
        elif kind == "json_object":
            if value is not True:
                raise StructuredOutputError(f"json_object must be True, or left out, got {shown(value)}")
        elif kind in ("regex", "grammar"):
            _text(value, kind)
        elif kind == "choice":
            choices = tuple(_sequence(value, kind))
            for place, text in enumerate(choices):
                _text(text, f"choice[{place}]")
            if len(choices) > MAX_CHOICES:
                raise StructuredOutputError(f"choice has {len(choices)} texts; {MAX_CHOICES} are the most")
            object.__setattr__(self, kind, choices)
        else:
            wanted = StructuralTag if kind == "structural_tag" else ToolCalls
            if not isinstance(value, wanted):
                raise StructuredOutputError(f"{kind} must be a {wanted.__name__}, got {shown(value)}")
        self._check_options()

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_options(self) -> None:
        _boolean(self.only_after_thinking, "only_after_thinking")
        if not _is_integer(self.max_whitespace) or not 0 <= self.max_whitespace <= MAX_WHITESPACE:
            raise StructuredOutputError(
                f"max_whitespace must be from 0 to {MAX_WHITESPACE}, got {shown(self.max_whitespace)}"
            )
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise StructuredOutputError(f"timeout must be seconds above 0, or None, got {shown(self.timeout)}")
        ids = () if self.trigger_token_ids is None else self.trigger_token_ids
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(_is_id(i) for i in ids):
            raise StructuredOutputError(f"trigger_token_ids must be a list of token ids, got {shown(ids)}")
        object.__setattr__(self, "trigger_token_ids", tuple(int(i) for i in ids))
        if self.bound_token_id is not None:
            if not _is_id(self.bound_token_id):
                raise StructuredOutputError(f"bound_token_id must be a token id, got {shown(self.bound_token_id)}")
            if not self.trigger_token_ids:
                raise StructuredOutputError("bound_token_id forces trigger_token_ids, and none are given")

    def token_ids(self) -> tuple[int, ...]:
        """Ids that it names, to be checked against a vocabulary."""
        bound = () if self.bound_token_id is None else (self.bound_token_id,)
        return (*self.trigger_token_ids, *bound)


_SO_KINDS: Final = {"json": "json_schema", "regex": "regex", "ebnf": "grammar"}


def read_so_args(value: object) -> StructuredOutput:
    """DeepInfer's `so_args`: `schema_type`, `schema`, and `trigger_token_ids` with `bound_token_id` where wanted.

    Raises:
        StructuredOutputError: a key is unknown or missing, or a value wrong; it is named.
    """
    if not isinstance(value, Mapping):
        raise StructuredOutputError(f"so_args must be a mapping, got {shown(value)}")
    known = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
    for name in value:
        if name not in known:
            raise StructuredOutputError(f"so_args has an unknown key {shown(name)}; keys are {', '.join(known)}")
    kind = value.get("schema_type")
    if not isinstance(kind, str) or kind not in _SO_KINDS:
        names = ", ".join(map(repr, _SO_KINDS))
        raise StructuredOutputError(f"so_args.schema_type must be one of {names}, got {shown(kind)}")
    schema = value.get("schema")
    if not isinstance(schema, str) or not schema:
        raise StructuredOutputError(f"so_args.schema must be a non-empty text, got {shown(schema)}")
    options: dict[str, Any] = {name: value[name] for name in known[2:] if value.get(name) is not None}
    options[_SO_KINDS[kind]] = schema
    return StructuredOutput(only_after_thinking=False, **options)


def _json(text: str, where: str) -> Any:
    _text(text, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StructuredOutputError(f"{where} is not valid JSON: {error}") from error


def _schema(value: object, where: str) -> None:
    if not isinstance(value, Mapping) and value is not True:
        hint = "; it allows nothing" if value is False else ""
        raise StructuredOutputError(f"{where} must be a JSON schema: an object or true, got {shown(value)}{hint}")
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise StructuredOutputError(f"{where} cannot be written as JSON: {error}") from error
    if size > MAX_TEXT:
        raise StructuredOutputError(f"{where} has {size} characters as JSON; {MAX_TEXT} are the most")


def _tag_schema(item: Mapping[str, Any], where: str) -> Any:
    """The schema of a tag in either spelling."""
    if "schema" in item:
        return item["schema"]
    content = item.get("content")
    if isinstance(content, Mapping) and content.get("type") == "json_schema":
        return content.get("json_schema")
    raise StructuredOutputError(f"{where} has no schema, nor content of type 'json_schema'")


def _text(value: object, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise StructuredOutputError(f"{where} must be a non-empty text, got {shown(value)}")
    if len(value) > MAX_TEXT:
        raise StructuredOutputError(f"{where} has {len(value)} characters; {MAX_TEXT} are the most")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise StructuredOutputError(f"{where} holds half of a surrogate pair at {error.start}") from error


def _sequence(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise StructuredOutputError(f"{where} must be a non-empty list, got {shown(value)}")
    return value


def _boolean(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise StructuredOutputError(f"{where} must be True or False, got {shown(value)}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
