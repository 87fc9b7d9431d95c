"""Cache records inside kernels: where a slot's codes and scales are, and how values go in and come out."""

from __future__ import annotations

from typing import Any, Final

import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.codes import e2m1_value, e4m3_value, encode, load_values, pack_pairs, scale_value
from deepinfer.backends.nvidia.launch import device_function
from deepinfer.backends.nvidia.tensors import next_pow2
from deepinfer.ops.formats import PagedCache

KIND: Final[dict[str, int]] = {"f32": 0, "fp8": 1, "index": 2, "fp4": 3}
"""Record kinds, numbered as the formats of their codes (`codes.py`)."""


def cache_constants(cache: PagedCache) -> dict[str, Any]:
    """What kernels know about a cache at compile time."""
    fmt = cache.format
    return {"RECORDS": cache.records, "KIND": KIND[fmt.kind], "DIM": fmt.head_dim, "BLOCK": record_block(cache)}


def record_block(cache: PagedCache) -> int:
    """Elements of a tile that holds one record."""
    return max(next_pow2(cache.format.head_dim), 32)


def cache_arguments(cache: PagedCache) -> tuple[Tensor, int]:
    """Bytes of a cache and how many there are from page to page."""
    return cache.data, cache.data.stride(0)


@device_function
def code_bytes(KIND: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """Bytes of codes in a record."""
    if KIND == 0:
        return DIM * 4
    elif KIND == 1:
        return DIM
    else:
        return DIM // 2


@device_function
def scale_bytes(KIND: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """Bytes of scales in a record."""
    if KIND == 0:
        return 0
    elif KIND == 3:
        return DIM // 16
    else:
        return DIM // 32


@device_function
def record_places(
    slot: tl.tensor,
    page_bytes: tl.tensor,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    VEC: tl.constexpr = 1,
) -> tl.tensor:
    """First code byte and first scale byte of slots, both int64: pages times bytes can pass 2^31.

    With VEC, which divides `page_bytes`, the compiler knows how records are aligned.
    """
    codes = code_bytes(KIND, DIM)
    scales = scale_bytes(KIND, DIM)
    slot = slot.to(tl.int64)
    page = (slot // RECORDS) * (page_bytes // VEC) * VEC
    offset = slot % RECORDS
    if KIND == 2:
        return page + offset * codes, page + RECORDS * codes + offset * scales
    else:
        return page + offset * (codes + scales), page + offset * (codes + scales) + codes


@device_function
def store_records(
    cache: tl.tensor,
    slot: tl.tensor,
    page_bytes: tl.tensor,
    value: tl.tensor,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """Encode a record per row of a tile.

    Args:
        cache: bytes of the pool.
        slot: [ROWS], -1 where nothing is written.
        page_bytes: from page to page.
        value: [ROWS, BLOCK] float32, 0 behind DIM.
        RECORDS: records per page.
        KIND: of the records.
        DIM: values in a record.
        ROWS: of the tile.
        BLOCK: a power of two that covers DIM.
        VEC: divides `page_bytes`.
    """
    there = (slot >= 0)[:, None]
    code_place, scale_place = record_places(tl.where(slot >= 0, slot, 0), page_bytes, RECORDS, KIND, DIM, VEC)
    codes_at, scales_at = cache + code_place[:, None], cache + scale_place[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    if KIND == 0:
        bits = value.to(tl.int32, bitcast=True)
        for byte in tl.static_range(4):  # a view of a pool may start at any byte
            tl.store(codes_at + place * 4 + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=there & (place < DIM))
    else:
        group: tl.constexpr = 16 if KIND == 3 else 32
        groups: tl.constexpr = BLOCK // group
        codes, scales = encode(tl.reshape(value, (ROWS * groups, group)), KIND)
        number = tl.arange(0, groups)[None, :]
        tl.store(scales_at + number, tl.reshape(scales, (ROWS, groups)), mask=there & (number * group < DIM))
        if KIND == 1:
            codes = tl.reshape(codes, (ROWS, BLOCK)).to(tl.uint8)
            tl.store(codes_at + place, codes, mask=there & (place < DIM))
        else:
            pairs = tl.arange(0, BLOCK // 2)[None, :]
            packed = tl.reshape(pack_pairs(codes, ROWS * groups, group), (ROWS, BLOCK // 2))
            tl.store(codes_at + pairs, packed, mask=there & (pairs < DIM // 2))


@device_function
def load_record(
    cache: tl.tensor,
    slot: tl.tensor,
    page_bytes: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Values (float32) at the places `place` of the records at `slot`; 0 where `mask` is off.

    Args:
        cache: bytes of the pool.
        slot: valid slots where the mask is on, of a shape that broadcasts with `place`.
        page_bytes: from page to page.
        place: indices of values.
        mask: which are read.
        RECORDS: records per page.
        KIND: of the records.
        DIM: values in a record.
    """
    code_place, scale_place = record_places(slot, page_bytes, RECORDS, KIND, DIM)
    if KIND == 0:
        at = cache + code_place + place * 4
        bits = tl.load(at, mask=mask, other=0).to(tl.uint32)
        bits |= tl.load(at + 1, mask=mask, other=0).to(tl.uint32) << 8
        bits |= tl.load(at + 2, mask=mask, other=0).to(tl.uint32) << 16
        bits |= tl.load(at + 3, mask=mask, other=0).to(tl.uint32) << 24
        return bits.to(tl.float32, bitcast=True)
    else:
        return load_values(cache + code_place, cache + scale_place, place, mask, KIND)


@device_function
def load_coded(
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    there: tl.tensor,
    FMT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """[R, BLOCK] of WIDE, a vector of codes in each row: each code and each scale is loaded once, in wide loads.

    Args:
        codes_at: [R, 1] where the codes of a row start.
        scales_at: [R, 1] where its scales start.
        there: [R, 1] which rows are read; the others are 0, as is what stands behind DIM.
        FMT: the format.
        DIM: values in a row.
        BLOCK: a power of two that covers DIM.
        WIDE: float32, or bfloat16, which holds codes, scales and their products exactly.
    """
    group: tl.constexpr = 16 if FMT == 3 else 32
    number = tl.arange(0, BLOCK // group)[None, :]
    scales = tl.load(scales_at + number, mask=there & (number * group < DIM), other=0)
    if FMT == 1:
        place = tl.arange(0, BLOCK)[None, :]
        value = e4m3_value(tl.load(codes_at + place, mask=there & (place < DIM), other=0))
    else:
        pairs = tl.arange(0, BLOCK // 2)[None, :]
        both = tl.load(codes_at + pairs, mask=there & (pairs < DIM // 2), other=0)
        value = tl.reshape(tl.join(e2m1_value(both), e2m1_value(both >> 4)), (there.shape[0], BLOCK))
    grouped = tl.reshape(value.to(WIDE), (there.shape[0], BLOCK // group, group))
    return tl.reshape(grouped * scale_value(scales, FMT).to(WIDE)[:, :, None], (there.shape[0], BLOCK))


@device_function
def load_whole(
    cache: tl.tensor,
    slot: tl.tensor,
    ok: tl.tensor,
    page_bytes: tl.tensor,
    RECORDS: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """[R, BLOCK] of WIDE, a record in each row.

    Args:
        cache: bytes of the pool.
        slot: [R], valid where `ok` is on.
        ok: [R] which records are read; the others are 0, as is what stands behind DIM.
        page_bytes: from page to page.
        RECORDS: records per page.
        KIND: of the records.
        DIM: values in a record.
        BLOCK: a power of two that covers DIM.
        VEC: divides `page_bytes`.
        WIDE: as in `load_coded`.
    """
    there = ok[:, None]
    if KIND == 0:
        place = tl.arange(0, BLOCK)[None, :]
        return load_record(cache, slot[:, None], page_bytes, place, there & (place < DIM), RECORDS, KIND, DIM).to(WIDE)
    else:
        codes_at, scales_at = record_places(slot[:, None], page_bytes, RECORDS, KIND, DIM, VEC)
        return load_coded(cache + codes_at, cache + scales_at, there, KIND, DIM, BLOCK, WIDE)
