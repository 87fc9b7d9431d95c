"""Values to be found: in a table, and in a text of thousands of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.entrypoints.eval_tasks.atoms import Atoms
from deepinfer.entrypoints.eval_tasks.filler import sentence
from deepinfer.entrypoints.eval_tasks.item import Answer, Item, Language

CountTokens = Callable[[str], int]
"""Tokens of a text; a sentence's count must not depend on what stands before it."""

_ASK = {
    "en": ("{}\n\nWhat is the value of {}?", "{}\n\nLook up {}.", "Table:\n{}\n\nWhat does {} stand for?"),
    "zh": ("{}\n\n{}的值是什么？", "表格：\n{}\n\n查找{}。"),
}
_HIDE = {"en": " The pass key is {}. Remember it.", "zh": "通行码是{}。请记住它。"}
_FIND = {"en": "\n\nWhat is the pass key?", "zh": "\n\n通行码是多少？"}


@dataclass(frozen=True)
class Haystack:
    """Where a pass key lies.

    Attributes:
        num_tokens: length of the whole question, reached within a sentence.
        depth: share of the filler before the key, 0 to 1; None draws it.
        residue: tokens before the key modulo `modulus`; None leaves it to chance.
        modulus: tokens of a compressed entry.
    """

    num_tokens: int = 256
    depth: float | None = None
    residue: int | None = None
    modulus: int = 2


def lookup(atoms: Atoms, language: Language) -> Item:
    """The value of one of several keys."""
    rng = atoms.rng
    count = rng.randint(3, 10)
    keys = atoms.several(atoms.word if language == "en" else lambda: atoms.place("zh"), count)
    value = [lambda: str(atoms.number(10, 9999)), atoms.word, lambda: atoms.name(language)][rng.randrange(3)]
    values = atoms.several(value, count)
    mark = rng.choice((": ", " = ", " -> "))
    rows = "\n".join(f"{key}{mark}{value}" for key, value in zip(keys, values, strict=True))
    wanted = rng.randrange(count)
    question = rng.choice(_ASK[language]).format(rows, keys[wanted])
    return Item("lookup", language, question, Answer(values[wanted]), atoms=atoms.drawn)


def pass_key(atoms: Atoms, language: Language, count_tokens: CountTokens, where: Haystack) -> Item:
    """Five digits somewhere in filler.

    Raises:
        ValueError: the length has no room for the key and the question.
    """
    rng = atoms.rng
    key = atoms.digits(5)
    needle, question = _HIDE[language].format(key), _FIND[language]
    room = where.num_tokens - count_tokens(needle) - count_tokens(question)
    if room < 0:
        raise ValueError(f"a pass key and its question do not fit in {where.num_tokens} tokens")
    depth = rng.random() if where.depth is None else where.depth
    before, num_before = _fill(atoms, language, count_tokens, int(room * depth))
    while where.residue is not None and num_before % where.modulus != where.residue:
        more = sentence(rng, language)
        before, num_before = before + more, num_before + count_tokens(more)
    behind, _ = _fill(atoms, language, count_tokens, room - num_before)
    return Item("pass_key", language, before + needle + behind + question, Answer(key), atoms=atoms.drawn)


def _fill(atoms: Atoms, language: Language, count_tokens: CountTokens, num_tokens: int) -> tuple[str, int]:
    """Sentences of at most so many tokens, and how many those are."""
    parts: list[str] = []
    total = 0
    while True:
        part = sentence(atoms.rng, language)
        count = count_tokens(part)
        if total + count > num_tokens:
            return "".join(parts), total
        parts.append(part)
        total += count
