"""Sums and comparisons, at once or after a short thinking section."""

from __future__ import annotations

from deepinfer.entrypoints.eval_tasks.atoms import Atoms
from deepinfer.entrypoints.eval_tasks.item import Answer, Item, Language

_ADD = {"en": ("What is {}?", "Compute {}.", "{} ="), "zh": ("{}等于多少？", "计算{}。", "{} =")}
_LARGER = {
    "en": ("Which is larger, {} or {}?", "Give the larger number: {} or {}."),
    "zh": ("{}和{}哪个大？", "{}与{}，较大的是？"),
}
_SMALLER = {
    "en": ("Which is smaller, {} or {}?", "Give the smaller number: {} or {}."),
    "zh": ("{}和{}哪个小？", "{}与{}，较小的是？"),
}


def add(atoms: Atoms, language: Language) -> Item:
    """The sum of two numbers of up to three digits."""
    first, second = (_operand(atoms) for _ in range(2))
    question = atoms.rng.choice(_ADD[language]).format(f"{first} + {second}")
    return Item("add", language, question, Answer(str(first + second)), atoms=atoms.drawn)


def compare(atoms: Atoms, language: Language) -> Item:
    """The larger or the smaller of two numbers."""
    first, second = (int(text) for text in atoms.several(lambda: str(atoms.number(10, 9999)), 2))
    wants_larger = atoms.rng.random() < 0.5
    question = atoms.rng.choice((_LARGER if wants_larger else _SMALLER)[language]).format(first, second)
    right = max(first, second) if wants_larger else min(first, second)
    return Item("compare", language, question, Answer(str(right)), atoms=atoms.drawn)


def think(atoms: Atoms, language: Language) -> Item:
    """The sum of three or four numbers, partial sums first."""
    operands = [_operand(atoms) for _ in range(atoms.rng.choice((3, 3, 4)))]
    steps, total = [], operands[0]
    for operand in operands[1:]:
        steps.append(f"{total} + {operand} = {total + operand}")
        total += operand
    question = atoms.rng.choice(_ADD[language]).format(" + ".join(map(str, operands)))
    return Item("think", language, question, Answer(str(total), "\n".join(steps)), atoms=atoms.drawn)


def _operand(atoms: Atoms) -> int:
    return atoms.number(*atoms.rng.choice(((10, 99), (100, 999), (10, 999))))
