# mypy: ignore-errors
"""Rotation of the last channels of every head, either way.

A task is a token and up to `HEADS` of its heads. Channels that stay go from global memory to global memory by way of
the unified buffer and meet no register; channels that turn stand in the buffer at a pitch of their own, so that every
load is aligned whatever the widths. Two registers of 64 channels are split into even and odd ones, turned, and put
together again.
"""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import MANY, TYPES, load, named, store, turns

HEADS = 16
"""Heads of a task."""

STAY = 512
"""Most channels of a head that stay."""

TURN = 128
"""Most channels of a head that turn: the pairs of two registers."""


def rope(kind):
    """The kernel for activations of `kind`."""
    dtype = TYPES[kind]
    row_pitch, head_pitch = T.dynamic("row_pitch", "int64"), T.dynamic("head_pitch", "int64")
    out_pitch, width = T.dynamic("out_pitch", "int64"), T.dynamic("width", "int64")
    table_pitch = T.dynamic("table_pitch", "int64")

    @T.prim_func
    def definition(
        x: T.StridedTensor((MANY, MANY, MANY), (row_pitch, head_pitch, 1), dtype),
        positions: T.Tensor((MANY,), T.int32),
        table: T.StridedTensor((MANY, MANY), (table_pitch, 1), T.float32),
        out: T.StridedTensor((MANY, MANY, MANY), (out_pitch, width, 1), dtype),
        rows: T.int32,
        heads: T.int32,
        stay: T.int32,
        pairs: T.int32,
        direction: T.float32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            kept = T.alloc_shared((HEADS, STAY), dtype)
            given = T.alloc_shared((HEADS, TURN), dtype)
            turned = T.alloc_shared((HEADS, TURN), dtype)
            angles = T.alloc_shared((2, TURN // 2), T.float32)
            T.annotate_buffer_versions({kept: 2, given: 2, turned: 2, angles: 2})
            groups = turns(heads, 0, HEADS)
            for turn in T.serial(turns(rows * groups, core, cores)):
                task = turn * cores + core
                row = T.truncdiv(task, groups)
                first = T.truncmod(task, groups) * HEADS
                here = T.min(HEADS, heads - first)
                position = positions[row]
                T.assume(row >= 0 and row < MANY and first >= 0 and here > 0 and first + here <= MANY)
                T.assume(pairs > 0 and pairs <= TURN // 2 and stay >= 0 and stay <= STAY)
                T.assume(position >= 0 and position < MANY)
                T.copy(table[position, 0:pairs], angles[0, 0:pairs])
                T.copy(table[position, pairs : 2 * pairs], angles[1, 0:pairs])
                T.copy(x[row, first : first + here, stay : stay + 2 * pairs], given[0:here, 0 : 2 * pairs])
                with T.SimdVF():
                    every, mask = T.simd.pset(32), T.simd.update_mask(pairs)
                    cos = T.simd.vld(angles[0, 0])
                    sin = T.simd.vmuls(T.simd.vld(angles[1, 0]), direction, mask)
                    for head in T.serial(here):
                        even, odd = T.simd.vdintlv(load(given[head, 0], every), load(given[head, 64], every))
                        real = T.simd.vsub(T.simd.vmul(even, cos, mask), T.simd.vmul(odd, sin, mask), mask)
                        imaginary = T.simd.vadd(T.simd.vmul(even, sin, mask), T.simd.vmul(odd, cos, mask), mask)
                        low, high = T.simd.vintlv(real, imaginary)
                        store(turned[head, 0], low, every)
                        store(turned[head, 64], high, every)
                T.copy(turned[0:here, 0 : 2 * pairs], out[row, first : first + here, stay : stay + 2 * pairs])
                T.copy(x[row, first : first + here, 0:stay], kept[0:here, 0:stay])
                T.copy(kept[0:here, 0:stay], out[row, first : first + here, 0:stay])

    return named(definition, f"rope_{kind}")


KERNELS = (rope("bf16"), rope("f32"))
