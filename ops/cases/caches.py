"""Cases of ops on paged records: storing, gathering, copying and attending."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.ops.cases.common import (
    FAR_BYTES,
    FLOATS,
    Poison,
    bound,
    cache_of,
    far_stride,
    fill_cache,
    integers,
    mixed,
    normal,
    poison_page,
    rotary,
    row_counts,
    scattered_slots,
    short,
)
from deepinfer.ops.formats import CacheFormat, CacheKind, PagedCache
from deepinfer.ops.spec import Case

ROWS = ("kv", "positions", "slots")
KINDS: tuple[tuple[CacheKind, int], ...] = (("fp8", 64), ("fp4", 64), ("index", 64), ("f32", 64))


def _store(
    gen: Generator,
    rows: int,
    kind: CacheKind,
    dim: int,
    dtype: torch.dtype,
    *,
    pages: int = 6,
    records: int = 8,
    ratio: int = 1,
    page_stride: int | None = None,
    skip: bool = True,
    width: int = 16,
    name: str = "kv",
) -> dict[str, Any]:
    cache = cache_of(gen, kind, dim, pages, records, page_stride=page_stride, empty=True)
    # the last slot is always among them: it is the one with the largest offset
    order = torch.randperm(cache.num_slots - records - 1, generator=gen)[: max(rows - 1, 0)] + records
    slots = torch.cat((order, torch.full((min(rows, 1),), cache.num_slots - 1))).int()
    if skip:
        slots[::3] = -1
    return {
        name: mixed(gen, rows, dim, dtype=dtype),
        "weight": normal(gen, dim) * 0.2 + 1,
        "eps": 1e-20,
        "positions": integers(gen, 200, rows),
        "cos_sin": rotary(200, width),
        "cache": cache,
        "slots": slots,
        "ratio": ratio,
    }


def kv_norm_rope_store_cases() -> Iterable[Case]:
    """Every record kind, slots of -1, ratios, pages that are strided or beyond 2^31 bytes."""
    for dtype in FLOATS:
        for kind, dim in KINDS[:2] + KINDS[3:]:
            for name, rows in row_counts():
                make = bound(_store, rows=rows, kind=kind, dim=dim, dtype=dtype)
                yield Case(f"{name}, {short(dtype)} to {kind}", make, "small", ROWS)
    for ratio in (2, 3):
        make = bound(_store, rows=20, kind="fp4", dim=32, dtype=torch.bfloat16, ratio=ratio)
        yield Case(f"ratio {ratio}", make, "small", ROWS)
    make = bound(_store, rows=20, kind="fp8", dim=64, dtype=torch.bfloat16, page_stride=4224)
    yield Case("pages inside wider blocks", make, "small", ROWS)
    for kind, dim in KINDS[:2]:
        make = bound(_store, rows=20, kind=kind, dim=dim, dtype=torch.bfloat16, page_stride=far_stride(6), skip=False)
        yield Case(f"MN-3 page offsets past 2^31, {kind}", make, "small", ROWS)
    for kind in ("fp8", "fp4"):
        make = bound(
            _store, rows=256, kind=kind, dim=512, dtype=torch.bfloat16, pages=20, records=32, width=64, skip=False
        )
        yield Case(f"model records, {kind}", make, "real", ROWS)


def index_k_store_cases() -> Iterable[Case]:
    """As `kv_norm_rope_store`, with the page-sectioned record."""
    rows_of = ("k", "positions", "slots")
    for dtype in FLOATS:
        for kind, dim in KINDS[2:]:
            for name, rows in row_counts():
                make = bound(_store, rows=rows, kind=kind, dim=dim, dtype=dtype, name="k")
                yield Case(f"{name}, {short(dtype)} to {kind}", make, "small", rows_of)
    common = {"rows": 20, "kind": "index", "dim": 32, "dtype": torch.bfloat16, "name": "k"}
    for ratio in (2, 3):
        yield Case(f"ratio {ratio}", bound(_store, ratio=ratio, **common), "small", rows_of)
    yield Case("pages inside wider blocks", bound(_store, page_stride=4224, **common), "small", rows_of)
    make = bound(_store, page_stride=far_stride(6), skip=False, **common)
    yield Case("MN-3 page offsets past 2^31", make, "small", rows_of)
    common = {"rows": 256, "kind": "index", "dim": 128, "dtype": torch.bfloat16, "name": "k"}
    yield Case("model records", bound(_store, pages=8, records=64, width=64, **common), "real", rows_of)


def _every_code(gen: Generator, kind: CacheKind, dtype: torch.dtype) -> dict[str, Any]:
    """All 256 bytes as codes under many scales, -1 between."""
    fmt = CacheFormat(kind, 64)
    cache = PagedCache(torch.randint(0, 256, (40, 8 * fmt.record_bytes), generator=gen).to(torch.uint8), fmt, 8)
    slots = torch.arange(-8, cache.num_slots).clamp(min=-1).int()
    return {"cache": cache, "slots": slots, "dtype": dtype}


def kv_gather_cases() -> Iterable[Case]:
    """Every code, holes, duplicates, several axes of slots, NaN in page 0, offsets past 2^31 packed and strided."""

    def make(
        gen: Generator, shape: tuple[int, ...], kind: CacheKind, dim: int, poison: Poison = "nan"
    ) -> dict[str, Any]:
        cache = cache_of(gen, kind, dim, 6, 8, poison=poison)
        slots = integers(gen, cache.num_slots, *shape, low=8)
        slots[torch.rand(shape, generator=gen) < 0.3] = -1
        return {"cache": cache, "slots": slots, "dtype": torch.float32}

    for kind, dim in KINDS:
        for name, rows in row_counts():
            yield Case(f"{name}, {kind}", bound(make, shape=(rows,), kind=kind, dim=dim), "small", ("slots",))
        yield Case(f"MN-2 holes, {kind}", bound(make, shape=(7, 13), kind=kind, dim=dim), "small", ("slots",))
        huge = bound(make, shape=(7, 13), kind=kind, dim=dim, poison="huge")
        yield Case(f"MN-2 holes, huge page 0, {kind}", huge, "small", ("slots",))
        yield Case(f"no columns, {kind}", bound(make, shape=(5, 0), kind=kind, dim=dim), "small", ("slots",))
        for strided in (False, True):
            form = "strided" if strided else "packed"
            far = bound(_far_gather, kind=kind, dim=dim, strided=strided)
            yield Case(f"MN-3 page offsets past 2^31, {form}, {kind}", far, "small", ("slots",))
    for kind, _ in KINDS[:3]:
        for dtype in FLOATS:
            make_codes = bound(_every_code, kind=kind, dtype=dtype)
            yield Case(f"every code, {kind}, {short(dtype)}", make_codes, "small", ("slots",))


def far_cache(gen: Generator, kind: CacheKind, dim: int, strided: bool) -> tuple[PagedCache, Tensor]:
    """A cache of 3 GiB of which a few pages are real memory, and the slots that hold values."""
    if strided:
        cache = cache_of(gen, kind, dim, 6, 8, page_stride=far_stride(6))
        return cache, torch.arange(8, cache.num_slots)
    import numpy as np

    fmt = CacheFormat(kind, dim)
    pages = FAR_BYTES // (8 * fmt.record_bytes)
    buffer = torch.from_numpy(np.zeros(pages * 8 * fmt.record_bytes, dtype=np.uint8))
    cache = PagedCache(buffer.reshape(pages, -1), fmt, 8)
    near = torch.tensor([1, pages // 5, pages // 3, pages // 2 + 1, pages * 3 // 4, pages - 1])
    slots = (near[:, None] * 8 + torch.arange(8)).flatten()
    fill_cache(gen, cache, slots)
    poison_page(cache, 0, "nan")
    return cache, slots


def _far_gather(gen: Generator, kind: CacheKind, dim: int, strided: bool) -> dict[str, Any]:
    cache, slots = far_cache(gen, kind, dim, strided)
    return {"cache": cache, "slots": slots.int(), "dtype": torch.float32}


def copy_blocks_cases() -> Iterable[Case]:
    """No copies, one source to many, float states, blocks beyond 2^31 bytes."""

    def make(gen: Generator, pairs: int, dtype: torch.dtype, stride: int | None = None) -> dict[str, Any]:
        width = 40
        pool = torch.randint(0, 100, (12, width), generator=gen).to(dtype)
        if stride:
            import numpy as np

            far = torch.from_numpy(np.zeros(11 * stride + width, dtype=np.uint8)).as_strided((12, width), (stride, 1))
            far.copy_(pool)
            pool = far
        order = torch.randperm(12, generator=gen).int()
        sources = order[torch.randint(0, 3, (pairs,), generator=gen)]
        return {"pool": pool, "sources": sources, "destinations": order[3 : 3 + pairs]}

    rows_of = ("sources", "destinations")
    for dtype, name in ((torch.uint8, "bytes"), (torch.float32, "float32")):
        for pairs in (0, 1, 9):
            label = "MN-5 no copies" if pairs == 0 else f"{pairs} copies"
            yield Case(f"{label}, {name}", bound(make, pairs=pairs, dtype=dtype), "small", rows_of)
    yield Case(
        "MN-3 offsets past 2^31", bound(make, pairs=9, dtype=torch.uint8, stride=far_stride(12)), "small", rows_of
    )


def _attend(
    gen: Generator,
    rows: int,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    dim: int = 64,
    window: int = 8,
    topk: int | None = 16,
    kinds: tuple[CacheKind, CacheKind] = ("fp8", "fp4"),
    poison: Poison = "nan",
    missing: float = 0.3,
    pages: int = 6,
    records: int = 8,
    sink: float = 1.0,
) -> dict[str, Any]:
    first = records
    window_cache = cache_of(gen, kinds[0], dim, pages, records, poison=poison)
    kv_cache = cache_of(gen, kinds[1], dim, pages, records, poison=poison) if topk is not None else None
    slots = None
    if kv_cache is not None and topk is not None:
        slots = scattered_slots(gen, rows, topk, kv_cache.num_slots, first, missing)
    return {
        "q": normal(gen, rows, heads, dim, dtype=dtype),
        "window_cache": window_cache,
        "window_slots": scattered_slots(gen, rows, window, window_cache.num_slots, first, missing),
        "kv_cache": kv_cache,
        "kv_slots": slots,
        "softmax_scale": dim**-0.5,
        "attn_sink": normal(gen, heads, scale=sink),
    }


ATTEND_ROWS = ("q", "window_slots", "kv_slots")


def sparse_attn_cases() -> Iterable[Case]:
    """Empty rows, holes anywhere, duplicates, poison at slot 0, windows of -1, 0, +1, sinks, every cache pair."""
    for dtype in FLOATS:
        for kinds in (("fp8", "fp4"), ("f32", "f32"), ("fp8", "fp8")):
            for name, rows in row_counts(many=13):
                make = bound(_attend, rows=rows, dtype=dtype, kinds=kinds)
                yield Case(f"{name}, {short(dtype)}, {kinds[0]} and {kinds[1]}", make, "small", ATTEND_ROWS)
        for name, rows in row_counts(many=13):
            yield Case(
                f"window only, {name}, {short(dtype)}",
                bound(_attend, rows=rows, dtype=dtype, topk=None),
                "small",
                ATTEND_ROWS,
            )
    bf16 = torch.bfloat16
    for width in (7, 8, 9, 31, 33):
        yield Case(f"window {width}", bound(_attend, rows=9, dtype=bf16, window=width), "small", ATTEND_ROWS)
        yield Case(f"top-k {width}", bound(_attend, rows=9, dtype=bf16, topk=width), "small", ATTEND_ROWS)
    for window, topk in ((0, 5), (5, 0), (0, None)):
        make = bound(_attend, rows=5, dtype=bf16, window=window, topk=topk)
        yield Case(f"no columns, {window} and {topk}", make, "small", ATTEND_ROWS)
    for poison in ("nan", "huge"):
        for missing in (0.5, 1.0):
            make = bound(_attend, rows=9, dtype=bf16, poison=poison, missing=missing)
            yield Case(f"MN-2 {missing:.0%} of slots are -1, page 0 is {poison}", make, "small", ATTEND_ROWS)
    for sink in (0.0, 20.0):
        yield Case(f"sinks of size {sink:g}", bound(_attend, rows=9, dtype=bf16, sink=sink), "small", ATTEND_ROWS)
    yield Case("sinks of -inf and +inf", _infinite_sinks, "small", ATTEND_ROWS)
    yield Case("NaN queries stay in their rows", _broken_queries, "small", ATTEND_ROWS)
    yield Case("a NaN record reaches the rows that name it", _broken_record, "small", ATTEND_ROWS)
    yield Case("peaked scores", _peaked, "small", ATTEND_ROWS)
    for strided in (False, True):
        form = "strided" if strided else "packed"
        yield Case(f"MN-3 page offsets past 2^31, {form}", bound(_far_attend, strided=strided), "small", ATTEND_ROWS)
    keywords = {"heads": 64, "dim": 512, "window": 128, "pages": 40, "records": 32, "missing": 0.02, "dtype": bf16}
    yield Case("model layer", bound(_attend, rows=32, topk=512, **keywords), "real", ATTEND_ROWS)
    yield Case("model window layer", bound(_attend, rows=32, topk=None, **keywords), "real", ATTEND_ROWS)
    # few rows and more, lists that fill no whole tile, and more keys than the model's
    for rows, window, topk in ((1, 128, 512), (40, 128, 512), (40, 127, 450), (9, 128, 1030)):
        make = bound(_attend, rows=rows, topk=topk, **(keywords | {"window": window, "missing": 0.3}))
        yield Case(f"model shape, {rows} rows of {window} and {topk} slots", make, "real", ATTEND_ROWS)
    make = bound(_attend, rows=40, topk=512, kinds=("fp8", "fp8"), **keywords)
    yield Case("model shape, fp8 and fp8", make, "real", ATTEND_ROWS)
    make = bound(_attend, rows=5, topk=512, sink=20.0, **(keywords | {"missing": 1.0}))
    yield Case("model shape, rows without keys", make, "real", ATTEND_ROWS)


def _infinite_sinks(gen: Generator) -> dict[str, Any]:
    args = _attend(gen, 7, torch.float32)
    args["attn_sink"][0] = -torch.inf
    args["attn_sink"][1] = torch.inf
    return args


def _broken_queries(gen: Generator) -> dict[str, Any]:
    args = _attend(gen, 9, torch.bfloat16, missing=0.1)
    args["q"][3, 1, 0] = torch.nan
    args["q"][5] = 0
    return args


def _broken_record(gen: Generator) -> dict[str, Any]:
    args = _attend(gen, 9, torch.bfloat16, missing=0.1)
    poison_page(args["window_cache"], 3, "nan")
    args["window_slots"][::2] = torch.where(args["window_slots"][::2] // 8 == 3, -1, args["window_slots"][::2])
    return args


def _peaked(gen: Generator) -> dict[str, Any]:
    args = _attend(gen, 9, torch.float32, kinds=("f32", "f32"))
    args["q"] = args["q"] * 40
    return args


def _far_attend(gen: Generator, strided: bool) -> dict[str, Any]:
    args = _attend(gen, 7, torch.bfloat16)
    for cache, slots in (("window_cache", "window_slots"), ("kv_cache", "kv_slots")):
        far, held = far_cache(gen, "fp8" if cache == "window_cache" else "fp4", 64, strided)
        picked = held[torch.randint(0, len(held), args[slots].shape, generator=gen)].int()
        args[cache], args[slots] = far, torch.where(args[slots] >= 0, picked, -1)
    return args


def attn_merge_cases() -> Iterable[Case]:
    """One split and many, empty splits, rows that are empty in all splits."""

    def make(gen: Generator, splits: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
        o, lse = normal(gen, splits, rows, 4, 32), normal(gen, splits, rows, 4, scale=5.0)
        empty = torch.rand(splits, rows, 4, generator=gen) < 0.3
        if rows > 1:
            empty[:, 1] = True
        lse = lse.masked_fill(empty, -torch.inf)
        return {"o": o.masked_fill(empty[..., None], 0.0), "lse": lse, "out_dtype": dtype}

    rows_of = ("o:1", "lse:1")
    for dtype in FLOATS:
        for splits in (1, 2, 5):
            for name, rows in row_counts():
                label = f"{splits} splits, {name}, {short(dtype)}"
                yield Case(label, bound(make, splits=splits, rows=rows, dtype=dtype), "small", rows_of)


def vision_attn_cases() -> Iterable[Case]:
    """No image, an empty image, one patch, several images, patches behind the last image."""

    def make(
        gen: Generator, sizes: tuple[int, ...], dtype: torch.dtype, heads: int = 2, dim: int = 32
    ) -> dict[str, Any]:
        total = sum(sizes)
        q, k, v = (normal(gen, total, heads, dim, dtype=dtype) for _ in range(3))
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).int()
        return {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "softmax_scale": dim**-0.5}

    for dtype in FLOATS:
        for name, sizes in (("MN-5 no images", ()), ("one patch", (1,)), ("ragged", (5, 0, 9, 1, 17)), ("two", (8, 8))):
            yield Case(f"{name}, {short(dtype)}", bound(make, sizes=sizes, dtype=dtype), "small", ("q", "k", "v"))
    make_real = bound(make, sizes=(576, 1521), dtype=torch.bfloat16, heads=16, dim=64)
    yield Case("model tower", make_real, "real", ("q", "k", "v"))
