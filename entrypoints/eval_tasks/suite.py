"""The tasks by name, and suites of held-out items."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfer.entrypoints.eval_tasks import lists, numbers, structured
from deepinfer.entrypoints.eval_tasks.atoms import Atoms, Split
from deepinfer.entrypoints.eval_tasks.item import Item, Language
from deepinfer.entrypoints.eval_tasks.lookups import CountTokens, Haystack, lookup, pass_key

Make = Callable[[Atoms, Language], Item]

SUITE_SEED = 41
NUM_DEPTHS = 10


@dataclass(frozen=True)
class TaskSpec:
    """A task of a suite.

    Attributes:
        num_items: in the suite.
        max_tokens: room for an answer.
        pass_key_tokens: length of the question for pass keys; 0 for other tasks.
    """

    num_items: int
    max_tokens: int
    pass_key_tokens: int = 0


_MAKERS: Mapping[str, Make] = {
    "copy": lists.copy,
    "reverse": lists.reverse,
    "sort": lists.sort,
    "add": numbers.add,
    "compare": numbers.compare,
    "think": numbers.think,
    "lookup": lookup,
    "extract": structured.extract,
    "tool_call": structured.tool_call,
}

TASKS: tuple[str, ...] = (*_MAKERS, "pass_key")
"""All task families, the pass key last."""

SUITES: Mapping[str, Mapping[str, TaskSpec]] = {
    "tiny": {
        "copy": TaskSpec(150, 96),
        "reverse": TaskSpec(150, 96),
        "sort": TaskSpec(100, 48),
        "add": TaskSpec(150, 16),
        "compare": TaskSpec(100, 16),
        "think": TaskSpec(100, 96),
        "lookup": TaskSpec(150, 32),
        "extract": TaskSpec(150, 96),
        "tool_call": TaskSpec(100, 160),
        "pass_key_512": TaskSpec(40, 16, 512),
        "pass_key_2k": TaskSpec(40, 16, 2048),
    },
    "long": {"pass_key_8k": TaskSpec(40, 16, 8000)},
}
"""Suites by name. Pass keys lie at ten depths and at both residues of two-token entries."""


def make_item(
    task: str,
    split: Split,
    seed: int,
    number: int,
    *,
    count_tokens: CountTokens = len,
    where: Haystack | None = None,
) -> Item:
    """The item of these coordinates; equal ones give equal items.

    Args:
        task: one of `TASKS`.
        split: which atoms may decide its answer.
        seed: of a series of items.
        number: in it.
        count_tokens: tokens of a text, for pass keys.
        where: the place of a pass key.

    Raises:
        ValueError: no such task or split.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}")
    rng = random.Random(f"{task} {split} {seed} {number}")
    atoms = Atoms(rng, split)
    language: Language = "zh" if rng.random() < 0.35 else "en"
    if task == "pass_key":
        return pass_key(atoms, language, count_tokens, where or Haystack())
    return _MAKERS[task](atoms, language)


def make_items(spec: TaskSpec, name: str, count_tokens: CountTokens, limit: int | None = None) -> list[Item]:
    """Held-out items of one task of a suite.

    Args:
        spec: how many, and how long.
        name: its key in the suite.
        count_tokens: tokens of a text.
        limit: at most so many.
    """
    count = spec.num_items if limit is None else min(limit, spec.num_items)
    if not spec.pass_key_tokens:
        return [make_item(name, "held_out", SUITE_SEED, number) for number in range(count)]
    return [
        make_item(
            "pass_key",
            "held_out",
            SUITE_SEED + spec.pass_key_tokens,
            number,
            count_tokens=count_tokens,
            where=Haystack(spec.pass_key_tokens, (number % NUM_DEPTHS) / (NUM_DEPTHS - 1), number // NUM_DEPTHS % 2),
        )
        for number in range(count)
    ]
