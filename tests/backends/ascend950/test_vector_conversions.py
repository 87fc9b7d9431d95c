"""Conversions of the twin, bit for bit: against torch's own types, and against rational arithmetic.

Every code of the narrow formats is decoded; every bfloat16 and half is encoded. Rounding is judged by a small
implementation that shares nothing with the twin: it lists the values of a format as rational numbers and picks a
neighbour. Those values and the middles between them are exact as Python floats, which makes the sweeps short.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# numpy says that a signalling nan is an invalid value when it casts one
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

LINES = Path(__file__).with_name("vector_kernels.asc").read_text().split("// cases\n")[1].split("// end of cases")[0]
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
PARTS = {"": 0, "v2": 1, "v3": 2, "v4": 3}


def size_of(kind: str) -> int:
    """Bytes of an element; packed 4-bit types count a byte for two."""
    if kind.startswith(("f8", "hif8")) or kind.endswith("x2"):
        return 1
    return SIZES[kind.lstrip("bfsu")]


def line_of(op: str) -> str:
    (found,) = (line for line in LINES.splitlines() if line.startswith(f"CONVERT({op},"))
    return found


def convert(run: Any, line: str, codes: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """The codes that a conversion makes of a flat array of codes, as many as it can place.

    Registers are filled so that each code is one that the case's part reads; what comes out is checked to be zero
    outside of the lanes of that part.
    """
    op, to, source = (word.strip() for word in line.split("(")[1].rstrip(")").split(",")[:3])
    suffix = op.rpartition("_")[2]
    part = PARTS.get(suffix, 0) if op.startswith("asc_") else int("PART_ODD" in line)
    wide, narrow = max(size_of(to), size_of(source)), min(size_of(to), size_of(source))
    packed = to.endswith("x2") or source.endswith("x2")
    ratio = 4 if packed else wide // narrow
    take = np.dtype(f"u{size_of(source)}")
    give = np.dtype(f"u{size_of(to)}")
    step_in = ratio if size_of(source) < size_of(to) else 1
    per_round = 256 // take.itemsize // step_in
    assert len(codes) % per_round == 0
    registers = np.full((len(codes) // per_round, per_round, step_in), 0x5A, take)
    registers[:, :, part if step_in > 1 else 0] = codes.reshape(-1, per_round)
    out = run(line, registers.reshape(len(registers), -1), mask=mask)[:, :256].copy().view(give)
    step_out = ratio if size_of(to) < size_of(source) else 1
    groups = out.reshape(len(out), -1, step_out)
    place = part if step_out > 1 else 0
    for other in set(range(step_out)) - {place}:
        assert not groups[:, :, other].any(), f"part {other} holds something"
    return groups[:, :, place].reshape(-1)


def floats(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    signed = codes.view(np.int8 if codes.itemsize == 1 else np.int16)
    return torch.from_numpy(signed.copy()).view(dtype).float().numpy()


def same_floats(found: np.ndarray, wanted: np.ndarray) -> None:
    a, b = found.view(np.float32), wanted.astype(np.float32)
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    assert same.all(), (a[~same][:4], b[~same][:4])


BYTES = np.arange(256, dtype=np.uint8)
WORDS = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(f"asc_e4m32float{part}", torch.float8_e4m3fn) for part in ("", "_v2", "_v3", "_v4")]
    + [("asc_e5m22float", torch.float8_e5m2), ("asc_e5m22float_v3", torch.float8_e5m2)],
)
def test_every_fp8_code_decodes_as_in_torch(vector_cases: Any, op: str, dtype: torch.dtype) -> None:
    same_floats(convert(vector_cases, line_of(op), BYTES), floats(BYTES, dtype))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("asc_bfloat162float", torch.bfloat16),
        ("asc_bfloat162float_v2", torch.bfloat16),
        ("asc_half2float", torch.float16),
        ("asc_half2float_v2", torch.float16),
    ],
)
def test_every_16_bit_code_decodes_as_in_torch(vector_cases: Any, op: str, dtype: torch.dtype) -> None:
    same_floats(convert(vector_cases, line_of(op), WORDS), floats(WORDS, dtype))


def test_every_e8m0_code_decodes_as_in_torch_and_bfloat16_gives_its_exponent(vector_cases: Any) -> None:
    line = "VCVT(vcvt, bf16, f8e8m0, PART_EVEN, MODE_ZEROING)"
    found = floats(convert(vector_cases, line, BYTES), torch.bfloat16)
    wanted = torch.from_numpy(BYTES).view(torch.float8_e8m0fnu).float().numpy()
    same_floats(found, wanted)
    line = "VCVT(vcvt, f8e8m0, bf16, PART_ODD, MODE_ZEROING)"
    found = convert(vector_cases, line, WORDS)
    value = np.abs(floats(WORDS, torch.bfloat16).astype(np.float64))
    exponent = np.floor(
        np.log2(np.where(value > 0, value, 2.0**-127), where=np.isfinite(value), out=np.zeros_like(value))
    )
    wanted = np.where(np.isnan(value), 255, np.where(np.isinf(value), 254, np.clip(exponent + 127, 0, 254)))
    assert (found == wanted.astype(np.uint8)).all()


FP4 = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]}


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes of each byte, the low one first."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(-1)


@pytest.mark.parametrize("op", ["asc_e2m1x22bfloat16", "asc_e2m1x22bfloat16_v3", "asc_e1m2x22bfloat16_v2"])
def test_every_fp4_byte_decodes_into_its_pair(vector_cases: Any, op: str) -> None:
    values = np.array(FP4[op[4:8]], np.float32)
    values = np.concatenate([values, -values])
    line = line_of(op)
    part = PARTS.get(op.rpartition("_")[2], 0)
    registers = np.full((4, 64, 4), 0xEE, np.uint8)
    registers[:, :, part] = BYTES.reshape(4, 64)
    found = vector_cases(line, registers.reshape(4, 256))[:, :256].copy().view(np.uint16).reshape(-1)
    same_floats(floats(found, torch.bfloat16), values[nibbles(BYTES)])


def test_int4_pairs(vector_cases: Any) -> None:
    signed = np.where(np.arange(16) < 8, np.arange(16), np.arange(16) - 16)
    for op, part, dtype in [("asc_int4x22half", 0, np.float16), ("asc_int4x22int16_v4", 3, np.int16)]:
        registers = np.full((4, 64, 4), 0xEE, np.uint8)
        registers[:, :, part] = BYTES.reshape(4, 64)
        found = vector_cases(line_of(op), registers.reshape(4, 256))[:, :256].copy().view(dtype).reshape(-1)
        assert (found == signed[nibbles(BYTES)]).all()
    halves = np.array(
        [0.5, 1.5, -8.5, -9, 7.4, 7.5, 100, -100, np.inf, -np.inf, np.nan, -0.5] + [2.0] * 116, np.float16
    )
    found = vector_cases(line_of("asc_half2int4x2_rn_sat"), halves[None])[0, :256].reshape(64, 4)
    wanted = [0, 2, -8, -8, 7, 7, 7, -8, 7, -8, 0, 0] + [2] * 116
    assert (nibbles(found[:, 0].copy()) == np.array(wanted) % 16).all()
    assert not found[:, 1:].any()


@dataclass(frozen=True)
class Format:
    """A binary format as the list of its non-negative finite values; the position in it is the code."""

    bits: int
    values: list[float]
    infinity: int | None
    nan: int | None

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)


def binary(exponent_bits: int, fraction_bits: int, *, ieee: bool, last: int | None = None) -> Format:
    bias = 1 if exponent_bits == 1 else 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + fraction_bits)):
        field, fraction = divmod(code, 2**fraction_bits)
        if ieee and field == 2**exponent_bits - 1:
            break
        power = Fraction(2) ** (max(field, 1) - bias - fraction_bits)
        values.append(float((fraction + (2**fraction_bits if field else 0)) * power))
    values = values[:last]
    infinity = len(values) if ieee else None
    nan = (2**exponent_bits - 1) * 2**fraction_bits + 2 ** (fraction_bits - 1) if ieee else None
    return Format(1 + exponent_bits + fraction_bits, values, infinity, nan)


E4M3 = binary(4, 3, ieee=False, last=-1)
FORMATS = {
    "bf16": binary(8, 7, ieee=True),
    "f16": binary(5, 10, ieee=True),
    "f8e5m2": binary(5, 2, ieee=True),
    "f8e4m3": Format(8, E4M3.values, 127, 127),  # no infinity: overflow is nan
    "f4e2m1x2": Format(4, [float(v) for v in FP4["e2m1"]], None, None),
    "f4e1m2x2": Format(4, [float(v) for v in FP4["e1m2"]], None, None),
}


def rounded(x: float, kind: str, mode: str, saturate: bool) -> int:
    """The code of a number in a format."""
    form = FORMATS[kind]
    if math.isnan(x):
        return 0 if saturate or form.nan is None else form.nan
    sign = form.sign if math.copysign(1, x) < 0 else 0
    overflow = len(form.values) - 1 if saturate or form.infinity is None else form.infinity
    if math.isinf(x):
        return sign | overflow
    size, values = abs(x), form.values
    above = bisect_left(values, size)
    if above < len(values) and values[above] == size:
        return sign | above
    below = above - 1
    # what would follow the largest value, for the decision whether to overflow
    upper = values[above] if above < len(values) else 2 * values[-1] - values[-2]
    if above == len(values) and size >= upper:
        return sign | overflow
    half = (values[below] + upper) / 2
    up = {
        "rn": size > half or (size == half and below % 2 == 1),
        "rna": size >= half,
        "rd": sign != 0,
        "ru": sign == 0,
        "rz": False,
        "ro": below % 2 == 0,
    }[mode]
    code = above if up else below
    return sign | (overflow if code == len(values) else code)


def hostile_floats(count: int, seed: int) -> np.ndarray:
    """Values of every kind: codes at random, halves and neighbours of halves of narrow formats, and the edges."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, count, np.uint32)
    x[: count // 2] = (
        (rng.standard_normal(count // 2) * np.exp2(rng.integers(-28, 20, count // 2)))
        .astype(np.float32)
        .view(np.uint32)
    )
    ties = x[count // 4 : count // 2]
    keep = rng.integers(8, 23, len(ties)).astype(np.uint32)
    ties[:] = (ties >> keep | 1) << keep  # few bits set: exact values and exact ties of formats with fewer
    edge = np.array(
        [
            0,
            1,
            0x7F800000,
            0x7F800001,
            0x7FC00000,
            0x7F7FFFFF,
            0x00800000,
            0x007FFFFF,
            0x477FEFFF,
            0x477FF000,
            0x43E00000,
            0x43E80000,
            0x43E7FFFF,
            0x47600000,
            0x477FFFFF,
            0x7F7F8000,
        ],
        np.uint32,
    )
    x[: len(edge)], x[len(edge) : 2 * len(edge)] = edge, edge | 0x80000000
    return x


ENCODES = [
    line
    for line in LINES.splitlines()
    if line.startswith(
        ("CONVERT(asc_float2bfloat16", "CONVERT(asc_float2half", "CONVERT(asc_float2e4m3", "CONVERT(asc_float2e5m2")
    )
]


def controls(line: str) -> tuple[str, str, bool]:
    """Target type, rounding, saturation of a conversion's name."""
    op, to, _ = (word.strip() for word in line.split("(")[1].rstrip(")").split(","))
    words = op.split("_")
    mode = next(word for word in words if word in ("rn", "rna", "rd", "ru", "rz", "ro"))
    return to, mode, "sat" in words


def compare(found: np.ndarray, given: Sequence[float], line: str) -> None:
    to, mode, saturate = controls(line)
    form = FORMATS[to]
    for code, x in zip(found.tolist(), given, strict=True):
        wanted = rounded(x, to, mode, saturate)
        if wanted == form.nan and form.nan is not None:
            assert code & (form.sign - 1) == form.nan, (x, hex(code))
        else:
            assert code == wanted, (x, hex(code), hex(wanted))


@pytest.mark.parametrize("line", ENCODES)
def test_floats_round_to_the_right_neighbour(vector_cases: Any, line: str) -> None:
    codes = hostile_floats(2048, 1)
    found = convert(vector_cases, line, codes)
    compare(found, codes.view(np.float32).astype(np.float64).tolist(), line)


@pytest.mark.parametrize(
    ("op", "dtype"), [("asc_float2bfloat16_rn", torch.bfloat16), ("asc_float2half_rn", torch.float16)]
)
def test_the_usual_rounding_is_torch_s(vector_cases: Any, op: str, dtype: torch.dtype) -> None:
    codes = hostile_floats(65536, 2)
    found = convert(vector_cases, line_of(op), codes)
    wanted = torch.from_numpy(codes.view(np.float32)).to(dtype).float().numpy()
    same_floats(floats(found, dtype), wanted)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("asc_float2e4m3_rn_sat", torch.float8_e4m3fn), ("asc_float2e5m2_rn_sat_v3", torch.float8_e5m2)],
)
def test_saturated_fp8_is_a_clamp_and_torch_s_rounding(vector_cases: Any, op: str, dtype: torch.dtype) -> None:
    codes = hostile_floats(65536, 3)
    found = convert(vector_cases, line_of(op), codes)
    x = torch.nan_to_num(torch.from_numpy(codes.view(np.float32)), nan=0.0)
    limit = torch.finfo(dtype).max
    assert (found == x.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()).all()


@pytest.mark.parametrize("line", [x for x in LINES.splitlines() if "2e2m1x2" in x or "2e1m2x2" in x])
def test_every_bfloat16_rounds_to_fp4(vector_cases: Any, line: str) -> None:
    part = PARTS.get(line.split("(")[1].split(",")[0].rpartition("_")[2], 0)
    groups = vector_cases(line, WORDS.reshape(512, 128))[:, :256].reshape(512, 64, 4)
    for other in set(range(4)) - {part}:
        assert not groups[:, :, other].any()
    compare(nibbles(groups[:, :, part].reshape(-1)), floats(WORDS, torch.bfloat16).astype(np.float64).tolist(), line)


@pytest.mark.parametrize(
    "op", ["asc_half2bfloat16_rn", "asc_half2bfloat16_rd", "asc_bfloat162half_rn", "asc_bfloat162half_rz_sat"]
)
def test_every_16_bit_float_rounds_to_the_other(vector_cases: Any, op: str) -> None:
    dtype = torch.float16 if op.startswith("asc_half") else torch.bfloat16
    line = line_of(op)
    compare(convert(vector_cases, line, WORDS), floats(WORDS, dtype).astype(np.float64).tolist(), line)


def test_bfloat16_to_fp8_at_once(vector_cases: Any) -> None:
    line = "VCVT(vcvt, f8e4m3, bf16, ROUND_R, RS_ENABLE, PART_EVEN, MODE_ZEROING)"
    found = convert(vector_cases, line, WORDS)
    x = torch.from_numpy(floats(WORDS, torch.bfloat16)).nan_to_num(nan=0.0).clamp(-448, 448)
    assert (found == x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()


@functools.cache
def hif8_values() -> list[float]:
    """HiFloat8's 256 values, written from table 1 of its paper: prefix, exponent, mantissa, as strings of bits."""
    values = []
    for code in range(256):
        word = f"{code:08b}"
        sign, word = -1.0 if word[0] == "1" else 1.0, word[1:]
        if word.startswith("0000"):
            exponent = int(word[4:], 2)
            values.append(sign * 2.0 ** (exponent - 23) if exponent else (math.nan if sign < 0 else 0.0))
            continue
        prefix, width = next(
            (p, w) for p, w in [("0001", 0), ("001", 1), ("01", 2), ("10", 3), ("11", 4)] if word.startswith(p)
        )
        rest = word[len(prefix) :]
        field, mantissa = rest[:width], rest[width:]
        exponent = (-1 if field[:1] == "1" else 1) * int("1" + field[1:], 2) if width else 0
        values.append(sign * math.ldexp(1 + int(mantissa, 2) / 2 ** len(mantissa), exponent))
    values[0x6F], values[0xEF] = math.inf, -math.inf
    return values


def test_every_hifloat8_code_decodes_as_its_paper_says(vector_cases: Any) -> None:
    wanted = np.array(hif8_values(), np.float32)
    same_floats(convert(vector_cases, line_of("asc_hif82float"), BYTES), wanted)
    found = convert(vector_cases, line_of("asc_hif82half"), BYTES)
    same_floats(floats(found, torch.float16), wanted)


@functools.cache
def positive_hif8() -> list[tuple[float, int]]:
    return sorted((v, code) for code, v in enumerate(hif8_values()[:128]) if math.isfinite(v))


def away_hif8(x: float, saturate: bool) -> int:
    if math.isnan(x):
        return 0 if saturate else 0x80
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    overflow = sign | (0x6E if saturate else 0x6F)
    size = abs(x)
    if size >= 1.25 * 2.0**15:  # half way from the largest value to infinity's place
        return overflow
    positive = positive_hif8()
    place = bisect_left(positive, (size, -1))
    if place == len(positive):
        return sign | positive[-1][1]
    if place and positive[place][0] != size:
        below, above = Fraction(positive[place - 1][0]), Fraction(positive[place][0])
        # a tie lies between mantissas, so below a power of two where only powers are left
        place -= Fraction(size) - below < above - Fraction(size)
    code = positive[place][1]
    return sign | code if code else 0


def test_floats_and_halves_round_away_to_hifloat8(vector_cases: Any) -> None:
    codes = hostile_floats(4096, 4)
    found = convert(vector_cases, line_of("asc_float2hif8_rna"), codes)
    for code, x in zip(found.tolist(), codes.view(np.float32).astype(np.float64).tolist(), strict=True):
        assert code == away_hif8(x, False), (x, hex(code), hex(away_hif8(x, False)))
    found = convert(vector_cases, line_of("asc_half2hif8_rna"), WORDS)
    for code, x in zip(found.tolist(), floats(WORDS, torch.float16).astype(np.float64).tolist(), strict=True):
        assert code == away_hif8(x, False), (x, hex(code), hex(away_hif8(x, False)))


def hybrid_hif8(bits: int) -> int:
    """A half under hybrid rounding, as Cast.md spells it: the last bit, and a one after it, are the threshold."""
    sign, field, fraction = bits >> 15 << 7, bits >> 10 & 31, bits & 1023
    threshold = (bits & 1) * 2 + 1
    if (
        field == 31 or field == 0
    ):  # its special values are those of the other rounding; subnormal halves are not spelt out
        return -1
    exponent = field - 15
    width = 3 if abs(exponent) <= 3 else 2 if abs(exponent) <= 7 else 1
    mantissa, tail = fraction >> (10 - width), fraction >> (8 - width) & 3
    up = bool(fraction >> (9 - width) & 1) if width == 3 else tail >= threshold
    value = (1 + (mantissa + up) / 2**width) * 2.0**exponent
    return sign | (0x6F if value >= 1.5 * 2**15 else hif8_values().index(value))


def test_halves_round_hybrid_as_the_document_spells_it(vector_cases: Any) -> None:
    found = convert(vector_cases, line_of("asc_half2hif8_rh"), WORDS)
    for code, bits in zip(found.tolist()[::7], WORDS.tolist()[::7], strict=True):
        wanted = hybrid_hif8(bits)
        assert wanted in (-1, code), (hex(bits), hex(code), hex(wanted))


def test_hybrid_rounding_takes_the_low_bits_as_its_number(vector_cases: Any) -> None:
    # 2^9 * (1 + 1/4): one mantissa bit, the rest is a quarter, so 14 bits of it are 0x1000.
    rest_below = 0x1000 << 8  # bits 21..8 of a float under one mantissa bit
    base = (127 + 9) << 23 | rest_below
    codes = np.full(64, base, np.uint32)
    codes[1] |= 0x0FFF  # threshold below the rest: up
    codes[2] |= 0x3F  # and still below
    # the threshold is the low 14 bits, of which the top six lie under the rest's lowest
    codes[3] = (127 + 9) << 23 | 0x0000 << 8 | 0x0001  # rest 0, threshold 1: down
    found = convert(vector_cases, line_of("asc_float2hif8_rh_sat"), codes)
    values = [hif8_values()[code] for code in found.tolist()]
    assert values[0] == 2.0**9 * 1.5
    assert values[1] == 2.0**9 * 1.5
    assert values[2] == 2.0**9 * 1.5
    assert values[3] == 2.0**9


def whole_number(x: float, mode: str) -> int:
    below = math.floor(x)
    rest = Fraction(x) - below
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and below % 2 == 1),
        "rna": rest > half or (rest == half and x > 0),
        "rd": False,
        "ru": rest > 0,
        "rz": rest > 0 and x < 0,
    }[mode]
    return below + up


