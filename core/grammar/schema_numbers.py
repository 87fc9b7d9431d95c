"""The texts of the numbers that bounds, multiples and exceptions leave, as an automaton.

Digits are read from the left and compared with those of each bound as they come; remainders for `multipleOf` are kept
in the same way. Everything is exact in decimal: 0.3 is a multiple of 0.1. Numbers have no exponent here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Final, NamedTuple

from deepinfer.core.grammar.automaton import Automaton, explore
from deepinfer.core.grammar.charset import CharSet, chars
from deepinfer.core.grammar.grammar_text import Ref, Rules, plain_terminals
from deepinfer.core.grammar.schema_cases import NUMBERS, Case

_DIGITS: Final = tuple((digit, chars(str(digit))) for digit in range(10))

_BELOW, _LESS, _EQUAL, _MORE, _ABOVE = range(-2, 3)
"""How a magnitude compares with another: decided, or by its first digits, if as many will follow."""
_TOO_FINE: Final = -1
"""In place of a remainder: a digit behind all of the divisor's is not 0."""

_SIDES: Final = {
    "minimum": (False, True, True),
    "exclusiveMinimum": (False, False, True),
    "maximum": (True, True, False),
    "exclusiveMaximum": (True, False, False),
    "not enum": (True, False, True),
}


@dataclass(frozen=True)
class Bound:
    """A number with which others are compared; below, equal to and above it they are allowed or not."""

    number: Decimal
    allowed: tuple[bool, bool, bool]

    @property
    def digits(self) -> tuple[str, str]:
        """Before and behind the point, without needless zeros."""
        whole, _, fraction = f"{abs(self.number):f}".partition(".")
        return whole.lstrip("0") or "0", fraction.rstrip("0")


@dataclass(frozen=True)
class Multiple:
    """A divisor, as an integer and the digits behind its point; others are its multiples, or are not."""

    divisor: int
    scale: int
    wanted: bool


def number_rule(rules: Rules, case: Case, max_digits: int) -> Ref:
    """A rule for the numbers of a case that says something about them.

    Raises:
        TooManyStatesError: bounds or divisors are too large.
    """
    bounds = [Bound(Decimal(fact.value), _SIDES[fact.name]) for fact in case.of(*list(_SIDES)[:4])]
    for fact in case.of("not enum"):
        numbers = [v for v in fact.value if isinstance(v, int | Decimal) and not isinstance(v, bool)]
        bounds += [Bound(Decimal(value), _SIDES["not enum"]) for value in numbers]
    multiples = [_multiple(fact.value, fact.name == "multipleOf") for fact in case.of("multipleOf", "not multipleOf")]
    wanted = "integer" in case.kinds, "fraction" in case.kinds
    language = _language(tuple(bounds), tuple(multiples), *wanted, max_digits)
    kinds = case.kinds & NUMBERS
    name = "number" if len(kinds) > 1 else next(iter(kinds))
    return rules.add_automaton(name, language, plain_terminals, ())


@lru_cache(maxsize=256)
def _language(
    bounds: tuple[Bound, ...], multiples: tuple[Multiple, ...], integers: bool, fractions: bool, max_digits: int
) -> Automaton:
    texts = _NumberTexts(bounds, multiples, integers, fractions, max_digits)
    return explore(_State(), texts.edges, texts.accepts)


def _multiple(number: int | Decimal, wanted: bool) -> Multiple:
    scale = len(Bound(Decimal(number), (True, True, True)).digits[1])
    return Multiple(int(Decimal(number).scaleb(scale)), scale, wanted)


class _State(NamedTuple):
    """How far a text is read.

    Attributes:
        part: "start", "sign", "whole", "point" or "fraction".
        sign: -1 behind a minus.
        size: digits read in this part.
        is_zero: the whole part is a 0, so that no digit may follow in it.
        is_fraction: a digit behind the point is not 0.
        compared: with the magnitude of each bound.
        remainders: by each divisor.
    """

    part: str = "start"
    sign: int = 1
    size: int = 0
    is_zero: bool = False
    is_fraction: bool = False
    compared: tuple[int, ...] = ()
    remainders: tuple[int, ...] = ()


