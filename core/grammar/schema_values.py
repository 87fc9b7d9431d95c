"""Whether a JSON value satisfies a schema: for the values that `enum` and `const` name, and for property names.

The same meaning as the grammars have, said directly; the two are tested against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any

from deepinfer.core.grammar.automaton import Automaton, TooManyStatesError
from deepinfer.core.grammar.regex_syntax import RegexError, automaton_of, parse_search
from deepinfer.core.grammar.schema_document import Document
from deepinfer.core.grammar.schema_error import child, refuse
from deepinfer.core.grammar.schema_formats import FORMATS


@dataclass
class _Seen:
    """What a subschema has looked at, for the keywords about what is left."""

    names: set[str] = field(default_factory=set)
    places: set[int] = field(default_factory=set)


def kinds_of(value: Any) -> str:
    """The type of a value, where "fraction" is a number that is no integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, Decimal):
        return "integer" if value == value.to_integral_value() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and true is not 1."""
    kind = kinds_of(left)
    if kind != kinds_of(right):
        return False
    if kind == "array":
        return len(left) == len(right) and all(map(same, left, right))
    if kind == "object":
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


def pattern_language(pattern: str, at: str) -> Automaton:
    """The strings in which a pattern is found.

    Raises:
        SchemaError: the pattern is wrong or not supported.
    """
    try:
        return _language(pattern)
    except RegexError as error:
        refuse(at, str(error))
    except TooManyStatesError as error:
        refuse(at, f"pattern {pattern!r} is too large ({error}); use smaller counts")


def format_language(name: str, at: str) -> Automaton:
    """The strings of a format.

    Raises:
        SchemaError: it is not supported.
    """
    return _language(format_pattern(name, at))


def format_pattern(name: str, at: str) -> str:
    """The pattern of a format.

    Raises:
        SchemaError: it is not supported.
    """
    if name not in FORMATS:
        refuse(at, f"format {name!r} is not supported; the formats are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


@lru_cache(maxsize=256)
def _language(pattern: str) -> Automaton:
    return automaton_of(parse_search(pattern))


def satisfies(document: Document, pointer: str, value: Any) -> bool:
    """Whether a value is valid against the subschema at a pointer."""
    return _look(document, pointer, value) is not None


def _look(document: Document, pointer: str, value: Any) -> _Seen | None:
    """What a subschema has seen of a value that satisfies it, else None."""
    schema = document[pointer]
    if isinstance(schema, bool):
        return _Seen() if schema else None
    if not _holds_plain(schema, pointer, value):
        return None
    seen = _Seen()

    def take(at: str) -> bool:
        found = _look(document, at, value)
        if found is not None:
            seen.names |= found.names
            seen.places |= found.places
        return found is not None

    for keyword in ("$ref", "$dynamicRef"):
        if keyword in schema and not take(document.target(child(pointer, keyword))):
            return None
    held = {
        keyword: sum(take(child(pointer, keyword, place)) for place in range(len(schema[keyword])))
        for keyword in ("allOf", "anyOf", "oneOf")
        if keyword in schema
    }
    if held.get("allOf", 0) < len(schema.get("allOf", ())) or held.get("anyOf") == 0 or held.get("oneOf", 1) != 1:
        return None
    if "not" in schema and satisfies(document, child(pointer, "not"), value):
        return None
    if "if" in schema:
        branch = "then" if take(child(pointer, "if")) else "else"
        if branch in schema and not take(child(pointer, branch)):
            return None
    if isinstance(value, list) and not _holds_array(document, schema, pointer, value, seen):
        return None
    if isinstance(value, dict) and not _holds_object(document, schema, pointer, value, seen, take):
        return None
    return seen


def _holds_plain(schema: dict[str, Any], pointer: str, value: Any) -> bool:
    """The keywords without subschemas."""
    kind = kinds_of(value)
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if kind not in types and not (kind in ("integer", "fraction") and "number" in types):
            return False
    # `==` is weaker than `same`, and far quicker where thousands of values are compared
    if "enum" in schema and not any(value == one and same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not same(value, schema["const"]):
        return False
    if kind in ("integer", "fraction"):
        return (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
            and ("multipleOf" not in schema or is_multiple(value, schema["multipleOf"]))
        )
    if kind == "string":
        return (
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            and ("pattern" not in schema or pattern_language(schema["pattern"], child(pointer, "pattern")).holds(value))
            and ("format" not in schema or format_language(schema["format"], child(pointer, "format")).holds(value))
        )
    if kind == "array":
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and not (
            schema.get("uniqueItems") and any(same(a, b) for place, a in enumerate(value) for b in value[:place])
        )
    if kind == "object":
        return (
            schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
            and all(name in value for name in schema.get("required", ()))
            and all(
                other in value
                for name, names in schema.get("dependentRequired", {}).items()
                if name in value
                for other in names
            )
        )
    return True


def is_multiple(value: int | Decimal, of: int | Decimal) -> bool:
    """Whether a number is a multiple of another, exactly."""
    (a, b), (c, d) = Decimal(value).as_integer_ratio(), Decimal(of).as_integer_ratio()
    return a * d % (b * c) == 0


def _holds_array(document: Document, schema: dict[str, Any], pointer: str, value: list[Any], seen: _Seen) -> bool:
    num_prefix = len(schema.get("prefixItems", ()))
    for place, item in enumerate(value):
        if place < num_prefix:
            if not satisfies(document, child(pointer, "prefixItems", place), item):
                return False
        elif "items" in schema:
            if not satisfies(document, child(pointer, "items"), item):
                return False
        else:
            continue
        seen.places.add(place)
    if "contains" in schema:
        found = {place for place, item in enumerate(value) if satisfies(document, child(pointer, "contains"), item)}
        if not schema.get("minContains", 1) <= len(found) <= schema.get("maxContains", len(found)):
            return False
        seen.places |= found
    if "unevaluatedItems" in schema:
        at = child(pointer, "unevaluatedItems")
        left = [item for place, item in enumerate(value) if place not in seen.places]
        seen.places.update(range(len(value)))
        return all(satisfies(document, at, item) for item in left)
    return True


def _holds_object(
    document: Document, schema: dict[str, Any], pointer: str, value: dict[str, Any], seen: _Seen, take: Any
) -> bool:
    for name, item in value.items():
        at = [child(pointer, "properties", name)] if name in schema.get("properties", ()) else []
        for pattern in schema.get("patternProperties", ()):
            where = child(pointer, "patternProperties", pattern)
            if pattern_language(pattern, where).holds(name):
                at.append(where)
        if not at and "additionalProperties" in schema:
            at = [child(pointer, "additionalProperties")]
        if not all(satisfies(document, where, item) for where in at):
            return False
        if at:
            seen.names.add(name)
        if "propertyNames" in schema and not satisfies(document, child(pointer, "propertyNames"), name):
            return False
    for name in schema.get("dependentSchemas", ()):
        if name in value and not take(child(pointer, "dependentSchemas", name)):
            return False
    if "unevaluatedProperties" in schema:
        left = [item for name, item in value.items() if name not in seen.names]
        seen.names.update(value)
        return all(satisfies(document, child(pointer, "unevaluatedProperties"), item) for item in left)
    return True
