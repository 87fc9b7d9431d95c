"""Rules of a grammar while they are made: which can produce anything, and their text.

A rule that produces nothing (a property that contradicts itself, a list that must contain itself) is taken out together
with whatever needs it. If the first rule goes that way, no value satisfies the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from deepinfer.core.grammar.automaton import Automaton
from deepinfer.core.grammar.charset import CharSet, terminal

MAX_RULES: Final = 10_000


class TooManyRulesError(ValueError):
    """A grammar grows beyond `MAX_RULES`. Remedy: smaller bounds in the schema."""


class Ref(NamedTuple):
    """A rule."""

    rule: str


class Many(NamedTuple):
    """A rule, several times; `most` None has no bound."""

    rule: str
    least: int
    most: int | None


Item: TypeAlias = str | Ref | Many
"""A string is EBNF text as it is: literals and character classes."""
Alternative: TypeAlias = tuple[Item, ...]


class Rules:
    """Named rules, each a choice of sequences."""

    def __init__(self) -> None:
        self._rules: dict[str, list[Alternative] | None] = {}
        self._shared: dict[tuple[Alternative, ...], Ref] = {}
        self._automata: dict[tuple[Automaton, Callable[[CharSet], list[str]], Alternative], Ref] = {}
        self._alive: set[str] = set()  # known to produce something, whatever is still to be defined

    def new(self, name: str) -> str:
        """Take a name, with a number behind it where it is taken. The rule may be used before it is defined.

        Raises:
            TooManyRulesError: there are `MAX_RULES` already.
        """
        if len(self._rules) >= MAX_RULES:
            raise TooManyRulesError(f"the grammar needs more than {MAX_RULES} rules")
        unique = name if name not in self._rules else f"{name}_{len(self._rules)}"
        self._rules[unique] = None
        return unique

    def define(self, name: str, alternatives: Iterable[Alternative]) -> None:
        """Say what a rule that has a name is."""
        self._rules[name] = list(dict.fromkeys(alternatives))

    def add(self, name: str, alternatives: Iterable[Alternative]) -> Ref:
        """A rule, the same one for the same alternatives: each costs time to compile."""
        key = tuple(dict.fromkeys(alternatives))
        if not key or key not in self._shared:
            self._shared[key] = Ref(self.new(name))
            self.define(self._shared[key].rule, key)
        return self._shared[key]

    def add_automaton(
        self, name: str, language: Automaton, terminals: Callable[[CharSet], list[str]], end: Alternative
    ) -> Ref:
        """A rule for the strings of an automaton, a state each; made once for the same strings.

        Args:
            name: of the rules.
            language: the strings; none makes a rule that produces nothing.
            terminals: the alternatives that write one character of a set.
            end: what follows the last character.
        """
        key = language, terminals, end
        if key in self._automata:
            return self._automata[key]
        names = [self.new(name) for _ in language.edges]
        for state, edges in enumerate(language.edges):
            found: list[Alternative] = [(t, Ref(names[to])) for chars, to in edges for t in terminals(chars)]
            self.define(names[state], [*found, end] if state in language.accepting else found)
        self._automata[key] = Ref(names[0])
        return self._automata[key]

    def is_possible(self, name: str) -> bool:
        """Whether a rule can produce anything, as far as is known: a rule without a definition yet might."""
        seen = {name}
        near = [name]  # what it takes to tell, up to rules that are known to be alive
        for one in near:
            if one not in self._alive:
                parts = (item for alternative in self._rules[one] or () for item in alternative)
                new = dict.fromkeys(i.rule for i in parts if not isinstance(i, str))
                near.extend(rule for rule in new if rule not in seen)
                seen.update(new)
        known = self._alive & set(near)
        self._alive |= self._productive(near, known)
        undefined = {one for one in near if self._rules[one] is None}
        return name in self._productive(near, known | undefined)

    def dead_parts(self, name: str) -> list[str]:
        """The rules that a rule that produces nothing needs and that produce nothing either."""
        alive = self._productive(self._rules, set())
        parts = (item for alternative in self._rules[name] or () for item in alternative)
        return [item.rule for item in parts if not isinstance(item, str) and item.rule not in alive]

    def text(self, root: str) -> str | None:
        """The grammar that starts with `root`, without what is dead or not used; None if nothing is left."""
        alive = self._productive(self._rules, set())
        if root not in alive:
            return None
        used, seen, lines = [root], {root}, []
        for name in used:  # grows while it is walked
            alternatives = []
            for alternative in self._rules[name] or ():
                if not _lives(alternative, alive):
                    continue
                alternative = tuple(i for i in alternative if not isinstance(i, Many) or i.rule in alive)
                new = dict.fromkeys(i.rule for i in alternative if not isinstance(i, str))
                used.extend(rule for rule in new if rule not in seen)
                seen.update(new)
                alternatives.append(" ".join(map(_written, alternative)) or '""')
            lines.append(f"{name} ::= {' | '.join(alternatives)}")
        return "\n".join(lines) + "\n"

    def _productive(self, names: Iterable[str], known: set[str]) -> set[str]:
        """Those of some rules that produce something, if what is known to does."""
        users: dict[str, list[str]] = {}
        for name in names:
            for item in (item for alternative in self._rules[name] or () for item in alternative):
                if not isinstance(item, str):
                    users.setdefault(item.rule, []).append(name)
        alive = set(known)
        todo = [*names]
        while todo:
            name = todo.pop()
            if name not in alive and any(_lives(one, alive) for one in self._rules[name] or ()):
                alive.add(name)
                todo.extend(users.get(name, ()))
        return alive


def plain_terminals(chars: CharSet) -> list[str]:
    """One character of a set as it is."""
    return [terminal(chars)]


def _lives(alternative: Alternative, alive: set[str]) -> bool:
    return all(
        isinstance(item, str) or item.rule in alive or (isinstance(item, Many) and item.least == 0)
        for item in alternative
    )


def _written(item: Item) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Ref):
        return item.rule
    if item.most is None:
        return item.rule + {0: "*", 1: "+"}.get(item.least, f"{{{item.least},}}")
    return f"{item.rule}{{{item.least},{item.most}}}"
