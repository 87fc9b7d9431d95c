"""Calls of tools as a grammar: the counterpart of `output_parser.py`, for answers that are held to the tools' schemas.

Whatever the grammar allows parses into calls whose arguments satisfy the schemas; not every such call is allowed: the
arguments are the declared ones, in their order. Text of a string argument stands as it is (`string="true"`); values of
all other schemas, and strings that a schema restricts by more than a list, are JSON (`string="false"`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer.models.deepseek_v41_flash.chat import DSML
from deepinfer.ops.show import shown

SchemaToRules = Callable[[Any, str], str]
"""Called with a schema and a prefix; gives EBNF rules for JSON that satisfies it, the start being `{prefix}root`."""

_OPEN, _CLOSE = f'"<" Token("{DSML}")', f'"</" Token("{DSML}")'
_CALLS, _PARAMETER = '" calls>\\n"', '" parameter>"'
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)
_DEFINITIONS = ("$defs", "definitions")
_OF_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties", *_DEFINITIONS)) | _ANNOTATIONS
_MAX_NAME = 256  # what the parser looks for
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair is no character, and no token spells it

# Text that cannot close its own parameter: "</" and the bar that begins the marker never follow one another in it.
_RAW_TEXT = r"""
raw ::= [^<] raw | "<" raw_open | ""
raw_open ::= "<" raw_open | "/" raw_slash | [^</] raw | ""
raw_slash ::= "<" raw_open | [^<｜] raw | ""
"""


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool, schema_to_rules: SchemaToRules
) -> str:
    r"""The grammar of an answer that may or must call tools.

    Args:
        tools: as OpenAI writes them.
        choice: "auto" allows text, and behind it calls; "required" allows only calls; a tool's name only those of it.
        parallel: several calls may follow one another.
        schema_to_rules: writes JSON of a schema.

    Returns:
        EBNF whose start is `root`; `Token("name")` is a control token, `Trigger("text")` a text with some in it.

    Raises:
        ValueError: a tool's schema cannot be written this way; its place is named.
    """
    named = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in named if choice in ("auto", "required", function["name"])]
    rules = [_RAW_TEXT.strip()]
    for number, function in enumerate(chosen):
        rules += _invoke(number, function, f"tools[{named.index(function)}].function", schema_to_rules)
    rules.append("invoke ::= " + " | ".join(f"invoke{number}" for number in range(len(chosen))))
    block = f"{'invoke+' if parallel else 'invoke'} {_CLOSE} " + '" calls>"'
    if choice == "auto":
        trigger = f'Trigger("<{DSML} calls>")'
        rules.insert(0, f"root ::= TagDispatch(({trigger}, block), loop_after_dispatch=false, excludes=())")
        rules.append(f'block ::= "\\n" {block}')
    else:
        rules.insert(0, f'root ::= "\\n\\n" {_OPEN} {_CALLS} {block}')
    return "\n".join(rules)


def _invoke(number: int, function: Mapping[str, Any], place: str, schema_to_rules: SchemaToRules) -> list[str]:
    """The rules of one tool's call, `invoke{number}` first."""
    schema = function.get("parameters")
    schema = {} if schema is None else schema
    place = f"{place}.parameters"
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"{place} must be the schema of an object, got {shown(schema)}")
    unknown = sorted(map(shown, schema.keys() - _OF_ARGUMENTS))
    if unknown:
        raise ValueError(f"{place} has {', '.join(unknown)}, which calls do not support at the top")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError(f"{place}.properties must be an object, got {shown(properties)}")
    if not isinstance(required, list | tuple):
        raise ValueError(f"{place}.required must be a list of names, got {shown(required)}")
    missing = [name for name in required if not isinstance(name, str) or name not in properties]
    if missing:
        raise ValueError(f"{place}.required names {', '.join(map(shown, missing))}, which properties lacks")
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    me = f"invoke{number}"
    name = _quoted(f' invoke name="{_checked(function["name"], place)}">\n')
    rules = [f'{me} ::= {_OPEN} {name} {me}_first0 "\\n" {_CLOSE} " invoke>\\n"']
    for place_of, (key, value) in enumerate(properties.items()):
        argument, after = f"{me}_argument{place_of}", f"{me}_more{place_of + 1}"
        skip = "" if key in required else f" | {me}_first{place_of + 1}"
        rules.append(f"{me}_first{place_of} ::= {argument} {after}{skip}")
        skip = "" if key in required else f" | {after}"
        rules.append(f'{me}_more{place_of} ::= "\\n" {argument} {after}{skip}')
        rules += _argument(argument, _checked(key, f"{place}.properties"), value, shared, schema_to_rules)
    rules += [f'{me}_first{len(properties)} ::= ""', f'{me}_more{len(properties)} ::= ""']
    return rules


def _argument(me: str, key: str, schema: Any, shared: Mapping[str, Any], schema_to_rules: SchemaToRules) -> list[str]:
    """The rules of one argument, `me` first."""
    texts = _listed_texts(schema)
    if texts is not None:
        return [f"{me} ::= {_parameter(key, True, '(' + ' | '.join(map(_quoted, texts)) + ')')}"]
    raw = _parameter(key, True, "raw")
    if isinstance(schema, Mapping) and schema.get("type") == "string" and _takes_any_text(schema):
        return [f"{me} ::= {raw}"]
    ways = [raw] if _takes_any_text(schema) else []
    ways.append(_parameter(key, False, f"{me}_root"))
    inside = {**schema, **shared} if isinstance(schema, Mapping) else schema
    return [f"{me} ::= {' | '.join(ways)}", schema_to_rules(inside, f"{me}_")]


def _parameter(key: str, is_text: bool, inside: str) -> str:
    head = _quoted(f' parameter name="{key}" string="{"true" if is_text else "false"}">')
    return f"{_OPEN} {head} {inside} {_CLOSE} {_PARAMETER}"


def _listed_texts(schema: Any) -> list[str] | None:
    """The strings that a schema lists, if it allows these and nothing else."""
    if not isinstance(schema, Mapping) or not schema.keys() - _ANNOTATIONS - {"type"} <= {"enum", "const"}:
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    among = schema.get("enum", listed)
    if not isinstance(among, list | tuple) or not listed or schema.get("type", "string") != "string":
        return None
    if "const" in schema and schema["const"] not in among:
        return None  # nothing satisfies it, which is for others to say
    texts = [text for text in listed if isinstance(text, str) and DSML not in text and not _SURROGATE.search(text)]
    return texts if len(texts) == len(listed) else None


def _takes_any_text(schema: Any) -> bool:
    """Whether every string satisfies a schema, as far as can be seen at once."""
    if not isinstance(schema, Mapping):
        return schema is True
    asserted = schema.keys() - _ANNOTATIONS
    if asserted <= {"type"}:
        kind = schema.get("type", "string")
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    branches = schema["anyOf"] if asserted == {"anyOf"} else None
    return isinstance(branches, list | tuple) and any(map(_takes_any_text, branches))


def _checked(name: object, place: str) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _MAX_NAME
        or any(letter in name for letter in '"｜\n')
        or _SURROGATE.search(name)
    ):
        raise ValueError(f"{place}: the name {shown(name)} cannot be written in a call")
    return name


def _quoted(text: str) -> str:
    """Text as an EBNF string."""
    return (
        '"' + "".join(c if c.isascii() and (c.isalnum() or c in " _-<>/=.") else f"\\U{ord(c):08x}" for c in text) + '"'
    )
