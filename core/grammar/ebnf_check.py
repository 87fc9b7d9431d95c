"""Grammars and regular expressions that people wrote: usable, or refused at once with the rule named.

The library reads the text, and accepts some that can never match or that would take for ever. Its own normal form is
read back here, and each rule must produce something, in repetitions of a size that can be matched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MAX_REPEATS: Final = 100_000
"""Of one counted repetition."""
MAX_TEXT: Final = 1 << 20

_PLACE_IN_LIBRARY: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
_TOKEN: Final = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<count>\{\s*\d+\s*(?:,\s*-?\d*\s*)?\})'
    r"|(?P<look>\(=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<mark>[()|*+?,=])|(?P<space>\s+)|(?P<other>.)"
)
_MACROS: Final = frozenset({"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex"})
"""They produce something whatever stands in their parentheses."""


class GrammarError(ValueError):
    """A grammar or a regular expression cannot be used. Remedy: the message names the rule and what would be right."""


def check_ebnf(text: str) -> None:
    """Make sure that a grammar compiles and that each rule it reaches can match. Left recursion is fine.

    Raises:
        GrammarError: it is empty or misspelled, a rule is missing or can never match, or a repetition is too large.
    """
    _check_size(text, "grammar")
    grammar = _read(text, "grammar")
    rules = _rules(str(grammar))
    used = ["root"]
    users: dict[str, list[str]] = {"root": []}
    for name in used:  # grows while it is walked
        for other in dict.fromkeys(other for other in _names(rules[name]) if other in rules):
            if other not in users:
                users[other] = []
                used.append(other)
            users[other].append(name)
    for name in used:
        _check_terminals(name, rules[name])
    alive: set[str] = set()
    waiting = used[::-1]  # what a rule needs comes before it, mostly
    while waiting:
        found: dict[str, None] = {}
        for name in waiting:
            if name not in alive and _Reader(rules[name], alive).produces():
                alive.add(name)
                found[name] = None
        waiting = list(dict.fromkeys(user for name in found for user in users[name] if user not in alive))
    for name in reversed(used):  # the one furthest from the start is nearest to the fault
        if name not in alive:
            raise GrammarError(f"grammar: rule {name!r} can never match: each of its alternatives needs itself")


def check_regex(pattern: str) -> None:
    """Make sure that a regular expression compiles.

    Raises:
        GrammarError: it is misspelled, or uses what is not supported.
    """
    _check_size(pattern, "regex")
    for count in re.finditer(r"(?<!\\)\{(\d+)(?:,(\d*))?\}", pattern):
        if max(int(number) for number in count.groups("0") if number) > MAX_REPEATS:
            raise GrammarError(f"regex: the repetition {count[0]} counts beyond {MAX_REPEATS}; use smaller counts")
    _read(pattern, "regex")


def _check_size(text: str, what: str) -> None:
    if not text.strip() and what == "grammar":
        raise GrammarError("grammar: it is empty; write at least a rule root ::= ...")
    if len(text) > MAX_TEXT:
        raise GrammarError(f"{what}: {len(text)} characters, of which at most {MAX_TEXT} are allowed")


def _read(text: str, what: str) -> object:
    import xgrammar

    read = xgrammar.Grammar.from_ebnf if what == "grammar" else xgrammar.Grammar.from_regex
    try:
        return read(text)
    except Exception as error:  # the library raises many kinds for a text that is wrong
        raise GrammarError(f"{what}: {_PLACE_IN_LIBRARY.sub('', str(error)).strip()}") from error


def _rules(text: str) -> dict[str, list[tuple[str, str]]]:
    """The tokens of each rule of the library's own normal form: kind and text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        name, _, body = line.partition(" ::= ")
        if body:
            found[name] = [(m.lastgroup or "", m[0]) for m in _TOKEN.finditer(body) if m.lastgroup != "space"]
    return found


def _names(tokens: list[tuple[str, str]]) -> Iterator[str]:
    return (text for kind, text in tokens if kind == "name")


def _check_terminals(name: str, tokens: list[tuple[str, str]]) -> None:
    for kind, text in tokens:
        if kind == "chars" and text == "[]":
            raise GrammarError(f"grammar: rule {name!r} has an empty character class, which matches nothing")
        if kind == "count" and any(int(number) > MAX_REPEATS for number in re.findall(r"\d+", text)):
            raise GrammarError(f"grammar: rule {name!r} repeats {text}, beyond {MAX_REPEATS}; use smaller counts")


class _Reader:
    """Reads one rule's tokens and tells whether it produces something when some others do."""

    def __init__(self, tokens: list[tuple[str, str]], alive: set[str]) -> None:
        self._tokens, self._alive, self._at = tokens, alive, 0

    def produces(self) -> bool:
        """Alternatives up to a closing parenthesis or the end."""
        found = self._sequence()
        while self._peek() == "|":
            self._at += 1
            found = self._sequence() or found
        return found

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _sequence(self) -> bool:
        found = True
        while self._peek() not in ("", "|", ")"):
            found = self._item() and found
        return found

    def _item(self) -> bool:
        kind, text = self._tokens[self._at]
        self._at += 1
        if text in ("(", "(="):
            found = self.produces() or text == "(="
            self._at += 1
        elif kind == "name" and text in _MACROS:
            self._skip_arguments()
            found = True
        else:
            found = kind != "name" or text in self._alive
        if self._at < len(self._tokens) and self._tokens[self._at][0] == "count":
            found = found or re.findall(r"\d+", self._peek())[0] == "0"
            self._at += 1
        elif self._peek() in ("*", "?", "+"):
            found = found or self._peek() != "+"
            self._at += 1
        return found

    def _skip_arguments(self) -> None:
        depth = 0
        while self._at < len(self._tokens):
            depth += {"(": 1, "(=": 1, ")": -1}.get(self._peek(), 0)
            self._at += 1
            if depth == 0:
                return
