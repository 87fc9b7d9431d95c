"""Rows, records and blocks from one place to another, and the pooling of rows on their way to a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from deepinfer.ops import compress, heads, index, kv, shaping
from op_work.work import BLOCK, DIM, HIDDEN, STREAMS, TOPK, WINDOW, WINDOW_PAGE, Families, Maker, Peer, Work, phases

_RING = 8
"""Tokens that the open group of a compressor keeps."""
_LAYERS = 43
"""That keep a window: those of the backbone and of the draft."""


def look_up(make: Maker) -> Iterator[Work]:
    """Rows of the embedding table."""
    weight = make.plain(make.sizes.vocabulary, HIDDEN)
    for rows in (make.sizes.few, make.sizes.many):
        ids = make.integers(0, make.sizes.vocabulary, rows)
        peer = {"input": weight, "dim": 0, "index": ids}
        yield Work(
            heads.embedding,
            f"{rows} rows of {HIDDEN}",
            [{"weight": weight, "input_ids": ids, "out_dtype": torch.bfloat16}],
            0.0,
            rows * (4.0 * HIDDEN + 4),
            [Peer("torch.index_select", torch.index_select, lambda peer=peer: [peer])],
        )


def chosen_rows(make: Maker) -> Iterator[Work]:
    """Streams of the rows that go on, and logits that a user's own code made."""
    few, many, ids = make.sizes.few, make.sizes.many, make.sizes.vocabulary
    h = make.plain(many, STREAMS, HIDDEN)
    for rows in (few, many):
        args = {"x": h, "rows": make.shuffled(many)[:rows].contiguous()}
        peer = {"input": h, "dim": 0, "index": args["rows"]}
        yield Work(
            heads.gather_rows,
            f"{rows} of {many} rows of {STREAMS} x {HIDDEN}",
            [args],
            0.0,
            rows * (4.0 * STREAMS * HIDDEN + 4),
            [Peer("torch.index_select", torch.index_select, lambda peer=peer: [peer])],
        )
    logits = make.single(few, ids)
    for rows in (max(few // 8, 1), few):
        args = {"x": logits, "rows": make.shuffled(few)[:rows].contiguous(), "values": make.single(rows, ids)}
        yield Work(shaping.put_rows, f"{rows} of {few} rows of {ids}, float32", [args], 0.0, rows * (8.0 * ids + 4))


def side_by_side(make: Maker) -> Iterator[Work]:
    """The draft's features, index lists, and choices that were made in slices."""
    for rows in (make.sizes.few, make.sizes.many):
        parts = tuple(make.plain(rows, HIDDEN) for _ in range(3))
        peer = Peer("torch.cat", torch.cat, lambda parts=parts: [{"tensors": parts, "dim": 1}])
        num_bytes = 2 * 3 * 2.0 * rows * HIDDEN
        yield Work(heads.concat_columns, f"3 of {rows} x {HIDDEN}", [{"parts": parts}], 0.0, num_bytes, [peer])
        near, far = make.integers(0, 1 << 20, rows, WINDOW), make.integers(0, 1 << 20, rows, TOPK)
        peer = Peer("torch.cat", torch.cat, lambda both=(near, far): [{"tensors": both, "dim": 1}])
        args, num_bytes = {"first": near, "second": far}, 8.0 * rows * (WINDOW + TOPK)
        yield Work(index.concat_index, f"{rows} x {WINDOW} and {TOPK}", [args], 0.0, num_bytes, [peer])
    rows = -(-make.sizes.many // 4)
    parts = tuple(make.integers(0, 1 << 20, rows, TOPK) for _ in range(4))
    peer = Peer("torch.cat", torch.cat, lambda: [{"tensors": parts}])
    yield Work(index.concat_rows, f"4 of {rows} x {TOPK}", [{"parts": parts}], 0.0, 32.0 * rows * TOPK, [peer])


def blocks(make: Maker) -> Iterator[Work]:
    """Window pages of all layers, and blocks of compressed records and index keys, to pages and blocks beside them."""
    count = make.sizes.requests
    for what, num_bytes in (("pages", _LAYERS * WINDOW_PAGE * 528), ("blocks", (3 * BLOCK // 2 + BLOCK) * (288 + 68))):
        pool = torch.zeros((2 * count, num_bytes), dtype=torch.uint8, device=make.device)
        order = make.shuffled(2 * count)
        args = {"pool": pool, "sources": order[:count].contiguous(), "destinations": order[count:].contiguous()}
        yield Work(kv.copy_blocks, f"{count} {what} of {num_bytes} bytes", [args], 0.0, 2.0 * count * num_bytes)


def records(make: Maker) -> Iterator[Work]:
    """Records of different slots to values."""
    for rows, columns, kind in ((make.sizes.few, TOPK, "fp4"), (make.sizes.many, WINDOW, "fp8")):
        count = rows * columns
        cache = make.cache(kind, count // 64 + 1, 64, DIM)
        slots = (64 + make.shuffled(count)).reshape(rows, columns)
        num_bytes = count * (cache.format.record_bytes + 2.0 * DIM + 4)
        args = {"cache": cache, "slots": slots, "dtype": torch.bfloat16}
        yield Work(kv.kv_gather, f"{rows} x {columns} records, {kind}", [args], 0.0, num_bytes)


def compressed(make: Maker) -> Iterator[Work]:
    """Pairs of tokens to one entry; a decode row closes the group that the token before it began."""
    for rows, sequences, what in phases(make):
        each = rows // sequences
        args = {
            "gate": make.single(rows, DIM),
            "value": make.single(rows, DIM),
            "state": torch.zeros((sequences + 1, _RING, 2, DIM), device=make.device),
            "state_slots": make.numbers(1, sequences + 1),
            "positions": 1024 - each % 2 + make.numbers(0, rows) % each,
            "row_to_seq": make.numbers(0, rows) // each,
            "cu_seqlens_q": make.numbers(0, sequences + 1) * each,
            "ratio": 2,
            "out_dtype": torch.bfloat16,
        }
        read = sequences * (8.0 * DIM if each == 1 else 0.0)
        kept = sequences * min(each, _RING) * 8.0 * DIM
        yield Work(compress.kv_compress, f"{what}, ratio 2", [args], 0.0, rows * (4 + 4 + 2.0) * DIM + read + kept)


FAMILIES: Final[Families] = {
    look_up: ("embedding",),
    chosen_rows: ("gather_rows", "put_rows"),
    side_by_side: ("concat_columns", "concat_index", "concat_rows"),
    blocks: ("copy_blocks",),
    records: ("kv_gather",),
    compressed: ("kv_compress",),
}
