"""Vector intrinsics of the twin against NumPy: every lane, under masks whose bits between lanes are noise.

Floats are compared bit for bit (any nan for any other); only exp and ln, which the device approximates, have a bound.
Conversions have a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

LINES = Path(__file__).with_name("vector_kernels.asc").read_text().split("// cases\n")[1].split("// end of cases")[0]
TYPES = {
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "bf16": np.uint16,
    "f8e4m3": np.uint8,
}
ROUNDS = 6
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1.5, 2.5, -2.5, 0.5, 65504.0, 3e38, -3e38, 1e-40, -1e-40, 2**-126],
    np.float32,
)


def lines(kind: str) -> list[str]:
    return [line for line in LINES.splitlines() if line.startswith(kind + "(")]


def parts(line: str) -> list[str]:
    return [word.strip() for word in line.split("(")[1].rstrip(")").split(",")]


def to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def real(x: np.ndarray, kind: str) -> np.ndarray:
    """The values of a register: bfloat16 codes as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else x


def source(kind: str, seed: int, *, positive: bool = False) -> np.ndarray:
    """[ROUNDS, lanes] of a type, special values first."""
    rng = np.random.default_rng(seed)
    lanes = 256 // np.dtype(TYPES[kind]).itemsize
    if kind not in ("f16", "f32", "bf16"):
        info = np.iinfo(TYPES[kind])
        x = rng.integers(info.min, info.max, (ROUNDS, lanes), TYPES[kind], endpoint=True)
        x[0, :4] = [info.min, info.max, 0, 1]
        return x
    x = (rng.standard_normal((ROUNDS, lanes)) * np.exp(rng.uniform(-6, 6, (ROUNDS, lanes)))).astype(np.float32)
    head = rng.permutation(SPECIAL)
    x[0, : len(head)] = head
    x = np.abs(x) if positive else x
    with np.errstate(over="ignore"):
        return to_bf16(x) if kind == "bf16" else x.astype(TYPES[kind])


def noise(seed: int) -> np.ndarray:
    """[ROUNDS, 256] of predicate bits; the first round has all, the second none."""
    bits = np.random.default_rng(seed).integers(0, 2, (ROUNDS, 256), np.uint8)
    bits[0], bits[1] = 1, 0
    return bits


def lanes_of(mask: np.ndarray, kind: str) -> np.ndarray:
    return mask[:, :: np.dtype(TYPES[kind]).itemsize].astype(bool)


def lower(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return to_bf16(x)
    return x.astype(TYPES[kind])


def result(out: np.ndarray, kind: str, register: int = 0) -> np.ndarray:
    return np.ascontiguousarray(out[:, 256 * register : 256 * (register + 1)]).view(TYPES[kind])


def assert_same(found: np.ndarray, wanted: np.ndarray, kind: str) -> None:
    """Equal bits, or both nan."""
    a, b = real(found, kind), real(np.ascontiguousarray(wanted), kind)
    same = found.view(np.uint8).reshape(*found.shape, -1) == wanted.astype(found.dtype).view(np.uint8).reshape(
        *found.shape, -1
    )
    same = same.all(-1)
    if np.issubdtype(a.dtype, np.floating):
        same |= np.isnan(a) & np.isnan(b)
    where = np.argwhere(~same)
    assert not len(where), f"lane {where[0]}: {a[tuple(where[0])]!r}, wanted {b[tuple(where[0])]!r}"


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.zeros_like(x), x), x)


def extreme(a: np.ndarray, b: np.ndarray, largest: bool) -> np.ndarray:
    chosen = np.maximum(a, b) if largest else np.minimum(a, b)
    if not np.issubdtype(a.dtype, np.floating):
        return chosen
    zero = (a == 0) & (b == 0)
    minus = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
    return np.where(zero, np.where(minus, a.dtype.type(-0.0), a.dtype.type(0.0)), chosen)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not np.issubdtype(a.dtype, np.floating):
        return np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(np.int64).astype(a.dtype)
    a, b = a.astype(np.float32), b.astype(np.float32)
    return flush(a / flush(b))


