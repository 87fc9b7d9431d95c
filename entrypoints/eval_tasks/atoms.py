"""Words, names and numbers that decide answers, each in exactly one of two splits by a hash of its spelling."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2s
from typing import Literal, get_args

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)

HELD_OUT_SHARE = 8
"""One atom of so many is held out."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "", "n", "r", "s")
_SURNAMES = "王李张刘陈杨黄赵吴周徐孙马朱胡林"
_GIVEN = "安明华丽文军平芳强敏静磊洋艳勇杰娟涛超秀霞桂英红玉兰海山"
_PLACES = "东西南北上下高长大新青白"
_PLACE_ENDS = "山河湖海城门桥港"


def split_of(text: str) -> Split:
    """The split that an atom belongs to."""
    return "held_out" if blake2s(text.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0 else "train"


class Atoms:
    """Draws atoms of one split and notes them.

    Args:
        rng: where they come from.
        split: the one that all of them belong to.
    """

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        self.rng = rng
        self.split = split
        self._drawn: dict[str, None] = {}

    @property
    def drawn(self) -> tuple[str, ...]:
        """All atoms so far, in order."""
        return tuple(self._drawn)

    def word(self) -> str:
        """A word of two or three syllables that no language has reserved."""
        return self._draw(lambda: "".join(self._syllable() for _ in range(self.rng.choice((2, 2, 3)))))

    def name(self, language: str) -> str:
        """A person's name."""
        if language == "zh":
            return self._draw(lambda: self.rng.choice(_SURNAMES) + "".join(self.rng.choices(_GIVEN, k=2)))
        return self._draw(lambda: (self._syllable() + self._syllable()).capitalize())

    def place(self, language: str) -> str:
        """A town's name."""
        if language == "zh":
            return self._draw(lambda: "".join(self.rng.choices(_PLACES, k=2)) + self.rng.choice(_PLACE_ENDS))
        return self._draw(lambda: (self._syllable() + self._syllable() + self._syllable()).capitalize())

    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return int(self._draw(lambda: str(self.rng.randint(low, high))))

    def digits(self, count: int) -> str:
        """A string of digits."""
        return self._draw(lambda: "".join(self.rng.choices("0123456789", k=count)))

    def several(self, draw: Callable[[], str], count: int) -> list[str]:
        """Different ones of a kind."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[draw()] = None
        return list(found)

    def _syllable(self) -> str:
        return self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) + self.rng.choice(_CODAS)

    def _draw(self, make: Callable[[], str]) -> str:
        while split_of(text := make()) != self.split:
            pass
        self._drawn[text] = None
        return text
