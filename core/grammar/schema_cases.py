"""What a value must satisfy, as a choice of plain cases: references followed, combinations multiplied out.

A `Goal` is a set of subschemas, some of them negated, that must all hold; it stands for all values that do. `Cases`
turns a goal into alternatives, each a list of `Fact`s without `anyOf`, `not`, `if` and the like. Below a property or
an item there are goals again, so recursive schemas stay finite. Negation goes one level down at a time, and is
refused where it cannot be said with facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from deepinfer.core.grammar.schema_document import Document
from deepinfer.core.grammar.schema_error import SchemaError, child, refuse
from deepinfer.core.grammar.schema_values import kinds_of

MAX_WORK: Final = 50_000
"""Subschemas looked at, each as often as it is combined with others."""
MAX_CASES: Final = 2_000
MAX_CONFLICTS: Final = 100
"""That are remembered; the first one is shown."""

KINDS: Final = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""The types, where "fraction" is a number that is no integer."""
NUMBERS: Final = frozenset({"integer", "fraction"})


class Node(NamedTuple):
    """A subschema that holds, or does not."""

    pointer: str
    negated: bool = False


Goal: TypeAlias = frozenset[Node]
ANYTHING: Final[Goal] = frozenset()


class Fact(NamedTuple):
    """One thing that is asked of a value.

    Attributes:
        name: a keyword; "not " and a keyword for what must not be; "array shape" and "object shape" for the schemas of
            what is inside; "absent" for names of properties that must not be there.
        value: what it asks.
        pointer: where it is asked.
        scope: the subschemas around it that judge the same value, outermost first.
    """

    name: str
    value: Any
    pointer: str
    scope: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArrayShape:
    """The first items, and the others; None where nothing is said."""

    prefix: tuple[Node | None, ...]
    items: Node | None


@dataclass(frozen=True)
class ObjectShape:
    """Properties by name, by pattern (with where it is), and all others; None where nothing is said."""

    properties: dict[str, Node]
    patterns: tuple[tuple[str, str, Node], ...] = ()
    additional: Node | None = None


