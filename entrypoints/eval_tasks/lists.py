"""Lists to be copied, reversed and sorted."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.entrypoints.eval_tasks.atoms import Atoms
from deepinfer.entrypoints.eval_tasks.item import Answer, Item, Language

_COPY = {
    "en": ("Repeat exactly: {}", "Copy this list: {}", "Say this again: {}"),
    "zh": ("请原样重复：{}", "照抄：{}"),
}
_REVERSE = {
    "en": ("Reverse the order of this list: {}", "Write these from last to first: {}"),
    "zh": ("倒序输出：{}", "请把顺序反过来：{}"),
}
_SORT = {
    "en": ("Sort in ascending order: {}", "Order these numbers from small to large: {}"),
    "zh": ("从小到大排序：{}", "请按升序排列：{}"),
}


def copy(atoms: Atoms, language: Language) -> Item:
    """Repeat words, names or numbers."""
    members = _members(atoms, language, 3, 9)
    return _item("copy", atoms, language, _COPY, members, members)


def reverse(atoms: Atoms, language: Language) -> Item:
    """Repeat them from last to first."""
    members = _members(atoms, language, 3, 6)
    return _item("reverse", atoms, language, _REVERSE, members, members[::-1])


def sort(atoms: Atoms, language: Language) -> Item:
    """Repeat numbers in ascending order."""
    members = atoms.several(lambda: str(atoms.number(10, 999)), atoms.rng.randint(3, 5))
    return _item("sort", atoms, language, _SORT, members, sorted(members, key=int))


def _members(atoms: Atoms, language: Language, low: int, high: int) -> list[str]:
    kind = atoms.rng.randrange(3)
    count = atoms.rng.randint(low, high)
    if kind == 0:
        return atoms.several(lambda: str(atoms.number(10, 9999)), count)
    if kind == 1:
        return atoms.several(lambda: atoms.name(language), count)
    return atoms.several(atoms.word if language == "en" else lambda: atoms.place("zh"), count)


def _item(
    task: str,
    atoms: Atoms,
    language: Language,
    wordings: Mapping[str, tuple[str, ...]],
    members: list[str],
    answer: list[str],
) -> Item:
    comma = ", " if language == "en" else "，"
    question = atoms.rng.choice(wordings[language]).format(comma.join(members))
    return Item(task, language, question, Answer(comma.join(answer)), atoms=atoms.drawn)
