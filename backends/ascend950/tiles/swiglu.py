# mypy: ignore-errors
"""The gated activation of an expert, plain or ending in mxfp8 without a rounding in between.

A task is a row and a stretch of its values. Magnitudes are compared as integers and clamps are comparisons and
selections, for the reason that `codes` gives: a NaN has to come out on top, where hardware maxima may drop it.
"""

import tilelang.ascend.language as T
from tvm.tirx.script.builder.ir import bind as _bind

from deepinfer.backends.ascend950.tiles.codes import BLOCK, STRETCH, as_type, number, spread, where
from deepinfer.backends.ascend950.tiles.common import MANY, TYPES, VECTOR, load, named, store, turns


def _activated(gate, up, limit, weight, mask):
    """The clamped gate's silu, times the clamped up-projection, times the row's weight."""
    top = _bind(T.simd.vdup(limit, "float32", mask))
    bottom = _bind(T.simd.vneg(top, mask))
    gate = _bind(where(T.simd.vcmp(gate, top, mask, "gt"), top, gate))
    up = where(T.simd.vcmp(up, top, mask, "gt"), top, up)
    up = _bind(where(T.simd.vcmp(up, bottom, mask, "lt"), bottom, up))
    below = T.simd.vadds(T.simd.vexp(T.simd.vneg(gate, mask), mask), T.float32(1), mask)
    silu = T.simd.vdiv(gate, below, mask, precision="ftz_true")
    return T.simd.vmuls(T.simd.vmul(silu, up, mask), weight, mask)


def _greatest(peaks, place):
    """The greatest of each four peaks, in the low lanes: a group of 32 is four blocks of eight lanes."""
    even, odd = T.simd.vdintlv(T.simd.vld(peaks[place]), T.simd.vld(peaks[place + VECTOR]))
    pair = _bind(T.simd.vmax(even, odd))
    even, odd = T.simd.vdintlv(pair, pair)
    return T.simd.vmax(even, odd)


def _scale(greatest, full):
    """ue8m0 byte of each group: the power of two not below greatest / 448, 255 where something is not finite.

    448 is 1.75 * 2^8, so the exponent is that of the greatest magnitude less 8, and one more where its fraction is
    above 0.75: an addition that carries into the exponent, and no division whose last bit would decide.
    """
    floor = number(0x38D1B717, full)  # 1e-4, the least magnitude that the format looks at
    size = where(T.simd.vcmps(greatest, T.uint32(0x38D1B717), full, "lt"), floor, greatest)
    exponent = T.simd.vshrs(T.simd.vadds(size, T.uint32(0x1FFFFF), full), T.int16(23), full)
    byte = T.simd.vsub(exponent, number(8, full), full)
    return where(T.simd.vcmps(greatest, T.uint32(0x7F800000), full, "ge"), number(255, full), byte)


def swiglu(kind, result):
    """From activations of `kind` to plain ones of a type, or to mxfp8."""
    dtype = TYPES[kind]
    quantised = result == "mxfp8"
    made_type = T.float8_e4m3fn if quantised else TYPES[result]
    gate_pitch, up_pitch = T.dynamic("gate_pitch", "int64"), T.dynamic("up_pitch", "int64")
    out_pitch, scale_pitch = T.dynamic("out_pitch", "int64"), T.dynamic("scale_pitch", "int64")

    @T.prim_func
    def definition(
        gate: T.StridedTensor((MANY, MANY), (gate_pitch, 1), dtype),
        up: T.StridedTensor((MANY, MANY), (up_pitch, 1), dtype),
        weights: T.Tensor((MANY,), T.float32),
        out: T.StridedTensor((MANY, MANY), (out_pitch, 1), made_type),
        scale: T.StridedTensor((MANY, MANY), (scale_pitch, 1), T.uint8),
        rows: T.int32,
        width: T.int32,
        weighted: T.int32,
        limit: T.float32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            gates = T.alloc_shared((STRETCH,), dtype)
            ups = T.alloc_shared((STRETCH,), dtype)
            made = T.alloc_shared((STRETCH,), made_type)
            T.annotate_buffer_versions({gates: 2, ups: 2, made: 2})
            if quantised:
                wide = T.alloc_shared((STRETCH,), T.float32)
                peaks = T.alloc_shared((STRETCH // 8,), T.uint32)
                factors = T.alloc_shared((STRETCH // 8,), T.float32)
                bytes_ = T.alloc_shared((STRETCH // 32,), T.uint8)
                T.annotate_buffer_versions({bytes_: 2})
            stretches = turns(width, 0, STRETCH)
            for turn in T.serial(turns(rows * stretches, core, cores)):
                task = turn * cores + core
                row = T.truncdiv(task, stretches)
                first = T.truncmod(task, stretches) * STRETCH
                size = T.min(STRETCH, width - first)
                groups = turns(size, 0, 32)
                begin = T.truncdiv(first, 32)
                weight = T.if_then_else(weighted > 0, weights[row], T.float32(1))
                T.assume(row >= 0 and row < MANY and first >= 0 and size > 0 and first + size <= MANY)
                T.assume(begin >= 0 and groups > 0 and begin + groups <= MANY)
                T.copy(gate[row, first : first + size], gates[0:size])
                T.copy(up[row, first : first + size], ups[0:size])
                with T.SimdVF():
                    full, eight = T.simd.pset(32), T.simd.pset(32, "PAT_VL8")
                    for step in T.serial(turns(size, 0, VECTOR)):
                        mask = T.simd.update_mask(size - step * VECTOR)
                        place = step * VECTOR
                        value = _activated(load(gates[place], mask), load(ups[place], mask), limit, weight, mask)
                        if quantised:
                            T.simd.vsts(wide[place], value, full)
                            bits = T.simd.vand(as_type("uint32", value), number(0x7FFFFFFF, full), full)
                            T.simd.vsts(peaks[step * 8], T.simd.vcgmax(bits, full), eight)
                        else:
                            store(made[place], value, mask)
                    if quantised:
                        T.simd.mem_bar("VST_VLD")
                        for block in T.serial(turns(size, 0, BLOCK)):
                            byte = _scale(_greatest(peaks, block * (BLOCK // 8)), full)
                            inverse = T.simd.vshls(T.simd.vsub(number(254, full), byte, full), T.int16(23), full)
                            spread(factors, block * (BLOCK // 8), as_type("float32", inverse), 4, 32)
                            half = T.simd.pset(32, "PAT_VL32")
                            T.simd.vsts(bytes_[block * 32], as_type("uint8", byte), half, dist="PK4_B32")
                        T.simd.mem_bar("VST_VLD")
                        for step in T.serial(turns(size, 0, VECTOR)):
                            factor = T.simd.vld(factors[step * 8], dist="E2B_B32")
                            value = T.simd.vmul(T.simd.vld(wide[step * VECTOR]), factor, full)
                            code = T.simd.vcvt(value, "float8_e4m3fn", full)
                            T.simd.vsts(made[step * VECTOR], code, full, dist="PK4_B32")
                T.copy(made[0:size], out[row, first : first + size])
                if quantised:
                    T.copy(bytes_[0:groups], scale[row, begin : begin + groups])

    return named(definition, f"swiglu_{kind}_{result}")


KERNELS = (
    swiglu("bf16", "bf16"),
    swiglu("bf16", "f32"),
    swiglu("f32", "f32"),
    swiglu("bf16", "mxfp8"),
    swiglu("f32", "mxfp8"),
)
