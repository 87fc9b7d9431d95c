"""Finite automata over code points: what it takes to intersect, complement and compare sets of strings.

An EBNF grammar can join languages, not intersect them or take one from another, and JSON schema does both. A language
here is a deterministic automaton whose missing edges reject; each operation returns the smallest one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from deepinfer.core.grammar.charset import UNICODE, CharSet, atoms, charset, holds

MAX_STATES: Final = 20_000
"""Of an automaton on the way; what is left of one is far smaller."""

_State = TypeVar("_State", bound=Hashable)


class TooManyStatesError(ValueError):
    """A language needs more states than we take time for. Remedy: smaller bounds or simpler patterns."""


@dataclass(frozen=True)
class Automaton:
    """A set of strings.

    Attributes:
        edges: of each state: characters and the state behind them; sets of one state do not overlap. State 0 starts.
        accepting: states in which a string may end.
    """

    edges: tuple[tuple[tuple[CharSet, int], ...], ...]
    accepting: frozenset[int]

    @property
    def is_empty(self) -> bool:
        """Whether it holds no string. Automata are kept small, so that none can be reached then."""
        return not self.accepting

    def holds(self, text: str) -> bool:
        """Whether a string is in the set."""
        state: int | None = 0
        for char in text:
            state = self.step(state, ord(char))
            if state is None:
                return False
        return state in self.accepting

    def step(self, state: int | None, code: int) -> int | None:
        """The state behind a character, None where no string of the set goes on so."""
        if state is None:
            return None
        return next((target for chars, target in self.edges[state] if holds(chars, code)), None)


def explore(
    start: _State, edges_of: Callable[[_State], Iterable[tuple[CharSet, _State]]], accepts: Callable[[_State], bool]
) -> Automaton:
    """The automaton of a function from states to edges, which must be deterministic.

    Raises:
        TooManyStatesError: it has more than `MAX_STATES`.
    """
    numbers: dict[_State, int] = {start: 0}
    order = [start]
    edges: list[list[tuple[CharSet, int]]] = []
    for state in order:  # grows while it is walked
        edges.append([])
        for chars, target in edges_of(state):
            if target not in numbers:
                if len(order) >= MAX_STATES:
                    raise TooManyStatesError(f"more than {MAX_STATES} states")
                numbers[target] = len(order)
                order.append(target)
            edges[-1].append((chars, numbers[target]))
    return _smallest(edges, {number for state, number in numbers.items() if accepts(state)})


def combine(languages: Sequence[Automaton], accepts: Callable[[tuple[bool, ...]], bool]) -> Automaton:
    """The strings for which `accepts`, told which of the languages hold them, says yes.

    Raises:
        TooManyStatesError: see `explore`.
    """

    def edges_of(states: tuple[int | None, ...]) -> Iterable[tuple[CharSet, tuple[int | None, ...]]]:
        sets = [
            chars
            for language, state in zip(languages, states, strict=True)
            if state is not None
            for chars, _ in language.edges[state]
        ]
        for atom in atoms([*sets, UNICODE]):
            if holds(UNICODE, atom[0][0]):
                code = atom[0][0]
                yield atom, tuple(language.step(state, code) for language, state in zip(languages, states, strict=True))

    def accepting(states: tuple[int | None, ...]) -> bool:
        return accepts(tuple(s in language.accepting for language, s in zip(languages, states, strict=True)))

    start: tuple[int | None, ...] = (0,) * len(languages)
    return explore(start, edges_of, accepting)


def intersection(languages: Sequence[Automaton]) -> Automaton:
    """The strings of all; every string for none."""
    return languages[0] if len(languages) == 1 else combine(languages, all)


def union(languages: Sequence[Automaton]) -> Automaton:
    """The strings of any."""
    return languages[0] if len(languages) == 1 else combine(languages, any)


def difference(language: Automaton, other: Automaton) -> Automaton:
    """The strings of the first alone."""
    return combine([language, other], lambda held: held[0] and not held[1])


def of_strings(texts: Iterable[str]) -> Automaton:
    """Just these strings."""
    texts = sorted(set(texts))
    # A state is a prefix that is shared, so the automaton is a trie until it is made small.
    prefixes = {text[:size] for text in texts for size in range(len(text) + 1)} | {""}
    children: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for prefix in sorted(prefixes - {""}):
        children[prefix[:-1]].append(prefix)
    ends = set(texts)
    return explore("", lambda p: [(((ord(c[-1]), ord(c[-1])),), c) for c in children[p]], lambda p: p in ends)


def of_length(least: int, most: int | None) -> Automaton:
    """Strings of so many characters."""
    last = least if most is None else most

    def edges_of(size: int) -> Iterable[tuple[CharSet, int]]:
        if size < last or most is None:
            yield UNICODE, min(size + 1, last)

    return explore(0, edges_of, lambda size: size >= least)


def _smallest(edges: list[list[tuple[CharSet, int]]], accepting: set[int]) -> Automaton:
    """The least automaton of the same language."""
    alive = _reaching(edges, accepting)
    edges = [[(chars, t) for chars, t in row if t in alive] if s in alive else [] for s, row in enumerate(edges)]
    sets = sorted({chars for row in edges for chars, _ in row})
    letters = atoms(sets)
    within = {chars: [place for place, atom in enumerate(letters) if holds(chars, atom[0][0])] for chars in sets}
    rows = [{place: target for chars, target in row for place in within[chars]} for row in edges]
    block = [int(state in accepting) for state in range(len(edges))]
    num_blocks = len(set(block))
    while True:
        number: dict[Hashable, int] = {}
        keys = (
            (block[state], *(block[row[place]] if place in row else -1 for place in range(len(letters))))
            for state, row in enumerate(rows)
        )
        block = [number.setdefault(key, len(number)) for key in keys]  # state 0 stays in block 0
        if len(number) == num_blocks:
            break
        num_blocks = len(number)
    merged = {block[state]: _by_target(row, block) for state, row in reversed(list(enumerate(edges)))}
    reachable = [0]
    for state in reachable:  # grows while it is walked
        reachable.extend(t for t in dict.fromkeys(t for _, t in merged[state]) if t not in reachable)
    place = {state: number for number, state in enumerate(reachable)}
    return Automaton(
        tuple(tuple((chars, place[target]) for chars, target in merged[state]) for state in reachable),
        frozenset(place[block[state]] for state in accepting if block[state] in place),
    )


def _by_target(row: Iterable[tuple[CharSet, int]], block: Sequence[int]) -> tuple[tuple[CharSet, int], ...]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for chars, target in row:
        ranges.setdefault(block[target], []).extend(chars)
    return tuple(sorted((charset(found), target) for target, found in ranges.items()))


def _reaching(edges: list[list[tuple[CharSet, int]]], accepting: set[int]) -> set[int]:
    before: dict[int, set[int]] = {}
    for state, row in enumerate(edges):
        for _, target in row:
            before.setdefault(target, set()).add(state)
    alive, todo = set(accepting), list(accepting)
    while todo:
        new = before.get(todo.pop(), set()) - alive
        alive |= new
        todo.extend(new)
    return alive
