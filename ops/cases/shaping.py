"""Conformance cases of the ops that shape logits row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.ops.cases.common import integers, normal
from deepinfer.ops.cases.sampling import REAL_VOCABULARY
from deepinfer.ops.spec import Case


def adjust_logits_cases() -> Iterable[Case]:
    """No entries, entries of one row and of many, skipped entries, -inf, logits that are -inf, NaN or huge."""

    def make(gen: Generator, num_rows: int, num_ids: int, share: float) -> dict[str, Any]:
        rows, ids = _pairs(gen, num_rows, num_ids, share)
        values = normal(gen, len(rows), scale=3.0)
        values[1::5] = -math.inf
        values[2::7] = 0.0
        return {"logits": _logits(gen, num_rows, num_ids), "rows": rows, "ids": ids, "values": values}

    yield from _cases(make)


def apply_penalties_cases() -> Iterable[Case]:
    """Each penalty alone and all together, off values, counts of 0 and many, logits of both signs and of none."""

    def make(gen: Generator, num_rows: int, num_ids: int, share: float) -> dict[str, Any]:
        rows, ids = _pairs(gen, num_rows, num_ids, share)
        counts = integers(gen, 5, len(rows))
        counts[3::11] = 100_000
        repetition = torch.rand(num_rows, generator=gen) * 2 + 0.1
        frequency = torch.rand(num_rows, generator=gen) * 4 - 2
        presence = torch.rand(num_rows, generator=gen) * 4 - 2
        repetition[::3], frequency[1::3], presence[::2] = 1.0, 0.0, 0.0
        return {
            "logits": _logits(gen, num_rows, num_ids),
            "rows": rows,
            "ids": ids,
            "counts": counts,
            "repetition": repetition,
            "frequency": frequency,
            "presence": presence,
        }

    yield from _cases(make)


def put_rows_cases() -> Iterable[Case]:
    """No rows, one, all of them in another order."""

    def make(gen: Generator, num_rows: int, chosen: int) -> dict[str, Any]:
        rows = torch.randperm(num_rows, generator=gen)[:chosen].int()
        return {"x": _logits(gen, num_rows, 37), "rows": rows, "values": normal(gen, chosen, 37)}

    yield Case("MN-5 no rows", partial(make, num_rows=5, chosen=0))
    yield Case("MN-5 no rows of none", partial(make, num_rows=0, chosen=0))
    yield Case("one row", partial(make, num_rows=5, chosen=1))
    yield Case("all rows", partial(make, num_rows=9, chosen=9))


def logprobs_of_cases() -> Iterable[Case]:
    """No ids, ids outside the vocabulary, the same id twice, ties, broken rows."""

    def make(gen: Generator, num_rows: int, num_ids: int, count: int, ties: bool) -> dict[str, Any]:
        logits = normal(gen, num_rows, num_ids, scale=4.0)
        if ties:
            logits = (logits / 2).round() * 2
        logits[1::4, 1 % num_ids] = -math.inf
        logits[2::5] = math.nan
        logits[3::7] = -math.inf
        logits[4::9, 0] = math.inf
        ids = integers(gen, num_ids + 1, num_rows, count, low=-1)
        if count > 1:
            ids[:, 1] = ids[:, 0]
        return {"logits": logits, "ids": ids}

    rows = ("logits", "ids")
    for num_rows, num_ids, count in ((0, 37, 3), (1, 37, 0), (11, 1, 2), (22, 33, 1), (22, 257, 5)):
        for ties in (False, True):
            name = f"{num_rows} rows, {num_ids} ids, {count} asked" + (", ties" if ties else "")
            yield Case(name, partial(make, num_rows=num_rows, num_ids=num_ids, count=count, ties=ties), "small", rows)
    real = partial(make, num_rows=9, num_ids=REAL_VOCABULARY, count=4, ties=False)
    yield Case("model vocabulary", real, "real", rows)


def _cases(make: Any) -> Iterable[Case]:
    yield Case("MN-5 no rows", partial(make, num_rows=0, num_ids=37, share=0.0))
    yield Case("no entries", partial(make, num_rows=4, num_ids=37, share=0.0))
    yield Case("one row, every id", partial(make, num_rows=1, num_ids=37, share=1.0))
    for num_ids in (1, 33, 257):
        yield Case(f"11 rows, {num_ids} ids", partial(make, num_rows=11, num_ids=num_ids, share=0.4))
    yield Case("model vocabulary", partial(make, num_rows=6, num_ids=REAL_VOCABULARY, share=0.01), "real")


def _pairs(gen: Generator, num_rows: int, num_ids: int, share: float) -> tuple[Tensor, Tensor]:
    """Different (row, id) pairs in any order; every tenth entry is skipped, the last row has none."""
    chosen = torch.rand(num_rows, num_ids, generator=gen) < share
    if num_rows > 1:
        chosen[-1] = False
    places = chosen.nonzero()
    places = places[torch.randperm(len(places), generator=gen)].int()
    rows, ids = places[:, 0].clone(), places[:, 1].clone()
    rows[::10] = -1
    return rows, ids


def _logits(gen: Generator, num_rows: int, num_ids: int) -> Tensor:
    logits = normal(gen, num_rows, num_ids, scale=5.0)
    flat = logits.view(-1)
    flat[::13], flat[1::17], flat[2::19], flat[3::23] = -math.inf, 0.0, -0.0, math.nan
    flat[5::29] = 3e38
    return logits
