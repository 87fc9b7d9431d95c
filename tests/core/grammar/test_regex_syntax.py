"""Patterns mean what ECMA-262 means, and automata are the sets they say."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.grammar.automaton import combine, difference, intersection, of_length, of_strings, union
from deepinfer.core.grammar.charset import UNICODE, atoms, charset, complement, holds, subtract
from deepinfer.core.grammar.regex_syntax import RegexError, automaton_of, parse_search

TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("ab1\n", repeat=size)]
PATTERNS = [
    "", "a", "^a", "b$", "^a$", "^$", "a|b", "^(a|b1)+$", "(^a|b$)", "^a|^b1|1$", "a*b+", "^a?b{2}$",
    "^(ab){1,2}$", "^a{2,}",
    "[^a]", "^[ab1]{3}$", "\\d", "^\\D+$", "\\w\\W", "^.+$", "^.*$", "a.b", "^(?:a|(?<n>b))1$", "^a+?$",
    "\\x61", "\\u0062",
    "\\u{31}", "[\\s]", "^[\\S\\s]$", "a||b", "^(|a)b$", "((a))", "[a-b-1]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_finds_what_the_standard_library_finds(pattern) -> None:
    theirs = re.compile(pattern.replace("(?<n>", "(?P<n>").replace("\\u{31}", "1").replace("$", "\\Z"), re.ASCII)
    ours = automaton_of(parse_search(pattern))
    for text in TEXTS:
        assert ours.holds(text) == bool(theirs.search(text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(", "without its )"), (")", "closes nothing"), ("[", "without its ]"), ("[b-a]", "backwards"),
        ("a**", "quantifier"),
        ("*", "stands alone"), ("a{3,2}", "counts down"), ("a{x}", "begins a count"), ("a{99999}", "count above"),
        ("(?=a)", "look-around"), ("(?<!a)", "look-around"), ("\\1", "backreferences"), ("\\b", "word boundaries"),
        ("\\p{L}", "Unicode properties"), ("a^", "ends of alternatives"), ("(a$)*", "ends of alternatives"),
        ("\\", "at the end"),
        ("\\q", "means nothing"), ("\\x1", "hexadecimal"), ("\\u{110000}", "10FFFF"), ("\\ud800", "surrogate"),
        ("(" * 200 + ")" * 200, "inside of each other"), ("[\\d-z]", "one character at each end"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(pattern, what) -> None:
    with pytest.raises(RegexError, match=re.escape(what)):
        parse_search(pattern)


@given(left=st.sampled_from(PATTERNS), right=st.sampled_from(PATTERNS))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_operations_are_those_of_sets(left, right) -> None:
    a, b = automaton_of(parse_search(left)), automaton_of(parse_search(right))
    both, either, less = intersection([a, b]), union([a, b]), difference(a, b)
    unlike = combine([a, b], lambda held: held[0] != held[1])
    for text in TEXTS:
        in_a, in_b = a.holds(text), b.holds(text)
        assert both.holds(text) == (in_a and in_b)
        assert either.holds(text) == (in_a or in_b)
        assert less.holds(text) == (in_a and not in_b)
        assert unlike.holds(text) == (in_a != in_b)
    assert difference(a, a).is_empty and intersection([a, a]) == a


def test_strings_and_lengths() -> None:
    words = of_strings(["", "ab", "abc", "é😀"])
    assert [text for text in ("", "a", "ab", "abc", "abcd", "é😀") if words.holds(text)] == ["", "ab", "abc", "é😀"]
    assert of_strings([]).is_empty
    assert [size for size in range(6) if of_length(2, 4).holds("é" * size)] == [2, 3, 4]
    assert of_length(3, None).holds("x" * 50) and not of_length(3, None).holds("xx")


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1])), max_size=5)


@settings(deadline=None)
@given(left=ranges, right=ranges)
def test_sets_of_characters(left, right) -> None:
    a, b = charset(left), charset(right)
    for code in range(40):
        in_a, in_b = (any(low <= code <= high for low, high in found) for found in (left, right))
        assert holds(a, code) == in_a and holds(complement(a), code) != in_a
        assert holds(subtract(a, b), code) == (in_a and not in_b)
    assert complement(complement(a)) == a and subtract(UNICODE, complement(b)) == b
    for ((low, high),) in atoms([a, b]):
        assert len({(holds(a, code), holds(b, code)) for code in range(low, high + 1)}) == 1
