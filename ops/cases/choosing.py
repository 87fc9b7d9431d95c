"""Cases of index scores, candidate blocks, top-k and slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator

from deepinfer.ops.cases.common import (
    FLOATS,
    Poison,
    bound,
    cache_of,
    cases_of,
    far_stride,
    integers,
    mixed,
    normal,
    packed,
    poison_page,
    quantised,
    rotary,
    row_counts,
    short,
    tables,
)
from deepinfer.ops.formats import CacheKind
from deepinfer.ops.spec import Case


def clip_window_cases() -> Iterable[Case]:
    """Starts of -1, 0 and +1 around a row and the ends of its window, several sequences, holes."""

    def make(gen: Generator, ends: tuple[int, ...], starts: tuple[int, ...], window: int, rows: int) -> dict[str, Any]:
        meta = packed(tuple(min(rows, end) for end in ends), ends)
        positions = meta["positions"]
        indices = integers(gen, 999, len(positions), window, low=-1)
        return {
            "indices": indices,
            "positions": positions,
            "row_to_seq": meta["row_to_seq"],
            "starts": torch.tensor(starts, dtype=torch.int32),
        }

    rows_of = ("indices", "positions", "row_to_seq")
    yield Case("MN-5 no rows", bound(make, ends=(0,), starts=(3,), window=8, rows=4), "small", rows_of)
    yield Case("MN-5 no sequences", bound(make, ends=(), starts=(), window=8, rows=4), "small", rows_of)
    for around in (-1, 0, 1):
        starts = (0, 20 + around, 13 + around, 29 + around)
        sizes = {"ends": (30, 30, 21, 30), "starts": starts, "window": 8, "rows": 11}
        yield Case(f"start {around:+d}", bound(make, **sizes), "small", rows_of)
    sizes = {"ends": (40, 4096), "starts": (0, 4096 - 140), "window": 128, "rows": 300}
    yield Case("model window", bound(make, **sizes), "real", rows_of)


def logical_to_slot_cases() -> Iterable[Case]:
    """-1 anywhere, a whole row of -1, several sequences, slots close to 2^31."""

    def make(gen: Generator, rows: int, topk: int, block: int, columns: int = 5, high: int = 0) -> dict[str, Any]:
        indices = integers(gen, block * columns, rows, topk, low=-1)
        indices[torch.rand(rows, topk, generator=gen) < 0.2] = -1
        if rows > 1:
            indices[1] = -1
        table = tables(gen, 3, columns, 3 * columns + 1, holes=False)
        if high:
            table = table + (2**31 // block - 3 * columns - 2)
        return {"indices": indices, "block_size": block, "block_table": table, "row_to_seq": integers(gen, 3, rows)}

    rows_of = ("indices", "row_to_seq")
    for block in (1, 4, 64):
        names = ((f"{n}, blocks of {block}", {"rows": r, "topk": 9, "block": block}) for n, r in row_counts())
        yield from cases_of(make, rows_of, names)
    yield Case("no columns", bound(make, rows=4, topk=0, block=4), "small", rows_of)
    yield Case("MN-3 slots close to 2^31", bound(make, rows=9, topk=9, block=64, high=1), "small", rows_of)
    yield Case("model selection", bound(make, rows=256, topk=512, block=64, columns=40), "real", rows_of)


def index_q_quant_cases() -> Iterable[Case]:
    """Quantised and plain results, awkward rows."""

    def make(
        gen: Generator, rows: int, dtype: torch.dtype, fmt: str | None, heads: int = 3, dim: int = 64
    ) -> dict[str, Any]:
        return {
            "q": mixed(gen, rows, heads, dim, dtype=dtype),
            "positions": integers(gen, 100, rows),
            "cos_sin": rotary(100, dim // 2),
            "fmt": fmt,
        }

    for dtype in FLOATS:
        for fmt in ("mxfp4", None):
            names = (
                (f"{n}, {short(dtype)} to {fmt or 'plain'}", {"rows": r, "dtype": dtype, "fmt": fmt})
                for n, r in row_counts()
            )
            yield from cases_of(make, ("q", "positions"), names)
    keywords = {"rows": 128, "dtype": torch.bfloat16, "fmt": "mxfp4", "heads": 32, "dim": 128}
    yield Case("model heads", bound(make, **keywords), "real", ("q", "positions"))


def _query(gen: Generator, rows: int, heads: int, dim: int, quant: bool) -> Any:
    return quantised(gen, rows, heads, dim, fmt="mxfp4") if quant else normal(gen, rows, heads, dim)


def index_logits_ragged_cases() -> Iterable[Case]:
    """No keys, no visible keys, ragged starts and ends, negative weights, both rounding modes."""

    def make(
        gen: Generator, rows: int, keys: int, quant: bool, dtype: torch.dtype, heads: int = 4, dim: int = 32
    ) -> dict[str, Any]:
        starts = integers(gen, max(keys // 2, 1), rows)
        ends = torch.minimum(starts + integers(gen, keys + 1, rows), torch.tensor(keys)).int()
        return {
            "q": _query(gen, rows, heads, dim, quant),
            "k": quantised(gen, keys, dim, fmt="mxfp4") if quant else normal(gen, keys, dim),
            "weights": normal(gen, rows, heads, dtype=dtype),
            "starts": starts,
            "ends": torch.maximum(starts, ends),
        }

    for quant in (False, True):
        for dtype in FLOATS:
            tail = f"{'mxfp4' if quant else 'f32'}, weights {short(dtype)}"
            names = ((f"{n}, {tail}", {"rows": r, "keys": 37, "quant": quant, "dtype": dtype}) for n, r in row_counts())
            yield from cases_of(make, (), names)
    yield Case("no keys", bound(make, rows=3, keys=0, quant=True, dtype=torch.bfloat16))
    keywords = {"rows": 64, "keys": 2048, "quant": True, "dtype": torch.bfloat16, "heads": 32, "dim": 128}
    yield Case("model heads", bound(make, **keywords), "real")


def _paged(
    gen: Generator,
    rows: int,
    kind: CacheKind,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    dim: int = 32,
    records: int = 8,
    columns: int = 5,
    poison: Poison = "nan",
    holes: bool = False,
    page_stride: int | None = None,
) -> dict[str, Any]:
    sequences = 3
    pages = sequences * columns + 1
    table = tables(gen, sequences, columns, pages, holes=holes)
    return {
        "q": _query(gen, rows, heads, dim, kind == "index"),
        "cache": cache_of(gen, kind, dim, pages, records, poison=poison, page_stride=page_stride),
        "weights": normal(gen, rows, heads, dtype=dtype),
        "visible": integers(gen, records * columns + 1, rows),
        "block_table": table,
        "row_to_seq": integers(gen, sequences, rows),
    }


PAGED_ROWS = ("q", "weights", "visible", "row_to_seq")


def index_logits_paged_cases() -> Iterable[Case]:
    """Nothing visible, a ragged last block, poison in page 0 and behind `visible`, offsets past 2^31."""

    def make(gen: Generator, num_columns: int = 40, **keywords: Any) -> dict[str, Any]:
        args = _paged(gen, **keywords)
        args["visible"] = args["visible"].clamp(max=num_columns)
        return {**args, "num_columns": num_columns}

    for kind in ("index", "f32"):
        for dtype in FLOATS:
            tail = f"{kind}, weights {short(dtype)}"
            names = ((f"{n}, {tail}", {"rows": r, "kind": kind, "dtype": dtype}) for n, r in row_counts())
            yield from cases_of(make, PAGED_ROWS, names)
    base: dict[str, Any] = {"rows": 9, "kind": "index", "dtype": torch.bfloat16}
    for columns in (0, 1, 39):
        yield Case(f"{columns} columns", bound(make, num_columns=columns, **base), "small", PAGED_ROWS)

    def behind(gen: Generator) -> dict[str, Any]:
        args = make(gen, **base)
        args["visible"].clamp_(max=16)
        for page in args["block_table"][:, 2:].flatten().tolist():
            poison_page(args["cache"], page, "nan")
        return args

    yield Case("NaN behind the visible keys", behind, "small", PAGED_ROWS)
    yield Case("MN-3 page offsets past 2^31", bound(make, page_stride=far_stride(16), **base), "small", PAGED_ROWS)
    keywords = {"heads": 32, "dim": 128, "records": 64, "columns": 32, "rows": 32, "num_columns": 2048}
    yield Case("model heads", bound(make, kind="index", dtype=torch.bfloat16, **keywords), "real", PAGED_ROWS)
    keywords = {"heads": 32, "dim": 128, "records": 64, "columns": 5, "num_columns": 301}

    def neighbours(gen: Generator, rows: int) -> dict[str, Any]:
        """Rows of one sequence side by side, as in a prefill chunk or a verified draft."""
        args = make(gen, kind="index", dtype=torch.bfloat16, rows=rows, **keywords)
        return {**args, "row_to_seq": args["row_to_seq"].sort().values}

    for rows in (1, 7, 30):
        yield Case(f"model heads, {rows} neighbours", bound(neighbours, rows=rows), "real", PAGED_ROWS)


def index_logits_blocks_cases() -> Iterable[Case]:
    """Blocks of -1, duplicate blocks, the last block cut by `visible`, blocks behind it, poison in page 0."""

    def make(gen: Generator, blocks: int, candidate: int = 4, **keywords: Any) -> dict[str, Any]:
        args = _paged(gen, **keywords)
        positions = args["block_table"].shape[1] * args["cache"].records
        picked = integers(gen, positions // candidate, keywords["rows"], blocks).sort(1).values
        picked[torch.rand(keywords["rows"], blocks, generator=gen) < 0.2] = -1
        return {**args, "blocks": picked, "candidate_block": candidate}

    rows_of = (*PAGED_ROWS, "blocks")
    for kind in ("index", "f32"):
        for dtype in FLOATS:
            tail = f"{kind}, weights {short(dtype)}"
            names = ((f"{n}, {tail}", {"rows": r, "kind": kind, "dtype": dtype, "blocks": 5}) for n, r in row_counts())
            yield from cases_of(make, rows_of, names)
    base: dict[str, Any] = {"rows": 9, "kind": "index", "dtype": torch.bfloat16}
    yield Case("no blocks", bound(make, blocks=0, **base), "small", rows_of)
    yield Case("blocks of 3, not a divisor of a page", bound(make, blocks=4, candidate=3, **base), "small", rows_of)
    yield Case(
        "MN-3 page offsets past 2^31", bound(make, blocks=5, page_stride=far_stride(16), **base), "small", rows_of
    )
    keywords = {"heads": 32, "dim": 128, "records": 64, "columns": 32, "rows": 16, "blocks": 128, "candidate": 8}
    yield Case("model pool", bound(make, kind="index", dtype=torch.bfloat16, **keywords), "real", rows_of)
    keywords = {"heads": 32, "dim": 128, "records": 64, "columns": 5, "rows": 9, "blocks": 70}
    for candidate in (3, 8):
        make_one = bound(make, kind="index", dtype=torch.bfloat16, candidate=candidate, **keywords)
        yield Case(f"model heads, blocks of {candidate}", make_one, "real", rows_of)


def block_max_cases() -> Iterable[Case]:
    """No valid column, a ragged last block, NaN and -inf blocks, everything behind the length is NaN."""

    def make(gen: Generator, rows: int, columns: int, block: int) -> dict[str, Any]:
        logits, lens = normal(gen, rows, columns), integers(gen, columns + 1, rows)
        for index, fill in enumerate((torch.nan, -torch.inf, torch.inf)):
            if rows > 3 * index + 3 and columns > block:
                logits[3 * index + 2, :block] = fill
        logits[torch.arange(columns) >= lens[:, None]] = torch.nan
        return {"logits": logits, "lens": lens, "block": block}

    rows_of = ("logits", "lens")
    for columns, block in ((32, 8), (37, 8), (5, 8), (7, 1)):
        names = (
            (f"{n}, {columns} by {block}", {"rows": r, "columns": columns, "block": block}) for n, r in row_counts()
        )
        yield from cases_of(make, rows_of, names)
    yield Case("no columns", bound(make, rows=4, columns=0, block=8), "small", rows_of)
    yield Case("model pool", bound(make, rows=64, columns=20000, block=8), "real", rows_of)


def topk_select_cases() -> Iterable[Case]:
    """Ties at the edge, all equal, NaN, -inf, both infinities, fewer columns than k, lengths of 0."""
    rows_of = ("x", "lens")

    def make(
        gen: Generator, rows: int, columns: int, k: int, dtype: torch.dtype, dress: str = "plain"
    ) -> dict[str, Any]:
        x = normal(gen, rows, columns)
        if dress == "ties":
            x = integers(gen, 3, rows, columns).float() - 1
        elif dress == "equal":
            x = torch.full_like(x, -0.5)
        elif dress == "zeros":
            x = torch.where(torch.rand(rows, columns, generator=gen) < 0.5, 0.0, -0.0)
        elif dress == "broken":
            x[torch.rand(rows, columns, generator=gen) < 0.3] = torch.nan
            x[torch.rand(rows, columns, generator=gen) < 0.3] = -torch.inf
            x[torch.rand(rows, columns, generator=gen) < 0.05] = torch.inf
        elif dress == "tiny":
            x = x * 2.0**-140
        lens = integers(gen, columns + 1, rows)
        if rows > 3:
            lens[0], lens[1], lens[2] = columns, 0, min(k, columns)
        x[torch.arange(columns) >= lens[:, None]] = 1e30
        return {"x": x.to(dtype), "k": k, "lens": lens}

    def close(gen: Generator) -> dict[str, Any]:
        """Values that differ in their last bits only, both signs."""
        args = make(gen, 12, 70, 16, torch.float32)
        sign = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)[:, None]
        return {**args, "x": sign * (1 + integers(gen, 64, 12, 70).float() * 2.0**-23)}

    for dtype in FLOATS:
        names = ((f"{n}, {short(dtype)}", {"rows": r, "columns": 50, "k": 8, "dtype": dtype}) for n, r in row_counts())
        yield from cases_of(make, rows_of, names)
        for dress in ("ties", "equal", "zeros", "broken", "tiny"):
            keywords = {"rows": 20, "columns": 70, "k": 16, "dtype": dtype, "dress": dress}
            yield Case(f"{dress}, {short(dtype)}", bound(make, **keywords), "small", rows_of)
    yield Case("close values", close, "small", rows_of)
    for columns, k in ((0, 4), (3, 8), (8, 8), (9, 8), (1, 1), (1025, 512)):
        keywords = {"rows": 7, "columns": columns, "k": k, "dtype": torch.float32}
        yield Case(f"{k} of {columns}", bound(make, **keywords), "small", rows_of)
    for name, columns, k in (("selection", 32768, 512), ("pool", 4096, 2048)):
        keywords = {"rows": 32, "columns": columns, "k": k, "dtype": torch.bfloat16, "dress": "ties"}
        yield Case(f"model {name}", bound(make, **keywords), "real", rows_of)
    for columns, k, dress in (
        (65536, 512, "plain"),
        (40001, 2048, "broken"),
        (20000, 512, "equal"),
        (16387, 512, "zeros"),
        (129280, 1, "plain"),
    ):
        keywords = {"rows": 5, "columns": columns, "k": k, "dtype": torch.float32, "dress": dress}
        yield Case(f"{k} of {columns}, {dress}", bound(make, **keywords), "real", rows_of)


def blocks_to_positions_cases() -> Iterable[Case]:
    """-1 anywhere."""

    def make(gen: Generator, rows: int, k: int, blocks: int, block: int) -> dict[str, Any]:
        indices = integers(gen, blocks * block, rows, k, low=-1).sort(1).values
        indices[torch.rand(rows, k, generator=gen) < 0.2] = -1
        chosen = integers(gen, 90, rows, blocks).sort(1).values
        return {"indices": indices, "blocks": chosen, "block": block}

    rows_of = ("indices", "blocks")
    for block in (1, 8):
        names = ((f"{n}, blocks of {block}", {"rows": r, "k": 7, "blocks": 5, "block": block}) for n, r in row_counts())
        yield from cases_of(make, rows_of, names)
    yield Case("model pool", bound(make, rows=64, k=512, blocks=2048, block=8), "real", rows_of)
