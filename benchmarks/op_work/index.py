"""Index scores, the choice of entries, and candidate blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from deepinfer.ops import index
from op_work.work import INDEX_DIM, INDEX_HEADS, POOL_BLOCK, POOL_BLOCKS, TOPK, Families, Maker, Peer, Work


def _index_args(make: Maker, rows: int, columns: int, sequences: int) -> dict[str, Any]:
    """Rows of so many sequences, which see all their keys; scales are near 1 as in a cache, not any bytes."""
    records = 64
    pages = columns // records * sequences
    cache = make.cache("index", pages + 1, records, INDEX_DIM)
    keys = make.codes((pages + 1) * records, INDEX_DIM, fmt="mxfp4")
    cache.data.copy_(torch.cat([x.reshape(pages + 1, -1) for x in (keys.data, keys.scale)], 1))
    return {
        "q": make.codes(rows, INDEX_HEADS, INDEX_DIM, fmt="mxfp4"),
        "cache": cache,
        "weights": make.plain(rows, INDEX_HEADS),
        "visible": torch.full((rows,), columns, dtype=torch.int32, device=make.device),
        "block_table": make.numbers(1, pages + 1).reshape(sequences, -1),
        "row_to_seq": make.numbers(0, rows) * sequences // rows,
    }


def choose(make: Maker) -> Iterator[Work]:
    """Index scores and the choice of the best entries."""
    for rows, columns, sequences in ((64, 32768, 1), (64, 32768, 64), (1024, 8192, 1), (8192, 16384, 1)):
        args = _index_args(make, rows, columns, sequences)
        work, keys = 2.0 * rows * INDEX_HEADS * INDEX_DIM, 68.0 * sequences
        shape = f"{rows} x {columns}, {'one sequence' if sequences == 1 else 'a sequence a row'}"
        num_bytes = (keys + 4 * rows) * columns
        yield Work(index.index_logits_paged, shape, [{**args, "num_columns": columns}], work * columns, num_bytes)
        if sequences > 1:
            continue
        blocks = min(columns // POOL_BLOCK, POOL_BLOCKS)
        chosen = torch.rand(rows, columns // POOL_BLOCK, generator=make.gen, device=make.device).argsort(1)[:, :blocks]
        part = {**args, "blocks": chosen.sort(1).values.int(), "candidate_block": POOL_BLOCK}
        width = blocks * POOL_BLOCK
        shape, num_bytes = f"{rows} x {blocks} blocks of {POOL_BLOCK}", (keys + 4 * rows) * width
        yield Work(index.index_logits_blocks, shape, [part], work * width, num_bytes)
    for columns in (16384, 65536):
        for dtype in (torch.float32, torch.bfloat16):
            x = make.plain(256, columns).to(dtype)
            args = {"x": x, "k": TOPK, "lens": torch.full((256,), columns, dtype=torch.int32, device=make.device)}
            peer = {"input": x, "k": TOPK, "sorted": False}
            yield Work(
                index.topk_select,
                f"{TOPK} of {columns}, 256 rows, {str(dtype)[6:]}",
                [args],
                0.0,
                float(x.numel() * x.element_size()),
                [Peer("torch.topk, any ties", torch.topk, lambda peer=peer: [peer])],
            )


def ragged_scores(make: Maker) -> Iterator[Work]:
    """Index scores against dense keys. How wide the result is stands in values, so each call waits for the host."""
    rows, keys = make.sizes.few, make.sizes.many
    args = {
        "q": make.codes(rows, INDEX_HEADS, INDEX_DIM, fmt="mxfp4"),
        "k": make.codes(keys, INDEX_DIM, fmt="mxfp4"),
        "weights": make.plain(rows, INDEX_HEADS),
        "starts": make.same(0, rows),
        "ends": make.same(keys, rows),
    }
    num_bytes = (rows * INDEX_HEADS + keys) * 68.0 + 4.0 * rows * keys
    flops = 2.0 * rows * keys * INDEX_HEADS * INDEX_DIM
    yield Work(index.index_logits_ragged, f"{rows} x {keys}, waits for the host", [args], flops, num_bytes)


def pool(make: Maker) -> Iterator[Work]:
    """Candidate blocks from scores, and choices among their entries back to positions."""
    sizes = make.sizes
    for rows, columns in ((sizes.requests, 4 * sizes.many), (sizes.many, 2 * sizes.many)):
        args = {"logits": make.single(rows, columns), "lens": make.same(columns, rows), "block": POOL_BLOCK}
        num_bytes = 4.0 * rows * columns * (1 + 1 / POOL_BLOCK)
        yield Work(index.block_max, f"{rows} x {columns}, blocks of {POOL_BLOCK}", [args], 0.0, num_bytes)
    for rows in (sizes.few, sizes.many):
        picks = make.integers(0, POOL_BLOCKS * POOL_BLOCK, rows, TOPK).sort(1).values
        blocks = make.numbers(0, POOL_BLOCKS).expand(rows, POOL_BLOCKS).contiguous() * 2
        args = {"indices": picks, "blocks": blocks, "block": POOL_BLOCK}
        num_bytes = 4.0 * rows * (2 * TOPK + POOL_BLOCKS)  # choices are dense enough to touch every sector of blocks
        yield Work(index.blocks_to_positions, f"{rows} x {TOPK} of {POOL_BLOCKS} blocks", [args], 0.0, num_bytes)


FAMILIES: Final[Families] = {
    choose: ("index_logits_paged", "index_logits_blocks", "topk_select"),
    ragged_scores: ("index_logits_ragged",),
    pool: ("block_max", "blocks_to_positions"),
}
