"""What case generators share: awkward values, caches with poisoned holes, packed sequences, far memory.

Cases are adversarial by default. A cache's page 0 is the page that holes point to, so it always holds poison: a kernel
that reads slot 0 for -1, or a hole of a block table, shows NaN or huge numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from deepinfer.ops.formats import CacheFormat, CacheKind, PagedCache, QTensor, QuantFormat
from deepinfer.ops.spec import Case

FLOATS = (torch.bfloat16, torch.float32)
FAR_BYTES = 3 << 30
"""Size of a far buffer: offsets pass 2^31, and, seen as a signed 32-bit number, come out negative."""

Maker = Callable[..., dict[str, Any]]


def bound(make: Maker, /, **keywords: Any) -> Callable[[Generator], dict[str, Any]]:
    """A maker with its keywords filled in, as a `Case` wants it."""
    return partial(make, **keywords)


def short(dtype: torch.dtype) -> str:
    """bf16, f32: how case names say a dtype."""
    return {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]


def normal(gen: Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Standard normal values times `scale`."""
    return (torch.randn(*shape, generator=gen) * scale).to(dtype)


def integers(gen: Generator, high: int, *shape: int, low: int = 0) -> Tensor:
    """int32 in [low, high)."""
    return torch.randint(low, max(high, low + 1), shape, generator=gen).int()


