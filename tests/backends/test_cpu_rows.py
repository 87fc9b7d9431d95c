"""Rows of the CPU backend have the same bits in every batch, place and thread count, whatever stands beside them."""

import functools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND
from deepinfer.ops import attention, engram, heads, index, kv, linear, mhc, moe, norm, quant, rope
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor

BACKEND.load()
IMPLEMENTATIONS = {i.op.name: i for i in BACKEND.implementations}
F32, BF16 = torch.float32, torch.bfloat16
MAX_ROWS = 65
GARBAGE = (math.nan, math.inf, -3e38)
COUNTS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def run(op, *args):
    return IMPLEMENTATIONS[op.name].bind({}, None).run(*args)


@pytest.fixture(autouse=True)
def threads():
    was = torch.get_num_threads()
    yield
    torch.set_num_threads(was)


def take(x, rows):
    """Some rows of an argument or a result."""
    if isinstance(x, QTensor):
        return QTensor(x.data[rows], x.scale[rows], x.fmt)
    if isinstance(x, tuple):
        return tuple(take(v, rows) for v in x)
    return x[rows]


def leaves(x):
    if isinstance(x, tuple):
        return [leaf for v in x for leaf in leaves(v)]
    return [x.data, x.scale] if isinstance(x, QTensor) else [x]


def same_bits(got, want, what):
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, what
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b))), what


@dataclass
class Rowwise:
    """An op whose arguments at `rows` have one row per token, and the rest of them."""

    op: object
    args: tuple
    rows: tuple[int, ...]
    floats: tuple[int, ...] = field(default=(0,))  # row arguments that garbage may be put into

    def __call__(self, rows):
        return run(self.op, *[take(a, rows) if i in self.rows else a for i, a in enumerate(self.args)])

    def spoiled(self, keep, value):
        """Results with every row but `keep` filled with garbage."""
        args = list(self.args)
        for i in self.floats:
            if isinstance(args[i], Tensor):
                args[i] = args[i].clone()
                args[i][torch.arange(len(args[i])) != keep] = value
        return run(self.op, *args)


def g(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, dtype=F32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=g(seed + sum(shape))) * scale).to(dtype)


def ints(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=g(seed), dtype=torch.int32)


def cache(kind, dim, pages=70, records=4):
    fmt = CacheFormat(kind, dim)
    pool = PagedCache(torch.zeros(pages, records * fmt.record_bytes, dtype=torch.uint8), fmt, records)
    quant.write_records(pool, torch.arange(pool.num_slots), normal(pool.num_slots, dim))
    return pool


def with_holes(slots, seed=5):
    return torch.where(torch.rand(slots.shape, generator=g(seed)) < 0.3, -1, slots).int()


TABLE = rope.rope_table(64, rope.plain_frequencies(16, 1e4))
N = MAX_ROWS


