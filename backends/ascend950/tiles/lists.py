# mypy: ignore-errors
"""Index lists and ids: integers only, one SIMT thread per entry, straight from and to global memory.

Tried and left: the same in SIMD. Lists are short and full of look-ups that differ per entry, so the copies and masks
cost more than the arithmetic.
"""

import tilelang.ascend.language as T

from deepinfer.backends.ascend950.tiles.common import FAR, FLAT, LANES, LINES, turns


@T.prim_func
def window_index(
    positions: T.Tensor((FAR,), T.int32),
    row_to_seq: T.Tensor((FAR,), T.int32),
    tables: T.Tensor((FAR,), T.int32),
    first_pages: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    window: T.int32,
    page_size: T.int32,
    num_pages: T.int32,
    table_pitch: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=(LANES, LINES)):
            lane, line = T.get_thread_bindings()[:2]
            for turn in T.serial(turns(rows, core * LINES + line, cores * LINES)):
                row = (turn * cores + core) * LINES + line
                seq = row_to_seq[row]
                first = positions[row] - (window - 1)
                for step in T.serial(turns(window, lane, LANES)):
                    column = step * LANES + lane
                    position = T.max(first + column, 0)
                    index = T.truncdiv(position, page_size) - first_pages[seq]
                    held = first + column >= 0 and index >= 0 and index < num_pages
                    page = T.if_then_else(held, tables[T.int64(seq) * table_pitch + index], 0)
                    slot = page * page_size + T.truncmod(position, page_size)
                    out[T.int64(row) * window + column] = T.if_then_else(page > 0, slot, -1)


@T.prim_func
def clip_window(
    indices: T.Tensor((FAR,), T.int32),
    positions: T.Tensor((FAR,), T.int32),
    row_to_seq: T.Tensor((FAR,), T.int32),
    starts: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    window: T.int32,
    pitch: T.int64,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=(LANES, LINES)):
            lane, line = T.get_thread_bindings()[:2]
            for turn in T.serial(turns(rows, core * LINES + line, cores * LINES)):
                row = (turn * cores + core) * LINES + line
                hidden = starts[row_to_seq[row]] - positions[row] + window - 1
                for step in T.serial(turns(window, lane, LANES)):
                    column = step * LANES + lane
                    if column < hidden:
                        indices[T.int64(row) * pitch + T.int64(column) * stride] = -1


@T.prim_func
def dense_index(
    visible: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    columns: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=(LANES, LINES)):
            lane, line = T.get_thread_bindings()[:2]
            for turn in T.serial(turns(rows, core * LINES + line, cores * LINES)):
                row = (turn * cores + core) * LINES + line
                seen = visible[row]
                for step in T.serial(turns(columns, lane, LANES)):
                    column = step * LANES + lane
                    out[T.int64(row) * columns + column] = T.if_then_else(column < seen, column, -1)


@T.prim_func
def slots_of(
    indices: T.Tensor((FAR,), T.int32),
    tables: T.Tensor((FAR,), T.int32),
    row_to_seq: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    columns: T.int32,
    block_size: T.int32,
    num_blocks: T.int32,
    table_pitch: T.int64,
    pitch: T.int64,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=(LANES, LINES)):
            lane, line = T.get_thread_bindings()[:2]
            for turn in T.serial(turns(rows, core * LINES + line, cores * LINES)):
                row = (turn * cores + core) * LINES + line
                table = T.int64(row_to_seq[row]) * table_pitch
                for step in T.serial(turns(columns, lane, LANES)):
                    place = T.int64(row) * pitch + T.int64(step * LANES + lane) * stride
                    position = indices[place]
                    if position >= 0:
                        block = tables[table + T.min(T.truncdiv(position, block_size), num_blocks - 1)]
                        indices[place] = block * block_size + T.truncmod(position, block_size)


