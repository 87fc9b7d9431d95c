"""Quantised values inside kernels: encode and decode the three block formats, bit for bit as `deepinfer.ops.quant`.

A tile is [groups, group]: one scale per row of it. Scales that are powers of two are made on the float's own bits,
never through a logarithm; e2m1 codes come from comparisons of |v| with midpoint * scale, which are exact in float32.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer.backends.nvidia.launch import device_function

MXFP8 = tl.constexpr(1)
MXFP4 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)


@device_function
def is_finite(x: tl.tensor) -> tl.tensor:
    """Neither NaN nor an infinity."""
    return tl.abs(x) < float("inf")


@device_function
def ue8m0_value(byte: tl.tensor) -> tl.tensor:
    """2^(byte - 127) in float32; 255 is NaN, 0 is the subnormal 2^-127."""
    code = byte.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@device_function
def e4m3_value(byte: tl.tensor) -> tl.tensor:
    """Value of e4m3 codes (uint8) in float32."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@device_function
def e4m3_code(x: tl.tensor) -> tl.tensor:
    """e4m3 code (uint8) of float32 values within +-448, nearest even."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@device_function
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """Value of e2m1 codes (low nibble) in float32."""
    kind = code.to(tl.int32) & 7
    # two exponent bits and one of mantissa; below exponent 1 the mantissa counts halves
    normal = ((((kind >> 1) + 126) << 23) | ((kind & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(kind < 2, kind.to(tl.float32) * 0.5, normal)
    return tl.where((code.to(tl.int32) & 8) != 0, -value, value)


@device_function
def e2m1_code(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """e2m1 code (int32, 0 to 15) of x / scale: |x| against midpoint * scale; a tie goes to the even code."""
    size = tl.abs(x)
    code = (size > 0.25 * scale).to(tl.int32)
    code += (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32)
    code += (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32)
    code += (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    return code | (sign << 3)


@device_function
def scale_code(amax: tl.tensor, FMT: tl.constexpr) -> tl.tensor:
    """Scale byte (uint8) of groups whose largest magnitude is `amax`; a group that is not finite has a NaN scale."""
    finite = is_finite(amax)
    if FMT == NVFP4:
        target = tl.minimum(tl.div_rn(tl.maximum(amax, 6.0 * 2.0**-9), 6.0), 448.0)
        return tl.where(finite, e4m3_code(target).to(tl.int32), 0x7F).to(tl.uint8)
    if FMT == MXFP8:
        target = tl.div_rn(tl.maximum(amax, 1e-4), 448.0)
    else:
        target = tl.div_rn(tl.maximum(amax, 6.0 * 2.0**-126), 6.0)
    bits = target.to(tl.int32, bitcast=True)
    return tl.where(finite, ((bits + 0x7FFFFF) >> 23) & 0xFF, 255).to(tl.uint8)


@device_function
def scale_value(byte: tl.tensor, FMT: tl.constexpr) -> tl.tensor:
    """Value of scale bytes in float32."""
    return e4m3_value(byte) if FMT == NVFP4 else ue8m0_value(byte)


@device_function
def encode(x: tl.tensor, FMT: tl.constexpr) -> tl.tensor:
    """Codes and scale bytes of a tile.

    Args:
        x: [groups, group] float32; values behind the end of a row are 0.
        FMT: the format.

    Returns:
        codes [groups, group] int32 (e4m3 bytes or e2m1 nibbles) and scales [groups] uint8.
    """
    # magnitudes sort as their bits do, NaN above infinity
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    byte = scale_code(amax, FMT)
    if FMT == MXFP8:
        # the reciprocal of a power of two is exact, so the product is the quotient, correctly rounded, and at most 448
        inverse = ue8m0_value(254 - byte.to(tl.int32))[:, None]
        return e4m3_code(x * inverse).to(tl.int32), byte
    return e2m1_code(x, scale_value(byte, FMT)[:, None]), byte


@device_function
def pack_pairs(codes: tl.tensor, GROUPS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Nibbles [groups, group] to bytes [groups, group / 2] (uint8), the even index in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@device_function
def store_codes(
    data: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    bytes_: tl.tensor,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    FMT: tl.constexpr,
) -> None:
    """Write a row's codes and scales.

    Args:
        data: where the row's codes start.
        scale: where its scales start.
        codes: [GROUPS, group] int32.
        bytes_: [GROUPS] uint8.
        WIDTH: values in the row.
        GROUPS: groups of the tile, a power of two that covers the row.
        FMT: the format.
    """
    group: tl.constexpr = 16 if FMT == NVFP4 else 32
    rows = tl.arange(0, GROUPS)
    tl.store(scale + rows, bytes_, mask=rows * group < WIDTH)
    if FMT == MXFP8:
        place = rows[:, None] * group + tl.arange(0, group)[None, :]
        tl.store(data + place, codes.to(tl.uint8), mask=place < WIDTH)
    else:
        half: tl.constexpr = group // 2
        place = rows[:, None] * half + tl.arange(0, half)[None, :]
        tl.store(data + place, pack_pairs(codes, GROUPS, group), mask=place < WIDTH // 2)


@device_function
def store_tile(
    data: tl.tensor,
    scale: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    stretch: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FMT: tl.constexpr,
) -> None:
    """Encode and write a stretch of several packed rows.

    Args:
        data: codes of all rows.
        scale: their scales.
        value: [ROWS, BLOCK] float32, 0 outside the rows.
        row: [ROWS], which rows.
        rows: how many there are.
        stretch: which BLOCK values of a row.
        WIDTH: values in a row.
        ROWS: of the tile.
        BLOCK: values of a row in the tile, whole groups.
        GROUP_SIZE: of the format.
        FMT: the format.
    """
    groups: tl.constexpr = BLOCK // GROUP_SIZE
    scales: tl.constexpr = (WIDTH + GROUP_SIZE - 1) // GROUP_SIZE
    live = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None]
    codes, factors = encode(tl.reshape(value, (ROWS * groups, GROUP_SIZE)), FMT)
    number = stretch * groups + tl.arange(0, groups)[None, :]
    tl.store(scale + at * scales + number, tl.reshape(factors, (ROWS, groups)), mask=live & (number < scales))
    if FMT == MXFP8:
        place = stretch * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(data + at * WIDTH + place, tl.reshape(codes, (ROWS, BLOCK)).to(tl.uint8), mask=live & (place < WIDTH))
    else:
        half: tl.constexpr = BLOCK // 2
        pairs = stretch * half + tl.arange(0, half)[None, :]
        packed = tl.reshape(pack_pairs(codes, ROWS * groups, GROUP_SIZE), (ROWS, half))
        tl.store(data + at * (WIDTH // 2) + pairs, packed, mask=live & (pairs < WIDTH // 2))


@device_function
def load_values(
    data: tl.tensor,
    scale: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    FMT: tl.constexpr,
) -> tl.tensor:
    """Values (float32) of a quantised row at the places `place`.

    Args:
        data: where the row's codes start.
        scale: where its scales start.
        place: indices of values, any shape.
        mask: which of them are read; the others are 0.
        FMT: the format.
    """
    group: tl.constexpr = 16 if FMT == NVFP4 else 32
    factor = scale_value(tl.load(scale + place // group, mask=mask, other=0), FMT)
    if FMT == MXFP8:
        value = e4m3_value(tl.load(data + place, mask=mask, other=0))
    else:
        byte = tl.load(data + place // 2, mask=mask, other=0).to(tl.int32)
        value = e2m1_value(tl.where(place % 2 == 0, byte & 15, byte >> 4))
    return tl.where(mask, value * factor, 0.0)