def awkward(x: Tensor) -> Tensor:
    """Rows that break kernels, in place: zeros, a spike, subnormals, huge, negative zero, NaN, Inf; the rest stays.

    Args:
        x: [T, ...] floating.
    """
    flat = x.flatten(1)
    edits: Sequence[Callable[[Tensor], Any]] = (
        lambda row: row.zero_(),
        lambda row: row.zero_().narrow(0, row.numel() - 1, 1).fill_(3.0),
        lambda row: row.mul_(2.0**-130),
        lambda row: row.mul_(2.0**40),
        lambda row: row.fill_(-0.0),
        lambda row: row.narrow(0, 0, 1).fill_(torch.nan),
        lambda row: row.narrow(0, row.numel() // 2, 1).fill_(torch.inf),
        lambda row: row.mul_(2.0**-20),
    )
    for index, edit in enumerate(edits):
        if 2 * index + 1 < len(flat):
            edit(flat[2 * index + 1])
    return x


def mixed(gen: Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal rows with awkward ones between them."""
    return awkward(normal(gen, *shape, dtype=dtype))


def quantised(gen: Generator, *shape: int, fmt: QuantFormat, scale: float = 1.0) -> QTensor:
    """Quantised normal values."""
    from deepinfer.ops.quant import quantize

    return quantize.reference(normal(gen, *shape, scale=scale), fmt)


def weight_of(gen: Generator, *shape: int, kind: str) -> Tensor | QTensor:
    """A weight of `kind`: bf16, f32, mxfp8 or mxfp4, scaled so that products stay near 1."""
    scale = shape[-1] ** -0.5
    formats: dict[str, QuantFormat] = {"mxfp8": "mxfp8", "mxfp4": "mxfp4"}
    if kind in formats:
        return quantised(gen, *shape, fmt=formats[kind], scale=scale)
    return normal(gen, *shape, dtype={"bf16": torch.bfloat16, "f32": torch.float32}[kind], scale=scale)


def activation_of(gen: Generator, *shape: int, kind: str) -> Tensor | QTensor:
    """Activations of `kind`: bf16, f32 or mxfp8, with rows of very different size."""
    x = normal(gen, *shape)
    if len(x):
        x = x * torch.logspace(-2, 1, len(x)).reshape(-1, *[1] * (x.dim() - 1))
    if kind == "mxfp8":
        from deepinfer.ops.quant import quantize

        return quantize.reference(x, "mxfp8")
    return x.to({"bf16": torch.bfloat16, "f32": torch.float32}[kind])


Poison = Literal["nan", "huge"]


def cache_of(
    gen: Generator,
    kind: CacheKind,
    dim: int,
    pages: int,
    records: int,
    *,
    poison: Poison = "huge",
    page_stride: int | None = None,
    empty: bool = False,
) -> PagedCache:
    """A cache of random records whose page 0 is poison.

    Args:
        gen: source of values.
        kind: record kind.
        dim: values per record.
        pages: pages, page 0 included.
        records: records per page.
        poison: what page 0 holds.
        page_stride: bytes from page to page; None for packed pages. The gap holds 0xFF.
        empty: leave the other pages as they are (0xA5) instead of filling them.
    """
    fmt = CacheFormat(kind, dim)
    need = records * fmt.record_bytes
    stride = page_stride or need
    if stride * pages >= FAR_BYTES // 2:
        buffer = torch.from_numpy(np.zeros(stride * (pages - 1) + need, dtype=np.uint8))
    else:
        buffer = torch.full((stride * (pages - 1) + need,), 0xFF, dtype=torch.uint8)
    cache = PagedCache(buffer.as_strided((pages, need), (stride, 1)), fmt, records)
    cache.data.fill_(0xA5)
    if not empty:
        fill_cache(gen, cache, torch.arange(cache.num_slots))
    poison_page(cache, 0, poison)
    return cache


def fill_cache(gen: Generator, cache: PagedCache, slots: Tensor) -> None:
    """Write normal values to `slots`."""
    from deepinfer.ops.quant import write_records

    write_records(cache, slots, normal(gen, len(slots), cache.format.head_dim))


def poison_page(cache: PagedCache, page: int, poison: Poison) -> None:
    """Fill a page with NaN, or with the largest values the format holds."""
    from deepinfer.ops.quant import write_records

    slots = torch.arange(page * cache.records, (page + 1) * cache.records)
    value = {"nan": torch.nan, "huge": 1e4}[poison]
    write_records(cache, slots, torch.full((cache.records, cache.format.head_dim), value))


def far_stride(pages: int) -> int:
    """Page stride that spreads `pages` pages over `FAR_BYTES`, a multiple of 4224 (whole records of every kind)."""
    return FAR_BYTES // (pages - 1) // 4224 * 4224


def packed(lengths: Sequence[int], ends: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Metadata of packed sequences: cu_seqlens_q, row_to_seq, positions (the last row of sequence s is ends[s] - 1)."""
    ends = lengths if ends is None else ends
    positions = [torch.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return {
        "cu_seqlens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        "row_to_seq": torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
        ).int(),
        "positions": torch.cat([*positions, torch.zeros(0, dtype=torch.long)]).int(),
    }


def tables(gen: Generator, sequences: int, columns: int, pages: int, holes: bool = True) -> Tensor:
    """[sequences, columns] int32 of different pages from 1 up, some columns a hole (0)."""
    order = torch.randperm(pages - 1, generator=gen)[: sequences * columns] + 1
    table = order.reshape(sequences, columns).int()
    if holes and columns > 2:
        table[:, 1] = 0
    return table


def scattered_slots(gen: Generator, rows: int, columns: int, slots: int, first: int, missing: float = 0.3) -> Tensor:
    """[rows, columns] int32 of slots in [first, slots), with -1 anywhere and duplicates; row 1 is all -1."""
    picked = integers(gen, slots, rows, columns, low=first)
    picked[torch.rand(rows, columns, generator=gen) < missing] = -1
    if rows > 1:
        picked[1] = -1
    if rows > 2 and columns > 1:
        picked[2] = picked[2, 0]
    return picked


def rotary(positions: int, width: int) -> Tensor:
    """[positions, width] float32 table."""
    from deepinfer.ops.rope import plain_frequencies, rope_table

    return rope_table(positions, plain_frequencies(width, 10000.0))


def cases_of(make: Maker, rows: tuple[str, ...], variants: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Case]:
    """One small case per (name, keywords)."""
    for name, keywords in variants:
        yield Case(name, partial(make, **keywords), "small", rows)


def row_counts(*, many: int = 21) -> Iterator[tuple[str, int]]:
    """No rows, one, two, and enough to leave a ragged tail in any tile."""
    yield "MN-5 no rows", 0
    yield "one row", 1
    yield "two rows", 2
    yield f"{many} rows", many
