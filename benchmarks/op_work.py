"""What `benchmarks/ops.py` times: ops at DeepSeek-V4.1-Flash's real shapes, and what torch offers for the same.

Operands are random and made on the device. Those of a product that a cache could hold come in as many sets as leave it
no chance. Peers say in their name what they leave out: a copy in bfloat16 was decoded beforehand, one scale is not the
model's format, gathered keys were gathered beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops import attention, index, kv, linear, mhc, moe, norm, quant, rope
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.registry import OpTable
from deepinfer.ops.spec import OpSpec

HIDDEN: Final = 5120
HEADS: Final = 64
DIM: Final = 512
EXPERTS: Final = 384
CHOSEN: Final = 6
INTERMEDIATE: Final = 2304
STREAMS: Final = 4
GROUPS, RANK = 8, 1024
INDEX_HEADS, INDEX_DIM = 32, 128
POOL_BLOCKS, POOL_BLOCK = 2048, 8
Q_RANK: Final = 1280
ROTATED: Final = 64
CODE_BYTES: Final = 33 / 32
_ROTATED_BYTES: Final = 400 << 20
Calls = list[dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """Something to time beside an op.

    Attributes:
        name: in the table.
        run: called with the arguments of `calls`.
        calls: makes argument lists to rotate over.
    """

    name: str
    run: Callable[..., Any]
    calls: Callable[[], Calls]


@dataclass(frozen=True)
class Work:
    """An op on operands.

    Attributes:
        op: its contract.
        shape: in the table.
        calls: argument lists to rotate over.
        flops: a call's; 0 where there are none to speak of.
        num_bytes: that a call must move.
        peers: what is timed beside it.
    """

    op: OpSpec[..., Any]
    shape: str
    calls: Calls
    flops: float
    num_bytes: float
    peers: list[Peer] = field(default_factory=list)


class Maker:
    """Random operands on the device, and the ops that peers need.

    Args:
        ops: of the device.
    """

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops
        self.device = ops.context.device
        self.gen = torch.Generator(self.device).manual_seed(0)

    def plain(self, *shape: int) -> Tensor:
        """Standard normal bfloat16."""
        return torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_(generator=self.gen)

    def single(self, *shape: int) -> Tensor:
        """Uniform float32 in [0, 1)."""
        return torch.rand(shape, generator=self.gen, device=self.device)

    def codes(self, *shape: int, fmt: str) -> QTensor:
        """Any code but NaN, scales near 1."""
        width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
        data = torch.randint(0, 256, (*shape[:-1], width), generator=self.gen, device=self.device, dtype=torch.uint8)
        if fmt == "mxfp8":
            data.masked_fill_((data & 0x7F) == 0x7F, 0)
        scale_shape = (*shape[:-1], shape[-1] // 32)
        scale = torch.randint(110, 118, scale_shape, generator=self.gen, device=self.device, dtype=torch.uint8)
        return QTensor(data, scale, fmt)  # type: ignore[arg-type]

    def cache(self, kind: str, pages: int, records: int, dim: int) -> PagedCache:
        """Records of random bytes that are no NaN."""
        fmt = CacheFormat(kind, dim)  # type: ignore[arg-type]
        data = torch.randint(
            0, 100, (pages, records * fmt.record_bytes), generator=self.gen, device=self.device, dtype=torch.uint8
        )
        return PagedCache(data, fmt, records)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.gen, device=self.device, dtype=torch.int32)

    def numbers(self, low: int, high: int) -> Tensor:
        """int32 low, low + 1, ..., high - 1."""
        return torch.arange(low, high, device=self.device, dtype=torch.int32)


def rotated(make: Callable[[], dict[str, Any]], num_bytes: float) -> Calls:
    """As many operand sets as leave a cache no chance, 16 at most."""
    return [make() for _ in range(max(1, min(16, math.ceil(_ROTATED_BYTES / max(num_bytes, 1)))))]


def dense(make: Maker) -> Iterator[Work]:
    """Products with FP8 weights."""
    for label, n, k in (("q_b", 32768, 1280), ("shared up", 4608, HIDDEN), ("o_b", HIDDEN, 8192)):
        for rows in (16, 64, 128, 2048, 8192):

            def operands(rows: int = rows, n: int = n, k: int = k) -> dict[str, Any]:
                x, weight = make.codes(rows, k, fmt="mxfp8"), make.codes(n, k, fmt="mxfp8")
                return {"x": x, "weight": weight, "out_dtype": torch.bfloat16}

            yield Work(
                linear.linear_mx,
                f"{label} {rows} x {n} x {k}, mxfp8",
                rotated(operands, n * k),
                2.0 * rows * n * k,
                n * k * 33 / 32 + rows * k * 33 / 32 + rows * n * 2,
                _dense_peers(make, rows, n, k),
            )


def _dense_peers(make: Maker, rows: int, n: int, k: int) -> list[Peer]:
    decode = make.ops.bind(quant.dequantize, k=k, fmt="mxfp8")

    def decoded() -> dict[str, Any]:
        return {"input": make.plain(rows, k), "mat2": make.plain(n, k).t()}

    def coded() -> dict[str, Any]:
        return {"x": make.plain(rows, k), "weight": make.codes(n, k, fmt="mxfp8")}

    def decode_and_multiply(x: Tensor, weight: QTensor) -> Tensor:
        return torch.mm(x, decode(weight, torch.bfloat16).t())

    peers = [
        Peer("torch.mm, bf16 copy", torch.mm, lambda: rotated(decoded, 2 * n * k)),
        Peer("dequantise, then torch.mm", decode_and_multiply, lambda: rotated(coded, n * k)),
    ]
    if rows >= 64 and make.device.type != "cpu" and hasattr(torch, "_scaled_mm"):
        one = torch.ones((), device=make.device)

        def scaled() -> dict[str, Any]:
            eight = torch.float8_e4m3fn
            a, b = make.plain(rows, k).to(eight), make.plain(n, k).to(eight).t()
            return {"input": a, "mat2": b, "scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}

        peers.append(Peer("torch._scaled_mm, one scale", torch._scaled_mm, lambda: rotated(scaled, n * k)))
    return peers


def grouped_output(make: Maker) -> Iterator[Work]:
    """The grouped half of the output projection."""
    width = HEADS * DIM // GROUPS
    for rows in (64, 8192):

        def operands(rows: int = rows) -> dict[str, Any]:
            return {"x": make.plain(rows, GROUPS, width), "weight": make.codes(GROUPS, RANK, width, fmt="mxfp8")}

        size = GROUPS * RANK * width
        yield Work(
            linear.linear_grouped_o,
            f"{rows} x {GROUPS} groups of {RANK} x {width}, mxfp8",
            rotated(operands, size),
            2.0 * rows * size,
            size * 33 / 32 + rows * GROUPS * (width + RANK) * 2,
        )


def plain_dense(make: Maker) -> Iterator[Work]:
    """Products with plain weights."""
    for label, n, k, counts in (("router", EXPERTS, HIDDEN, (64, 8192)), ("head", 129280, HIDDEN, (16, 64))):
        for rows in counts:
            args = {"x": make.plain(rows, k), "weight": make.plain(n, k), "out_dtype": torch.float32}
            num_bytes = 2.0 * n * k + 2.0 * rows * k + 4.0 * rows * n
            peer = {"input": args["x"], "mat2": args["weight"].t()}
            yield Work(
                linear.linear_bf16,
                f"{label} {rows} x {n} x {k}, bf16",
                [args],
                2.0 * rows * n * k,
                num_bytes,
                [Peer("torch.mm, bf16 result", torch.mm, lambda peer=peer: [peer])],
            )


def experts(make: Maker) -> Iterator[Work]:
    """Products with the weights of chosen experts."""
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    for n, k in shapes:
        weight = make.codes(EXPERTS, n, k, fmt="mxfp4")
        for tokens in (16, 128, 1024, 16384):
            choice = torch.rand(tokens, EXPERTS, generator=make.gen, device=make.device).topk(CHOSEN, 1).indices
            counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
            hit, rows = int((counts > 0).sum()), tokens * CHOSEN
            args = {
                "x": make.codes(rows, k, fmt="mxfp8"),
                "weight": weight,
                "psum": counts.cumsum(0).int(),
                "out_dtype": torch.bfloat16,
            }
            yield Work(
                moe.moe_grouped_gemm,
                f"{tokens} tokens, {hit} experts, {n} x {k}",
                [args],
                2.0 * rows * n * k,
                hit * n * k * 17 / 32 + rows * k * 33 / 32 + rows * n * 2,
                _expert_peers(make, rows, n, k, args["psum"]),
            )


def _expert_peers(make: Maker, rows: int, n: int, k: int, ends: Tensor) -> list[Peer]:
    if make.device.type == "cpu" or not hasattr(torch, "_grouped_mm"):
        return []

    def decoded() -> Calls:
        matrices = make.plain(EXPERTS, n, k).transpose(1, 2)
        return [{"input": make.plain(rows, k), "mat2": matrices, "offs": ends}]

    return [Peer("torch._grouped_mm, bf16 copy", torch._grouped_mm, decoded)]


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
            args = {"x": x, "k": 512, "lens": torch.full((256,), columns, dtype=torch.int32, device=make.device)}
            peer = {"input": x, "k": 512, "sorted": False}
            yield Work(
                index.topk_select,
                f"512 of {columns}, 256 rows, {str(dtype)[6:]}",
                [args],
                0.0,
                float(x.numel() * x.element_size()),
                [Peer("torch.topk, any ties", torch.topk, lambda peer=peer: [peer])],
            )


def row_ops(make: Maker) -> Iterator[Work]:
    """What moves rows and computes little."""
    for count in (128, 8192):
        for rows, width in ((count, HIDDEN), (count, Q_RANK), *(((4 * count, Q_RANK),) if count > 128 else ())):
            yield from _normed(make, rows, width)
        for rows in (count, count * CHOSEN):
            yield _gated(make, rows)
        yield from _turned(make, count)
        yield _stream_step(make, count)
    for count in (128, 65536):
        yield from (_store(make, count, kind) for kind in ("fp4", "fp8", "index"))


def _normed(make: Maker, rows: int, width: int) -> Iterator[Work]:
    x, weight = make.plain(rows, width), torch.ones(width, device=make.device)
    size, shape = float(rows * width), f"{rows} x {width}"
    yield Work(norm.rms_norm, shape, [{"x": x, "weight": weight, "eps": 1e-6}], 0.0, 4 * size)
    args = {"x": x, "weight": weight, "eps": 1e-6, "fmt": "mxfp8"}
    yield Work(norm.rms_norm_quant, f"{shape}, mxfp8", [args], 0.0, (4 + CODE_BYTES) * size)
    yield Work(quant.quantize, f"{shape}, mxfp8", [{"x": x, "fmt": "mxfp8"}], 0.0, (2 + CODE_BYTES) * size)


def _gated(make: Maker, rows: int) -> Work:
    both = make.plain(rows, 2 * INTERMEDIATE)
    args = {
        "gate": both[:, :INTERMEDIATE],
        "up": both[:, INTERMEDIATE:],
        "limit": 10.0,
        "row_weight": make.single(rows),
        "fmt": "mxfp8",
    }
    size = float(rows * INTERMEDIATE)
    return Work(moe.swiglu_quant, f"{rows} x {INTERMEDIATE}, mxfp8", [args], 0.0, (4 + CODE_BYTES) * size)


def _turned(make: Maker, rows: int) -> Iterator[Work]:
    """Rotations of queries, of attention's output, and of index queries on their way to codes."""
    at = {"positions": make.numbers(0, rows), "cos_sin": make.single(rows, ROTATED)}
    heads, shape = make.plain(rows, HEADS, DIM), f"{rows} x {HEADS} x {DIM}"
    size, table = float(rows * HEADS * DIM), rows * 4.0 * ROTATED
    yield Work(rope.q_norm_rope, shape, [{"q": heads, **at}], 0.0, 4 * size + table)
    yield Work(rope.o_rope, shape, [{"o": heads, **at, "num_groups": GROUPS}], 0.0, 4 * size + table)
    heads, shape = make.plain(rows, INDEX_HEADS, INDEX_DIM), f"{rows} x {INDEX_HEADS} x {INDEX_DIM}"
    size = float(rows * INDEX_HEADS * INDEX_DIM)
    yield Work(rope.rope, shape, [{"x": heads, **at}], 0.0, 4 * size + table)
    args = {"q": heads, **at, "fmt": "mxfp4"}
    yield Work(index.index_q_quant, f"{shape}, mxfp4", [args], 0.0, (2 + 17 / 32) * size + table)


