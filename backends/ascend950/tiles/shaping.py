# mypy: ignore-errors
"""Changes to single logits in place: one SIMT thread per entry, or per id of a constrained row."""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import FAR, FLAT, turns


@T.prim_func
def add_to_logits(
    logits: T.Tensor((FAR,), T.float32),
    entry_rows: T.Tensor((FAR,), T.int32),
    ids: T.Tensor((FAR,), T.int32),
    values: T.Tensor((FAR,), T.float32),
    entries: T.int32,
    pitch: T.int64,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(entries, core * FLAT + thread, cores * FLAT)):
                entry = (turn * cores + core) * FLAT + thread
                row = entry_rows[entry]
                if row >= 0:
                    place = T.int64(row) * pitch + T.int64(ids[entry]) * stride
                    logits[place] = logits[place] + values[entry]


@T.prim_func
def penalise(
    logits: T.Tensor((FAR,), T.float32),
    entry_rows: T.Tensor((FAR,), T.int32),
    ids: T.Tensor((FAR,), T.int32),
    counts: T.Tensor((FAR,), T.int32),
    repetition: T.Tensor((FAR,), T.float32),
    frequency: T.Tensor((FAR,), T.float32),
    presence: T.Tensor((FAR,), T.float32),
    entries: T.int32,
    pitch: T.int64,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(entries, core * FLAT + thread, cores * FLAT)):
                entry = (turn * cores + core) * FLAT + thread
                row = entry_rows[entry]
                if row >= 0:
                    place = T.int64(row) * pitch + T.int64(ids[entry]) * stride
                    x = logits[place]
                    scaled = T.if_then_else(x > 0.0, x / repetition[row], x * repetition[row])
                    lowered = scaled - frequency[row] * T.Cast("float32", counts[entry])
                    logits[place] = lowered - T.if_then_else(counts[entry] > 0, presence[row], 0.0)


@T.prim_func
def forbid(
    logits: T.Tensor((FAR,), T.float32),
    mask: T.Tensor((FAR,), T.int32),
    mask_rows: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    num_ids: T.int32,
    mask_pitch: T.int64,
    pitch: T.int64,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for row in T.serial(rows):
                chosen = mask_rows[row]
                if chosen >= 0:
                    for turn in T.serial(turns(num_ids, core * FLAT + thread, cores * FLAT)):
                        token = (turn * cores + core) * FLAT + thread
                        word = mask[T.int64(chosen) * mask_pitch + T.shift_right(token, 5)]
                        if T.bitwise_and(T.shift_right(word, T.bitwise_and(token, 31)), 1) == 0:
                            logits[T.int64(row) * pitch + T.int64(token) * stride] = -T.infinity("float32")


KERNELS = (add_to_logits, penalise, forbid)
