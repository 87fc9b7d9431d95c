"""From a schema to the rules of a grammar, goal by goal.

Every goal (a set of subschemas that must all hold) becomes one rule, whatever refers to it, so recursive schemas are
recursive rules. What a case says of each type goes to the module of that type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from deepinfer.core.grammar.automaton import Automaton, TooManyStatesError, of_strings, union
from deepinfer.core.grammar.charset import DIRECT, json_escape, literal, terminal
from deepinfer.core.grammar.grammar_text import Alternative, Many, Ref, Rules, TooManyRulesError
from deepinfer.core.grammar.schema_arrays import ArrayContext, array_rule
from deepinfer.core.grammar.schema_cases import NUMBERS, Case, Cases, Goal, Node, opposite
from deepinfer.core.grammar.schema_document import Document
from deepinfer.core.grammar.schema_error import SchemaError, refuse
from deepinfer.core.grammar.schema_numbers import number_rule
from deepinfer.core.grammar.schema_objects import ObjectContext, object_rule
from deepinfer.core.grammar.schema_strings import QUOTE, string_language, string_rule
from deepinfer.core.grammar.schema_values import kinds_of, same, satisfies

MAX_GOALS: Final = 5_000

_HEX: Final = "[0-9a-fA-F]"
_NUMBER_FACTS: Final = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "not multipleOf",
)  # fmt: skip
_STRING_FACTS: Final = ("minLength", "maxLength", "pattern", "format", "not pattern")
_ARRAY_FACTS: Final = ("array shape", "minItems", "maxItems", "contains", "uniqueItems", "unevaluatedItems")
_OBJECT_FACTS: Final = (
    "object shape", "minProperties", "maxProperties", "required", "absent", "propertyNames", "unevaluatedProperties",
)  # fmt: skip


class Builder:
    """Makes the rules of one schema.

    Args:
        document: the schema.
        max_whitespace: most whitespace characters in one place.
        max_digits: most digits in a row, where the schema does not ask for more.
    """

    def __init__(self, document: Document, max_whitespace: int, max_digits: int) -> None:
        self._document = document
        self._max_digits = max_digits
        self._rules = Rules()
        self._names: dict[Goal, str] = {}
        self._goals: dict[str, Goal] = {}
        self._conflicts: dict[str, list[SchemaError]] = {}
        self._last_resorts: dict[str, SchemaError] = {}
        self._cases = Cases(document, self._is_possible)
        space: Alternative = (
            (self._rules.add("space", [(f"[ \\n\\t\\r]{{0,{max_whitespace}}}",)]),) if max_whitespace else ()
        )
        separator, colon = (*space, '","', *space), (*space, '":"', *space)
        self._add_basics(separator, colon, space)
        self._arrays = ArrayContext(self._rules, self.rule_of, self._values_of, self._text_of, separator, space)
        self._objects = ObjectContext(
            self._rules, self.rule_of, self._is_never, self._names_of, self._holds, _quoted, separator, colon, space
        )
        self._separator, self._colon, self._space = separator, colon, space

    def grammar(self) -> str:
        """The text of the grammar, from `root` on.

        Raises:
            SchemaError: something cannot be expressed, or nothing satisfies the schema.
        """
        goal = frozenset((Node(""),))
        try:
            self._rules.define("root", [(self.rule_of(goal),)])
            text = self._rules.text("root")
        except TooManyRulesError as error:
            refuse("", f"{error}; use smaller bounds or fewer alternatives")
        if text is None:
            raise self._why_not("root", (), set()) or SchemaError("", "nothing satisfies the schema")
        return text

    def rule_of(self, goal: Goal) -> Ref:
        """The rule of a goal, made where there is none yet."""
        goal = frozenset(node for node in goal if self._document[node.pointer] is not (not node.negated))
        if not goal:
            return Ref("any")
        if goal not in self._names:
            if len(self._names) >= MAX_GOALS:
                refuse(min(goal).pointer, f"more than {MAX_GOALS} different combinations of subschemas; write fewer")
            name = self._names[goal] = self._rules.new("value")
            self._goals[name] = goal
            cases, self._conflicts[name] = self._cases.of(goal)
            alternatives = [found for case in cases for found in self._alternatives(case, goal, name)]
            self._rules.define(name, alternatives)
            if len(alternatives) == 1 and len(alternatives[0]) == 1 and isinstance(alternatives[0][0], Ref):
                self._names[goal] = alternatives[0][0].rule  # from now on without the detour
                self._goals[self._names[goal]] = goal
                self._conflicts.setdefault(self._names[goal], []).extend(self._conflicts[name])
        return Ref(self._names[goal])

    def _add_basics(self, separator: Alternative, colon: Alternative, space: Alternative) -> None:
        """Rules for values of which nothing is asked."""
        add, digits = self._rules.add, self._max_digits
        self._rules.new("root")
        any_value = Ref(self._rules.new("any"))
        direct = terminal(DIRECT)
        unit: list[Alternative] = [("[0-9abcefABCEF]", _HEX, _HEX, _HEX), ("[dD]", "[0-7]", _HEX, _HEX)]
        pair: Alternative = ("[dD]", "[89abAB]", _HEX, _HEX, literal("\\u"), "[dD]", "[c-fC-F]", _HEX, _HEX)
        code = add("code", [*unit, pair])
        escape = add("escape", [(literal("\\"), '["\\\\/bfnrt]'), (literal("\\u"), code)])
        rest = Ref(self._rules.new("string_rest"))
        self._rules.define(rest.rule, [(QUOTE,), (direct, rest), (escape, rest)])
        string = add("string", [(QUOTE, rest)])
        whole = add("whole", [('"0"',), ("[1-9]", f"[0-9]{{0,{digits - 1}}}")])
        sign = add("sign", [(), ('"-"',)])
        integer = add("integer", [(sign, whole)])
        point = add("point", [(), ('"."', f"[0-9]{{1,{digits}}}")])
        exponent = add("exponent", [(), ("[eE]", "[+-]", "[0-9]{1,2}"), ("[eE]", "[0-9]{1,2}")])
        number = add("number", [(integer, point, exponent)])
        boolean = add("boolean", [('"true"',), ('"false"',)])
        more_items = add("more_items", [(*separator, any_value)])
        array = add("any_array", [
            ('"["', *space, '"]"'), ('"["', *space, any_value, Many(more_items.rule, 0, None), *space, '"]"'),
        ])  # fmt: skip
        member = add("member", [(string, *colon, any_value)])
        more_members = add("more_members", [(*separator, member)])
        dictionary = add("any_object", [
            ('"{"', *space, '"}"'), ('"{"', *space, member, Many(more_members.rule, 0, None), *space, '"}"'),
        ])  # fmt: skip
        everything: list[Alternative] = [('"null"',), (boolean,), (number,), (string,), (array,), (dictionary,)]
        self._rules.define(any_value.rule, everything)

    def _alternatives(self, case: Case, goal: Goal, name: str) -> list[Alternative]:
        """What a case allows."""
        if case.of("enum"):
            return self._enumerated(case, goal, name)
        found: list[Alternative] = []
        excluded = [value for fact in case.of("not enum") for value in fact.value]
        for value in (None, True, False):
            if kinds_of(value) in case.kinds and not any(same(value, one) for one in excluded):
                found.append((literal(json.dumps(value)),))
        for value in excluded:
            if isinstance(value, list | dict) and value and kinds_of(value) in case.kinds:
                refuse(case.of("not enum")[0].pointer, f"an {kinds_of(value)} cannot be excluded by its value")
        for kinds, facts, plain, rule in (
            (
                NUMBERS,
                _NUMBER_FACTS,
                self._plain_number(case),
                lambda: number_rule(self._rules, case, self._max_digits),
            ),
            ({"string"}, _STRING_FACTS, "string", lambda: string_rule(self._rules, case)),
            ({"array"}, _ARRAY_FACTS, "any_array", lambda: array_rule(self._arrays, case)),
            ({"object"}, _OBJECT_FACTS, "any_object", lambda: object_rule(self._objects, case)),
        ):
            if not case.kinds & kinds:
                continue
            says_nothing = plain and not case.of(*facts) and not any(kinds_of(value) in kinds for value in excluded)
            found.append((Ref(plain) if says_nothing else self._checked(rule, case, facts, name),))
        return found

    @staticmethod
    def _plain_number(case: Case) -> str:
        return {NUMBERS: "number", frozenset({"integer"}): "integer"}.get(case.kinds & NUMBERS, "")

    def _checked(self, rule: Callable[[], Ref], case: Case, facts: tuple[str, ...], name: str) -> Ref:
        """A rule, with its place named where it is too large or allows nothing."""
        said = case.of(*facts)
        try:
            made = rule()
        except TooManyStatesError as error:
            together = ", ".join(dict.fromkeys(fact.name for fact in said))
            refuse(said[0].pointer, f"{together} together are too complex ({error}); use smaller bounds")
        contradictions = _contradictions(case)
        self._conflicts[name] += contradictions
        if said and not contradictions:
            names = ", ".join(dict.fromkeys(f.name for f in said if not f.name.endswith("shape"))) or said[0].name
            self._last_resorts[made.rule] = SchemaError(said[0].pointer, f"no value satisfies {names} together")
        return made

    def _enumerated(self, case: Case, goal: Goal, name: str) -> list[Alternative]:
        facts = case.of("enum")
        values = [v for v in facts[0].value if kinds_of(v) in case.kinds and all(self._agrees(n, v) for n in goal)]
        if not values:
            keywords = " and ".join(dict.fromkeys(fact.pointer for fact in facts))
            self._conflicts[name].append(SchemaError(facts[0].pointer, f"no value of {keywords} satisfies the rest"))
        return [self._text_of(value) for value in values]

    def _agrees(self, node: Node, value: Any) -> bool:
        return satisfies(self._document, node.pointer, value) != node.negated

    def _holds(self, node: Node, name: str) -> bool:
        return self._agrees(node, name)

    def _is_never(self, goal: Goal) -> bool:
        return any(self._document[node.pointer] is node.negated or opposite(node) in goal for node in goal)

    def _is_possible(self, goal: Goal) -> bool:
        return not self._is_never(goal) and self._rules.is_possible(self.rule_of(goal).rule)

    def _values_of(self, goal: Goal) -> list[Any] | None:
        """All values of a goal if it names them."""
        found: list[Any] = []
        for case in self._cases.of(goal)[0]:
            if case.of("enum"):
                candidates = case.of("enum")[0].value
            elif case.kinds <= {"null", "boolean"}:
                candidates = [value for value in (None, True, False) if kinds_of(value) in case.kinds]
            else:
                return None
            for value in candidates:
                if all(self._agrees(node, value) for node in goal) and not any(same(value, one) for one in found):
                    found.append(value)
        return found

    def _names_of(self, goal: Goal) -> Automaton:
        """The strings of a goal."""
        languages = []
        for case in self._cases.of(goal)[0]:
            if "string" not in case.kinds:
                continue
            if case.of("enum"):
                texts = [
                    v for v in case.of("enum")[0].value if isinstance(v, str) and all(self._agrees(n, v) for n in goal)
                ]
                languages.append(of_strings(texts))
            else:
                languages.append(string_language(case))
        return union(languages) if languages else of_strings(())

    def _text_of(self, value: Any) -> Alternative:
        """A value as JSON, with whitespace where there may be some."""
        if isinstance(value, str):
            return (literal(_quoted(value)),)
        if isinstance(value, Decimal):
            return (literal(f"{value:f}" if -20 <= value.adjusted() <= 20 else str(value)),)
        if isinstance(value, list):
            parts = [self._text_of(item) for item in value]
            return self._enclosed("[", parts, "]")
        if isinstance(value, dict):
            parts = [(literal(_quoted(name)), *self._colon, *self._text_of(item)) for name, item in value.items()]
            return self._enclosed("{", parts, "}")
        return (literal(json.dumps(value)),)

    def _enclosed(self, begin: str, parts: list[Alternative], end: str) -> Alternative:
        inner: Alternative = ()
        for place, part in enumerate(parts):
            inner = (*inner, *(self._separator if place else ()), *part)
        return (literal(begin), *self._space, *inner, *(self._space if parts else ()), literal(end))

    def _why_not(self, name: str, path: tuple[str, ...], seen: set[str]) -> SchemaError | None:
        """Why a rule allows nothing: what contradicts itself, or contains itself, as deep inside as it stands."""
        seen.add(name)
        path = (*path, name)
        if self._conflicts.get(name):
            return self._conflicts[name][0]
        parts = self._rules.dead_parts(name)
        for part in parts:
            if part not in seen and (reason := self._why_not(part, path, seen)):
                return reason
        for part in parts:
            if part in path and part in self._goals:
                return SchemaError(
                    min(self._goals[part]).pointer, "every value would have to contain itself without end"
                )
        return self._last_resorts.get(name)


def _quoted(text: str) -> str:
    """A string in the one spelling that we use."""
    return '"' + "".join(json_escape(ord(c)) if c in '"\\' or c < " " else c for c in text) + '"'


def _contradictions(case: Case) -> list[SchemaError]:
    """Pairs of facts that say on their own that nothing is left."""
    found: list[SchemaError] = []
    for ending in ("Length", "Items", "Properties"):
        least = max(case.of("min" + ending), key=lambda fact: fact.value, default=None)
        most = min(case.of("max" + ending), key=lambda fact: fact.value, default=None)
        if least and most and least.value > most.value:
            message = f"{least.name} {least.value} is more than {most.name} {most.value} ({most.pointer})"
            found.append(SchemaError(least.pointer, message))
    least = max(case.of("minimum", "exclusiveMinimum"), key=lambda fact: fact.value, default=None)
    most = min(case.of("maximum", "exclusiveMaximum"), key=lambda fact: fact.value, default=None)
    if least and most and least.value > most.value:
        found.append(SchemaError(least.pointer, f"{least.name} {least.value} is above {most.name} {most.value}"))
    absent = {name: fact.pointer for fact in case.of("absent") for name in fact.value}
    for fact in case.of("required"):
        for name in fact.value:
            if name in absent:
                found.append(
                    SchemaError(fact.pointer, f"property {name!r} is required, and must be absent ({absent[name]})")
                )
    return found
