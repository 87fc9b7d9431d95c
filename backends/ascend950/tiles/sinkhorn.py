# mypy: ignore-errors
"""Mixing logits to read weights, write weights and a nearly doubly stochastic matrix: one SIMT thread per token.

The matrix of four streams is sixteen numbers, so with that number known a thread keeps it in registers through all
rounds, and no thread waits for another. Any other number of streams takes the same text with a run-time count. Tried
and left: tokens along the lanes of SIMD registers, which needs every column of the logits in a register of its own and
so a transposition on the way in and out.
"""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import FAR, MANY, named, turns

THREADS = 128
"""Tokens of a core at a time: few, so that a decode step of some hundred tokens reaches several cores."""


MOST = 8
"""Most streams of the kernel with a run-time count."""


def _settled(known, streams):
    return streams if known is None else known


def sinkhorn(known):
    """The kernel for a known number of streams, or for a run-time one."""
    mix_pitch = T.dynamic("mix_pitch", "int64")
    room = (known or MOST) ** 2

    @T.prim_func
    def definition(
        mix: T.StridedTensor((MANY, MANY), (mix_pitch, 1), T.float32),
        scale: T.Tensor((3,), T.float32),
        base: T.Tensor((FAR,), T.float32),
        pre: T.Tensor((FAR,), T.float32),
        post: T.Tensor((FAR,), T.float32),
        comb: T.Tensor((FAR,), T.float32),
        rows: T.int32,
        streams: T.int32,
        iters: T.int32,
        eps: T.float32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core:
            with T.SimtVF(threads=THREADS):
                thread = T.get_thread_binding()
                matrix = T.alloc_local((room,), T.float32)
                streams = _settled(known, streams)
                square = streams * streams
                total = T.alloc_var(T.float32)
                top = T.alloc_var(T.float32)
                for turn in T.serial(turns(rows, core * THREADS + thread, cores * THREADS)):
                    row = (turn * cores + core) * THREADS + thread
                    for i in T.serial(streams):
                        read = mix[row, i] * scale[0] + base[i]
                        pre[T.int64(row) * streams + i] = T.float32(1) / (T.float32(1) + T.exp(-read)) + eps
                        write = mix[row, streams + i] * scale[1] + base[streams + i]
                        post[T.int64(row) * streams + i] = T.float32(2) / (T.float32(1) + T.exp(-write))
                    for i in T.serial(streams):
                        top = -T.infinity("float32")
                        for j in T.serial(streams):
                            place = i * streams + j
                            matrix[place] = mix[row, 2 * streams + place] * scale[2] + base[2 * streams + place]
                            top = T.if_then_else(matrix[place] <= top, top, matrix[place])
                        total = T.float32(0)
                        for j in T.serial(streams):
                            matrix[i * streams + j] = T.exp(matrix[i * streams + j] - top)
                            total = total + matrix[i * streams + j]
                        for j in T.serial(streams):
                            matrix[i * streams + j] = matrix[i * streams + j] / total + eps
                    for j in T.serial(streams):
                        total = eps
                        for i in T.serial(streams):
                            total = total + matrix[i * streams + j]
                        for i in T.serial(streams):
                            matrix[i * streams + j] = matrix[i * streams + j] / total
                    for _ in T.serial(iters - 1):
                        for i in T.serial(streams):
                            total = eps
                            for j in T.serial(streams):
                                total = total + matrix[i * streams + j]
                            for j in T.serial(streams):
                                matrix[i * streams + j] = matrix[i * streams + j] / total
                        for j in T.serial(streams):
                            total = eps
                            for i in T.serial(streams):
                                total = total + matrix[i * streams + j]
                            for i in T.serial(streams):
                                matrix[i * streams + j] = matrix[i * streams + j] / total
                    for place in T.serial(square):
                        comb[T.int64(row) * square + place] = matrix[place]

    return named(definition, f"sinkhorn_{known}" if known else "sinkhorn")


@T.prim_func
def read_first(pre: T.Tensor((FAR,), T.float32), count: T.int32, streams: T.int32, cores: T.int32):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=THREADS):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * THREADS + thread, cores * THREADS)):
                place = (turn * cores + core) * THREADS + thread
                pre[place] = T.if_then_else(T.truncmod(place, streams) == 0, T.float32(1), T.float32(0))


KERNELS = (sinkhorn(4), sinkhorn(None), read_first)