INTEGERS = [
    line
    for line in LINES.splitlines()
    if line.startswith(
        (
            "CONVERT(asc_float2int",
            "CONVERT(asc_half2int8",
            "CONVERT(asc_half2uint8",
            "CONVERT(asc_half2int32",
            "CONVERT(asc_bfloat162int32",
        )
    )
]
READ: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f32": lambda c: c.view(np.float32),
    "f16": lambda c: c.view(np.float16),
    "bf16": lambda c: floats(c, torch.bfloat16),
}


@pytest.mark.parametrize("line", INTEGERS)
def test_floats_to_integers(vector_cases: Any, line: str) -> None:
    source = line.rstrip(")").rpartition(",")[2].strip()
    to, mode, saturate = controls(line)
    codes = hostile_floats(4096, 5) if source == "f32" else WORDS
    found = convert(vector_cases, line, codes)
    bits = 8 * size_of(to)
    signed = to.startswith("s")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    for code, x in zip(found.tolist(), READ[source](codes).astype(np.float64).tolist(), strict=True):
        if math.isnan(x):
            wanted = 0
        elif math.isinf(x):
            wanted = high if x > 0 else low
        else:
            wanted = whole_number(x, mode)
            wanted = min(max(wanted, low), high) if saturate else wanted
        assert code == wanted % 2**bits, (x, code, wanted)


