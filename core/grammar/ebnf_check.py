"""Grammars and regular expressions that people wrote: usable, or refused at once with the rule named.

The library reads the text, and accepts some that can never match or that would take for ever. Its own normal form is
read back here, and each rule must produce something, in repetitions of a size that can be matched. Both are linear in
the text, whose length is bounded: a few seconds for the longest, so none of this needs a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from deepinfer.ops.show import shown

MAX_REPEATS: Final = 100_000
"""Of one counted repetition."""
MAX_TEXT: Final = 1 << 20

_PLACE_IN_LIBRARY: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
_TOKEN: Final = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<count>\{\s*\d+\s*(?:,\s*-?\d*\s*)?\})'
    r"|(?P<look>\(=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<mark>[()|*+?,=])|(?P<space>\s+)|(?P<other>.)"
)
_COUNT: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}')
"""A counted repetition in what was written, or what may look like one: a text, a character class, a comment."""
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
    _check_counts(_COUNT.finditer(text), "grammar")
    rules = _rules(str(grammar))
    used, seen = ["root"], {"root"}
    for name in used:  # grows while it is walked
        for other in _names(rules[name]):
            if other in rules and other not in seen:
                seen.add(other)
                used.append(other)
    for name in used:
        _check_terminals(name, rules[name])
    alive = _alive({name: rules[name] for name in used})
    for name in reversed(used):  # the one furthest from the start is nearest to the fault
        if name not in alive:
            raise GrammarError(f"grammar: rule {name!r} can never match: each of its alternatives needs itself")


def check_regex(pattern: str) -> None:
    """Make sure that a regular expression compiles.

    Raises:
        GrammarError: it is misspelled, or uses what is not supported.
    """
    _check_size(pattern, "regex")
    _check_counts(re.finditer(r"(?<!\\)\{(\d+)(?:,(\d*))?\}", pattern), "regex")
    _read(pattern, "regex")


def _check_size(text: str, what: str) -> None:
    if not text.strip() and what == "grammar":
        raise GrammarError("grammar: it is empty; write at least a rule root ::= ...")
    if len(text) > MAX_TEXT:
        raise GrammarError(f"{what}: {len(text)} characters, of which at most {MAX_TEXT} are allowed")


def _check_counts(counts: Iterator[re.Match[str]], what: str) -> None:
    """Judge the counts as they were written: the library keeps 32 bits of them."""
    for count in counts:
        for number in filter(None, count.groups()):
            digits = number.lstrip("0")
            if len(digits) > len(str(MAX_REPEATS)) or int(digits or "0") > MAX_REPEATS:
                raise GrammarError(
                    f"{what}: the repetition {shown(count[0])} counts beyond {MAX_REPEATS}; use smaller counts"
                )


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


class _Part:
    """A rule, or a part of one: it can match once `missing` of the parts that it is made of can."""

    __slots__ = ("missing", "users")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.users: list[_Part] = []


def _alive(rules: Mapping[str, list[tuple[str, str]]]) -> set[str]:
    """The rules that can match something. Each part is looked at as often as it is named: linear in the text."""
    by_name = {name: _Part(1) for name in rules}
    found = []
    for name, tokens in rules.items():
        body = _Reader(tokens, by_name).alternatives()
        if body is None:
            by_name[name].missing = 0
            found.append(by_name[name])
        else:
            body.users.append(by_name[name])
    for part in found:  # grows while it is walked
        for user in part.users:
            user.missing -= 1
            if user.missing == 0:
                found.append(user)
    return {name for name, part in by_name.items() if part.missing <= 0}


class _Reader:
    """Reads one rule's tokens into parts; None stands for what can match whatever the rules do."""

    def __init__(self, tokens: list[tuple[str, str]], rules: Mapping[str, _Part]) -> None:
        self._tokens, self._rules, self._at = tokens, rules, 0

    def alternatives(self) -> _Part | None:
        """Up to a closing parenthesis or the end; one of them has to match."""
        found = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence())
        return None if None in found else _joined(list(filter(None, found)), 1)

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _sequence(self) -> _Part | None:
        found = []
        while self._peek() not in ("", "|", ")"):
            item = self._item()
            if item is not None:
                found.append(item)
        return _joined(found, len(found)) if found else None

    def _item(self) -> _Part | None:
        kind, text = self._tokens[self._at]
        self._at += 1
        found: _Part | None = None
        if text in ("(", "(="):
            found = self.alternatives()
            self._at += 1
            if text == "(=":
                found = None
        elif kind == "name" and text in _MACROS:
            self._skip_arguments()
        elif kind == "name":
            found = self._rules.get(text) or _Part(1)
        if self._at < len(self._tokens) and self._tokens[self._at][0] == "count":
            least = re.findall(r"\d+", self._peek())[0]
            self._at += 1
            return None if int(least) == 0 else found
        if self._peek() in ("*", "?", "+"):
            self._at += 1
            return found if self._tokens[self._at - 1][1] == "+" else None
        return found

    def _skip_arguments(self) -> None:
        depth = 0
        while self._at < len(self._tokens):
            depth += {"(": 1, "(=": 1, ")": -1}.get(self._peek(), 0)
            self._at += 1
            if depth == 0:
                return


def _joined(parts: list[_Part], missing: int) -> _Part:
    """What matches once so many of some parts do."""
    if len(parts) == 1:
        return parts[0]
    whole = _Part(missing)
    for part in parts:
        part.users.append(whole)
    return whole
