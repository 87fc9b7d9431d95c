"""Quantise and dequantise, bit for bit: the three block formats of V4.1 and the cache records made of them.

Scales that are powers of two are rounded up on the float's own bits, never through a logarithm, so a value that is a
power of two keeps its exponent. e2m1 codes are those of the real quotient: |v| is compared with midpoint * scale, which
is exact in float32. A group with NaN or Inf gets a NaN scale, so that the fault is still visible when it is read back.

Source: DeepSeek-V4.1-Flash (model specification, sections 8.1 and 8.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import rows
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import GROUP, CacheFormat, PagedCache, QTensor, QuantFormat
from deepinfer.ops.results import codes
from deepinfer.ops.spec import EXACT, define_op

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# midpoint, and whether the midpoint itself goes up (to the even code)
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_NAN_SCALE = 255
_NAN_E4M3 = 0x7F


def pow2_ceil_bits(x: Tensor) -> Tensor:
    """Biased exponent (ue8m0 byte, as int32) of the smallest power of two >= x; 255 for NaN and Inf.

    Args:
        x: float32, positive and normal.
    """
    bits = x.float().contiguous().view(torch.int32)
    rounded = ((bits + 0x7FFFFF) >> 23) & 0xFF
    return torch.where(torch.isfinite(x), rounded, _NAN_SCALE)


def ue8m0_value(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127); byte 255 is NaN, byte 0 is 2^-127."""
    byte = scale.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is subnormal in float32
    value: Tensor = torch.where(byte == _NAN_SCALE, torch.nan, bits.view(torch.float32))
    return value.to(dtype)


def e4m3_value(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of e4m3 codes (uint8)."""
    return code.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def e2m1_value(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of e2m1 codes (uint8, low nibble): bit 3 is the sign."""
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype, device=code.device)
    return table[code.long()]


def unpack_nibbles(data: Tensor) -> Tensor:
    """[..., N] bytes to [..., 2N] codes; the low nibble comes first."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., 2N] codes to [..., N] bytes."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _group_amax(x: Tensor, group: int) -> Tensor:
    pad = -x.shape[-1] % group
    grouped = torch.nn.functional.pad(x.abs(), (0, pad)).unflatten(-1, (-1, group))
    amax: Tensor = grouped.amax(-1) if grouped.numel() else grouped.new_zeros(grouped.shape[:-1])
    return amax


def _spread(scale: Tensor, group: int, width: int) -> Tensor:
    return scale.repeat_interleave(group, dim=-1)[..., :width]


def _e2m1_codes(x: Tensor, scale: Tensor) -> Tensor:
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint, tie_up in _MIDPOINTS:
        edge = midpoint * scale
        code += ((magnitude >= edge) if tie_up else (magnitude > edge)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=rows.quantize_cases,
    dims={"k": "x:-1", "fmt": "fmt"},
    rules=Rules(nan="a group with NaN or Inf has a NaN scale, its codes are undefined; other groups do not change"),
    results=lambda new, a: codes(new, a.x.shape, a.fmt),
)
def quantize(x: Tensor, fmt: QuantFormat) -> QTensor:
    """Quantise along the last axis.

    mxfp8: s = 2^ceil(log2(max(amax, 1e-4) / 448)). mxfp4: s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).
    nvfp4: s = e4m3(max(amax, 6 * 2^-9) / 6), at most 448. Codes: nearest even of clamp(x / s).

    Args:
        x: [..., K] bfloat16 or float32 (float64 is rounded to float32 first). K even for the 4-bit formats.
        fmt: target format.

    Returns:
        Codes and scales in canonical layout. A group with NaN or Inf has a NaN scale.
    """
    x = x.float()
    group = GROUP[fmt]
    amax = _group_amax(x, group)
    if fmt == "nvfp4":
        target = torch.where(torch.isfinite(amax), amax.clamp(min=6 * 2.0**-9) / 6, torch.nan).clamp(max=448.0)
        scale = target.to(torch.float8_e4m3fn).view(torch.uint8)
        value = e4m3_value(scale)
    else:
        floor, top = (1e-4, 448.0) if fmt == "mxfp8" else (6 * 2.0**-126, 6.0)
        target = torch.where(torch.isfinite(amax), amax, torch.nan).clamp(min=floor) / top
        scale = pow2_ceil_bits(target).to(torch.uint8)
        value = ue8m0_value(scale)
    wide = _spread(value, group, x.shape[-1])
    if fmt == "mxfp8":
        codes = (x / wide).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return QTensor(codes, scale, fmt)
    return QTensor(pack_nibbles(_e2m1_codes(x, wide)), scale, fmt)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=rows.dequantize_cases,
    dims={"k": "x:-1", "fmt": "x"},
    results=lambda new, a: new(a.x.shape, a.dtype),
)
def dequantize(x: QTensor, dtype: torch.dtype) -> Tensor:
    """Values of a quantised tensor: code * scale, exact in bfloat16 for every V4.1 operand.

    Args:
        x: [..., K] values in canonical layout.
        dtype: bfloat16, float32 or float64.

    Returns:
        [..., K] of `dtype`; NaN where the group's scale is NaN.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if x.fmt == "mxfp8":
        codes, scale = e4m3_value(x.data, exact), ue8m0_value(x.scale, exact)
    else:
        codes = e2m1_value(unpack_nibbles(x.data), exact)
        scale = e4m3_value(x.scale, exact) if x.fmt == "nvfp4" else ue8m0_value(x.scale, exact)
    return (codes * _spread(scale, GROUP[x.fmt], codes.shape[-1])).to(dtype)


