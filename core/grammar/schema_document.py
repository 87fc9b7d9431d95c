"""A JSON schema as a whole: its subschemas by JSON pointer, each keyword checked, each reference resolved.

Keywords are those of draft 2020-12. What the draft calls an annotation is ignored. An unknown keyword is refused,
although the draft would ignore it: nearly all are a misspelling or belong to another draft, and then an answer would
silently be less than what was asked for. Names that begin with "x-" are for everyone's own use.
"""

from __future__ import annotations

import difflib
import math
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from deepinfer.core.grammar.schema_error import child, refuse

MAX_SUBSCHEMAS: Final = 20_000
MAX_DEPTH: Final = 128
MAX_VALUES: Final = 5_000

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

_SCHEMA: Final = frozenset(
    [
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_SCHEMA_LISTS: Final = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
_SCHEMA_MAPS: Final = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
_COUNTS: Final = frozenset(
    ["maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"]
)
_NUMBERS: Final = frozenset(["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"])
_STRINGS: Final = frozenset(["$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "format", "pattern"])
_OTHERS: Final = frozenset(["const", "dependentRequired", "enum", "required", "type", "uniqueItems"])
ANNOTATIONS: Final = frozenset(
    [
        "$comment",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    ]
)
"""Those of the draft, and those that OpenAPI and its tools add without changing what is valid."""
KEYWORDS: Final = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _COUNTS | _NUMBERS | _STRINGS | _OTHERS | ANNOTATIONS
_OTHER_DRAFTS: Final = {
    "additionalItems": "write prefixItems for the first items and items for the others",
    "dependencies": "write dependentRequired or dependentSchemas",
    "disallow": "write not",
    "divisibleBy": "write multipleOf",
    "extends": "write allOf",
    "id": "write $id",
    "nullable": 'add "null" to type',
    "$recursiveRef": "write $dynamicRef",
    "$recursiveAnchor": "write $dynamicAnchor",
}


class Document:
    """A schema that is well-formed.

    Args:
        schema: what `json.loads` makes of its text.

    Raises:
        SchemaError: something in it is not JSON, malformed, unknown, or refers to nothing.
    """

    def __init__(self, schema: object) -> None:
        self.root = _plain(schema, "", 0)
        self._schemas: dict[str, Any] = {}
        self._bases: dict[str, str] = {}
        self._resources: dict[str, str] = {"": ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._walk(self.root, "", "")
        self._targets: dict[str, str] = {}
        todo = list(self._schemas)
        for pointer in todo:
            found = self._schemas[pointer]
            for keyword in ("$ref", "$dynamicRef"):
                if isinstance(found, dict) and keyword in found:
                    at, num_known = child(pointer, keyword), len(self._schemas)
                    self._targets[at] = self._resolve(found[keyword], at, self._bases[pointer], keyword)
                    todo.extend(list(self._schemas)[num_known:])  # a target may lie where no schema was expected
        self._sizes: dict[str, int] = {}
        for pointer in list(self._schemas):
            self._measure(pointer)

    def __getitem__(self, pointer: str) -> Any:
        """The subschema at a pointer: a dict, or a boolean."""
        return self._schemas[pointer]

    def target(self, pointer: str) -> str:
        """The pointer of what the reference at a pointer refers to."""
        return self._targets[pointer]

    def in_place(self, pointer: str) -> list[str]:
        """The subschemas that judge the same value as the one at a pointer."""
        schema = self._schemas[pointer]
        if isinstance(schema, bool):
            return []
        found = [self._targets[child(pointer, k)] for k in ("$ref", "$dynamicRef") if k in schema]
        for keyword in ("allOf", "anyOf", "oneOf"):
            found += [child(pointer, keyword, place) for place in range(len(schema.get(keyword, ())))]
        found += [child(pointer, k) for k in ("not", "if", "then", "else") if k in schema]
        return found + [child(pointer, "dependentSchemas", name) for name in schema.get("dependentSchemas", ())]

    def _measure(self, start: str) -> None:
        """Count what judges a value together with each subschema: it is finite, and no more than we take time for."""
        path, todo = [start], [iter(self.in_place(start))]
        while path and start not in self._sizes:
            follow = next(todo[-1], None)
            if follow is None:
                size = 1 + sum(self._sizes[inner] for inner in self.in_place(path[-1]))
                if size > MAX_SUBSCHEMAS:
                    refuse(path[-1], f"its references and combinations expand to more than {MAX_SUBSCHEMAS} subschemas")
                self._sizes[path.pop()] = size
                todo.pop()
            elif follow in path:
                refuse(path[-1], "refers back to itself for the same value, which never ends")
            elif follow not in self._sizes:
                path.append(follow)
                todo.append(iter(self.in_place(follow)))

    def _walk(self, schema: Any, pointer: str, base: str) -> None:
        if pointer in self._schemas:
            return
        if len(self._schemas) >= MAX_SUBSCHEMAS:
            refuse(pointer, f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        self._schemas[pointer] = schema
        if isinstance(schema, bool):
            self._bases[pointer] = base
            return
        if not isinstance(schema, dict):
            refuse(pointer, f"a schema is an object or a boolean, not {_kind(schema)}")
        if isinstance(schema.get("$id"), str):
            base = urljoin(base, schema["$id"])
            self._resources[urldefrag(base)[0]] = pointer
        self._bases[pointer] = base
        for keyword, value in schema.items():
            _check(keyword, value, child(pointer, keyword))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if keyword in schema:
                self._anchors[urldefrag(base)[0], schema[keyword]] = pointer
        if "$dynamicAnchor" in schema:
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(pointer)
        for keyword, value in schema.items():
            at = child(pointer, keyword)
            if keyword in _SCHEMA:
                self._walk(value, at, base)
            elif keyword in _SCHEMA_LISTS:
                for place, part in enumerate(value):
                    self._walk(part, child(at, place), base)
            elif keyword in _SCHEMA_MAPS:
                for name, part in value.items():
                    self._walk(part, child(at, name), base)

    def _resolve(self, reference: str, at: str, base: str, keyword: str) -> str:
        address, fragment = urldefrag(urljoin(base, reference))
        fragment = unquote(fragment)
        if keyword == "$dynamicRef" and len(self._dynamic.get(fragment, ())) > 1:
            refuse(at, f"$dynamicRef {reference!r} has several targets in this schema; write $ref to one of them")
        if address not in self._resources:
            refuse(at, f"{reference!r} is outside of the schema; put its text under $defs and refer to that")
        start = self._resources[address]
        if fragment and not fragment.startswith("/"):
            if (address, fragment) not in self._anchors:
                refuse(at, f"{reference!r}: no subschema has the anchor {fragment!r}")
            return self._anchors[address, fragment]
        target = start + fragment
        if target not in self._schemas:
            self._walk(self._value_at(target, reference, at), target, base)
        return target

    def _value_at(self, target: str, reference: str, at: str) -> Any:
        value = self.root
        for part in target.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                refuse(at, f"{reference!r} refers to nothing: {key!r} does not exist there")
        return value


def _plain(value: Any, pointer: str, depth: int) -> Any:
    """A copy with decimal numbers, so that 0.1 is a tenth."""
    if depth > MAX_DEPTH:
        refuse(pointer, f"more than {MAX_DEPTH} levels inside of each other")
    if isinstance(value, float):
        if not math.isfinite(value):
            refuse(pointer, f"{value} is no JSON number")
        return _whole(Decimal(repr(value)))
    if isinstance(value, Decimal):
        if not value.is_finite():
            refuse(pointer, f"{value} is no JSON number")
        return _whole(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            refuse(pointer, "half a surrogate pair is no character")
        return value
    if isinstance(value, list | tuple):
        return [_plain(part, child(pointer, place), depth + 1) for place, part in enumerate(value)]
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                refuse(pointer, f"{name!r} is no property name: those are strings")
            _plain(name, pointer, depth)
        return {name: _plain(part, child(pointer, name), depth + 1) for name, part in value.items()}
    refuse(pointer, f"{_kind(value)} is no JSON value")


def _whole(number: Decimal) -> int | Decimal:
    if not -400 <= number.adjusted() <= 400:
        return number if number else 0
    return int(number) if number == number.to_integral_value() else number


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | Decimal) else type(value).__name__)


def _check(keyword: str, value: Any, at: str) -> None:
    """Refuse a keyword that is unknown, or whose value it cannot have."""
    if keyword not in KEYWORDS:
        if keyword.startswith("x-"):
            return
        if keyword in _OTHER_DRAFTS:
            refuse(at, f"{keyword} is not of draft 2020-12; {_OTHER_DRAFTS[keyword]}")
        lower = {known.lower(): known for known in sorted(KEYWORDS)}
        near = difflib.get_close_matches(keyword.lower(), lower, 1, 0.75)
        hint = f"did you mean {lower[near[0]]}? " if near else ""
        refuse(at, f"{keyword!r} is no keyword of draft 2020-12; {hint}Own keywords begin with x-")
    elif keyword in _SCHEMA:
        if keyword == "items" and isinstance(value, list):
            refuse(at, "items is one schema for all items; write prefixItems for a list of them")
    elif keyword in _SCHEMA_LISTS:
        if not isinstance(value, list) or not value:
            refuse(at, f"{keyword} is an array of at least one schema, not {_kind(value) if value != [] else 'empty'}")
    elif keyword in _SCHEMA_MAPS:
        if not isinstance(value, dict):
            refuse(at, f"{keyword} is an object of schemas, not {_kind(value)}")
    elif keyword in _COUNTS:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            refuse(at, f"{keyword} is an integer of at least 0, not {value!r}")
    elif keyword in _NUMBERS:
        if not isinstance(value, int | Decimal) or isinstance(value, bool):
            refuse(at, f"{keyword} is a number, not {_kind(value)}")
        if keyword == "multipleOf" and value <= 0:
            refuse(at, f"multipleOf is above 0, not {value}")
        if value and not -300 <= Decimal(value).adjusted() <= 300:
            refuse(at, f"{keyword} {value} is beyond what is supported, 1e-300 to 1e300")
    elif keyword in _STRINGS:
        if not isinstance(value, str):
            refuse(at, f"{keyword} is a string, not {_kind(value)}")
    elif keyword in _OTHERS:
        _check_other(keyword, value, at)


def _check_other(keyword: str, value: Any, at: str) -> None:
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name not in TYPES:
                refuse(at, f"{name!r} is no type; the types are {', '.join(TYPES)}")
        if not names or len(set(names)) < len(names):
            refuse(at, "type is one name or an array of different names, at least one")
    elif keyword == "enum":
        if not isinstance(value, list):
            refuse(at, f"enum is an array of values, not {_kind(value)}")
        if not value:
            refuse(at, "enum without values is satisfied by nothing; name at least one")
        if len(value) > MAX_VALUES:
            refuse(at, f"enum has {len(value)} values, and {MAX_VALUES} are the most; say them by type or pattern")
    elif keyword == "required":
        _check_names(keyword, value, at)
    elif keyword == "dependentRequired":
        if not isinstance(value, dict):
            refuse(at, f"dependentRequired is an object of arrays of names, not {_kind(value)}")
        for name, names in value.items():
            _check_names(keyword, names, child(at, name))
    elif keyword == "uniqueItems" and not isinstance(value, bool):
        refuse(at, f"uniqueItems is true or false, not {_kind(value)}")


def _check_names(keyword: str, value: Any, at: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        hint = " beside properties, not inside of one" if isinstance(value, bool) else ""
        refuse(at, f"{keyword} is an array of property names{hint}, not {_kind(value)}")
    if len(set(value)) < len(value):
        refuse(at, f"{keyword} names a property twice")
