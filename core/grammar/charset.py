"""Sets of Unicode code points, and how a grammar and a JSON string spell them.

A set is a tuple of inclusive ranges, sorted and apart from each other, so equal sets are equal tuples. Surrogates are
in no set: they are not characters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

CharSet: TypeAlias = tuple[tuple[int, int], ...]

UNICODE: Final[CharSet] = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_SURROGATES: Final = (0xD800, 0xDFFF)
_SHORT_ESCAPES: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


def charset(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The set of these inclusive ranges, in any order, overlapping or not."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def chars(text: str) -> CharSet:
    """The set of the characters of a text."""
    return charset((ord(char), ord(char)) for char in text)


def subtract(left: CharSet, right: CharSet) -> CharSet:
    """What is in `left` alone."""
    kept: list[tuple[int, int]] = []
    for low, high in left:
        for cut_low, cut_high in right:
            if cut_high < low or cut_low > high:
                continue
            if cut_low > low:
                kept.append((low, cut_low - 1))
            low = cut_high + 1
            if low > high:
                break
        if low <= high:
            kept.append((low, high))
    return charset(kept)


def complement(chars: CharSet) -> CharSet:
    """All other characters."""
    return subtract(UNICODE, chars)


def atoms(sets: Iterable[CharSet]) -> list[CharSet]:
    """Ranges that none of the sets tells apart, one by one: each lies in a set whole or not at all."""
    cuts = {edge for ranges in sets for low, high in ranges for edge in (low, high + 1)}
    bounds = sorted(cuts)
    return [((low, high - 1),) for low, high in itertools.pairwise(bounds)]


def holds(chars: CharSet, code: int) -> bool:
    """Whether a code point is in the set."""
    return any(low <= code <= high for low, high in chars)


MUST_ESCAPE: Final[CharSet] = charset([(0, 0x1F), (34, 34), (92, 92)])
"""What a JSON string cannot hold as it is."""
DIRECT: Final[CharSet] = complement(MUST_ESCAPE)


def json_escape(code: int) -> str:
    """The one way in which we write a character that must be escaped."""
    return "\\" + _SHORT_ESCAPES[code] if code in _SHORT_ESCAPES else f"\\u{code:04x}"


def json_terminals(chars: CharSet) -> list[str]:
    """The alternatives that write one character of the set inside of a JSON string."""
    direct = subtract(chars, MUST_ESCAPE)
    escaped = [code for low, high in subtract(chars, DIRECT) for code in range(low, high + 1)]
    return ([terminal(direct)] if direct else []) + [literal(json_escape(code)) for code in escaped]


def terminal(chars: CharSet) -> str:
    """The character class of an EBNF grammar for a set that is not empty."""
    if chars[-1][1] == UNICODE[-1][1]:
        # Told by what is missing it is short; surrogates are named, since bytes could spell them.
        missing = subtract(((0, UNICODE[-1][1]),), chars)
        return "[^" + "".join(_range(low, high) for low, high in missing) + "]"
    return "[" + "".join(_range(low, high) for low, high in chars) + "]"


def literal(text: str) -> str:
    """The string of an EBNF grammar for a text."""
    return '"' + "".join(_spelled(ord(char), '"\\') for char in text) + '"'


def _range(low: int, high: int) -> str:
    first = _spelled(low, "")
    return first if low == high else f"{first}-{_spelled(high, '')}"


def _spelled(code: int, special: Sequence[str]) -> str:
    char = chr(code)
    if char.isascii() and (char.isalnum() or (special and char.isprintable() and char not in special)):
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