@dataclass(frozen=True)
class Contains:
    """How many items satisfy a subschema."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Case:
    """Values of some types for which some facts hold."""

    kinds: frozenset[str] = KINDS
    facts: tuple[Fact, ...] = ()

    def of(self, *names: str) -> list[Fact]:
        """The facts of these names."""
        return [fact for fact in self.facts if fact.name in names]


def opposite(node: Node) -> Node:
    """What holds exactly when a node does not."""
    return Node(node.pointer, not node.negated)


_NUMBER_FACTS: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
    "multipleOf": "not multipleOf",
}
_COUNT_FACTS: Final = {"Length": "string", "Items": "array", "Properties": "object"}
_REFUSED_NEGATIONS: Final = {
    "format": ("string", "give a pattern of what is wanted"),
    "uniqueItems": ("array", "say what the items are"),
    "patternProperties": ("object", "say which properties are wanted"),
    "additionalProperties": ("object", "say which properties are wanted"),
    "propertyNames": ("object", "say which names are wanted"),
    "unevaluatedItems": ("array", "say what the items are"),
    "unevaluatedProperties": ("object", "say which properties are wanted"),
}


class Cases:
    """Turns goals into cases.

    Args:
        document: where the subschemas are.
        is_possible: whether any value satisfies a goal; True when in doubt.
    """

    def __init__(self, document: Document, is_possible: Callable[[Goal], bool]) -> None:
        self._document = document
        self._is_possible = is_possible
        self._work = 0
        self._conflicts: list[SchemaError] = []

    def of(self, goal: Goal) -> tuple[list[Case], list[SchemaError]]:
        """The cases of a goal, none if its parts contradict each other, and why others were left out.

        Raises:
            SchemaError: something in it cannot be said with facts, or there are too many cases.
        """
        outer, self._conflicts = self._conflicts, []  # asking whether something is possible comes back here
        cases = self._with_all([Case()], [(node, ()) for node in sorted(goal)])
        conflicts, self._conflicts = self._conflicts, outer
        return cases, conflicts

    def _with_all(self, cases: list[Case], nodes: Iterable[tuple[Node, tuple[str, ...]]]) -> list[Case]:
        for node, scope in nodes:
            cases = [found for case in cases for found in self._with(case, node, scope)]
            if len(cases) > MAX_CASES:
                refuse(node.pointer, f"its combinations give more than {MAX_CASES} cases; write fewer alternatives")
        return cases

    def _with(self, case: Case, node: Node, scope: tuple[str, ...]) -> list[Case]:
        """The cases in which `case` and a node hold."""
        self._work += 1
        if self._work > MAX_WORK:
            refuse(node.pointer, f"its combinations take more than {MAX_WORK} steps; write fewer alternatives")
        schema = self._document[node.pointer]
        if isinstance(schema, bool):
            if schema == node.negated:
                self._conflict(node.pointer, "false is satisfied by nothing" if not schema else "nothing is not true")
                return []
            return [case]
        scope = (*scope, node.pointer)
        return self._without(case, schema, node.pointer) if node.negated else self._holding(case, schema, scope)

    def _conflict(self, pointer: str, message: str) -> None:
        if len(self._conflicts) < MAX_CONFLICTS:
            self._conflicts.append(SchemaError(pointer, message))

    # What holds

    def _holding(self, case: Case, schema: dict[str, Any], scope: tuple[str, ...]) -> list[Case]:
        at = scope[-1]
        kinds = case.kinds & _kinds(schema["type"]) if "type" in schema else case.kinds
        if not kinds:
            known = " or ".join(sorted(case.kinds)) or "nothing"
            self._conflict(child(at, "type"), f"type {schema['type']} contradicts what else is asked, {known}")
            return []
        case = replace(case, kinds=kinds, facts=(*case.facts, *_facts(schema, scope)))
        if "const" in schema:
            case = _narrowed(case, [schema["const"]])
        if "enum" in schema:
            case = _narrowed(case, schema["enum"])
        if not case.kinds:
            keyword = "const" if "const" in schema else "enum"
            self._conflict(child(at, keyword), f"no value of {keyword} is of a type that is allowed here")
            return []
        cases = [case]
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                target = Node(self._document.target(child(at, keyword)))
                cases = self._with_all(cases, [(target, scope)])
        cases = self._with_all(cases, ((node, scope) for node in _branches(schema, "allOf", at)))
        if "not" in schema:
            cases = self._with_all(cases, [(Node(child(at, "not"), True), scope)])
        cases = self._split(cases, self._choices(schema, at), scope)
        return cases

    def _choices(self, schema: dict[str, Any], at: str) -> Iterable[list[list[Node | Fact]]]:
        """Alternatives, one of which must hold: each a list of what holds then."""
        if "anyOf" in schema:
            yield [[node] for node in _branches(schema, "anyOf", at)]
        if "oneOf" in schema:
            yield self._exactly_one(_branches(schema, "oneOf", at))
        if "if" in schema and ("then" in schema or "else" in schema):
            test = Node(child(at, "if"))
            yield [
                [test, *([Node(child(at, "then"))] if "then" in schema else [])],
                [opposite(test), *([Node(child(at, "else"))] if "else" in schema else [])],
            ]
        for name, names in schema.get("dependentRequired", {}).items():
            where = child(at, "dependentRequired", name)
            yield [[Fact("absent", (name,), where)], [Fact("required", (name, *names), where)]]
        for name in schema.get("dependentSchemas", {}):
            where = child(at, "dependentSchemas", name)
            yield [[Fact("absent", (name,), where)], [Fact("required", (name,), where), Node(where)]]

    def _split(
        self, cases: list[Case], choices: Iterable[list[list[Node | Fact]]], scope: tuple[str, ...]
    ) -> list[Case]:
        for options in choices:
            found: list[Case] = []
            for option in options:
                facts = [part._replace(scope=scope) for part in option if isinstance(part, Fact)]
                nodes = [(part, scope) for part in option if isinstance(part, Node)]
                found += self._with_all([replace(case, facts=(*case.facts, *facts)) for case in cases], nodes)
            cases = found
            if len(cases) > MAX_CASES:
                refuse(scope[-1], f"its combinations give more than {MAX_CASES} cases; write fewer alternatives")
        return cases

    def _exactly_one(self, branches: Sequence[Node]) -> list[list[Node | Fact]]:
        """Each branch with the others denied, unless they cannot hold beside it anyway."""
        self._work += len(branches) ** 2
        overlapping = {
            frozenset((one, other))
            for place, one in enumerate(branches)
            for other in branches[:place]
            if self._is_possible(frozenset((one, other)))
        }
        return [
            [one, *(opposite(other) for other in branches if other != one and frozenset((one, other)) in overlapping)]
            for one in branches
        ]

    # What does not hold

    def _without(self, case: Case, schema: dict[str, Any], at: str) -> list[Case]:
        """The cases in which `case` holds and one of a schema's keywords does not."""
        found: list[Case] = []
        for keyword in schema:
            found += self._failing(case, schema, keyword, at)
        if not found:
            self._conflict(at, "nothing else that is asked is possible when this is not")
        return found

    def _failing(self, case: Case, schema: dict[str, Any], keyword: str, at: str) -> list[Case]:
        value, where = schema[keyword], child(at, keyword)

        def add(kinds: Iterable[str], *facts: Fact) -> list[Case]:
            left = case.kinds & frozenset(kinds)
            return [Case(left, (*case.facts, *facts))] if left else []

        def all_of(*nodes: Node) -> list[Case]:
            return self._with_all([case], [(node, ()) for node in nodes])

        if keyword in _REFUSED_NEGATIONS:
            kind, advice = _REFUSED_NEGATIONS[keyword]
            always_holds = value is (keyword != "uniqueItems")
            if kind in case.kinds and not always_holds:
                refuse(where, f"{keyword} cannot be denied, as not, oneOf or if need it here; {advice}")
            return []
        match keyword:
            case "type":
                return add(KINDS - _kinds(value))
            case "enum" | "const":
                return add(KINDS, Fact("not enum", value if keyword == "enum" else [value], where))
            case "$ref" | "$dynamicRef":
                return all_of(Node(self._document.target(where), True))
            case "not":
                return all_of(Node(where))
            case "allOf":
                return [found for node in _branches(schema, keyword, at) for found in all_of(opposite(node))]
            case "anyOf":
                return all_of(*map(opposite, _branches(schema, keyword, at)))
            case "oneOf":
                nodes = _branches(schema, keyword, at)
                pairs = [(one, other) for place, one in enumerate(nodes) for other in nodes[:place]]
                return all_of(*map(opposite, nodes)) + [
                    found for pair in pairs if self._is_possible(frozenset(pair)) for found in all_of(*pair)
                ]
            case "if":
                test, then, other = (Node(child(at, part)) for part in ("if", "then", "else"))
                return (all_of(test, opposite(then)) if "then" in schema else []) + (
                    all_of(opposite(test), opposite(other)) if "else" in schema else []
                )
            case "pattern":
                return add({"string"}, Fact("not pattern", value, where))
            case "items":
                prefix = len(schema.get("prefixItems", ()))
                if prefix and "array" in case.kinds:
                    refuse(where, "items behind prefixItems cannot be denied (by not, oneOf or if)")
                return add({"array"}, Fact("contains", Contains(Node(where, True), 1, None), where))
            case "prefixItems":
                return [
                    found
                    for place in range(len(value))
                    for found in add(
                        {"array"},
                        Fact("minItems", place + 1, where),
                        Fact(
                            "array shape", ArrayShape((*[None] * place, Node(child(where, place), True)), None), where
                        ),
                    )
                ]
            case "contains":
                return self._other_count(add, schema, at)
            case "properties":
                return [
                    found
                    for name in value
                    for found in add(
                        {"object"},
                        Fact("required", (name,), where),
                        Fact("object shape", ObjectShape({name: Node(child(where, name), True)}), where),
                    )
                ]
            case "required":
                return [found for name in value for found in add({"object"}, Fact("absent", (name,), where))]
            case "dependentRequired":
                return [
                    found
                    for name, names in value.items()
                    for other in names
                    for found in add({"object"}, Fact("required", (name,), where), Fact("absent", (other,), where))
                ]
            case "dependentSchemas":
                return [
                    found
                    for name in value
                    for start in add({"object"}, Fact("required", (name,), where))
                    for found in self._with(start, Node(child(where, name), True), ())
                ]
        if keyword in _NUMBER_FACTS:
            return add(NUMBERS, Fact(_NUMBER_FACTS[keyword], value, where))
        for ending, kind in _COUNT_FACTS.items():
            if keyword == "min" + ending:
                return add({kind}, Fact("max" + ending, value - 1, where)) if value else []
            if keyword == "max" + ending:
                return add({kind}, Fact("min" + ending, value + 1, where))
        return []

    def _other_count(self, add: Callable[..., list[Case]], schema: dict[str, Any], at: str) -> list[Case]:
        where, node = child(at, "contains"), Node(child(at, "contains"))
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        fewer = add({"array"}, Fact("contains", Contains(node, 0, least - 1), where)) if least else []
        more = add({"array"}, Fact("contains", Contains(node, most + 1, None), where)) if most is not None else []
        return fewer + more


