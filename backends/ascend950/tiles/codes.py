# mypy: ignore-errors
"""Block formats: values of codes and scales, and the gated activation that ends in mxfp8.

A task is a row and a stretch of its values. A group's scale is wanted by every register that holds a part of the group,
so scales stand in the buffer once for each eight float32 lanes, and one load spreads eight of them over a register.
Greatest magnitudes are compared as integers: the order of non-negative floats is that of their bits, and NaN and Inf
come out on top, where hardware maxima may drop a NaN. Clamps are comparisons and selections for the same reason.
"""

import tilelang.ascend.language as T
from tvm.tirx.script.builder.ir import bind as _bind

from deepinfer.backends.ascend950.tiles.common import FAR, MANY, TYPES, VECTOR, named, store, turns

STRETCH = 2048
"""Values of a task, whole groups of every format and whole registers of codes."""

BLOCK = 1024
"""Values whose scales are made together: 32 groups of 32, so that their bytes fill a block of the buffer."""

GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Values under one scale."""

_NAN = 0x7FC00000


def where(condition, yes, no):
    """Lane by lane."""
    return T.simd.vsel(yes, no, condition)


def number(value, full):
    """An integer in every lane; unsigned, for shifts of signed lanes leave the sign where it is."""
    return T.simd.vdup(T.uint32(value), "uint32", full)


def as_type(dtype, register):
    """The bits of a register as lanes of another type."""
    lanes = {"uint8": 256}.get(dtype, VECTOR)
    return T.reinterpret(f"{dtype}x{lanes}", register)


def _scale_values(place, fmt, full):
    """float32 of 64 scale bytes: 2^(byte - 127) or e4m3."""
    if fmt == "nvfp4":
        return T.simd.vcvt(T.simd.vld(place, dist="UNPK4_B8"), "float32", full)
    byte = _bind(as_type("uint32", T.simd.vld(place, dist="UNPK4_B8")))
    bits = where(
        T.simd.vcmps(byte, T.uint32(0), full, "eq"), number(1 << 22, full), T.simd.vshls(byte, T.int16(23), full)
    )
    bits = where(T.simd.vcmps(byte, T.uint32(255), full, "eq"), number(_NAN, full), bits)
    return as_type("float32", bits)


def spread(scales, place, value, repeats, count=VECTOR):
    """The low `count` lanes stored `repeats` times each, two or four, so that each eight values find their scale.

    Args:
        scales: where they stand.
        place: index of the first.
        value: the lanes.
        repeats: eighths of a group.
        count: lanes in use, 32 or 64.
    """
    halves = [value]
    for _ in range({2: 1, 4: 2}[repeats]):
        halves = [half for one in halves for half in T.simd.vintlv(one, one)]
    for index, half in enumerate(halves[: count * repeats // VECTOR]):
        T.evaluate(T.simd.vsts(scales[place + index * VECTOR], half))


def _nibble_values(code, full):
    """float32 of e2m1 codes in the low nibbles of integer lanes."""
    magnitude = _bind(T.simd.vand(code, number(7, full), full))
    sign = T.simd.vshls(T.simd.vand(code, number(8, full), full), T.int16(28), full)
    bits = T.simd.vadds(T.simd.vshls(magnitude, T.int16(22), full), T.uint32(0x3F000000), full)
    bits = where(T.simd.vcmps(magnitude, T.uint32(1), full, "eq"), number(0x3F000000, full), bits)
    bits = where(T.simd.vcmps(magnitude, T.uint32(0), full, "eq"), number(0, full), bits)
    return as_type("float32", T.simd.vor(bits, sign, full))


def dequantize(fmt, kind):
    """Codes times scales."""
    group, dtype = GROUPS[fmt], TYPES[kind]
    per_byte = 1 if fmt == "mxfp8" else 2
    code_type = T.float8_e4m3fn if fmt == "mxfp8" else T.uint8
    scale_type = T.float8_e4m3fn if fmt == "nvfp4" else T.uint8
    code_pitch, scale_pitch = T.dynamic("code_pitch", "int64"), T.dynamic("scale_pitch", "int64")

    @T.prim_func
    def definition(
        codes: T.StridedTensor((MANY, MANY), (code_pitch, 1), code_type),
        scale: T.StridedTensor((MANY, MANY), (scale_pitch, 1), scale_type),
        out: T.Tensor((FAR,), dtype),
        rows: T.int32,
        width: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            given = T.alloc_shared((STRETCH // per_byte,), code_type)
            bytes_ = T.alloc_shared((STRETCH // group,), scale_type)
            scales = T.alloc_shared((STRETCH // 8,), T.float32)
            made = T.alloc_shared((STRETCH,), dtype)
            T.annotate_buffer_versions({given: 2, bytes_: 2, made: 2})
            stretches = turns(width, 0, STRETCH)
            for turn in T.serial(turns(rows * stretches, core, cores)):
                task = turn * cores + core
                row = T.truncdiv(task, stretches)
                first = T.truncmod(task, stretches) * STRETCH
                size = T.min(STRETCH, width - first)
                packed = turns(size, 0, per_byte)
                groups = turns(size, 0, group)
                start = T.truncdiv(first, per_byte)
                begin = T.truncdiv(first, group)
                place = T.int64(row) * width + first
                T.assume(row >= 0 and row < MANY and start >= 0 and size > 0 and start + packed <= MANY)
                T.assume(begin >= 0 and groups > 0 and begin + groups <= MANY and place >= 0 and place + size <= FAR)
                T.copy(codes[row, start : start + packed], given[0:packed])
                T.copy(scale[row, begin : begin + groups], bytes_[0:groups])
                with T.SimdVF():
                    full = T.simd.pset(32)
                    for step in T.serial(turns(groups, 0, VECTOR)):
                        spread(
                            scales,
                            step * VECTOR * (group // 8),
                            _bind(_scale_values(bytes_[step * VECTOR], fmt, full)),
                            group // 8,
                        )
                    T.simd.mem_bar("VST_VLD")
                    if fmt == "mxfp8":
                        for step in T.serial(turns(size, 0, VECTOR)):
                            value = T.simd.vcvt(T.simd.vld(given[step * VECTOR], dist="UNPK4_B8"), "float32", full)
                            factor = T.simd.vld(scales[step * 8], dist="E2B_B32")
                            store(made[step * VECTOR], T.simd.vmul(value, factor, full), full)
                    else:
                        for step in T.serial(turns(size, 0, 2 * VECTOR)):
                            byte = as_type("uint32", T.simd.vld(given[step * VECTOR], dist="UNPK4_B8"))
                            low, high = T.simd.vintlv(
                                _nibble_values(byte, full), _nibble_values(T.simd.vshrs(byte, T.int16(4), full), full)
                            )
                            factor = T.simd.vld(scales[step * 16], dist="E2B_B32")
                            store(made[step * 2 * VECTOR], T.simd.vmul(low, factor, full), full)
                            later = T.simd.vld(scales[step * 16 + 8], dist="E2B_B32")
                            store(made[(step * 2 + 1) * VECTOR], T.simd.vmul(high, later, full), full)
                T.copy(made[0:size], out[place : place + size])

    return named(definition, f"dequantize_{fmt}_{kind}")


KERNELS = tuple(dequantize(fmt, kind) for fmt in GROUPS for kind in TYPES)