def bitwise(f: Callable[[Any, Any], Any]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def apply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return np.asarray(f(a.view(bits), b.view(bits)), bits).view(a.dtype)

    return apply


def leaky(a: np.ndarray, b: Any) -> np.ndarray:
    return np.where(a > 0, a, a * b)


BINARY: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "asc_add": lambda a, b: a + b,
    "asc_sub": lambda a, b: a - b,
    "asc_mul": lambda a, b: a * b,
    "asc_div": divide,
    "asc_max": lambda a, b: extreme(a, b, True),
    "asc_min": lambda a, b: extreme(a, b, False),
    "asc_prelu": leaky,
    "asc_leakyrelu": leaky,
    "asc_abs_sub": lambda a, b: np.abs(a - b),
    "asc_and": bitwise(lambda a, b: a & b),
    "asc_or": bitwise(lambda a, b: a | b),
    "asc_xor": bitwise(lambda a, b: a ^ b),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", [x for x in lines("BINARY") if parts(x)[0] not in ("asc_select", "asc_exp_sub")])
def test_binary_operations(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, b, mask = source(kind, 1), source(kind, 2), noise(3)
    if op == "asc_div" and kind not in ("f16", "f32"):
        b[b == 0] = 3
    found = result(vector_cases(line, a, b, mask=mask), kind)
    wanted = BINARY[op](real(a, kind), real(b, kind))
    assert_same(found, np.where(lanes_of(mask, kind), lower(wanted, kind), 0), kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", lines("REAL"))
@pytest.mark.parametrize("value", [3.0, -7.0])
def test_operations_with_a_scalar(vector_cases: Any, line: str, value: float) -> None:
    op, kind = parts(line)
    a, mask = source(kind, 4), noise(5)
    found = result(vector_cases(line, a, mask=mask, real=value), kind)
    scalar = np.full_like(real(a, kind), value)
    wanted = BINARY[op.removesuffix("_scalar")](real(a, kind), scalar)
    assert_same(found, np.where(lanes_of(mask, kind), lower(wanted, kind), 0), kind)


def round_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + np.where(np.abs(x) < 2**23, 0.5, 0)), x).astype(x.dtype)


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "asc_abs": np.abs,
    "asc_neg": lambda a: -a,
    "asc_relu": lambda a: np.where(a > 0, a, a.dtype.type(0)) + np.where(a != a, a, a.dtype.type(0)),
    "asc_sqrt": lambda a: flush(np.sqrt(flush(a.astype(np.float32)))),
    "asc_not": lambda a: ~a,
    "asc_rint": np.rint,
    "vtrc": np.rint,
    "asc_round": round_away,
    "asc_floor": np.floor,
    "asc_ceil": np.ceil,
    "asc_trunc": np.trunc,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", [x for x in lines("UNARY") + lines("WHOLE_NUMBER") if parts(x)[0] in UNARY])
def test_unary_operations(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)[:2]
    a, mask = source(kind, 6), noise(7)
    found = result(vector_cases(line, a, mask=mask), kind)
    wanted = UNARY[op](real(a, kind))
    assert_same(found, np.where(lanes_of(mask, kind), lower(wanted, kind), 0), kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("line", "function"), [("UNARY(asc_exp, f32)", np.exp), ("UNARY(asc_ln, f32)", np.log)])
def test_exp_and_ln_are_within_one_ulp_and_flush_subnormals(
    vector_cases: Any, line: str, function: Callable[[np.ndarray], np.ndarray]
) -> None:
    a = source("f32", 8)
    a[1] = np.random.default_rng(9).uniform(-100, 100, a.shape[1])
    found = result(vector_cases(line, a), "f32")
    given = flush(a) if function is np.log else a
    exact = function(given.astype(np.float64))
    wanted = flush(exact.astype(np.float32))
    finite = np.isfinite(wanted) & (wanted != 0)
    assert_same(np.where(finite, np.float32(0), found), np.where(finite, np.float32(0), wanted), "f32")
    ulp = np.spacing(np.abs(wanted[finite])).astype(np.float64)
    assert (np.abs(found[finite].astype(np.float64) - exact[finite]) <= ulp).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exp_of_halves_and_of_differences(vector_cases: Any) -> None:
    a = source("f16", 10)
    found = result(vector_cases("UNARY(asc_exp, f16)", a), "f16")
    assert_same(found, np.exp(a.astype(np.float64)).astype(np.float16), "f16")
    x, y = source("f32", 11), source("f32", 12)
    found = result(vector_cases("BINARY(asc_exp_sub, f32)", x, y), "f32")
    wanted = flush(np.exp((x - y).astype(np.float64)).astype(np.float32))
    np.testing.assert_allclose(found, wanted, rtol=2e-7)


def shifted(a: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    wide, by = a.astype(object), by.astype(object)
    out = np.empty(a.shape, object)
    for i in np.ndindex(a.shape):
        x, n = int(wide[i]), int(by[i])
        signed = np.issubdtype(a.dtype, np.signedinteger)
        if n >= bits:
            out[i] = -1 if not left and x < 0 else 0
        elif not left:
            out[i] = x >> n
        else:  # a signed value keeps its sign bit
            low = (x << n) & ((1 << (bits - signed)) - 1)
            out[i] = low - (1 << (bits - 1)) if signed and x < 0 else low
    return out.astype(a.dtype)


@pytest.mark.parametrize("line", lines("SHIFT"))
def test_shifts_by_lanes(vector_cases: Any, line: str) -> None:
    op, kind, amount = parts(line)
    a, mask = source(kind, 13), noise(14)
    by = np.random.default_rng(15).integers(0, 8 * a.dtype.itemsize + 3, a.shape).astype(TYPES[amount])
    found = result(vector_cases(line, a, by, mask=mask), kind)
    assert_same(found, np.where(lanes_of(mask, kind), shifted(a, by, op.endswith("left")), 0), kind)


@pytest.mark.parametrize("line", lines("WHOLE"))
@pytest.mark.parametrize("by", [0, 3, 15, 40])
def test_shifts_by_a_scalar(vector_cases: Any, line: str, by: int) -> None:
    op, kind = parts(line)
    a, mask = source(kind, 16), noise(17)
    found = result(vector_cases(line, a, mask=mask, whole=by), kind)
    wanted = shifted(a, np.full(a.shape, by), "left" in op)
    assert_same(found, np.where(lanes_of(mask, kind), wanted, 0), kind)


COMPARE: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "asc_eq": lambda a, b: a == b,
    "asc_ne": lambda a, b: a != b,
    "asc_lt": lambda a, b: a < b,
    "asc_le": lambda a, b: a <= b,
    "asc_gt": lambda a, b: a > b,
    "asc_ge": lambda a, b: a >= b,
}


def spread(lanes: np.ndarray, kind: str) -> np.ndarray:
    """Bits of a predicate, [rounds, 32 bytes]: one a lane, zeros between."""
    size = np.dtype(TYPES[kind]).itemsize
    bits = np.zeros((*lanes.shape, size), np.uint8)
    bits[..., 0] = lanes
    return np.packbits(bits.reshape(len(lanes), -1), axis=-1, bitorder="little")


@pytest.mark.parametrize("line", lines("COMPARE") + lines("COMPARE_REAL"))
def test_compares(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, b, mask = source(kind, 18), source(kind, 19), noise(20)
    b[2:] = a[2:]
    scalar = op.endswith("_scalar")
    value = 5 if kind == "u32" else 1.5
    if scalar:
        a[3, :8] = value
        out = vector_cases(line, a, mask=mask, real=value)
        holds = COMPARE[op.removesuffix("_scalar")](a, a.dtype.type(value))
    else:
        out = vector_cases(line, a, b, mask=mask)
        holds = COMPARE[op](real(a, kind), real(b, kind))
    assert (out[:, :32] == spread(holds & lanes_of(mask, kind), kind)).all()


@pytest.mark.parametrize("line", [x for x in lines("BINARY") if "asc_select" in x])
def test_select_takes_the_second_where_the_mask_is_zero(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    a, b, mask = source(kind, 21), source(kind, 22), noise(23)
    assert_same(result(vector_cases(line, a, b, mask=mask), kind), np.where(lanes_of(mask, kind), a, b), kind)


def test_copy_keeps_what_the_mask_leaves_out(vector_cases: Any) -> None:
    a, old, mask = source("f32", 24), source("f32", 25), noise(26)
    found = result(vector_cases("ONTO(asc_copy, f32, f32)", a, a, old, mask=mask), "f32")
    assert_same(found, np.where(lanes_of(mask, "f32"), a, old), "f32")


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to their type: by rational numbers where float32 could hide a second rounding."""
    near = (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(a.dtype)
    if a.dtype != np.float32:
        return near
    for i in np.argwhere(np.isfinite(near) & (near != 0)):
        x, y, z, guess = (v[tuple(i)] for v in (a, b, c, near))
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [guess, *(np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf))]
        around = [candidate for candidate in around if np.isfinite(candidate)]
        near[tuple(i)] = min(around, key=lambda candidate: abs(Fraction(float(candidate)) - exact))
    return near


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", lines("TERNARY") + lines("MERGED"))
def test_multiply_add_rounds_once(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, b, d, mask = source(kind, 27), source(kind, 28), source(kind, 29), noise(30)
    x, y, z = real(a, kind), real(b, kind), real(d, kind)
    z = np.where(np.arange(z.shape[1]) % 3 == 1, (-x * y).astype(z.dtype), z)  # cancellation shows the second rounding
    d = lower(z, kind)
    z = real(d, kind)
    found = result(vector_cases(line, a, b, d, mask=mask), kind)
    wanted = lower(fused(x, y, z) if op == "vmula" else fused(z, x, y), kind)
    otherwise = d if line.startswith("MERGED") else np.zeros_like(d)
    assert_same(found, np.where(lanes_of(mask, kind), wanted, otherwise), kind)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", lines("ONTO_REAL"))
def test_axpy(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    a, d, mask = source(kind, 31), source(kind, 32), noise(33)
    found = result(vector_cases(line, a, a, d, mask=mask, real=0.75), kind)
    wanted = fused(a, np.full_like(a, 0.75), d)
    assert_same(found, np.where(lanes_of(mask, kind), wanted, 0), kind)


@pytest.mark.parametrize("line", lines("TWO_MASKED"))
def test_wide_product(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    a, b, mask = source(kind, 34), source(kind, 35), noise(36)
    out = vector_cases(line, a, b, mask=mask)
    wide = a.astype(object) * b.astype(object)
    active = lanes_of(mask, kind)
    low, high = (wide & 0xFFFFFFFF).astype(np.uint32), ((wide >> 32) & 0xFFFFFFFF).astype(np.uint32)
    assert (result(out, "u32", 0) == np.where(active, low, 0)).all()
    assert (result(out, "u32", 1) == np.where(active, high, 0)).all()


@pytest.mark.parametrize("line", lines("CARRY") + lines("CARRIED"))
def test_carries(vector_cases: Any, line: str) -> None:
    op = parts(line)[0]
    a, b, mask = source("u32", 37), source("u32", 38), noise(39)
    a[0, :3], b[0, :3] = [0xFFFFFFFF, 0, 5], [1, 0, 5]
    carry_in = np.random.default_rng(40).integers(0, 2, 256, np.uint8)
    out = vector_cases(line, a, b, mask=mask, predicates=[carry_in])
    add = "add" in op
    extra = carry_in[::4] if line.startswith("CARRIED") else np.array(0 if add else 1)
    total = a.astype(np.uint64) + (b if add else ~b).astype(np.uint64) + extra.astype(np.uint64)
    active = lanes_of(mask, "u32")
    assert (result(out, "u32") == np.where(active, total.astype(np.uint32), 0)).all()
    assert (out[:, 256:288] == spread((total >> np.uint64(32)).astype(bool) & active, "u32")).all()


@pytest.mark.parametrize("line", [x for x in lines("ONTO") if "histogram" in x])
def test_histograms_add_to_what_is_there(vector_cases: Any, line: str) -> None:
    op = parts(line)[0]
    a, old, mask = source("u8", 41), source("u16", 42), noise(43)
    found = result(vector_cases(line, a, a, old, mask=mask), "u16")
    counts = np.stack([np.bincount(a[r][mask[r] == 1], minlength=256) for r in range(ROUNDS)])
    if "cumulative" in op:
        counts = counts.cumsum(-1)
    half = counts[:, 128:] if op.endswith("1") else counts[:, :128]
    assert (found == (old + half).astype(np.uint16)).all()


def tree(x: np.ndarray) -> np.ndarray:
    while x.shape[-1] > 1:
        x = (x[..., ::2] + x[..., 1::2]).astype(x.dtype)
    return x[..., 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", [x for x in lines("CONVERT") if "reduce_sum" in x])
def test_sums_are_trees_of_neighbours(vector_cases: Any, line: str) -> None:
    op, to, kind = parts(line)
    x, mask = source(kind, 44), noise(45)
    if kind == "f32":
        x[2:] = np.abs(x[2:]) * 1e6  # rounding shows the order
    active = lanes_of(mask, kind)
    terms = np.where(active, x, np.zeros_like(x)).astype(TYPES[to])
    group = {"asc_reduce_sum": terms.shape[1], "asc_reduce_sum_datablock": terms.shape[1] // 8}.get(op, 2)
    sums = tree(terms.reshape(ROUNDS, -1, group))
    found = result(vector_cases(line, x, mask=mask), to)
    wanted = np.zeros_like(found)
    wanted[:, : sums.shape[1]] = sums
    assert_same(found, wanted, to)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", [x for x in lines("CONVERT") if "reduce_max" in x or "reduce_min" in x])
def test_extremes_and_their_lanes(vector_cases: Any, line: str) -> None:
    op, kind, _ = parts(line)
    x, mask = source(kind, 46), noise(47)
    x[2, ::7] = x[2].max() if "max" in op else x[2].min()  # ties: the lowest lane answers
    lanes, floating = x.shape[1], kind.startswith("f")
    worst: Any = (
        (-np.inf if "max" in op else np.inf)
        if floating
        else getattr(np.iinfo(x.dtype), "min" if "max" in op else "max")
    )
    given = np.where(lanes_of(mask, kind), x, x.dtype.type(worst))
    group = lanes // 8 if op.endswith("datablock") else lanes
    found = result(vector_cases(line, x, mask=mask), kind)
    blocks = given.reshape(ROUNDS, -1, group)
    best = np.argmax(blocks, -1) if "max" in op else np.argmin(blocks, -1)  # the first nan, or the first of equals
    values = np.take_along_axis(blocks, best[..., None], -1)[..., 0]
    wanted = np.zeros_like(found)
    wanted[:, : values.shape[1]] = values
    if group == lanes:
        index = np.dtype(f"u{x.dtype.itemsize}")
        active = lanes_of(mask, kind)
        wanted.view(index)[:, 1] = np.where(active.any(-1), best[:, 0], 0)
    assert_same(found, wanted, kind)


@pytest.mark.parametrize("line", lines("FILL"))
def test_fill_under_a_mask(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    mask = noise(48)[3]
    found = result(vector_cases(line, mask=mask, real=-2.5), kind)
    value = lower(np.array([-2.5], np.float32), kind)
    assert_same(found, np.where(lanes_of(mask[None], kind), value, 0), kind)


@pytest.mark.parametrize("line", lines("RAMP"))
def test_ramps(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    found = result(vector_cases(line, real=120), kind)
    steps = np.arange(found.shape[1])
    wanted = {"asc_duplicate_scalar": 0 * steps, "asc_arange": steps, "asc_arange_descend": steps[::-1]}[op] + 120
    assert_same(found, wanted.astype(TYPES[kind])[None], kind)


@pytest.mark.parametrize("line", [x for x in lines("UNARY") if "duplicate" in x])
def test_duplicate_a_lane(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, mask = source(kind, 49), noise(50)
    lane = a[:, -1:] if op.endswith("highest") else a[:, :1]
    assert_same(result(vector_cases(line, a, mask=mask), kind), np.where(lanes_of(mask, kind), lane, 0), kind)


@pytest.mark.parametrize("line", [x for x in lines("UNARY") if "squeeze" in x])
def test_squeeze(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    a, mask = source(kind, 51), noise(52)
    wanted = np.zeros_like(a)
    for row, active, target in zip(a, lanes_of(mask, kind), wanted, strict=True):
        target[: active.sum()] = row[active]
    assert_same(result(vector_cases(line, a, mask=mask), kind), wanted, kind)


@pytest.mark.parametrize("line", lines("FROM_MASK"))
def test_unsqueeze_counts_the_lanes_below(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    mask = noise(53)[2]
    active = lanes_of(mask[None], kind)
    wanted = (active.cumsum(-1) - active).astype(TYPES[kind])
    assert_same(result(vector_cases(line, mask=mask), kind), wanted, kind)


@pytest.mark.parametrize("line", lines("TWO"))
def test_interleaving(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, b = source(kind, 54), source(kind, 55)
    out = vector_cases(line, a, b)
    found = np.concatenate([result(out, kind, 0), result(out, kind, 1)], -1)
    if op == "asc_intlv":
        wanted = np.stack([a, b], -1).reshape(ROUNDS, -1)
    else:
        both = np.concatenate([a, b], -1)
        wanted = np.concatenate([both[:, ::2], both[:, 1::2]], -1)
    assert_same(found, wanted, kind)


@pytest.mark.parametrize("line", lines("RELAY"))
def test_packing_and_unpacking(vector_cases: Any, line: str) -> None:
    op, to, kind = parts(line)
    a = source(kind, 56)
    found = result(vector_cases(line, a), to)
    wanted = np.zeros_like(found)
    half = found.shape[1] // 2
    if "unpack" in op:
        wanted[:] = (a[:, len(a[0]) // 2 :] if "upper" in op else a[:, : len(a[0]) // 2]).astype(TYPES[to])
    else:
        wanted[:, half if "high" in op else 0 :][:, :half] = a.astype(TYPES[to])
    assert (found == wanted).all()


def memory(seed: int) -> np.ndarray:
    """[1, 768] bytes that loads read, and the same as three sources."""
    return np.random.default_rng(seed).integers(0, 256, (1, 768), np.uint8)


def loaded(op: str, data: np.ndarray, offset: int) -> np.ndarray:
    """What a load of a distribution gives; `data` is memory as elements."""
    x, size = data[offset:], data.dtype.itemsize
    lanes, block = 256 // size, 32 // size
    if op == "asc_loadalign_brc_elem":
        return np.repeat(x[:1], lanes)
    if op == "asc_loadalign_brc_datablock":
        return np.tile(x[:block], 8)
    if op == "asc_loadalign_brc_elem2datablock":
        return np.repeat(x[:8], block)
    if op == "asc_loadalign_upsample":
        return np.repeat(x[: lanes // 2], 2)
    if op == "asc_loadalign_downsample":
        return x[: 2 * lanes : 2]
    room = {"asc_loadalign_unpack": 2, "asc_loadalign_unpack4": 4}.get(op, 1)
    out = np.zeros(lanes, data.dtype)
    out[::room] = x[: lanes // room]
    return out


@pytest.mark.parametrize("line", lines("LOAD"))
@pytest.mark.parametrize("blocks", [0, 1])
def test_loads(vector_cases: Any, line: str, blocks: int) -> None:
    op, kind = parts(line)
    data = memory(57)
    elements = data[0].view(TYPES[kind])
    # a broadcast starts at any element; elements to blocks at a multiple of eight; the others at a block
    offset = blocks * (1 if op.endswith("brc_elem") else 32 // elements.itemsize)
    out = vector_cases(line, *np.split(data, 3, -1), whole=offset)
    assert (result(out, kind) == loaded(op, elements, offset)).all()


@pytest.mark.parametrize("line", lines("LOAD_TWO"))
def test_loads_that_take_apart(vector_cases: Any, line: str) -> None:
    kind = parts(line)[1]
    data = memory(58)
    elements = data[0, :512].view(TYPES[kind])
    out = vector_cases(line, *np.split(data, 3, -1))
    for register in (0, 1):
        assert result(out, kind, register).tobytes() == elements[register::2].tobytes()


@pytest.mark.parametrize("line", lines("LOAD_POST"))
def test_loads_that_move_the_pointer(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    data = memory(59)
    elements = data[0].view(np.dtype(f"u{np.dtype(TYPES[kind]).itemsize}"))
    out = vector_cases(line, *np.split(data, 3, -1), whole=16)
    for register in (0, 1):
        wanted = loaded(op.removesuffix("_postupdate"), elements, 16 * register)
        assert (result(out, kind, register).view(wanted.dtype) == wanted).all()


def test_loads_of_blocks_apart(vector_cases: Any) -> None:
    data, mask = memory(60), noise(61)[2]
    mask[64:96] = 0  # the third block is not touched
    blocks = data[0, 32:].view(np.uint32).reshape(-1, 8)[::2][:8].reshape(-1)  # stride 2, base one block on
    blocks = np.concatenate([blocks, np.zeros(64 - len(blocks), np.uint32)])
    out = vector_cases("LOAD_BLOCKS(asc_loadalign, f32)", *np.split(data, 3, -1), mask=mask)
    assert (result(out, "u32")[0] == np.where(lanes_of(mask[None], "u32")[0], blocks, 0)).all()


@pytest.mark.parametrize("line", lines("LOAD_MASK"))
def test_loads_of_predicates(vector_cases: Any, line: str) -> None:
    op = parts(line)[0]
    data = memory(62)
    bits = np.unpackbits(data[0, 32:], bitorder="little")
    wanted = {
        "asc_loadalign": bits[:256],
        "asc_loadalign_upsample": np.repeat(bits[:128], 2),
        "asc_loadalign_downsample": bits[:512:2],
    }[op]
    out = vector_cases(line, *np.split(data, 3, -1), whole=32)
    assert (np.unpackbits(out[0, :32], bitorder="little") == wanted).all()


@pytest.mark.parametrize("line", lines("STORE"))
def test_stores_touch_active_lanes_alone(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a, mask = source(kind, 63), noise(64)
    keep = {"asc_storealign_pack": 2, "asc_storealign_pack_quarter": 4}.get(op, 1)
    if keep > 1:  # packing is defined for a run of lanes from the lowest
        mask = (np.arange(256) < np.array([256, 0, 100, 4, 20, 252])[:, None]).astype(np.uint8)
    size = a.dtype.itemsize
    out = vector_cases(line, a, mask=mask, whole=32 // size)
    for found, row, active in zip(out, a, lanes_of(mask, kind), strict=True):
        wanted = np.full(1024, 0xA5, np.uint8)
        lanes = row.view(np.uint8).reshape(-1, size)[:, : size // keep]
        place = wanted[32:][: len(lanes) * (size // keep)].reshape(lanes.shape)
        place[active] = lanes[active]
        assert (found == wanted).all()


@pytest.mark.parametrize("line", lines("STORE_POST"))
def test_stores_that_move_the_pointer(vector_cases: Any, line: str) -> None:
    op, kind = parts(line)
    a = source(kind, 65)
    size = 2 if "pack" in op else 4
    out = vector_cases(line, a, whole=64)
    once = a.view(np.uint8).reshape(ROUNDS, -1, 4)[:, :, :size].reshape(ROUNDS, -1)
    for begin in (0, 256):  # 64 elements of the pointer's type are 256 bytes
        assert (out[:, begin : begin + once.shape[1]] == once).all()


def test_stores_of_a_part(vector_cases: Any) -> None:
    a = source("bf16", 66)
    out = vector_cases("STORE_PLAIN(asc_storealign_1st, bf16)", a, whole=3)
    assert (out[:, 6:8].copy().view(np.uint16)[:, 0] == a[:, 0]).all()
    assert (out[:, :6] == 0xA5).all()
    assert (out[:, 8:] == 0xA5).all()
    a = source("s16", 67)
    out = vector_cases("STORE_PLAIN(asc_store, s16)", a, whole=5)
    assert (out[:, :10] == a.view(np.uint8)[:, :10]).all()
    assert (out[:, 10:] == 0xA5).all()


def test_stores_of_two_registers_and_of_blocks_apart(vector_cases: Any) -> None:
    a, b = source("bf16", 68), source("bf16", 69)
    out = vector_cases("STORE_TWO(asc_storealign_intlv, bf16)", a, b, mask=np.zeros(256, np.uint8))
    assert (out[:, :512].copy().view(np.uint16) == np.stack([a, b], -1).reshape(ROUNDS, -1)).all()
    a, mask = source("f32", 70), noise(71)
    out = vector_cases("STORE_BLOCKS(asc_storealign, f32)", a, mask=mask)
    for found, row, active in zip(out, a, lanes_of(mask, "f32"), strict=True):
        wanted = np.full(1024, 0xA5, np.uint8)
        blocks = wanted[32:544].reshape(8, 64)[:, :32].view(np.uint32)  # base one block on, stride two
        blocks[active.reshape(8, 8)] = row.view(np.uint32)[active]
        assert (found == wanted).all()


def test_stores_of_predicates(vector_cases: Any) -> None:
    mask = noise(72)[2]
    out = vector_cases("STORE_MASK(asc_storealign, u8)", mask=mask, whole=32)
    assert (np.unpackbits(out[0, 32:64], bitorder="little") == mask).all()
    out = vector_cases("STORE_MASK(asc_storealign_pack, u8)", mask=mask, whole=16)
    assert (np.unpackbits(out[0, 16:32], bitorder="little") == mask[::2]).all()
    assert (out[0, 32:] == 0xA5).all()


@pytest.mark.parametrize("line", [x for x in lines("GATHER") if "datablock" not in x])
def test_gathers_from_memory(vector_cases: Any, line: str) -> None:
    _, to, kind, index = parts(line)
    data, mask = memory(73)[:, :512], noise(74)[3]
    elements = data[0].view(TYPES[kind])
    lanes = 256 // np.dtype(TYPES[index]).itemsize
    at = np.random.default_rng(75).integers(0, len(elements), (1, lanes)).astype(TYPES[index])
    active = lanes_of(mask[None], index)[0]
    at[0, ~active] = np.iinfo(at.dtype).max  # what the mask leaves out is not read
    out = vector_cases(line, *np.split(data, 2, -1), at, mask=mask)
    wanted = np.where(active, elements[np.where(active, at[0], 0)].astype(TYPES[to]), 0)
    assert_same(result(out, to)[0], wanted.astype(TYPES[to]), to)


def test_gathers_of_blocks_listen_to_eight_lanes_of_the_mask(vector_cases: Any) -> None:
    data, mask = memory(76)[:, :512], np.zeros(256, np.uint8)
    mask[[0, 4, 12, 28]] = 1
    at = np.zeros((1, 64), np.uint32)
    at[0, :8] = np.array([3, 3, 9, 15, 1, 2, 4, 0]) * 32
    out = vector_cases("GATHER(asc_gather_datablock, f32, f32, u32)", *np.split(data, 2, -1), at, mask=mask)
    blocks = data[0].reshape(-1, 32)[at[0, :8] // 32]
    blocks[[2, 4, 5, 6]] = 0
    assert (out[0, :256].reshape(8, 32) == blocks).all()


@pytest.mark.parametrize("line", lines("PERMUTE"))
def test_gathers_from_a_register_wrap(vector_cases: Any, line: str) -> None:
    _, kind, index = parts(line)
    a, at = source(kind, 77), source(index, 78)
    found = result(vector_cases(line, a, a, at), kind)
    assert (found == np.take_along_axis(a, at.astype(np.int64) % a.shape[1], -1)).all()


def test_scatters(vector_cases: Any) -> None:
    rng, mask = np.random.default_rng(79), noise(80)[4]
    a = source("f32", 81)[:1]
    at = rng.permutation(256)[:64].astype(np.uint32)[None]
    out = vector_cases("SCATTER(asc_scatter, f32, u32)", a, a, at, mask=mask)
    wanted = np.full(1024, 0xA5, np.uint8).view(np.uint32)
    active = mask[::4].astype(bool)
    wanted[at[0][active]] = a.view(np.uint32)[0][active]
    assert (out[0].view(np.uint32) == wanted).all()
    bytes_ = source("u8", 82)[:1]
    at = rng.permutation(1000)[:128].astype(np.uint16)[None]
    out = vector_cases("SCATTER(asc_scatter, u8, u16)", bytes_, bytes_, at, mask=mask)
    flat = np.full(1024, 0xA5, np.uint8)
    active = mask[::2].astype(bool)
    flat[at[0][active]] = bytes_[0, ::2][active]  # of bytes, the even lanes
    assert (out[0] == flat).all()


def test_unaligned_streams(vector_cases: Any) -> None:
    data = memory(83)
    words = data[0].view(np.uint32)
    out = vector_cases("STREAM_IN(f32)", *np.split(data, 3, -1))
    assert (result(out, "u32", 0)[0] == words[3:67]).all()
    assert (result(out, "u32", 1)[0] == words[53:117]).all()
    a, b = source("f32", 84)[:1], source("f32", 85)[:1]
    out = vector_cases("STREAM_OUT(f32)", a, b)
    wanted = np.full(256, 0xA5A5A5A5, np.uint32)
    wanted[3:53], wanted[53:58] = a.view(np.uint32)[0, :50], b.view(np.uint32)[0, :5]
    assert (out[0].view(np.uint32) == wanted).all()


def test_squeezed_streams_follow_one_another(vector_cases: Any) -> None:
    a, b, mask = source("f32", 86), source("f32", 87), noise(88)
    out = vector_cases("STREAM_SQUEEZED(f32)", a, b, mask=mask)
    for found, x, y, active in zip(out, a, b, lanes_of(mask, "f32"), strict=True):
        kept = np.concatenate([x[active], y[active]]).view(np.uint32)
        wanted = np.full(256, 0xA5A5A5A5, np.uint32)
        wanted[3 : 3 + len(kept)] = kept
        assert (found.view(np.uint32) == wanted).all()


def bits_of(out: np.ndarray, register: int = 0) -> np.ndarray:
    return np.unpackbits(out[0, 256 * register : 256 * register + 32], bitorder="little")


@pytest.mark.parametrize("line", lines("PREDICATES"))
def test_logic_of_predicates(vector_cases: Any, line: str) -> None:
    a, b, mask = noise(89)[2:5]
    wanted = {
        "asc_and": a & b & mask,
        "asc_or": (a | b) & mask,
        "asc_xor": (a ^ b) & mask,
        "asc_select": np.where(mask, a, b),
    }[parts(line)[0]]
    assert (bits_of(vector_cases(line, mask=mask, predicates=[a, b])) == wanted).all()


@pytest.mark.parametrize("line", lines("PREDICATE"))
def test_packing_of_predicates(vector_cases: Any, line: str) -> None:
    a = noise(90)[2]
    wanted = np.zeros(256, np.uint8)
    op = parts(line)[0]
    if "unpack" in op:
        wanted[::2] = a[128:] if "upper" in op else a[:128]
    else:
        wanted[128 if "high" in op else 0 :][:128] = a[::2]
    assert (bits_of(vector_cases(line, predicates=[a])) == wanted).all()


@pytest.mark.parametrize("line", lines("PREDICATE_PAIR"))
def test_interleaving_of_predicates(vector_cases: Any, line: str) -> None:
    op = parts(line)[0]
    a, b = noise(91)[2:4]
    group = int(op.rpartition("_b")[2]) // 8
    if "deintlv" in op:
        both = np.concatenate([a, b]).reshape(-1, 2, group)
        wanted = np.concatenate([both[:, 0].reshape(-1), both[:, 1].reshape(-1)])
    else:
        wanted = np.stack([a.reshape(-1, group), b.reshape(-1, group)], 1).reshape(-1)
    out = vector_cases(line, predicates=[a, b])
    assert (np.concatenate([bits_of(out, 0), bits_of(out, 1)]) == wanted).all()


@pytest.mark.parametrize("line", lines("PATTERN"))
def test_patterns(vector_cases: Any, line: str) -> None:
    pattern, bits = parts(line)
    size = int(bits) // 8
    lane = np.arange(256 // size)
    chosen = {
        "PAT_ALL": lane >= 0,
        "PAT_ALLF": lane < 0,
        "PAT_M3": lane % 3 == 0,
        "PAT_M4": lane % 4 == 0,
        "PAT_H": lane < len(lane) // 2,
        "PAT_Q": lane < len(lane) // 4,
    }
    wanted = chosen[pattern] if pattern in chosen else lane < int(pattern.removeprefix("PAT_VL"))
    found = bits_of(vector_cases(line)).reshape(-1, size)
    assert (found[:, 0] == wanted).all()
    assert not found[:, 1:].any()


@pytest.mark.parametrize("line", lines("COUNT"))
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 130, 300, 600])
def test_masks_of_a_count_take_what_they_cover(vector_cases: Any, line: str, count: int) -> None:
    size = int(parts(line)[1]) // 8
    lanes = 256 // size
    out = vector_cases(line, whole=count)
    left = count
    for register in (0, 1):
        active = bits_of(out, register).reshape(-1, size)
        assert (active[:, 0] == (np.arange(lanes) < left)).all()
        left = max(0, left - lanes)
    assert result(out, "u32", 2)[0, 0] == left


@pytest.mark.parametrize("line", lines("MASK_FROM"))
def test_predicates_from_a_register(vector_cases: Any, line: str) -> None:
    kind, part = parts(line)
    a = source(kind, 92)[2:3]
    size = a.dtype.itemsize
    block = a.view(np.uint8)[0].reshape(-1, 32 // size)[int(part)]
    wanted = np.repeat(np.unpackbits(block, bitorder="little"), size)
    assert (bits_of(vector_cases(line, a)) == wanted).all()


def test_every_case_is_tested_here_or_with_the_conversions() -> None:
    """A case that no test asks for would prove nothing."""
    kinds = {line.split("(")[0] for line in LINES.splitlines()}
    asked = {line.split("(")[0] for line in LINES.splitlines() if line.startswith(("CONVERT(asc_", "VCVT("))}
    text = Path(__file__).read_text()
    asked |= {kind for kind in kinds if f'lines("{kind}")' in text or f'"{kind}(' in text}
    assert kinds == asked