def _store(make: Maker, count: int, kind: str) -> Work:
    """Records of a kind; entries and windows come with the normed rows, index keys without."""
    dim = INDEX_DIM if kind == "index" else DIM
    cache = make.cache(kind, count // 64 + 2, 64, dim)
    args = {
        "weight": torch.ones(dim, device=make.device),
        "eps": 1e-6,
        "positions": make.numbers(0, count),
        "cos_sin": make.single(count, ROTATED),
        "cache": cache,
        "slots": make.numbers(64, 64 + count),
    }
    num_bytes = count * (2.0 * dim + cache.format.record_bytes + 4 * ROTATED)
    shape, x = f"{count} x {dim}, {kind}", make.plain(count, dim)
    if kind == "index":
        return Work(kv.index_k_store, shape, [{"k": x, **args}], 0.0, num_bytes)
    return Work(kv.kv_norm_rope_store, shape, [{"kv": x, **args}], 0.0, num_bytes + count * 2.0 * dim)


def _stream_step(make: Maker, count: int) -> Work:
    mix = STREAMS * (STREAMS + 2)
    args = {
        "y": make.plain(count, HIDDEN),
        "h": make.plain(count, STREAMS, HIDDEN),
        "post": make.single(count, STREAMS),
        "comb": make.single(count, STREAMS, STREAMS),
        "read": make.single(count, STREAMS),
        "fn": make.single(mix, STREAMS * HIDDEN) * 0.01,
        "scale": torch.ones(3, device=make.device),
        "base": torch.zeros(mix, device=make.device),
        "iters": 20,
        "hc_eps": 1e-6,
        "norm_weight": torch.ones(HIDDEN, device=make.device),
        "norm_eps": 1e-6,
    }
    num_bytes = count * HIDDEN * 2.0 * (1 + STREAMS + STREAMS + 1) + 4.0 * mix * STREAMS * HIDDEN
    return Work(
        mhc.mhc_step, f"{count} x {STREAMS} x {HIDDEN}", [args], 2.0 * count * mix * STREAMS * HIDDEN, num_bytes
    )


FAMILIES: Final[dict[Callable[[Maker], Iterator[Work]], tuple[str, ...]]] = {
    dense: ("linear_mx",),
    grouped_output: ("linear_grouped_o",),
    plain_dense: ("linear_bf16",),
    experts: ("moe_grouped_gemm",),
    attend: ("sparse_attn",),
    choose: ("index_logits_paged", "index_logits_blocks", "topk_select"),
    row_ops: (
        "rms_norm",
        "rms_norm_quant",
        "quantize",
        "swiglu_quant",
        "q_norm_rope",
        "o_rope",
        "rope",
        "index_q_quant",
        "kv_norm_rope_store",
        "index_k_store",
        "mhc_step",
    ),
}
"""The ops of each family, known before its operands are made."""
