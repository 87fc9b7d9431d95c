"""Regular expressions as JSON schema means them: ECMA-262 with Unicode, as a tree, and as an automaton.

A pattern of a schema is searched for, so one without anchors may stand anywhere in the string. Anchors are taken at the
ends of alternatives, where they mean just that. What no automaton can do (backreferences, look-around), or what means
something only next to its neighbours (word boundaries), is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from deepinfer.core.grammar.automaton import Automaton, TooManyStatesError, explore
from deepinfer.core.grammar.charset import UNICODE, CharSet, atoms, chars, charset, complement, holds

MAX_REPEATS: Final = 10_000
"""Of one counted repetition."""
_MAX_NFA_STATES: Final = 50_000
_MAX_DEPTH: Final = 100

_DIGITS: Final = charset([(48, 57)])
_WORD: Final = charset([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE: Final = charset(
    [
        (9, 13),
        (32, 32),
        (160, 160),
        (5760, 5760),
        (8192, 8202),
        (8232, 8233),
        (8239, 8239),
        (8287, 8287),
        (12288, 12288),
        (65279, 65279),
    ]
)
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE} | {
    "D": complement(_DIGITS),
    "W": complement(_WORD),
    "S": complement(_SPACE),
}
_NO_LINE_END: Final = complement(chars("\n\r\u2028\u2029"))
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class RegexError(ValueError):
    """A pattern is wrong or cannot be had. Remedy: the message says what and where."""


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    chars: CharSet


@dataclass(frozen=True)
class Sequence:
    """Parts behind each other."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True)
class Choice:
    """One of several."""

    options: tuple[Regex, ...]


@dataclass(frozen=True)
class Repeat:
    """A part several times; `most` None has no bound."""

    part: Regex
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """`^` or `$`."""

    at_start: bool


Regex: TypeAlias = Chars | Sequence | Choice | Repeat | Anchor

ANYTHING: Final = Repeat(Chars(UNICODE), 0, None)


def parse_search(pattern: str) -> Regex:
    """The tree of all strings in which a pattern is found; it has no anchors.

    Raises:
        RegexError: the pattern is wrong, or uses what is not supported.
    """
    return _unanchored(_Parser(pattern).parse(), pattern)


def automaton_of(regex: Regex) -> Automaton:
    """The strings that a tree without anchors describes.

    Raises:
        TooManyStatesError: the pattern is too large.
    """
    return _Nfa(regex).determinised()


def _unanchored(regex: Regex, pattern: str) -> Regex:
    options = []
    for option in _options(regex):
        parts = _flat(option)
        starts = bool(parts) and parts[0] == Anchor(True)
        ends = bool(parts) and parts[-1] == Anchor(False)
        inner = parts[1 if starts else 0 : len(parts) - 1 if ends else len(parts)]
        if any(_has_anchor(part) for part in inner):
            raise RegexError(f"pattern {pattern!r}: ^ and $ are supported at the ends of alternatives only")
        options.append(Sequence((*(() if starts else (ANYTHING,)), *inner, *(() if ends else (ANYTHING,)))))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _options(regex: Regex) -> list[Regex]:
    """The alternatives of a tree, multiplied out as far as anchors stand inside of groups at its ends."""
    if isinstance(regex, Choice):
        return [found for option in regex.options for found in _options(option)]
    if isinstance(regex, Sequence):
        parts = _flat(regex)
        for place in (0, len(parts) - 1):
            if parts and isinstance(parts[place], Choice) and _has_anchor(parts[place]):
                before, behind = tuple(parts[:place]), tuple(parts[place + 1 :])
                return [
                    found for o in _options(parts[place]) for found in _options(Sequence((*before, *_flat(o), *behind)))
                ]
    return [regex]


def _flat(regex: Regex) -> list[Regex]:
    return [leaf for part in regex.parts for leaf in _flat(part)] if isinstance(regex, Sequence) else [regex]