@T.prim_func
def block_positions(
    indices: T.Tensor((FAR,), T.int32),
    blocks: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    rows: T.int32,
    columns: T.int32,
    num_blocks: T.int32,
    block: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=(LANES, LINES)):
            lane, line = T.get_thread_bindings()[:2]
            for turn in T.serial(turns(rows, core * LINES + line, cores * LINES)):
                row = (turn * cores + core) * LINES + line
                for step in T.serial(turns(columns, lane, LANES)):
                    place = T.int64(row) * columns + step * LANES + lane
                    index = indices[place]
                    chosen = T.if_then_else(
                        index >= 0, blocks[T.int64(row) * num_blocks + T.truncdiv(T.max(index, 0), block)], 0
                    )
                    out[place] = T.if_then_else(index >= 0, chosen * block + T.truncmod(index, block), -1)


@T.prim_func
def groups_before(
    positions: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    count: T.int32,
    ratio: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                out[place] = T.truncdiv(positions[place] + 1, ratio)


@T.prim_func
def fill_ids(out: T.Tensor((FAR,), T.int32), count: T.int32, value: T.int32, cores: T.int32):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                out[(turn * cores + core) * FLAT + thread] = value


@T.prim_func
def known_ids(
    ids: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    count: T.int32,
    fallback: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                out[place] = T.if_then_else(ids[place] >= 0, ids[place], fallback)


@T.prim_func
def shift_ids(
    values: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    count: T.int32,
    amount: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                out[place] = values[place] + amount


@T.prim_func
def gather_ids(
    ids: T.Tensor((FAR,), T.int32),
    picks: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    count: T.int32,
    num_ids: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                pick = picks[place]
                out[place] = T.if_then_else(pick >= 0 and num_ids > 0, ids[pick], -1)


@T.prim_func
def last_emitted(
    tokens: T.Tensor((FAR,), T.int32),
    starts: T.Tensor((FAR,), T.int32),
    emitted: T.Tensor((FAR,), T.int32),
    out: T.Tensor((FAR,), T.int32),
    count: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                out[place] = tokens[starts[place] + emitted[place] - 1]


@T.prim_func
def rewind(
    values: T.Tensor((FAR,), T.int32),
    previous: T.Tensor((FAR,), T.int32),
    planned: T.Tensor((FAR,), T.int32),
    accepted: T.Tensor((FAR,), T.int32),
    count: T.int32,
    stride: T.int64,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                place = (turn * cores + core) * FLAT + thread
                source = previous[place]
                if source >= 0:
                    values[T.int64(place) * stride] -= planned[source] - accepted[source]


@T.prim_func
def draft_rows(
    anchor_ids: T.Tensor((FAR,), T.int32),
    anchor_positions: T.Tensor((FAR,), T.int32),
    seqs: T.Tensor((FAR,), T.int32),
    ids: T.Tensor((FAR,), T.int32),
    positions: T.Tensor((FAR,), T.int32),
    context_ends: T.Tensor((FAR,), T.int32),
    row_seqs: T.Tensor((FAR,), T.int32),
    numbers: T.Tensor((FAR,), T.int32),
    block_numbers: T.Tensor((FAR,), T.int32),
    count: T.int32,
    num_tokens: T.int32,
    noise_id: T.int32,
    cores: T.int32,
):
    with T.Kernel(cores) as core:
        with T.SimtVF(threads=FLAT):
            thread = T.get_thread_binding()
            for turn in T.serial(turns(count, core * FLAT + thread, cores * FLAT)):
                row = (turn * cores + core) * FLAT + thread
                anchor = T.truncdiv(row, num_tokens)
                place = T.truncmod(row, num_tokens)
                ids[row] = T.if_then_else(place == 0 and anchor_ids[anchor] >= 0, anchor_ids[anchor], noise_id)
                positions[row] = anchor_positions[anchor] + place
                context_ends[row] = anchor_positions[anchor] - 1
                row_seqs[row] = seqs[anchor]
                numbers[row] = row
                for other in T.serial(num_tokens):
                    block_numbers[T.int64(row) * num_tokens + other] = row - place + other


KERNELS = (
    window_index,
    clip_window,
    dense_index,
    slots_of,
    block_positions,
    groups_before,
    fill_ids,
    known_ids,
    shift_ids,
    gather_ids,
    last_emitted,
    rewind,
    draft_rows,
)
