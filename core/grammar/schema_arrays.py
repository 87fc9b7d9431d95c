"""Rules for arrays: items by place, counts of items, items that must be among them, items that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from deepinfer.core.grammar.grammar_text import Alternative, Many, Ref, Rules
from deepinfer.core.grammar.schema_cases import ArrayShape, Case, Contains, Fact, Goal, Node, opposite
from deepinfer.core.grammar.schema_error import refuse
from deepinfer.core.grammar.schema_values import same

MAX_UNIQUE: Final = 8
"""Values from which an array's items are taken without repeating one."""

_Counts = tuple[int, ...]


@dataclass(frozen=True)
class ArrayContext:
    """What array rules need from outside.

    Attributes:
        rules: to add to.
        rule_of: the rule of a goal.
        values_of: all values of a goal where they are few and known, else None.
        text_of: a value as grammar text.
        separator: a comma with its whitespace.
        space: whitespace, nothing where there is none.
    """

    rules: Rules
    rule_of: Callable[[Goal], Ref]
    values_of: Callable[[Goal], list[Any] | None]
    text_of: Callable[[Any], Alternative]
    separator: Alternative
    space: Alternative


def array_rule(context: ArrayContext, case: Case) -> Ref:
    """A rule for the arrays of a case that says something about them.

    Raises:
        SchemaError: `uniqueItems` where the values are not few, or `contains` that cannot be counted.
    """
    return _Arrays(context, case).rule()