def _has_anchor(regex: Regex) -> bool:
    match regex:
        case Anchor():
            return True
        case Sequence(parts) | Choice(parts):
            return any(map(_has_anchor, parts))
        case Repeat(part):
            return _has_anchor(part)
    return False


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> Regex:
        tree = self._choice()
        if self._at < len(self._text):
            raise self._error("a ) that closes nothing")
        return tree

    def _error(self, what: str) -> RegexError:
        return RegexError(f"pattern {self._text!r}, at character {self._at}: {what}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, expected: str) -> bool:
        if self._text.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _choice(self) -> Regex:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Regex:
        parts: list[Regex] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom()
            parts.append(part if isinstance(part, Anchor) else self._repeated(part))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Regex) -> Regex:
        if self._take("*"):
            least, most = 0, None
        elif self._take("+"):
            least, most = 1, None
        elif self._take("?"):
            least, most = 0, 1
        elif self._peek() == "{":
            least, most = self._counts()
        else:
            return part
        self._take("?")  # how eagerly it matches says nothing about what it matches
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            raise self._error("a quantifier behind a quantifier")
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        first, comma, last = self._text[self._at + 1 : max(end, 0)].partition(",")
        if not first.isdecimal() or not (last == "" or last.isdecimal()):
            raise self._error("{ begins a count such as {2}, {2,} or {2,5}; write \\{ for the character")
        least = int(first)
        most = int(last) if last else None if comma else least
        if most is not None and most < least:
            raise self._error(f"{{{least},{most}}} counts down")
        if max(least, most or 0) > MAX_REPEATS:
            raise self._error(f"a count above {MAX_REPEATS}")
        self._at = end + 1
        return least, most

    def _atom(self) -> Regex:
        char = self._peek()
        if char == "(":
            return self._group()
        self._at += 1
        if char == "^":
            return Anchor(True)
        if char == "$":
            return Anchor(False)
        if char == ".":
            return Chars(_NO_LINE_END)
        if char == "[":
            return Chars(self._class())
        if char == "\\":
            return Chars(self._escape())
        if char in "*+?{}]":
            self._at -= 1
            raise self._error(f"{char} stands alone; write \\{char} for the character")
        return Chars(chars(char))

    def _group(self) -> Regex:
        for look in ("(?=", "(?!", "(?<=", "(?<!"):
            if self._text.startswith(look, self._at):
                raise self._error(f"look-around {look}...) is not supported")
        self._take("(")
        if self._take("?<"):
            end = self._text.find(">", self._at)
            if end < 0:
                raise self._error("a group's name without its >")
            self._at = end + 1
        elif self._take("?") and not self._take(":"):
            raise self._error("only (...), (?:...) and (?<name>...) are supported")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} groups inside of each other")
        inner = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("a ( without its )")
        return inner

    def _class(self) -> CharSet:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._class_member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if not (_is_single(low) and _is_single(high)):
                    raise self._error("a range needs one character at each end")
                if high[0][0] < low[0][0]:
                    raise self._error("a range that runs backwards")
                low = charset([(low[0][0], high[0][0])])
            ranges.extend(low)
        found = charset(ranges)
        return complement(found) if negated else complement(complement(found))  # without surrogates

    def _class_member(self) -> CharSet:
        char = self._peek()
        if not char:
            raise self._error("a [ without its ]")
        self._at += 1
        if char != "\\":
            return chars(char)
        return chars("\b") if self._take("b") else self._escape(in_class=True)

    def _escape(self, in_class: bool = False) -> CharSet:
        char = self._peek()
        if not char:
            raise self._error("a \\ at the end")
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not (char == "0" and self._peek().isdecimal()):
            return chars(_CONTROLS[char])
        if char == "x":
            return self._hex(2)
        if char == "u":
            return self._unicode()
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return chars(chr(ord(self._text[self._at - 1]) % 32))
        if char in "bB":
            raise self._error(f"word boundaries (\\{char}) are not supported")
        if char in "pP":
            raise self._error("Unicode properties (\\p) are not supported; write the ranges out")
        if char.isdecimal() or char == "k":
            raise self._error("backreferences are not supported")
        if char.isalnum():
            raise self._error(f"\\{char} means nothing")
        return chars(char)

    def _hex(self, digits: int) -> CharSet:
        text = self._text[self._at : self._at + digits]
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            raise self._error(f"{digits} hexadecimal digits are missing")
        self._at += digits
        return chars(chr(int(text, 16)))

    def _unicode(self) -> CharSet:
        if not self._take("{"):
            first = self._hex(4)[0][0]
            if 0xD800 <= first < 0xDC00 and self._take("\\u"):
                second = self._hex(4)[0][0]
                if 0xDC00 <= second < 0xE000:
                    return chars(chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00))
            if 0xD800 <= first < 0xE000:
                raise self._error("half a surrogate pair is no character")
            return chars(chr(first))
        end = self._text.find("}", self._at)
        digits = self._text[self._at : max(end, 0)]
        if not digits or any(c not in "0123456789abcdefABCDEF" for c in digits) or int(digits, 16) > 0x10FFFF:
            raise self._error("\\u{...} holds a code point in hexadecimal, up to 10FFFF")
        self._at = end + 1
        return chars(chr(int(digits, 16)))


def _is_single(found: CharSet) -> bool:
    return len(found) == 1 and found[0][0] == found[0][1]


class _Nfa:
    """Thompson's construction: states with empty edges and with edges of characters."""

    def __init__(self, regex: Regex) -> None:
        self._empty: list[list[int]] = []
        self._edges: list[list[tuple[CharSet, int]]] = []
        start = self._state()
        self._end = self._add(regex, start)
        self._start = start

    def determinised(self) -> Automaton:
        def edges_of(states: frozenset[int]) -> Iterable[tuple[CharSet, frozenset[int]]]:
            edges = [edge for state in sorted(states) for edge in self._edges[state]]
            for atom in atoms(found for found, _ in edges):
                targets = {target for found, target in edges if holds(found, atom[0][0])}
                if targets:
                    yield atom, self._closure(targets)

        return explore(self._closure({self._start}), edges_of, lambda states: self._end in states)

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        seen = set(states)
        todo = list(seen)
        while todo:
            for target in self._empty[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)

    def _state(self) -> int:
        if len(self._edges) >= _MAX_NFA_STATES:
            raise TooManyStatesError(f"more than {_MAX_NFA_STATES} states")
        self._empty.append([])
        self._edges.append([])
        return len(self._edges) - 1

    def _add(self, regex: Regex, start: int) -> int:
        """Build a tree from a state on; its end."""
        match regex:
            case Chars(found):
                end = self._state()
                self._edges[start].append((found, end))
                return end
            case Sequence(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case Choice(options):
                end = self._state()
                for option in options:
                    begin = self._state()
                    self._empty[start].append(begin)
                    self._empty[self._add(option, begin)].append(end)
                return end
            case Repeat(part, least, most):
                return self._repeat(part, least, most, start)
        raise AssertionError("anchors are gone by now")

    def _repeat(self, part: Regex, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self._add(part, start)
        end = self._state()
        if most is None:
            loop = self._state()
            self._empty[start].append(loop)
            self._empty[self._add(part, loop)].append(loop)
            self._empty[loop].append(end)
            return end
        for _ in range(most - least):
            self._empty[start].append(end)
            start = self._add(part, start)
        self._empty[start].append(end)
        return end