def encode_records(values: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """Codes [n, code_bytes] and scales [n, scale_bytes] (uint8) of values [n, head_dim]."""
    if fmt.quant is None:
        codes = values.float().contiguous().view(torch.uint8).reshape(values.shape[0], fmt.code_bytes)
        return codes, codes[:, :0]
    packed = quantize(values, fmt.quant)
    return packed.data, packed.scale


def decode_records(codes: Tensor, scales: Tensor, fmt: CacheFormat, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] of codes [..., code_bytes] and scales [..., scale_bytes]."""
    if fmt.quant is None:
        return codes.contiguous().view(torch.float32).to(dtype)
    return dequantize(QTensor(codes, scales, fmt.quant), dtype)


def _byte_offsets(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Page, first code byte and first scale byte of each slot, all int64: pages times bytes can pass 2^31."""
    slots = slots.long()
    page, offset = slots // cache.records, slots % cache.records
    fmt = cache.format
    if fmt.layout == "sectioned":
        return page, offset * fmt.code_bytes, cache.records * fmt.code_bytes + offset * fmt.scale_bytes
    return page, offset * fmt.record_bytes, offset * fmt.record_bytes + fmt.code_bytes


def read_records(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] of the records at `slots` [...]; every slot must be valid."""
    page, code, scale = _byte_offsets(cache, slots)
    fmt, device = cache.format, cache.data.device
    codes = cache.data[page[..., None], code[..., None] + torch.arange(fmt.code_bytes, device=device)]
    scales = cache.data[page[..., None], scale[..., None] + torch.arange(fmt.scale_bytes, device=device)]
    return decode_records(codes, scales, fmt, dtype)


def write_records(cache: PagedCache, slots: Tensor, values: Tensor) -> None:
    """Write values [n, head_dim] to `slots` [n]; -1 writes nothing. Slots that are not -1 must differ."""
    keep = slots >= 0
    page, code, scale = _byte_offsets(cache, slots[keep])
    codes, scales = encode_records(values[keep], cache.format)
    device = cache.data.device
    cache.data[page[:, None], code[:, None] + torch.arange(codes.shape[1], device=device)] = codes
    cache.data[page[:, None], scale[:, None] + torch.arange(scales.shape[1], device=device)] = scales
