"""Cases of index lists: windows, dense positions, lengths, and lists put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator

from deepinfer.ops.cases.common import (
    bound,
    cases_of,
    integers,
    normal,
    packed,
    row_counts,
    tables,
)
from deepinfer.ops.spec import Case


def build_swa_index_cases() -> Iterable[Case]:
    """Windows of -1, 0 and +1 around the sequence and the page, freed pages, holes, several sequences."""

    def make(gen: Generator, ends: tuple[int, ...], window: int, page: int, rows: int, freed: bool) -> dict[str, Any]:
        lengths = tuple(min(rows, end) for end in ends)
        meta = packed(lengths, ends)
        columns = max([-(-end // page) for end in ends], default=1)
        first = torch.zeros(len(ends), dtype=torch.int32)
        if freed:
            first = torch.tensor([max(0, (end - window - 2) // page) for end in ends], dtype=torch.int32)
        return {
            "positions": meta["positions"],
            "row_to_seq": meta["row_to_seq"],
            "window_tables": tables(gen, len(ends), columns, len(ends) * columns + 2, holes=False),
            "window_first_page": first,
            "window_page": page,
            "window": window,
        }

    rows_of = ("positions", "row_to_seq")
    base = {"rows": 5, "freed": False}
    yield Case("MN-5 no rows", bound(make, ends=(0,), window=8, page=4, **base), "small", rows_of)
    yield Case("MN-5 no sequences", bound(make, ends=(), window=8, page=4, **base), "small", rows_of)
    for around in (-1, 0, 1):
        for freed in (False, True):
            tail = ", freed pages" if freed else ""
            sizes = {"ends": (8 + around, 16 + around, 33, 1), "page": 4, "rows": 9, "freed": freed}
            yield Case(f"length window {around:+d}{tail}", bound(make, window=8, **sizes), "small", rows_of)
            sizes["ends"] = (7, 31, 33, 64)
            yield Case(f"window page {around:+d}{tail}", bound(make, window=8 + around, **sizes), "small", rows_of)
    yield Case("window of one", bound(make, ends=(5, 9), window=1, page=4, **base), "small", rows_of)

    def holes(gen: Generator) -> dict[str, Any]:
        args = make(gen, ends=(30, 17), window=16, page=4, rows=17, freed=False)
        args["window_tables"][:, 2] = 0
        return args

    yield Case("MN-2 holes are -1, not slot 0", holes, "small", rows_of)
    yield Case(
        "model window", bound(make, ends=(4096, 700), window=128, page=32, rows=300, freed=True), "real", rows_of
    )


def build_dense_index_cases() -> Iterable[Case]:
    """Nothing visible, everything visible, more columns than entries."""

    def make(gen: Generator, rows: int, columns: int) -> dict[str, Any]:
        return {"visible_lens": integers(gen, columns + 1, rows), "num_columns": columns}

    for columns in (0, 1, 33):
        names = ((f"{n}, {columns} columns", {"rows": r, "columns": columns}) for n, r in row_counts())
        yield from cases_of(make, ("visible_lens",), names)


def concat_index_cases() -> Iterable[Case]:
    """Either side empty."""

    def make(gen: Generator, rows: int, a: int, b: int) -> dict[str, Any]:
        return {"first": integers(gen, 99, rows, a, low=-1), "second": integers(gen, 99, rows, b, low=-1)}

    for a, b in ((3, 5), (0, 4), (4, 0)):
        names = ((f"{n}, {a} and {b}", {"rows": r, "a": a, "b": b}) for n, r in row_counts())
        yield from cases_of(make, ("first", "second"), names)


def visible_lens_cases() -> Iterable[Case]:
    """Every residue of the compress ratio."""

    def make(gen: Generator, rows: int, ratio: int) -> dict[str, Any]:
        return {"positions": torch.arange(1000 - rows, 1000, dtype=torch.int32), "ratio": ratio}

    for ratio in (1, 2, 3, 4):
        yield Case(
            f"MN-4 64 consecutive positions, ratio {ratio}",
            bound(make, rows=64, ratio=ratio),
            "small",
            ("positions",),
        )
        yield Case(
            f"position 0, ratio {ratio}",
            bound(lambda gen, ratio: {"positions": torch.zeros(1).int(), "ratio": ratio}, ratio=ratio),
            "small",
            ("positions",),
        )
    yield Case("MN-5 no rows", bound(make, rows=0, ratio=2), "small", ("positions",))


def uniform_lens_cases() -> Iterable[Case]:
    """Nothing to count, and rows of anything."""

    def make(gen: Generator, rows: int, value: int) -> dict[str, Any]:
        return {"like": normal(gen, rows, 3), "value": value}

    yield from cases_of(make, ("like",), ((n, {"rows": r, "value": 7}) for n, r in row_counts()))


def concat_rows_cases() -> Iterable[Case]:
    """Empty parts, one part, strided parts, every width."""

    def make(gen: Generator, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        wide = [integers(gen, 99, size, 8, low=-1).to(dtype) for size in sizes]
        return {"parts": tuple(part[:, ::2] for part in wide)}

    for dtype in (torch.int32, torch.float32):
        for name, sizes in (("MN-5 no rows", (0,)), ("one part", (5,)), ("ragged", (3, 0, 1, 6))):
            yield Case(f"{name}, {str(dtype).removeprefix('torch.')}", bound(make, sizes=sizes, dtype=dtype))