def _kinds(names: str | list[str]) -> frozenset[str]:
    listed = names if isinstance(names, list) else [names]
    return frozenset(kind for name in listed for kind in (NUMBERS if name == "number" else (name,)))


def _narrowed(case: Case, values: Sequence[Any]) -> Case:
    return replace(case, kinds=case.kinds & {kinds_of(value) for value in values})


def _branches(schema: dict[str, Any], keyword: str, at: str) -> list[Node]:
    return [Node(child(at, keyword, place)) for place in range(len(schema.get(keyword, ())))]


def _facts(schema: dict[str, Any], scope: tuple[str, ...]) -> list[Fact]:
    """What a schema asks without looking at other subschemas for the same value."""
    at = scope[-1]
    found = [
        Fact(keyword, schema[keyword], child(at, keyword), scope)
        for keyword in (*_NUMBER_FACTS, "minLength", "maxLength", "pattern", "format", "minItems", "maxItems")
        if keyword in schema
    ]
    found += [Fact(k, schema[k], child(at, k), scope) for k in ("minProperties", "maxProperties") if k in schema]
    for keyword in ("enum", "const"):
        if keyword in schema:
            values = schema["enum"] if keyword == "enum" else [schema["const"]]
            found.append(Fact("enum", values, child(at, keyword), scope))
    if schema.get("uniqueItems"):
        found.append(Fact("uniqueItems", True, child(at, "uniqueItems"), scope))
    if schema.get("required"):
        found.append(Fact("required", tuple(schema["required"]), child(at, "required"), scope))
    for keyword in ("propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema:
            found.append(Fact(keyword, Node(child(at, keyword)), child(at, keyword), scope))
    if "contains" in schema:
        counts = Contains(Node(child(at, "contains")), schema.get("minContains", 1), schema.get("maxContains"))
        found.append(Fact("contains", counts, child(at, "contains"), scope))
    if "prefixItems" in schema or "items" in schema:
        items = Node(child(at, "items")) if "items" in schema else None
        shape: object = ArrayShape(tuple(_branches(schema, "prefixItems", at)), items)
        found.append(Fact("array shape", shape, at, scope))
    if schema.keys() & {"properties", "patternProperties", "additionalProperties"}:
        where = child(at, "patternProperties")
        shape = ObjectShape(
            {name: Node(child(at, "properties", name)) for name in schema.get("properties", ())},
            tuple((p, child(where, p), Node(child(where, p))) for p in schema.get("patternProperties", ())),
            Node(child(at, "additionalProperties")) if "additionalProperties" in schema else None,
        )
        found.append(Fact("object shape", shape, at, scope))
    return found
