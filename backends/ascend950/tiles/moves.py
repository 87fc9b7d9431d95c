# mypy: ignore-errors
"""Rows that only move: bytes by way of the unified buffer, and rows that change their type on the way.

A row is cut into stretches, and rows times stretches are dealt out to the cores, so a few long rows (blocks of a pool)
keep all cores busy as well as many short ones do. Two stretches are in flight on each core.
"""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import FAR, VECTOR, load, store, turns

STRETCH = 65536
"""Bytes of a row that move at a time."""

CAST = 8192
"""Elements of a row that are cast at a time."""


@T.prim_func
def move_rows(
    source: T.Tensor((FAR,), T.uint8),
    source_rows: T.Tensor((FAR,), T.int32),
    target: T.Tensor((FAR,), T.uint8),
    target_rows: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    stretches: T.int32,
    row_bytes: T.int64,
    source_pitch: T.int64,
    target_pitch: T.int64,
    source_step: T.int32,
    target_step: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        tile = T.alloc_shared((STRETCH,), T.uint8)
        T.annotate_buffer_versions({tile: 2})
        for turn in T.serial(turns(rows * stretches, core, cores)):
            task = turn * cores + core
            row = T.truncdiv(task, stretches)
            first = T.int64(T.truncmod(task, stretches)) * STRETCH
            taken = T.if_then_else(source_step > 0, source_rows[row * source_step], row)
            written = T.if_then_else(target_step > 0, target_rows[row * target_step], row)
            # padding repeats the first pair, and two cores that write one place would race, if only with equal bytes
            repeated = target_step > 0 and row > 0 and target_rows[0] == written
            size = T.if_then_else(repeated, T.int64(0), T.min(T.int64(STRETCH), row_bytes - first))
            start = T.int64(taken) * source_pitch + first
            place = T.int64(written) * target_pitch + first
            T.assume(size >= 0 and start >= 0 and start + size <= FAR and place >= 0 and place + size <= FAR)
            T.copy(source[start : start + size], tile[0:size])
            T.copy(tile[0:size], target[place : place + size])


@T.prim_func
def widen_rows(
    source: T.Tensor((FAR,), T.bfloat16),
    source_rows: T.Tensor((FAR,), T.int32),
    target: T.Tensor((FAR,), T.float32),
    rows: T.int32,
    stretches: T.int32,
    width: T.int32,
    source_pitch: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        narrow = T.alloc_shared((CAST,), T.bfloat16)
        wide = T.alloc_shared((CAST,), T.float32)
        T.annotate_buffer_versions({narrow: 2, wide: 2})
        for turn in T.serial(turns(rows * stretches, core, cores)):
            task = turn * cores + core
            row = T.truncdiv(task, stretches)
            first = T.truncmod(task, stretches) * CAST
            size = T.min(CAST, width - first)
            start = T.int64(source_rows[row]) * source_pitch + first
            place = T.int64(row) * width + first
            T.assume(size > 0 and start >= 0 and start + size <= FAR and place >= 0 and place + size <= FAR)
            T.copy(source[start : start + size], narrow[0:size])
            with T.SimdVF():
                for step in T.serial(turns(size, 0, VECTOR)):
                    mask = T.simd.update_mask(size - step * VECTOR)
                    store(wide[step * VECTOR], load(narrow[step * VECTOR], mask), mask)
            T.copy(wide[0:size], target[place : place + size])


@T.prim_func
def narrow_rows(
    source: T.Tensor((FAR,), T.float32),
    source_rows: T.Tensor((FAR,), T.int32),
    target: T.Tensor((FAR,), T.bfloat16),
    rows: T.int32,
    stretches: T.int32,
    width: T.int32,
    source_pitch: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        wide = T.alloc_shared((CAST,), T.float32)
        narrow = T.alloc_shared((CAST,), T.bfloat16)
        T.annotate_buffer_versions({narrow: 2, wide: 2})
        for turn in T.serial(turns(rows * stretches, core, cores)):
            task = turn * cores + core
            row = T.truncdiv(task, stretches)
            first = T.truncmod(task, stretches) * CAST
            size = T.min(CAST, width - first)
            start = T.int64(source_rows[row]) * source_pitch + first
            place = T.int64(row) * width + first
            T.assume(size > 0 and start >= 0 and start + size <= FAR and place >= 0 and place + size <= FAR)
            T.copy(source[start : start + size], wide[0:size])
            with T.SimdVF():
                for step in T.serial(turns(size, 0, VECTOR)):
                    mask = T.simd.update_mask(size - step * VECTOR)
                    store(narrow[step * VECTOR], load(wide[step * VECTOR], mask), mask)
            T.copy(narrow[0:size], target[place : place + size])


KERNELS = (move_rows, widen_rows, narrow_rows)