class _Arrays:
    def __init__(self, context: ArrayContext, case: Case) -> None:
        self._context, self._case = context, case
        self._least = max((fact.value for fact in case.of("minItems")), default=0)
        self._most: int | None = min((fact.value for fact in case.of("maxItems")), default=None)
        if [] in [value for fact in case.of("not enum") for value in fact.value]:
            self._least = max(self._least, 1)
        self._shapes = [fact for fact in case.of("array shape") if isinstance(fact.value, ArrayShape)]
        self._num_prefix = max((len(fact.value.prefix) for fact in self._shapes), default=0)
        self._unevaluated = case.of("unevaluatedItems")
        self._contains_facts = case.of("contains")
        self._contains: list[Contains] = [fact.value for fact in self._contains_facts]

    def rule(self) -> Ref:
        unique = self._case.of("uniqueItems")
        if unique and (self._most is None or self._most > 1):
            start = self._unique(unique[0])
        elif self._contains:
            start = self._counted()
        else:
            start = self._by_place()
        return self._context.rules.add("array", [('"["', *self._context.space, start)])

    def goal(self, place: int, found_by: Sequence[Fact] = ()) -> Goal:
        """What the item at a place must satisfy, if some `contains` have found it."""
        found: set[Node] = set()
        for fact in self._shapes:
            node = fact.value.prefix[place] if place < len(fact.value.prefix) else fact.value.items
            if node is not None:
                found.add(node)
        for fact in self._unevaluated:
            evaluating = [*found_by, *(shape for shape in self._shapes if self._covers(shape, place))]
            if not any(fact.scope[-1] in other.scope for other in evaluating):
                found.add(fact.value)
        return frozenset(found)

    @staticmethod
    def _covers(fact: Fact, place: int) -> bool:
        return place < len(fact.value.prefix) or fact.value.items is not None

    def _end(self, size: int) -> Alternative:
        return ('"]"',) if size == 0 else (*self._context.space, '"]"')

    def _item(self, size: int, item: Alternative) -> Alternative:
        return item if size == 0 else (*self._context.separator, *item)

    def _may_end(self, size: int) -> bool:
        return size >= self._least and (self._most is None or size <= self._most)

    def _by_place(self) -> Ref:
        """First items one by one, then as many of the others as there may be."""
        rules = self._context.rules
        last = self._num_prefix
        if self._most is not None and self._most < self._least:
            return rules.add("items", [])
        names = [rules.new("items") for _ in range(last + 1)]
        for size, name in enumerate(names):
            options = [self._end(size)] if self._may_end(size) else []
            if size < last and (self._most is None or size < self._most):
                options.append((*self._item(size, (self._context.rule_of(self.goal(size)),)), Ref(names[size + 1])))
            elif size == last and (self._most is None or size < self._most):
                item = self._context.rule_of(self.goal(size))
                first = 1 if size == 0 else 0
                least = max(self._least - size - first, 0)
                most = None if self._most is None else self._most - size - first
                more = rules.add("more", [(*self._context.separator, item)])
                rest: Alternative = (
                    (Many(more.rule, least, most), *self._context.space, '"]"') if most != 0 else self._end(1)
                )
                options = [*options, (item, *rest)] if first else [rest]
            rules.define(name, options)
        return Ref(names[0])

    def _counted(self) -> Ref:
        """Item by item, with the number of those that each `contains` has found."""
        rules, contains = self._context.rules, self._contains
        limit = self._most if self._most is not None else max(self._num_prefix, self._least)
        names: dict[tuple[int, _Counts], str] = {}
        todo: list[tuple[int, _Counts]] = []

        def state(size: int, counts: _Counts) -> Ref:
            key = size, counts
            if key not in names:
                names[key] = rules.new("items")
                todo.append(key)
            return Ref(names[key])

        start = state(0, (0,) * len(contains))
        for size, counts in todo:  # grows while it is walked
            enough = all(count >= one.least for count, one in zip(counts, contains, strict=True))
            options = [self._end(size)] if enough and self._may_end(size) else []
            if self._most is None or size < self._most:
                # the size beyond which nothing depends on it, but 0 stays apart: no comma comes before the first item
                following = size + 1 if self._most is not None else min(size + 1, max(limit, 1))
                for nodes, after in self._choices(counts):
                    found_by = [fact for fact in self._contains_facts if fact.value.node in nodes]
                    item = self._context.rule_of(self.goal(size, found_by) | nodes)
                    options.append((*self._item(size, (item,)), state(following, after)))
            rules.define(names[size, counts], options)
        return start

    def _choices(self, counts: _Counts) -> list[tuple[Goal, _Counts]]:
        """What the next item may be to each `contains`: found, not found, or either where it does not matter."""
        options: list[list[tuple[Goal, int]]] = []
        for count, one in zip(counts, self._contains, strict=True):
            here: list[tuple[Goal, int]] = []
            if one.most is not None:
                here.append((frozenset((opposite(one.node),)), count))
                if count < one.most:
                    here.append((frozenset((one.node,)), count + 1))
            else:
                here.append((frozenset(), count))
                if count < one.least or self._unevaluated:
                    here.append((frozenset((one.node,)), min(count + 1, one.least)))
            options.append(here)
        return [
            (frozenset().union(*(nodes for nodes, _ in chosen)), tuple(count for _, count in chosen))
            for chosen in product(*options)
        ]

    def _unique(self, fact: Fact) -> Ref:
        """Arrays of few values, each at most once."""
        if self._contains:
            refuse(fact.pointer, "uniqueItems together with contains is not supported; leave one out")
        goals = [self.goal(place) for place in range(self._num_prefix + 1)]
        lists = [self._context.values_of(goal) for goal in goals]
        known: list[Any] = []
        for values in lists:
            for value in values or ():
                if not any(same(value, other) for other in known):
                    known.append(value)
        if None in lists or len(known) > MAX_UNIQUE:
            refuse(
                fact.pointer,
                f"uniqueItems needs items of at most {MAX_UNIQUE} known values, by enum, const, boolean or null; "
                "no grammar tells other values apart",
            )
        rules = self._context.rules
        names: dict[tuple[int, frozenset[int]], str] = {}
        todo: list[tuple[int, frozenset[int]]] = []

        def state(size: int, used: frozenset[int]) -> Ref:
            if (size, used) not in names:
                names[size, used] = rules.new("distinct")
                todo.append((size, used))
            return Ref(names[size, used])

        start = state(0, frozenset())
        for size, used in todo:  # grows while it is walked
            options = [self._end(size)] if self._may_end(size) else []
            if self._most is None or size < self._most:
                allowed: Sequence[Any] = lists[min(size, self._num_prefix)] or ()
                for number, value in enumerate(known):
                    if number not in used and any(same(value, other) for other in allowed):
                        item = self._item(size, self._context.text_of(value))
                        options.append((*item, state(size + 1, used | {number})))
            rules.define(names[size, used], options)
        return start
