"""Rules for strings: of a length, of a pattern, of a format, other than some.

Strings that nothing but a length constrains are counted by the matcher, in the fewest states; there, beyond
`ESCAPED_LENGTH`, characters that JSON must escape are left out, since a count of alternatives is slow to match.
Anything else becomes an automaton, or for one large pattern the shape of the pattern itself, with the same exception.
"""

from __future__ import annotations

from typing import Final

from deepinfer.core.grammar.automaton import (
    Automaton,
    combine,
    intersection,
    of_length,
    of_strings,
)
from deepinfer.core.grammar.charset import DIRECT, UNICODE, CharSet, json_terminals, subtract, terminal
from deepinfer.core.grammar.grammar_text import Alternative, Many, Ref, Rules
from deepinfer.core.grammar.regex_syntax import Chars, Choice, Regex, Repeat, Sequence, parse_search
from deepinfer.core.grammar.schema_cases import Case
from deepinfer.core.grammar.schema_values import format_language, format_pattern, pattern_language

ESCAPED_LENGTH: Final = 8
"""Up to this bound on a length, strings hold any character."""
MAX_RULES_OF_PATTERN: Final = 64
"""A single pattern with more states is written in its own shape instead."""

QUOTE: Final = '"\\""'


def string_language(case: Case) -> Automaton:
    """The strings of a case, as an automaton.

    Raises:
        SchemaError: a pattern is wrong, or pattern or format are not supported.
        TooManyStatesError: together they are too large.
    """
    least, most = lengths(case)
    wanted = [pattern_language(fact.value, fact.pointer) for fact in case.of("pattern")]
    wanted += [format_language(fact.value, fact.pointer) for fact in case.of("format")]
    if least or most is not None:
        wanted.append(of_length(least, most))
    unwanted = [pattern_language(fact.value, fact.pointer) for fact in case.of("not pattern")]
    if excluded := _excluded(case):
        unwanted.append(of_strings(excluded))
    wanted = wanted or [of_length(0, None)]
    if not unwanted:
        return intersection(wanted)
    num_wanted = len(wanted)
    return combine([*wanted, *unwanted], lambda held: all(held[:num_wanted]) and not any(held[num_wanted:]))


def string_rule(rules: Rules, case: Case) -> Ref:
    """A rule for the strings of a case, quotes included.

    Raises:
        SchemaError: see `string_language`.
        TooManyStatesError: see `string_language`.
    """
    patterns = case.of("pattern", "format")
    if not patterns and not case.of("not pattern") and not _excluded(case):
        return _of_length(rules, *lengths(case))
    language = string_language(case)
    is_alone = len(patterns) == 1 and lengths(case) == (0, None) and not case.of("not pattern") and not _excluded(case)
    if is_alone and len(language.edges) > MAX_RULES_OF_PATTERN:
        fact = patterns[0]
        pattern = fact.value if fact.name == "pattern" else format_pattern(fact.value, fact.pointer)
        return rules.add("pattern", [(QUOTE, *_Shape(rules).items(parse_search(pattern)), QUOTE)])
    return quoted_rule(rules, "text", language)


def quoted_rule(rules: Rules, name: str, language: Automaton) -> Ref:
    """A rule for the strings of an automaton, quotes included."""
    return rules.add(name, [(QUOTE, rules.add_automaton(f"{name}_part", language, json_terminals, (QUOTE,)))])


def lengths(case: Case) -> tuple[int, int | None]:
    """The least and most characters; None has no bound."""
    least = max((fact.value for fact in case.of("minLength")), default=0)
    return least, min((fact.value for fact in case.of("maxLength")), default=None)


def _excluded(case: Case) -> list[str]:
    return [value for fact in case.of("not enum") for value in fact.value if isinstance(value, str)]


def _of_length(rules: Rules, least: int, most: int | None) -> Ref:
    direct = terminal(DIRECT)
    if most is None and least > ESCAPED_LENGTH:
        return rules.add("string_of", [(QUOTE, f"{direct}{{{least}}}", Ref("string_rest"))])
    if most is not None and most > ESCAPED_LENGTH:
        return rules.add("string_of", [(QUOTE, f"{direct}{{{least},{most}}}", QUOTE)])
    # A rule for each count, since a sequence of rules for one character would have every token tried anew each time.
    last = least if most is None else most
    rest = Ref("string_rest") if most is None else rules.add("string_rest", [(QUOTE,)] if last >= least else [])
    for size in range(last - 1, -1, -1):
        end: list[Alternative] = [(QUOTE,)] if size >= least else []
        rest = rules.add("string_rest", [*end, (direct, rest), (Ref("escape"), rest)])
    return rules.add("string_of", [(QUOTE, rest)])


class _Shape:
    """Writes the tree of a pattern as the rules of a grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def items(self, regex: Regex) -> Alternative:
        match regex:
            case Chars(found):
                options = json_terminals(found)
                return (options[0],) if len(options) == 1 else (self._rules.add("one_of", [(o,) for o in options]),)
            case Sequence(parts):
                return tuple(item for part in parts for item in self.items(part))
            case Choice(options):
                return (self._rules.add("either", [self.items(option) for option in options]),)
            case Repeat(part, least, most):
                return self._repeated(part, least, most)
        raise AssertionError("anchors are gone by now")

    def _repeated(self, part: Regex, least: int, most: int | None) -> Alternative:
        direct = self._direct(part)
        if direct:
            return (f"{terminal(direct)}{{{least},{'' if most is None else most}}}",)
        inner = self._rules.add("part", [self.items(part)])
        if most is not None:
            return (Many(inner.rule, least, most),)
        loop = self._rules.new("parts")
        self._rules.define(loop, [(), (inner, Ref(loop))])
        return (*[inner] * least, Ref(loop)) if least <= 1 else (Many(inner.rule, least, least), Ref(loop))

    @staticmethod
    def _direct(part: Regex) -> CharSet:
        """What a repeated class holds that needs no escape."""
        return subtract(part.chars, subtract(UNICODE, DIRECT)) if isinstance(part, Chars) else ()
