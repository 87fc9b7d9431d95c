# mypy: ignore-errors
"""Partial attention results of several splits of the keys, put together in the order of the splits.

A task is a token. Weights of all its heads are made in registers of heads; each head's values then meet its weight as a
broadcast load.
"""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import MANY, TYPES, VECTOR, named, store, turns

HEADS = 128
"""Most heads."""

SPLITS = 32
"""Most splits."""

WIDTH = 512
"""Most channels of a head."""


def merge(kind):
    """The kernel for results of `kind`."""
    dtype = TYPES[kind]
    split_pitch, row_pitch = T.dynamic("split_pitch", "int64"), T.dynamic("row_pitch", "int64")
    head_pitch, out_pitch = T.dynamic("head_pitch", "int64"), T.dynamic("out_pitch", "int64")
    width = T.dynamic("width", "int64")
    lse_split, lse_row = T.dynamic("lse_split_pitch", "int64"), T.dynamic("lse_row_pitch", "int64")
    out_lse_pitch = T.dynamic("out_lse_pitch", "int64")

    @T.prim_func
    def definition(
        o: T.StridedTensor((MANY, MANY, MANY, MANY), (split_pitch, row_pitch, head_pitch, 1), T.float32),
        lse: T.StridedTensor((MANY, MANY, MANY), (lse_split, lse_row, 1), T.float32),
        out: T.StridedTensor((MANY, MANY, MANY), (out_pitch, width, 1), dtype),
        out_lse: T.StridedTensor((MANY, MANY), (out_lse_pitch, 1), T.float32),
        rows: T.int32,
        splits: T.int32,
        heads: T.int32,
        channels: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            sums = T.alloc_shared((SPLITS, HEADS), T.float32)
            weights = T.alloc_shared((SPLITS, HEADS), T.float32)
            inverse = T.alloc_shared((HEADS,), T.float32)
            merged = T.alloc_shared((HEADS,), T.float32)
            parts = T.alloc_shared((SPLITS, WIDTH), T.float32)
            made = T.alloc_shared((WIDTH,), dtype)
            T.annotate_buffer_versions({parts: 2, made: 2})
            for turn in T.serial(turns(rows, core, cores)):
                row = turn * cores + core
                T.assume(row >= 0 and row < MANY and splits > 0 and splits <= SPLITS)
                T.assume(heads > 0 and heads <= HEADS and channels > 0 and channels <= WIDTH)
                T.copy(lse[0:splits, row, 0:heads], sums[0:splits, 0:heads])
                with T.SimdVF():
                    top, total = T.simd.alloc_var("float32"), T.simd.alloc_var("float32")
                    for group in T.serial(turns(heads, 0, VECTOR)):
                        mask = T.simd.update_mask(heads - group * VECTOR)
                        least = T.simd.vdup(-T.infinity("float32"), "float32", mask)
                        zero = T.simd.vdup(T.float32(0), "float32", mask)
                        top = least
                        for split in T.serial(splits):
                            one = T.simd.vld(sums[split, group * VECTOR])
                            # a comparison that NaN wins, so that it stays visible
                            top = T.simd.vsel(top, one, T.simd.vcmp(one, top, mask, "le"))
                        top = T.simd.vsel(zero, top, T.simd.vcmp(top, least, mask, "eq"))
                        total = zero
                        for split in T.serial(splits):
                            one = T.simd.vsub(T.simd.vld(sums[split, group * VECTOR]), top, mask)
                            weight = T.simd.vexp(one, mask)
                            total = T.simd.vadd(total, weight, mask)
                            T.simd.vsts(weights[split, group * VECTOR], weight, mask)
                        T.simd.vsts(merged[group * VECTOR], T.simd.vadd(T.simd.vln(total, mask), top, mask), mask)
                        none = T.simd.vcmps(total, T.float32(0), mask, "eq")
                        unit = T.simd.vdup(T.float32(1), "float32", mask)
                        T.simd.vsts(inverse[group * VECTOR], T.simd.vsel(unit, total, none), mask)
                T.copy(merged[0:heads], out_lse[row, 0:heads])
                for head in T.serial(heads):
                    T.assume(head >= 0 and head < HEADS)
                    T.copy(o[0:splits, row, head, 0:channels], parts[0:splits, 0:channels])
                    with T.SimdVF():
                        value = T.simd.alloc_var("float32")
                        divisor = T.simd.vld(inverse[head], dist="BRC_B32")
                        for step in T.serial(turns(channels, 0, VECTOR)):
                            mask = T.simd.update_mask(channels - step * VECTOR)
                            value = T.simd.vdup(T.float32(0), "float32", mask)
                            for split in T.serial(splits):
                                weight = T.simd.vld(weights[split, head], dist="BRC_B32")
                                part = T.simd.vmul(T.simd.vld(parts[split, step * VECTOR]), weight, mask)
                                value = T.simd.vadd(value, part, mask)
                            store(made[step * VECTOR], T.simd.vdiv(value, divisor, mask, precision="ftz_true"), mask)
                    T.copy(made[0:channels], out[row, head, 0:channels])

    return named(definition, f"merge_{kind}")


KERNELS = (merge("bf16"), merge("f32"))
