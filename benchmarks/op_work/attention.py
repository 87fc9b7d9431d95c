"""Attention over records, the merge of its parts, and that of the vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops import attention, kv, vision
from op_work.work import DIM, HEADS, Calls, Families, Maker, Peer, Work


def attend(make: Maker) -> Iterator[Work]:
    """Sparse attention over a window and chosen entries: of records all over the caches, and of one sequence's."""
    window, entries = make.cache("fp8", 2048, 32, DIM), make.cache("fp4", 2048, 64, DIM)

    def work(rows: int, which: str, window_slots: Tensor, kv_slots: Tensor) -> Work:
        args = {
            "q": make.plain(rows, HEADS, DIM) * 0.1,
            "window_cache": window,
            "window_slots": window_slots,
            "kv_cache": entries,
            "kv_slots": kv_slots,
            "softmax_scale": DIM**-0.5,
            "attn_sink": torch.zeros(HEADS, device=make.device),
        }
        flops, num_bytes = 4.0 * rows * HEADS * 640 * DIM, rows * (128 * 528 + 512 * 288 + 4.0 * HEADS * DIM)
        peers = _attention_peers(make, args) if rows <= 512 else []
        return Work(attention.sparse_attn, f"{rows} rows x 640 keys{which}", [args], flops, num_bytes, peers)

    for rows in (16, 64, 128, 512, 8192):
        near = make.integers(32, window.num_slots, rows, 128)
        yield work(rows, "", near, make.integers(64, entries.num_slots, rows, 512))
    near = 32 + make.numbers(0, 8192)[:, None] + make.numbers(0, 128)  # a row's own record and those before it
    far = make.integers(64, 64 + (16 << 10), 8192, 512)
    yield work(8192, ", one sequence of 16k entries", near, far)


def _attention_peers(make: Maker, args: dict[str, Any]) -> list[Peer]:
    """SDPA, without the sink that it does not know."""
    rows, attend_to = args["q"].shape[0], torch.nn.functional.scaled_dot_product_attention
    names = ("window", "kv")
    gathers = {name: make.ops.bind(kv.kv_gather, dim=DIM, kind=args[f"{name}_cache"].format.kind) for name in names}

    def spread(keys: Tensor) -> Tensor:
        return keys[:, None].expand(rows, HEADS, 640, DIM)

    def gather_and_attend(query: Tensor) -> Tensor:
        parts = [gathers[name](args[f"{name}_cache"], args[f"{name}_slots"], torch.bfloat16) for name in names]
        keys = spread(torch.cat(parts, 1))
        return attend_to(query, keys, keys)

    def gathered() -> Calls:
        keys = spread(make.plain(rows, 640, DIM))
        return [{"query": args["q"][:, :, None], "key": keys, "value": keys}]

    return [
        Peer("torch SDPA, gathered bf16", attend_to, gathered),
        Peer("gather, then torch SDPA", gather_and_attend, lambda: [{"query": args["q"][:, :, None]}]),
    ]


def merge(make: Maker) -> Iterator[Work]:
    """Results over parts of the keys to one."""
    for rows, parts in ((16, 4), (make.sizes.few, 4), (make.sizes.many, 2)):
        args = {
            "o": make.single(parts, rows, HEADS, DIM),
            "lse": make.single(parts, rows, HEADS),
            "out_dtype": torch.bfloat16,
        }
        read, written = 4.0 * parts * rows * HEADS * (DIM + 1), rows * HEADS * (2.0 * DIM + 4)
        yield Work(attention.attn_merge, f"{parts} parts of {rows} x {HEADS} x {DIM}", [args], 0.0, read + written)


def images(make: Maker) -> Iterator[Work]:
    """Attention of the vision tower."""
    for count, patches in ((1, make.sizes.image), (8, make.sizes.small_image)):
        rows, heads, dim = count * patches, 16, 64
        q, k, v = (make.plain(rows, heads, dim) for _ in range(3))
        ends = make.numbers(0, count + 1) * patches
        args = {"q": q, "k": k, "v": v, "cu_seqlens": ends, "softmax_scale": dim**-0.5}
        each = {
            name: x.view(count, patches, heads, dim).transpose(1, 2)
            for name, x in (("query", q), ("key", k), ("value", v))
        }
        yield Work(
            vision.vision_attn,
            f"{count} x {patches} patches, {heads} heads of {dim}",
            [args],
            4.0 * rows * patches * heads * dim,
            4 * 2.0 * rows * heads * dim,
            [
                Peer(
                    "torch SDPA, images of one size",
                    torch.nn.functional.scaled_dot_product_attention,
                    lambda each=each: [each],
                )
            ],
        )


FAMILIES: Final[Families] = {
    attend: ("sparse_attn",),
    merge: ("attn_merge",),
    images: ("vision_attn",),
}
