"""Cases of the small ops that correct a plan once the step before it is known."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Generator

from deepinfer.ops.cases.common import integers
from deepinfer.ops.spec import Case


def rewind_cases() -> Iterable[Case]:
    """Nothing to take back, everything, values that are right already."""

    def make(gen: Generator, count: int, before: int, drafts: int) -> dict[str, Any]:
        previous = integers(gen, before, count) if before else torch.full((count,), -1, dtype=torch.int32)
        previous[1::3] = -1
        return {
            "values": integers(gen, 1 << 20, count, low=64),
            "previous": previous,
            "planned": torch.full((before,), drafts + 1, dtype=torch.int32),
            "accepted": integers(gen, drafts + 2, before, low=1),
        }

    rows_of = ("values", "previous")
    yield Case("MN-5 no rows", partial(make, count=0, before=3, drafts=5), "small", rows_of)
    yield Case("no step before", partial(make, count=4, before=0, drafts=5), "small", rows_of)
    for drafts in (0, 1, 5):
        yield Case(f"{drafts} drafts", partial(make, count=9, before=6, drafts=drafts), "small", rows_of)


def last_emitted_cases() -> Iterable[Case]:
    """One token each, all drafts accepted, a row without a token."""

    def make(gen: Generator, counts: tuple[int, ...], full: bool) -> dict[str, Any]:
        width = torch.tensor(counts, dtype=torch.int32)
        starts = (width.cumsum(0) - width).int()
        emitted = width if full else torch.ones_like(width)
        tokens = integers(gen, 1000, int(width.sum()))
        tokens[::4] = -1
        return {"tokens": tokens, "starts": starts, "num_emitted": emitted}

    rows_of = ("starts", "num_emitted")
    yield Case("MN-5 no rows", partial(make, counts=(), full=True), "small", rows_of)
    yield Case("one row each", partial(make, counts=(1, 1, 1, 1, 1), full=True), "small", rows_of)
    yield Case("all accepted", partial(make, counts=(6, 1, 3, 6), full=True), "small", rows_of)
    yield Case("none accepted", partial(make, counts=(6, 1, 3, 6), full=False), "small", rows_of)


def advance_history_cases() -> Iterable[Case]:
    """Every split of the history between emitted tokens, rows of the step before, and its own history."""

    def make(
        gen: Generator, depth: int, drafts: int, emitted: int, chunk: int = 0, sequences: int = 4
    ) -> dict[str, Any]:
        rows_each = chunk or drafts + 1
        before = sequences + 1
        cu = torch.arange(before + 1, dtype=torch.int32) * rows_each
        previous = torch.randperm(before, generator=gen)[:sequences].int()
        previous[2::4] = -1
        draws_from = cu[:-1] + (rows_each - 1 - drafts if chunk else 0)
        return {
            "history": torch.full((sequences, depth - 1), -1, dtype=torch.int32),
            "previous": previous,
            "tokens": integers(gen, 1000, before * (drafts + 1)),
            "starts": torch.arange(before, dtype=torch.int32) * (drafts + 1),
            "num_emitted": torch.full((before,), emitted, dtype=torch.int32),
            "last_rows": draws_from.int(),
            "last_seqs": torch.arange(before, dtype=torch.int32),
            "last_input_ids": integers(gen, 1000, before * rows_each),
            "last_cu_seqlens_q": cu,
            "last_history": integers(gen, 1000, before, depth - 1, low=-1),
        }

    rows_of = ("history", "previous")
    none = partial(make, depth=4, drafts=2, emitted=1, sequences=0)
    yield Case("MN-5 no rows", none, "small", rows_of)
    yield Case("no history", partial(make, depth=1, drafts=2, emitted=2), "small", rows_of)
    for emitted in range(1, 7):
        case = partial(make, depth=4, drafts=5, emitted=emitted)
        yield Case(f"{emitted} of 6 emitted", case, "small", rows_of)
    for chunk in (1, 2, 3, 9):
        case = partial(make, depth=4, drafts=0, emitted=1, chunk=chunk)
        yield Case(f"after a prefill chunk of {chunk}", case, "small", rows_of)


def gather_ids_cases() -> Iterable[Case]:
    """-1 among the rows, repeats, nothing to gather."""

    def make(gen: Generator, count: int, rows: int) -> dict[str, Any]:
        picks = integers(gen, max(count, 1), rows) if count else torch.full((rows,), -1, dtype=torch.int32)
        picks[::3] = -1
        return {"ids": integers(gen, 1000, count), "rows": picks}

    yield Case("MN-5 no rows", partial(make, count=5, rows=0), "small", ("rows",))
    yield Case("no ids", partial(make, count=0, rows=3), "small", ("rows",))
    yield Case("repeats and -1", partial(make, count=4, rows=11), "small", ("rows",))


def shift_cases() -> Iterable[Case]:
    """No values, up, down, by nothing."""

    def make(gen: Generator, count: int, amount: int) -> dict[str, Any]:
        return {"values": integers(gen, 1 << 20, count), "amount": amount}

    yield Case("MN-5 no rows", partial(make, count=0, amount=2), "small", ("values",))
    for amount in (-3, 0, 5):
        yield Case(f"by {amount}", partial(make, count=7, amount=amount), "small", ("values",))
