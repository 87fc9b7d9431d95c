"""Rules for objects: properties in the order in which the schema declares them, then all others.

A name that the schema mentions is never taken for one of the others, so its value cannot escape its own schema: the
others' names are the complement of those. They may repeat, which every reader of JSON resolves to one of them, and each
satisfies the schema; so of several only one counts towards `minProperties`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Final

from deepinfer.core.grammar.automaton import Automaton, combine, of_length, of_strings
from deepinfer.core.grammar.charset import literal
from deepinfer.core.grammar.grammar_text import Alternative, Many, Ref, Rules
from deepinfer.core.grammar.schema_cases import Case, Fact, Goal, Node, ObjectShape
from deepinfer.core.grammar.schema_error import refuse
from deepinfer.core.grammar.schema_strings import quoted_rule
from deepinfer.core.grammar.schema_values import pattern_language

MAX_PATTERNS: Final = 6
"""Different patterns of names in one object: every subset of them is a kind of name."""


@dataclass(frozen=True)
class ObjectContext:
    """What object rules need from outside.

    Attributes:
        rules: to add to.
        rule_of: the rule of a goal.
        is_never: whether a goal is false at first sight.
        names_of: the strings of a goal.
        holds: whether a string satisfies a subschema.
        text_of: a name as a JSON string.
        separator: a comma with its whitespace.
        colon: a colon with its whitespace.
        space: whitespace, nothing where there is none.
    """

    rules: Rules
    rule_of: Callable[[Goal], Ref]
    is_never: Callable[[Goal], bool]
    names_of: Callable[[Goal], Automaton]
    holds: Callable[[Node, str], bool]
    text_of: Callable[[str], str]
    separator: Alternative
    colon: Alternative
    space: Alternative


def object_rule(context: ObjectContext, case: Case) -> Ref:
    """A rule for the objects of a case that says something about them.

    Raises:
        SchemaError: too many patterns, or more properties wanted than names can be told apart.
        TooManyStatesError: names are too complex.
    """
    return _Objects(context, case).rule()


class _Objects:
    def __init__(self, context: ObjectContext, case: Case) -> None:
        self._context, self._case = context, case
        self._shapes = [fact for fact in case.of("object shape") if isinstance(fact.value, ObjectShape)]
        self._required = {name: fact.pointer for fact in case.of("required") for name in fact.value}
        self._absent = {name for fact in case.of("absent") for name in fact.value}
        declared = [name for fact in self._shapes for name in fact.value.properties]
        self._names = list(dict.fromkeys([*declared, *self._required, *self._absent]))
        self._least = max((fact.value for fact in case.of("minProperties")), default=0)
        self._most: int | None = min((fact.value for fact in case.of("maxProperties")), default=None)
        if {} in [value for fact in case.of("not enum") for value in fact.value]:
            self._least = max(self._least, 1)

    def rule(self) -> Ref:
        values = [self._goal(name) for name in self._names]
        others = self._others()
        self._check_least(sum(value is not None for value in values) + bool(others))
        rules = self._context.rules
        other = rules.add("other", others).rule if others else None
        more = rules.add("more", [(*self._context.separator, Ref(other))]).rule if other else None
        names: dict[tuple[int, int, bool], str] = {}
        todo: list[tuple[int, int, bool]] = []

        def state(place: int, count: int, begun: bool) -> Ref:
            counted = count if self._most is not None else min(count, self._least)
            key = place, counted, begun
            if key not in names:
                names[key] = rules.new("members")
                todo.append(key)
            return Ref(names[key])

        start = state(0, 0, False)
        for place, count, begun in todo:  # grows while it is walked
            if place == len(self._names):
                rules.define(names[place, count, begun], self._ends(count, begun, other, more))
                continue
            name, goal = self._names[place], values[place]
            options: list[Alternative] = []
            if goal is not None and (self._most is None or count < self._most):
                pair = literal(self._context.text_of(name)), *self._context.colon, self._context.rule_of(goal)
                options.append((*self._comma(begun), *pair, state(place + 1, count + 1, True)))
            if name not in self._required:
                options.append((state(place + 1, count, begun),))
            rules.define(names[place, count, begun], options)
        return rules.add("object", [('"{"', *self._context.space, start)])

    def _comma(self, begun: bool) -> Alternative:
        return self._context.separator if begun else ()

    def _ends(self, count: int, begun: bool, other: str | None, more: str | None) -> list[Alternative]:
        """What may follow the last declared property."""
        missing = self._least - count
        room = None if self._most is None else self._most - count
        close = (*self._context.space, '"}"')
        options: list[Alternative] = []
        if missing <= 0:
            options.append(close if begun else ('"}"',))
        if other is not None and more is not None and missing <= 1 and room != 0:
            rest = Many(more, 0, None if room is None else room - 1)
            options.append((*self._comma(begun), Ref(other), *((rest,) if rest.most != 0 else ()), *close))
        return options

    def _check_least(self, num_distinct: int) -> None:
        for fact in self._case.of("minProperties"):
            if fact.value > num_distinct:
                refuse(
                    fact.pointer,
                    f"minProperties {fact.value} with {num_distinct} properties that can be told apart: undeclared "
                    "ones count as one; declare more under properties",
                )

    def _goal(self, name: str) -> Goal | None:
        """What the value of a declared property must satisfy; None if it cannot be there."""
        if name in self._absent or not all(
            self._context.holds(fact.value, name) for fact in self._case.of("propertyNames")
        ):
            return None
        goal = self._goal_where(name, lambda pattern, at: pattern_language(pattern, at).holds(name))
        return None if self._context.is_never(goal) and name not in self._required else goal

    def _goal_where(self, name: str | None, matches: Callable[[str, str], bool]) -> Goal:
        """What the value must satisfy under a name, None standing for all that are not declared."""
        found: set[Node] = set()
        seen: list[Fact] = []
        for fact in self._shapes:
            shape = fact.value
            nodes = [shape.properties[name]] if name is not None and name in shape.properties else []
            nodes += [node for pattern, at, node in shape.patterns if matches(pattern, at)]
            if not nodes and shape.additional is not None:
                nodes = [shape.additional]
            found.update(nodes)
            if nodes:
                seen.append(fact)
        for fact in self._case.of("unevaluatedProperties"):
            if not any(fact.scope[-1] in one.scope for one in seen):
                found.add(fact.value)
        return frozenset(found)

    def _others(self) -> list[Alternative]:
        """A name that is not declared with its value, by what patterns say of the name."""
        patterns = {pattern: at for fact in self._shapes for pattern, at, _ in fact.value.patterns}
        if len(patterns) > MAX_PATTERNS:
            at = next(iter(patterns.values()))
            refuse(at, f"more than {MAX_PATTERNS} patterns of property names for one object; write fewer")
        allowed = [self._context.names_of(frozenset((fact.value,))) for fact in self._case.of("propertyNames")]
        languages = [
            of_length(0, None),
            *allowed,
            of_strings(self._names),
            *(pattern_language(p, at) for p, at in patterns.items()),
        ]
        num_allowed = len(allowed)
        found: list[Alternative] = []
        for chosen in product((True, False), repeat=len(patterns)):
            matching = {pattern for pattern, is_in in zip(patterns, chosen, strict=True) if is_in}
            goal = self._goal_where(None, partial(_is_among, matching))
            if self._context.is_never(goal):
                continue
            if not patterns and not allowed and not self._names:
                return [(Ref("string"), *self._context.colon, self._context.rule_of(goal))]
            wanted = (*[True] * (1 + num_allowed), False, *chosen)
            language = _where(tuple(languages), wanted)
            if not language.is_empty:
                name = quoted_rule(self._context.rules, "name", language)
                found.append((name, *self._context.colon, self._context.rule_of(goal)))
        return found


def _is_among(patterns: set[str], pattern: str, _: str) -> bool:
    return pattern in patterns


@lru_cache(maxsize=256)
def _where(languages: tuple[Automaton, ...], wanted: tuple[bool, ...]) -> Automaton:
    """The strings that just the wanted ones of some languages hold. Objects that declare the same names share it."""
    return combine(languages, lambda held: held == wanted)