@pytest.mark.parametrize(
    "op", ["asc_int322float_rn", "asc_int322float_rz", "asc_int642float_rn_v2", "asc_int162half_rn"]
)
def test_integers_to_floats_round(vector_cases: Any, op: str) -> None:
    line = line_of(op)
    source = line.rstrip(")").rpartition(",")[2].strip()
    dtype = np.dtype(f"i{size_of(source)}")
    rng = np.random.default_rng(6)
    x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 4096, dtype, endpoint=True)
    x[:6] = [0, -1, np.iinfo(dtype).min, np.iinfo(dtype).max, 2049, -2051]
    x[100:2000] >>= rng.integers(0, 8 * dtype.itemsize - 1, 1900).astype(dtype)
    found = convert(vector_cases, line, x.view(f"u{dtype.itemsize}"))
    if "half" in op:
        wanted = x.astype(np.float64).astype(np.float16).view(np.uint16)
    elif op.endswith("rz"):
        near = x.astype(np.float64)
        wanted32 = near.astype(np.float32)
        too_far = np.abs(wanted32.astype(np.float64)) > np.abs(near)
        wanted = np.where(too_far, np.nextafter(wanted32, np.float32(0)), wanted32).view(np.uint32)
    else:
        wanted = np.array([np.float32(v) for v in x.astype(object)], np.float32)
        exact = [Fraction(int(v)) for v in x]
        for i, (w, e) in enumerate(
            zip(wanted, exact, strict=True)
        ):  # numpy goes through float64: judge by the distance
            around = [w, np.nextafter(w, np.float32(-np.inf)), np.nextafter(w, np.float32(np.inf))]
            best = min(around, key=lambda c: (abs(Fraction(float(c)) - e), int(np.float32(c).view(np.uint32)) % 2))
            wanted[i] = best
        wanted = wanted.view(np.uint32)
    assert (found == wanted).all()


