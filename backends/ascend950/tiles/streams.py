# mypy: ignore-errors
"""Residual streams: read, write back, spread, and the mixing matrix that the next sublayer uses.

A task is a token and a stretch of its channels, but for the mixing logits, where eight tokens share every load of the
matrix. Sums over channels run in the order of the channels, whatever the batch. Weights of a token are read from the
buffer as broadcast loads; with the streams' number known they stay in registers.

Tried and left: the mixing logits on the Cube. Its float32 mode would leave this kernel bound by memory (`budget.py`),
but TileLang's product takes float32 operands only with a rounding to a shorter mantissa, which the contract's bound
excludes.
"""

import tilelang.ascend.language as T
from tvm.tirx.script.builder.ir import bind as _bind

from deepinfer.backends.ascend950.tiles.common import (
    MANY,
    TYPES,
    VECTOR,
    load,
    named,
    store,
    turns,
)

STRETCH = 1024
"""Channels of a task."""

STREAMS = 4
"""Most streams of a trunk."""

TOKENS = 8
"""Tokens whose mixing logits are made together."""

PART = 512
"""Channels between two visits of the accumulators in the unified buffer."""

MIX = STREAMS * (2 + STREAMS)
"""Most mixing logits of a token."""


def read_streams(kind, weighted):
    """Weighted sum of the streams, or their mean."""
    dtype = TYPES[kind]
    row_pitch, stream_pitch = T.dynamic("row_pitch", "int64"), T.dynamic("stream_pitch", "int64")
    out_pitch, weight_pitch = T.dynamic("out_pitch", "int64"), T.dynamic("weight_pitch", "int64")

    @T.prim_func
    def definition(
        h: T.StridedTensor((MANY, MANY, MANY), (row_pitch, stream_pitch, 1), dtype),
        weights: T.StridedTensor((MANY, MANY), (weight_pitch, 1), T.float32),
        out: T.StridedTensor((MANY, MANY), (out_pitch, 1), dtype),
        rows: T.int32,
        streams: T.int32,
        hidden: T.int32,
        share: T.float32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            given = T.alloc_shared((STREAMS, STRETCH), dtype)
            factor = T.alloc_shared((8,), T.float32)
            made = T.alloc_shared((STRETCH,), dtype)
            T.annotate_buffer_versions({given: 2, made: 2})
            if weighted:
                T.annotate_buffer_versions({factor: 2})
            stretches = turns(hidden, 0, STRETCH)
            for turn in T.serial(turns(rows * stretches, core, cores)):
                task = turn * cores + core
                row = T.truncdiv(task, stretches)
                first = T.truncmod(task, stretches) * STRETCH
                size = T.min(STRETCH, hidden - first)
                T.assume(row >= 0 and row < MANY and first >= 0 and size > 0 and first + size <= MANY)
                T.assume(streams > 0 and streams <= STREAMS)
                if weighted:
                    T.copy(weights[row, 0:streams], factor[0:streams])
                T.copy(h[row, 0:streams, first : first + size], given[0:streams, 0:size])
                with T.SimdVF():
                    total = T.simd.alloc_var("float32")
                    for step in T.serial(turns(size, 0, VECTOR)):
                        mask = T.simd.update_mask(size - step * VECTOR)
                        total = T.simd.vdup(T.float32(0), "float32", mask)
                        for stream in T.serial(streams):
                            value = load(given[stream, step * VECTOR], mask)
                            if weighted:
                                weight = T.simd.vld(factor[stream], dist="BRC_B32")
                                total = T.simd.vadd(total, T.simd.vmul(value, weight, mask), mask)
                            else:
                                total = T.simd.vadd(total, T.simd.vmuls(value, share, mask), mask)
                        store(made[step * VECTOR], total, mask)
                T.copy(made[0:size], out[row, first : first + size])

    return named(definition, f"{'weigh' if weighted else 'average'}_streams_{kind}")


def _broadcast(weights, count):
    """A register for each weight."""
    return [_bind(T.simd.vld(weights[i], dist="BRC_B32")) for i in range(count)]


def _write_vector(made, update, given, shares, factors, place, mask):
    """64 channels of every stream; streams are told apart while the definition is read, so their weights stay put."""
    streams = len(shares)
    added = _bind(load(update[place], mask))
    old = [_bind(load(given[i, place], mask)) for i in range(streams)]
    for j in range(streams):
        kept = T.simd.vmul(old[0], factors[j], mask)
        for i in range(1, streams):
            kept = T.simd.vadd(kept, T.simd.vmul(old[i], factors[i * streams + j], mask), mask)
        store(made[j, place], T.simd.vadd(T.simd.vmul(added, shares[j], mask), kept, mask), mask)


def write_streams(kind, streams):
    """`post_j y + sum_i comb_ij h_i` for a known number of streams."""
    dtype = TYPES[kind]
    row_pitch, stream_pitch = T.dynamic("row_pitch", "int64"), T.dynamic("stream_pitch", "int64")
    y_pitch, hidden = T.dynamic("y_pitch", "int64"), T.dynamic("out_stream_pitch", "int64")
    out_pitch = T.dynamic("out_row_pitch", "int64")
    square = streams * streams

    @T.prim_func
    def definition(
        y: T.StridedTensor((MANY, MANY), (y_pitch, 1), dtype),
        h: T.StridedTensor((MANY, streams, MANY), (row_pitch, stream_pitch, 1), dtype),
        post: T.Tensor((MANY, streams), T.float32),
        comb: T.Tensor((MANY, square), T.float32),
        out: T.StridedTensor((MANY, streams, MANY), (out_pitch, hidden, 1), dtype),
        rows: T.int32,
        width: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            given = T.alloc_shared((streams, STRETCH), dtype)
            update = T.alloc_shared((STRETCH,), dtype)
            share = T.alloc_shared((8,), T.float32)
            matrix = T.alloc_shared((16,), T.float32)
            made = T.alloc_shared((streams, STRETCH), dtype)
            T.annotate_buffer_versions({given: 2, update: 2, share: 2, matrix: 2, made: 2})
            stretches = turns(width, 0, STRETCH)
            for turn in T.serial(turns(rows * stretches, core, cores)):
                task = turn * cores + core
                row = T.truncdiv(task, stretches)
                first = T.truncmod(task, stretches) * STRETCH
                size = T.min(STRETCH, width - first)
                T.assume(row >= 0 and row < MANY and first >= 0 and size > 0 and first + size <= MANY)
                T.copy(post[row, 0:streams], share[0:streams])
                T.copy(comb[row, 0:square], matrix[0:square])
                T.copy(y[row, first : first + size], update[0:size])
                T.copy(h[row, 0:streams, first : first + size], given[0:streams, 0:size])
                with T.SimdVF():
                    shares = _broadcast(share, streams)
                    factors = _broadcast(matrix, square)
                    for step in T.serial(turns(size, 0, VECTOR)):
                        mask = T.simd.update_mask(size - step * VECTOR)
                        _write_vector(made, update, given, shares, factors, step * VECTOR, mask)
                T.copy(made[0:streams, 0:size], out[row, 0:streams, first : first + size])

    return named(definition, f"write_streams_{kind}_{streams}")


def _resume(partial, sums, logit):
    """Partial sums of all tokens into registers."""
    for token in range(TOKENS):
        T.buffer_store(partial, T.simd.vld(sums[logit, token, 0]), [token])


def _add_products(partial, wide, row, step, mask):
    """64 channels of every token times the same part of the matrix: one load of it serves all."""
    row = _bind(row)
    for token in range(TOKENS):
        value = T.simd.vld(wide[token, step * VECTOR])
        T.evaluate(T.simd.vmula(partial[token], value, row, mask, mode="MODE_MERGING"))


def _pause(partial, sums, logit):
    """Partial sums back to the buffer."""
    for token in range(TOKENS):
        T.evaluate(T.simd.vsts(sums[logit, token, 0], partial[token]))


def mix_streams(kind):
    """Mixing logits: dot products with every row of the matrix, over the root of the mean square."""
    dtype = TYPES[kind]
    row_pitch, fn_pitch = T.dynamic("row_pitch", "int64"), T.dynamic("fn_pitch", "int64")
    out_pitch = T.dynamic("out_pitch", "int64")

    @T.prim_func
    def definition(
        h: T.StridedTensor((MANY, MANY), (row_pitch, 1), dtype),
        fn: T.StridedTensor((MANY, MANY), (fn_pitch, 1), T.float32),
        out: T.StridedTensor((MANY, MANY), (out_pitch, 1), T.float32),
        rows: T.int32,
        width: T.int32,
        logits: T.int32,
        eps: T.float32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            given = T.alloc_shared((TOKENS, PART), dtype)
            matrix = T.alloc_shared((MIX, PART), T.float32)
            wide = T.alloc_shared((TOKENS, PART), T.float32)
            sums = T.alloc_shared((MIX, TOKENS, VECTOR), T.float32)
            squares = T.alloc_shared((TOKENS, VECTOR), T.float32)
            made = T.alloc_shared((TOKENS, 32), T.float32)
            T.annotate_buffer_versions({given: 2, matrix: 2})
            for turn in T.serial(turns(turns(rows, 0, TOKENS), core, cores)):
                row = (turn * cores + core) * TOKENS
                here = T.min(TOKENS, rows - row)
                T.assume(row >= 0 and here > 0 and row + here <= MANY and logits > 0 and logits <= MIX and width > 0)
                with T.SimdVF():
                    full = T.simd.pset(32)
                    zero = T.simd.vdup(T.float32(0), "float32", full)
                    for token in T.serial(TOKENS):
                        T.simd.vsts(squares[token, 0], zero, full)
                        for logit in T.serial(logits):
                            T.simd.vsts(sums[logit, token, 0], zero, full)
                for part in T.serial(turns(width, 0, PART)):
                    first = part * PART
                    size = T.min(PART, width - first)
                    T.assume(first >= 0 and size > 0 and first + size <= MANY)
                    T.copy(h[row : row + here, first : first + size], given[0:here, 0:size])
                    T.copy(fn[0:logits, first : first + size], matrix[0:logits, 0:size])
                    with T.SimdVF():
                        total = T.simd.alloc_var("float32")
                        for token in T.serial(here):
                            total = T.simd.vld(squares[token, 0])
                            for step in T.serial(turns(size, 0, VECTOR)):
                                mask = T.simd.update_mask(size - step * VECTOR)
                                full = T.simd.pset(32)
                                value = T.simd.vmuls(load(given[token, step * VECTOR], mask), T.float32(1), mask)
                                T.simd.vsts(wide[token, step * VECTOR], value, full)
                                total = T.simd.vadd(total, T.simd.vmul(value, value, full), full)
                            full = T.simd.pset(32)
                            T.simd.vsts(squares[token, 0], total, full)
                        T.simd.mem_bar("VST_VLD")
                        partial = T.simd.alloc_local((TOKENS,), "float32")
                        for logit in T.serial(logits):
                            _resume(partial, sums, logit)
                            for step in T.serial(turns(size, 0, VECTOR)):
                                mask = T.simd.update_mask(size - step * VECTOR)
                                _add_products(partial, wide, T.simd.vld(matrix[logit, step * VECTOR]), step, mask)
                            _pause(partial, sums, logit)
                with T.SimdVF():
                    full, one = T.simd.pset(32), T.simd.pset(32, "PAT_VL1")
                    for token in T.serial(here):
                        mean = T.simd.vmuls(T.simd.vcadd(T.simd.vld(squares[token, 0]), full), 1.0 / width, full)
                        root = T.simd.vsqrt(T.simd.vadds(mean, eps, one), one)
                        for logit in T.serial(logits):
                            total = T.simd.vcadd(T.simd.vld(sums[logit, token, 0]), full)
                            value = T.simd.vdiv(total, root, one, precision="ftz_true")
                            T.simd.vsts(made[token, logit], value, one, dist="ONEPT_B32")
                T.copy(made[0:here, 0:logits], out[row : row + here, 0:logits])

    return named(definition, f"mix_streams_{kind}")


KERNELS = (
    *(read_streams(kind, weighted) for kind in TYPES for weighted in (True, False)),
    *(write_streams(kind, streams) for kind in TYPES for streams in (2, 4)),
    *(mix_streams(kind) for kind in TYPES),
)