@functools.cache
def rowwise(dtype):
    """Every op that promises D2 and works on rows, on sizes that leave ragged tiles everywhere."""
    x, h, positions = normal(N, 544, dtype=dtype), normal(N, 4, 72, dtype=dtype), ints(0, 64, N)
    weight, q = normal(43, 544, seed=1), normal(N, 5, 64, dtype=dtype, seed=2)
    post, comb = normal(N, 4, seed=3), normal(N, 4, 4, seed=4)
    fn, scale, base = normal(24, 288, seed=5), normal(3, seed=6), normal(24, seed=7)
    keys = cache("index", 64)
    iq = quant.quantize(q, "mxfp4")
    tables, sequence = ints(0, 70, 3, 17), ints(0, 3, N)
    visible, gates = ints(0, 65, N, seed=8), normal(N, 5, dtype=dtype, seed=9)
    both = normal(N, 144, dtype=dtype, seed=10)
    slots, other = with_holes(ints(0, 280, N, 16)), with_holes(ints(0, 280, N, 37, seed=1))
    return {
        "rms_norm": Rowwise(norm.rms_norm, (x, weight[0], 1e-20), (0,)),
        "rms_norm_quant": Rowwise(norm.rms_norm_quant, (x, weight[0], 1e-20, "mxfp8"), (0,)),
        "quantize": Rowwise(quant.quantize, (x, "mxfp4"), (0,)),
        "rope": Rowwise(rope.rope, (q, positions, TABLE), (0, 1)),
        "o_rope": Rowwise(rope.o_rope, (q, positions, TABLE, 5), (0, 1)),
        "linear f32": Rowwise(linear.linear_bf16, (x, weight, dtype), (0,)),
        "linear bf16": Rowwise(linear.linear_bf16, (x, weight.bfloat16(), F32, 0.5), (0,)),
        "linear mxfp8": Rowwise(linear.linear_mx, (x, quant.quantize(weight, "mxfp8"), dtype), (0,)),
        "linear mxfp4": Rowwise(
            linear.linear_mx,
            (quant.quantize(x, "mxfp8"), quant.quantize(weight, "mxfp4"), F32, normal(N, 43)),
            (0, 3),
            (3,),
        ),
        "grouped o": Rowwise(linear.linear_grouped_o, (q, normal(5, 11, 64)), (0,)),
        "attention": Rowwise(
            attention.sparse_attn,
            (q, cache("fp8", 64), slots, cache("fp4", 64), other, 0.125, normal(5)),
            (0, 2, 4),
        ),
        "index q": Rowwise(index.index_q_quant, (q, positions, TABLE, "mxfp4"), (0, 1)),
        "scores paged": Rowwise(
            index.index_logits_paged, (iq, keys, gates, visible, tables, sequence, 66), (0, 2, 3, 5), (2,)
        ),
        "scores blocks": Rowwise(
            index.index_logits_blocks,
            (iq, keys, gates, visible, ints(-1, 9, N, 5).sort(1).values, 7, tables, sequence),
            (0, 2, 3, 4, 7),
            (2,),
        ),
        "block_max": Rowwise(index.block_max, (normal(N, 66), visible, 7), (0, 1)),
        "topk": Rowwise(index.topk_select, (normal(N, 66).round(), 9, visible), (0, 2)),
        "mix": Rowwise(mhc.mhc_prenorm_mix, (h, fn, 1e-6), (0,)),
        "sinkhorn": Rowwise(mhc.mhc_split_sinkhorn, (normal(N, 24), scale, base, 20, 1e-6), (0,)),
        "apply": Rowwise(mhc.mhc_apply, (h, post), (0, 1), (0, 1)),
        "post": Rowwise(mhc.mhc_post, (h[:, 0], h, post, comb), (0, 1, 2, 3), (0, 1, 2, 3)),
        "step": Rowwise(
            mhc.mhc_step,
            (h[:, 0], h, post, comb, post, fn, scale, base, 20, 1e-6, normal(72), 1e-6),
            (0, 1, 2, 3, 4),
            (0, 1, 2, 3, 4),
        ),
        "stream_mean": Rowwise(heads.stream_mean, (h,), (0,)),
        "engram": Rowwise(
            engram.engram_gate, (h, normal(N, 360, dtype=dtype), fn[:4, :72], fn[4:8, :72], 1e-6), (0, 1), (0, 1)
        ),
        "gate": Rowwise(moe.moe_gate, (normal(N, 37), normal(37), None, None, 6, 1.5), (0,)),
        "swiglu": Rowwise(moe.swiglu_quant, (both[:, :72], both[:, 72:], 1.5, post[:, 0], "mxfp8"), (0, 1, 3), (0, 1)),
        "markov": Rowwise(heads.markov_logits, (normal(N, 50), positions, normal(64, 24), normal(50, 24)), (0, 1)),
        "confidence": Rowwise(heads.draft_confidence, (x, positions, normal(64, 24), normal(1, 568), 1.7), (0, 1)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", list(rowwise(F32)))
def test_a_row_has_the_same_bits_in_every_batch(name, dtype) -> None:
    case = rowwise(dtype)[name]
    torch.set_num_threads(1)
    whole = case(torch.arange(N))
    for count in range(1, N + 1):
        torch.set_num_threads(1 + count % 2)
        for first in {0, (N - count) // 2, N - count}:
            rows = torch.arange(first, first + count)
            same_bits(case(rows), take(whole, rows), (count, first))
    torch.set_num_threads(2)
    order = torch.randperm(N, generator=g(3))
    same_bits(case(order), take(whole, order), "permuted")
    repeated = torch.tensor([7]).expand(N)
    same_bits(case(repeated), take(whole, repeated), "every place")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", list(rowwise(F32)))
def test_garbage_in_other_rows_is_not_seen(name, dtype) -> None:
    case = rowwise(dtype)[name]
    whole = case(torch.arange(N))
    for keep in (0, 31, N - 1):
        for value in GARBAGE:
            same_bits(take(case.spoiled(keep, value), keep), take(whole, keep), (keep, value))


@pytest.mark.parametrize("kinds", [("fp8", "fp4"), ("f32", "f32")], ids=str)
def test_attention_depends_on_named_keys_alone(kinds) -> None:
    """Any number of keys, with holes in other places, a wider index and garbage in every other record."""
    window, other = cache(kinds[0], 64), cache(kinds[1], 64)
    sink, q = normal(5), normal(3, 5, 64, dtype=BF16)
    for keys in COUNTS:
        picked = torch.stack([torch.randperm(280, generator=g(keys + i))[:keys] for i in range(3)]).int()
        near, far = picked[:, : min(keys, 16)], picked[:, min(keys, 16) :]
        want = run(attention.sparse_attn, q, window, near, other, far, 0.125, sink)
        wide = torch.full((3, 2 * far.shape[1] + 3), -1, dtype=torch.int32)
        wide[:, 1 : 2 * far.shape[1] + 1 : 2] = far
        spoiled = []
        for pool, used in ((window, near[1]), (other, far[1])):
            unused = torch.ones(pool.num_slots, dtype=torch.bool)
            unused[used.long()] = False
            spoiled.append(PagedCache(pool.data.clone(), pool.format, pool.records))
            slots = torch.arange(pool.num_slots)[unused]
            quant.write_records(spoiled[-1], slots, torch.full((len(slots), 64), math.nan))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            same_bits(run(attention.sparse_attn, q, window, near, other, wide, 0.125, sink), want, keys)
            alone = run(attention.sparse_attn, q[1:2], spoiled[0], near[1:2], spoiled[1], wide[1:2], 0.125, sink)
            same_bits(alone, take(want, slice(1, 2)), keys)


def test_scores_and_selection_do_not_depend_on_the_number_of_columns() -> None:
    keys, tables = cache("index", 64), ints(0, 70, 1, 70)
    q, gates, zeros = quant.quantize(normal(2, 5, 64), "mxfp4"), normal(2, 5, dtype=BF16), torch.zeros(2).int()
    whole = run(index.index_logits_paged, q, keys, gates, torch.tensor([257, 257]).int(), tables, zeros, 257)
    dense = quant.read_records(keys, run_slots(tables, keys, 257), F32)
    for columns in COUNTS:
        for width in (columns, columns + 1, 300):
            visible = torch.tensor([columns, max(columns - 1, 0)]).int()
            got = run(index.index_logits_paged, q, keys, gates, visible, tables, zeros, width)
            same_bits(got[0, :columns], whole[0, :columns], columns)
            assert (got[0, columns:] == -math.inf).all()
            ragged = run(index.index_logits_ragged, q, dense, gates, zeros, visible)
            same_bits(ragged[0], whole[0, :columns], columns)
            chosen = run(index.topk_select, got, 16, visible)
            same_bits(chosen[0], run(index.topk_select, whole[:1], 16, visible[:1])[0], columns)


def run_slots(tables, keys, count):
    slots = torch.arange(count).int()[None].clone()
    index.logical_to_slot(slots, keys.records, tables, torch.zeros(1).int())
    return slots[0]


def test_experts_see_their_own_rows_only() -> None:
    """A token's result does not depend on who else was routed to its experts, nor on where its rows stand."""
    ids = torch.stack([torch.randperm(7, generator=g(t))[:3] for t in range(33)])
    x, weight = normal(33, 96), quant.quantize(normal(7, 41, 96), "mxfp4")
    token_weights, shared = normal(33, 3), normal(33, 41)

    def moe_of(rows):
        routed, _, psum, handle = run(moe.ep_dispatch, x[rows], ids[rows], token_weights[rows], 7)
        return run(moe.ep_combine, run(moe.moe_grouped_gemm, routed, weight, psum, F32), handle, shared[rows], F32)

    whole = moe_of(torch.arange(33))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (torch.arange(1), torch.arange(4, 9), torch.randperm(33, generator=g(1)), torch.tensor([5] * 20)):
            same_bits(moe_of(rows), whole[rows], rows)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "index", "f32"])
def test_stored_records_do_not_depend_on_the_chunk(kind) -> None:
    rows, positions, slots = normal(33, 64, dtype=BF16), ints(0, 64, 33), torch.randperm(280, generator=g(0))[:33].int()
    pools = []
    for size in (33, 8, 1):
        pool = cache(kind, 64)
        for start in range(0, 33, size):
            part = slice(start, start + size)
            run(kv.index_k_store, rows[part], normal(64), 1e-20, positions[part], TABLE, pool, slots[part], 2)
        pools.append(pool.data)
    assert torch.equal(pools[0], pools[1]) and torch.equal(pools[0], pools[2])


@functools.cache
def large(dtype):
    """Work that is worth several threads (`threads_for` in native/common.hpp), tiled by rows, columns or heads."""
    x, h, positions = normal(33, 1536, dtype=dtype), normal(33, 4, 4096, dtype=dtype), ints(0, 64, 33)
    weight, experts = normal(1000, 1536, seed=1), normal(5, 160, 1536, seed=2)
    q, iq = normal(33, 64, 128, dtype=dtype), normal(3, 32, 128, dtype=dtype)
    near, far = cache("fp8", 128, pages=200), cache("fp4", 128, pages=200)
    slots, sink = with_holes(ints(0, 800, 33, 400)), normal(64)
    keys, tables, zeros = cache("index", 128, pages=400), ints(0, 400, 1, 1000), torch.zeros(3).int()
    visible, gates = torch.tensor([3999, 2500, 4000]).int(), normal(3, 32, dtype=dtype)
    blocks = torch.arange(0, 500, 2).int().expand(3, 250).contiguous()
    post, comb, wide = normal(33, 4), normal(33, 4, 4), normal(200, 4096, dtype=dtype)
    psum = torch.tensor([2, 2, 20, 30, 33]).int()
    return {
        "rms_norm_quant": (norm.rms_norm_quant, wide, None, 1e-20, "mxfp8"),
        "quantize": (quant.quantize, wide, "nvfp4"),
        "dequantize": (quant.dequantize, quant.quantize(wide, "mxfp4"), dtype),
        "rope": (rope.rope, normal(33, 100, 128, dtype=dtype), positions, TABLE),
        "linear": (linear.linear_bf16, x, weight, dtype),
        "linear one row": (linear.linear_mx, x[:1], quant.quantize(normal(4000, 1536), "mxfp8"), dtype),
        "linear mxfp4": (linear.linear_mx, quant.quantize(x, "mxfp8"), quant.quantize(weight, "mxfp4"), dtype),
        "grouped o": (linear.linear_grouped_o, x.reshape(33, 3, 512), normal(3, 200, 512)),
        "experts": (moe.moe_grouped_gemm, x, quant.quantize(experts, "mxfp4"), psum, dtype),
        "attention one row": (attention.sparse_attn, q[:1], near, slots[:1], far, slots[1:2], 0.1, sink),
        "attention": (attention.sparse_attn, q, near, slots, far, slots, 0.1, sink),
        "merge": (attention.attn_merge, normal(4, 33, 64, 128), normal(4, 33, 64), dtype),
        "scores paged": (index.index_logits_paged, iq, keys, gates, visible, tables, zeros, 4000),
        "scores blocks": (index.index_logits_blocks, iq, keys, gates, visible, blocks, 8, tables, zeros),
        "scores ragged": (index.index_logits_ragged, iq, normal(4000, 128), gates, zeros, visible),
        "topk": (index.topk_select, normal(50, 4000).round(decimals=1), 99, ints(0, 4001, 50)),
        "block_max": (index.block_max, normal(120, 4000), ints(0, 4001, 120), 7),
        "mix": (mhc.mhc_prenorm_mix, h, normal(24, 16384), 1e-6),
        "apply": (mhc.mhc_apply, h, post),
        "post": (mhc.mhc_post, h[:, 0], h, post, comb),
        "stream_mean": (heads.stream_mean, h),
        "engram": (engram.engram_gate, h, normal(33, 5 * 4096, dtype=dtype), normal(4, 4096), wide[:4], 1e-6),
        "swiglu": (moe.swiglu_quant, wide[:, ::2], wide[:, 1::2], 1.5, None, "mxfp8"),
        "markov": (heads.markov_logits, normal(33, 2000), positions, normal(64, 256), normal(2000, 256)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", list(large(F32)))
def test_bits_do_not_depend_on_the_number_of_threads(name, dtype) -> None:
    op, *args = large(dtype)[name]
    torch.set_num_threads(1)
    alone = run(op, *args)
    torch.set_num_threads(2)
    for _ in range(3):
        same_bits(run(op, *args), alone, name)