WIDEN = [
    "asc_int162float_v2",
    "asc_uint82half",
    "asc_int82int32_v3",
    "asc_uint82uint16_v2",
    "asc_int322int64_v2",
    "asc_int162uint32",
]
NARROW = ["asc_int322int16", "asc_int322uint8_sat_v3", "asc_uint322int16_sat_v2", "asc_int642int32_sat"]
NUMPY = {
    "f16": "f2",
    "f32": "f4",
    "s8": "i1",
    "u8": "u1",
    "s16": "i2",
    "u16": "u2",
    "s32": "i4",
    "u32": "u4",
    "s64": "i8",
}


@pytest.mark.parametrize(
    "line", [line_of(op) for op in WIDEN + NARROW] + ["VCVT(vcvt, u8, s16, RS_DISABLE, PART_ODD, MODE_ZEROING)"]
)
def test_integers_widen_and_narrow(vector_cases: Any, line: str) -> None:
    _, to, source = (word.strip() for word in line.split("(")[1].rstrip(")").split(",")[:3])
    dtype, target = np.dtype(NUMPY[source]), np.dtype(NUMPY[to])
    rng = np.random.default_rng(7)
    x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 4096, dtype, endpoint=True)
    x[: 4096 // 2] >>= rng.integers(0, 8 * dtype.itemsize - 1, 2048).astype(dtype)
    found = convert(vector_cases, line, x.view(f"u{dtype.itemsize}")).view(target)
    if "_sat" in line or to == "u32":  # signed to unsigned, wider: only the saturating form exists
        x = np.clip(x.astype(object), int(np.iinfo(target).min), int(np.iinfo(target).max))
    assert (found == x.astype(target)).all()


def test_masks_of_conversions_are_those_of_the_source(vector_cases: Any) -> None:
    codes = (np.arange(64, dtype=np.float32) + 1).view(np.uint32)
    mask = np.zeros(256, np.uint8)
    mask[::4] = 1  # lanes of 32 bits
    found = convert(vector_cases, line_of("asc_float2bfloat16_rn"), codes, mask)
    assert (floats(found, torch.bfloat16) == np.arange(64) + 1).all()
    halves = torch.arange(1, 65).bfloat16().view(torch.int16).numpy().view(np.uint16)
    even = convert(vector_cases, line_of("asc_bfloat162float"), halves, mask)
    odd = convert(vector_cases, line_of("asc_bfloat162float_v2"), halves, mask)
    assert (even.view(np.float32) == np.arange(64) + 1).all()
    assert not odd.any()  # odd halves listen to bits 2, 6, 10, ...


def test_every_conversion_case_is_tested() -> None:
    text = Path(__file__).read_text()
    for line in LINES.splitlines():
        if not line.startswith(("CONVERT(asc_", "VCVT(")) or "reduce" in line:
            continue
        op = line.split("(")[1].split(",")[0]
        grouped = (
            line in ENCODES or line in INTEGERS or "2e2m1x2" in line or "2e1m2x2" in line or "asc_e4m32float" in op
        )
        assert grouped or op in text, line
