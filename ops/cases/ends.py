"""Cases of the model's ends: embedding, row selection, draft heads, and the correction of a planned step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator

from deepinfer.ops.cases.common import (
    FLOATS,
    bound,
    cases_of,
    integers,
    mixed,
    normal,
    packed,
    row_counts,
    short,
    tables,
)
from deepinfer.ops.spec import Case


def embedding_cases() -> Iterable[Case]:
    """First and last ids, repeated ids, both storage types and both results."""

    def make(gen: Generator, rows: int, weight: torch.dtype, out: torch.dtype) -> dict[str, Any]:
        ids = integers(gen, 40, rows)
        ids[: rows // 3] = 39
        return {"weight": normal(gen, 40, 24, dtype=weight), "input_ids": ids, "out_dtype": out}

    for weight in FLOATS:
        for out in FLOATS:
            tail = f"{short(weight)} to {short(out)}"
            names = ((f"{n}, {tail}", {"rows": r, "weight": weight, "out": out}) for n, r in row_counts())
            yield from cases_of(make, ("input_ids",), names)


def gather_rows_cases() -> Iterable[Case]:
    """No rows of many, repeated rows, one to three axes, every width of element."""

    def make(gen: Generator, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        x = integers(gen, 99, *shape).to(dtype)
        if dtype.is_floating_point:
            x = mixed(gen, *shape, dtype=dtype)
        return {"x": x, "rows": integers(gen, shape[0], rows)}

    for shape, dtype in (((9,), torch.int32), ((9, 7), torch.bfloat16), ((9, 4, 6), torch.float32)):
        tail = f"{len(shape)} axes"
        names = ((f"{n}, {tail}", {"rows": r, "shape": shape, "dtype": dtype}) for n, r in row_counts())
        yield from cases_of(make, ("rows",), names)


def concat_columns_cases() -> Iterable[Case]:
    """Empty parts, one part, strided parts, every width of element."""

    def make(gen: Generator, rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        wide = [integers(gen, 99, rows, 2 * width, low=-1).to(dtype) for width in widths]
        return {"parts": tuple(part[:, ::2] for part in wide)}

    for dtype in (torch.int32, *FLOATS):
        for name, widths in (("one part", (5,)), ("single columns", (1,) * 5), ("ragged", (3, 0, 1, 6))):
            for which, rows in row_counts():
                tail = f"{name}, {str(dtype).removeprefix('torch.')}"
                case = bound(make, rows=rows, widths=widths, dtype=dtype)
                yield Case(f"{which}, {tail}", case, "small", ("parts",))
    case = bound(make, rows=2048, widths=(5120,) * 3, dtype=torch.bfloat16)
    yield Case("draft features", case, "real", ("parts",))


def draft_rows_cases() -> Iterable[Case]:
    """Anchors that could not be sampled, anchors at the start and far out, sequences in any order, blocks of one."""

    def make(gen: Generator, rows: int, num_tokens: int) -> dict[str, Any]:
        ids, positions = integers(gen, 99, rows), integers(gen, 1 << 20, rows)
        ids[1::3] = -1
        positions[::4] = 0
        return {
            "anchor_ids": ids,
            "anchor_positions": positions,
            "seqs": torch.randperm(rows + 2, generator=gen)[:rows].int(),
            "num_tokens": num_tokens,
            "noise_id": 99,
        }

    for num_tokens in (1, 2, 5):
        for name, rows in row_counts():
            case = bound(make, rows=rows, num_tokens=num_tokens)
            yield Case(f"{name}, blocks of {num_tokens}", case, "small", ("anchor_ids", "anchor_positions", "seqs"))


def known_ids_cases() -> Iterable[Case]:
    """No id known, all known, some."""

    def make(gen: Generator, rows: int, low: int, high: int) -> dict[str, Any]:
        return {"token_ids": integers(gen, high, rows, low=low), "fallback": 7}

    for name, low, high in (("none", -1, 0), ("all", 0, 99), ("some", -1, 2)):
        names = ((f"{n}, {name} known", {"rows": r, "low": low, "high": high}) for n, r in row_counts())
        yield from cases_of(make, ("token_ids",), names)


def markov_logits_cases() -> Iterable[Case]:
    """Masked ids in the base, ragged vocabulary and rank."""

    def make(gen: Generator, rows: int, ids: int, rank: int, dtype: torch.dtype, holes: bool = False) -> dict[str, Any]:
        base = normal(gen, rows, ids, scale=4.0)
        if holes:
            base[:, ::3] = -torch.inf
            base[3] = torch.nan
        return {
            "base": base,
            "token_ids": integers(gen, ids, rows),
            "embed": normal(gen, ids, rank, dtype=dtype),
            "head": normal(gen, ids, rank, dtype=dtype, scale=rank**-0.5),
        }

    rows_of = ("base", "token_ids")
    for dtype in FLOATS:
        names = ((f"{n}, {short(dtype)}", {"rows": r, "ids": 37, "rank": 16, "dtype": dtype}) for n, r in row_counts())
        yield from cases_of(make, rows_of, names)
    yield Case("rank 7", bound(make, rows=9, ids=50, rank=7, dtype=torch.float32), "small", rows_of)
    holes = bound(make, rows=9, ids=50, rank=16, dtype=torch.bfloat16, holes=True)
    yield Case("masked and NaN rows", holes, "small", rows_of)
    yield Case("model vocabulary", bound(make, rows=8, ids=129280, rank=256, dtype=torch.bfloat16), "real", rows_of)


def draft_confidence_cases() -> Iterable[Case]:
    """Confidences near 0 and 1, temperatures, awkward rows."""

    def make(
        gen: Generator, rows: int, dtype: torch.dtype, temperature: float, h: int = 48, r: int = 16
    ) -> dict[str, Any]:
        hidden = mixed(gen, rows, h, dtype=dtype) if rows > 2 else normal(gen, rows, h, dtype=dtype)
        return {
            "hidden": hidden,
            "token_ids": integers(gen, 30, rows),
            "embed": normal(gen, 30, r, dtype=torch.bfloat16),
            "proj": normal(gen, 1, h + r, scale=(h + r) ** -0.5),
            "temperature": temperature,
        }

    rows_of = ("hidden", "token_ids")
    for dtype in FLOATS:
        for temperature in (1.0, 0.1):
            tail = f"{short(dtype)}, temperature {temperature}"
            names = ((f"{n}, {tail}", {"rows": r, "dtype": dtype, "temperature": temperature}) for n, r in row_counts())
            yield from cases_of(make, rows_of, names)
    real = bound(make, rows=32, dtype=torch.bfloat16, temperature=1.0, h=5120, r=256)
    yield Case("model width", real, "real", rows_of)


def advance_step_cases() -> Iterable[Case]:
    """Nothing accepted but the sampled token, everything accepted, new sequences between old ones, no drafts."""

    def make(
        gen: Generator,
        lengths: tuple[int, ...],
        drafts: int,
        ratios: tuple[int, ...] = (1, 2),
        known: bool = True,
        padding: int = 0,
    ) -> dict[str, Any]:
        sequences = len(lengths)
        before = sequences + 1
        ends = tuple(40 + 7 * s + n for s, n in enumerate(lengths))
        meta = packed(lengths, ends)
        total = sum(lengths)
        previous = torch.randperm(before, generator=gen)[:sequences].int()
        previous[1::3] = -1
        if not known:
            previous[:] = -1
        # a sequence that ran before was planned for one token and its drafts
        accepted = integers(gen, drafts + 2, before, low=1)
        row_to_seq = torch.cat((meta["row_to_seq"], torch.zeros(padding, dtype=torch.int32)))
        block_size, window_page = 8, 4
        columns = max(ends, default=8) // block_size + 1
        pages = max(ends, default=8) // window_page + 1
        first = torch.full((sequences,), 2, dtype=torch.int32)
        rows = total + padding
        return {
            "input_ids": integers(gen, 100, rows),
            "positions": torch.cat((meta["positions"], torch.full((padding,), 3, dtype=torch.int32))),
            "seq_lens": torch.tensor(ends, dtype=torch.int32),
            "window_slots": integers(gen, 50, rows, low=-1),
            "ratio_slots": integers(gen, 50, len(ratios), rows, low=-1),
            "cu_seqlens_q": meta["cu_seqlens_q"],
            "row_to_seq": row_to_seq,
            "previous": previous,
            "planned": torch.full((before,), drafts + 1, dtype=torch.int32),
            "accepted": accepted,
            "sampled_ids": integers(gen, 100, before),
            "draft_ids": integers(gen, 100, before, drafts),
            "block_tables": tables(gen, sequences, columns, sequences * columns + 2, holes=False),
            "block_size": block_size,
            "window_tables": tables(gen, sequences, pages, sequences * pages + 2, holes=False),
            "window_first_page": first,
            "window_page": window_page,
            "ratios": ratios,
        }

    yield Case("MN-5 no rows", bound(make, lengths=(), drafts=5))
    yield Case("decode rows", bound(make, lengths=(1,) * 7, drafts=0))
    for drafts in (1, 5):
        rows = drafts + 1
        yield Case(f"verify rows, {drafts} drafts", bound(make, lengths=(rows,) * 6, drafts=drafts))
        yield Case(
            f"fewer rows than drafts, {drafts} drafts", bound(make, lengths=(1, rows, 2, rows, 1), drafts=drafts)
        )
    yield Case("prefill between decode rows", bound(make, lengths=(1, 20, 1, 3), drafts=0))
    yield Case("no sequence ran before", bound(make, lengths=(3, 1, 9), drafts=2, known=False))
    for ratio in (1, 2, 4):
        yield Case(f"ratio {ratio}", bound(make, lengths=(6,) * 5, drafts=5, ratios=(ratio,)))
    yield Case("padding rows behind the last", bound(make, lengths=(6, 6, 1), drafts=5, padding=4))