class _NumberTexts:
    """Numbers within bounds; where integers and others are wanted, integers may have a point as well."""

    def __init__(
        self, bounds: Sequence[Bound], multiples: Sequence[Multiple], integers: bool, fractions: bool, max_digits: int
    ) -> None:
        self._bounds, self._multiples = bounds, multiples
        self._integers, self._fractions = integers, fractions
        self._digits = [bound.digits for bound in bounds]
        self._max_whole = max([max_digits, *(len(whole) for whole, _ in self._digits)])
        finest = [len(fraction) + 1 for _, fraction in self._digits] + [one.scale for one in multiples]
        self._max_fraction = max([max_digits, *finest]) if fractions else 0

    def edges(self, state: _State) -> Iterable[tuple[CharSet, _State]]:
        if state.part == "start":
            yield chars("-"), _State("sign", -1)
        if state.part in ("start", "sign"):
            # a bound on the other side of 0 is passed before the first digit
            begun = tuple(_ABOVE if bound.number * state.sign < 0 else _EQUAL for bound in self._bounds)
            first = _State("whole", state.sign, compared=begun, remainders=(0,) * len(self._multiples))
            for digit, char in _DIGITS:
                yield char, self._with_whole_digit(first, digit)._replace(is_zero=digit == 0)
        elif state.part == "whole":
            if self._max_fraction:
                yield chars("."), state._replace(part="point", size=0, compared=self._whole_compared(state))
            if state.size < self._max_whole and not state.is_zero:
                for digit, char in _DIGITS:
                    yield char, self._with_whole_digit(state, digit)
        elif state.size < self._max_fraction:
            for digit, char in _DIGITS:
                yield char, self._with_fraction_digit(state, digit)

    def _with_whole_digit(self, state: _State, digit: int) -> _State:
        compared = []
        for (whole, _), known in zip(self._digits, state.compared, strict=True):
            if state.size >= len(whole):
                known = _ABOVE
            elif known == _EQUAL:
                known = _order(digit, int(whole[state.size]))
            compared.append(known)
        remainders = (
            (10 * known + digit) % one.divisor for one, known in zip(self._multiples, state.remainders, strict=True)
        )
        return state._replace(size=state.size + 1, compared=tuple(compared), remainders=tuple(remainders))

    def _whole_compared(self, state: _State) -> tuple[int, ...]:
        """How the magnitudes compare when no digit follows before the point."""
        return tuple(
            known if known in (_ABOVE, _BELOW) else _BELOW if state.size < len(whole) else 2 * known
            for (whole, _), known in zip(self._digits, state.compared, strict=True)
        )

    def _with_fraction_digit(self, state: _State, digit: int) -> _State:
        compared = tuple(
            2 * _order(digit, int(fraction[state.size : state.size + 1] or "0")) if known == _EQUAL else known
            for (_, fraction), known in zip(self._digits, state.compared, strict=True)
        )
        remainders = []
        for one, known in zip(self._multiples, state.remainders, strict=True):
            if known != _TOO_FINE and state.size < one.scale:
                known = (10 * known + digit) % one.divisor
            elif digit:
                known = _TOO_FINE
            remainders.append(known)
        return state._replace(
            part="fraction",
            size=state.size + 1,
            is_fraction=state.is_fraction or digit > 0,
            compared=compared,
            remainders=tuple(remainders),
        )

    def accepts(self, state: _State) -> bool:
        if state.part not in ("whole", "fraction"):
            return False
        if not (self._fractions if state.is_fraction else self._integers):
            return False
        read = state.size if state.part == "fraction" else 0
        compared = state.compared if state.part == "fraction" else self._whole_compared(state)
        for bound, (_, fraction), known in zip(self._bounds, self._digits, compared, strict=True):
            if known == _EQUAL and len(fraction) > read:
                known = _BELOW
            if not bound.allowed[1 + _order(known * state.sign, 0)]:
                return False
        for one, known in zip(self._multiples, state.remainders, strict=True):
            scaled = known * 10 ** max(0, one.scale - read) % one.divisor
            if (known != _TOO_FINE and scaled == 0) != one.wanted:
                return False
        return True


def _order(left: int, right: int) -> int:
    return (left > right) - (left < right)
