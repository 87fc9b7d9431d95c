"""Every implementation of the CPU backend against its reference, over small and awkward shapes."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.backends.cpu import BACKEND
from deepinfer.ops import (
    attention,
    compress,
    engram,
    heads,
    index,
    kv,
    linear,
    mhc,
    moe,
    norm,
    quant,
    rope,
    step,
    vision,
)
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.spec import defined_ops

BACKEND.load()
IMPLEMENTATIONS = {i.op.name: i for i in BACKEND.implementations}

F32, BF16 = torch.float32, torch.bfloat16
ROWS = (0, 1, 5, 33)


def run(op, *args, **kwargs):
    return IMPLEMENTATIONS[op.name].bind({}, None).run(*args, **kwargs)


@dataclass
class Draw:
    """Random arguments of one dtype."""

    dtype: torch.dtype
    g: torch.Generator

    def normal(self, *shape, dtype=None, scale=1.0):
        return (torch.randn(shape, generator=self.g) * scale).to(dtype or self.dtype)

    def ints(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.g, dtype=torch.int32)

    def chance(self, p, *shape):
        return torch.rand(shape, generator=self.g) < p

    def cache(self, kind, dim, pages=9, records=4, strided=True):
        """A filled pool whose rows lie apart, as pools that are views into wider blocks do."""
        fmt = CacheFormat(kind, dim)
        need = records * fmt.record_bytes
        pool = torch.zeros(pages, need + (48 if strided else 0), dtype=torch.uint8)
        cache = PagedCache(pool[:, 16 : 16 + need] if strided else pool, fmt, records)
        quant.write_records(cache, torch.arange(cache.num_slots), self.normal(cache.num_slots, dim, dtype=F32))
        return cache

    def slots(self, cache, rows, columns, holes=0.3):
        slots = self.ints(0, cache.num_slots, rows, columns)
        return torch.where(self.chance(holes, rows, columns), -1, slots).int()


def clone(x):
    """A deep copy that keeps strides of pools."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, QTensor):
        return QTensor(x.data.clone(), x.scale.clone(), x.fmt, x.layout)
    if isinstance(x, PagedCache):
        wide = torch.zeros(x.data.shape[0], x.data.stride(0), dtype=torch.uint8)
        wide[:, : x.data.shape[1]] = x.data
        return PagedCache(wide[:, : x.data.shape[1]], x.format, x.records)
    return x


def close(got, want, tolerance, where=""):
    """Compare a result of any shape the ops return."""
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            close(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(want, QTensor):
        assert got.fmt == want.fmt and got.layout == want.layout and got.shape == want.shape
        assert torch.equal(got.scale, want.scale), where
        codes_close(got.data, want.data, tolerance.off_by_one)
    elif isinstance(want, moe.DispatchHandle):
        assert torch.equal(got.slot_to_row, want.slot_to_row)
    elif isinstance(want, PagedCache) and want.format.kind == "f32":
        everywhere = torch.arange(want.num_slots)
        a, b = (quant.read_records(c, everywhere, F32) for c in (got, want))
        close(a, b, tolerance, where)
    elif isinstance(want, PagedCache):
        codes_close(got.data, want.data, tolerance.off_by_one)
    elif want is None:
        assert got is None
    else:
        assert got.shape == want.shape, where
        if not want.is_floating_point():
            assert got.dtype == want.dtype and torch.equal(got, want), where
            return
        a, b = got.double(), want.double()
        assert torch.equal(a.isnan(), b.isnan()), where
        finite = b.isfinite()
        assert torch.equal(a[~finite].nan_to_num(1.0), b[~finite].nan_to_num(1.0)), where
        # two fp32 results on both sides of a midpoint round to neighbours, which are up to 2^-7 apart
        rtol = max(tolerance.rtol, 2.0**-7) if want.dtype == BF16 and not tolerance.exact else tolerance.rtol
        excess = (a - b)[finite].abs() - tolerance.atol - rtol * b[finite].abs()
        assert excess.numel() == 0 or excess.max() <= 0, f"{where}: {excess.max()} over"


def codes_close(got, want, off_by_one):
    assert got.shape == want.shape
    if off_by_one == 0:
        assert torch.equal(got, want)
    elif got.numel():
        assert (got != want).double().mean() <= max(off_by_one, 2 / got.numel())


def wide(x):
    """float64 in place of float32, to check against the reference at its most exact."""
    if isinstance(x, Tensor):
        return x.double() if x.dtype == F32 else x
    return torch.float64 if x is F32 else x


def agree(op, d, *args, exact_too=False, **kwargs):
    """Run both on copies of the same arguments; compare results and everything the op may write."""
    names = list(op.signature.parameters)
    mine, theirs = [clone(a) for a in args], [clone(a) for a in args]
    got, want = run(op, *mine, **kwargs), op(*theirs, **kwargs)
    close(got, want, op.tolerance, op.name)
    for name, a, b in zip(names, mine, theirs, strict=False):
        if name in op.mutates:
            close(a, b, op.tolerance, f"{op.name} {name}")
    if exact_too and d.dtype == F32:
        close(got, to_f32(op(*[wide(clone(a)) for a in args], **{k: wide(v) for k, v in kwargs.items()})), op.tolerance)


def to_f32(x):
    if isinstance(x, tuple):
        return tuple(to_f32(v) for v in x)
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x


@pytest.fixture(params=[(r, t) for r in ROWS for t in (F32, BF16)], ids=lambda p: f"{p[0]}-{str(p[1])[6:]}")
def draw(request):
    rows, dtype = request.param
    return rows, Draw(dtype, torch.Generator().manual_seed(rows + 1))


def table(positions=64, width=16):
    return rope.rope_table(positions, rope.plain_frequencies(width, 1e4))


def ragged(d, rows, sequences=3):
    """(row_to_seq, cu_seqlens_q, positions) of rows cut into consecutive runs, one of them empty."""
    cuts = sorted(d.ints(0, rows + 1, sequences - 1).tolist())
    bounds = torch.tensor([0, *cuts, rows], dtype=torch.int32)
    row_to_seq = torch.repeat_interleave(torch.arange(sequences), bounds.diff().long()).int()
    start = d.ints(0, 20, sequences)
    positions = start[row_to_seq.long()] + torch.arange(rows).int() - bounds[row_to_seq.long()]
    return row_to_seq, bounds, positions.int()


def test_no_op_that_computes_runs_on_the_reference() -> None:
    """Ops that only move bits may fall back: torch does that as well."""
    modules = {m.__name__ for m in (attention, compress, engram, heads, index, kv, linear, mhc, moe, norm, quant, rope)}
    computing = {name for name, op in defined_ops().items() if op.module in modules and not op.tolerance.exact}
    assert computing <= set(IMPLEMENTATIONS)


def test_norms_agree(draw) -> None:
    rows, d = draw
    for width in (1, 7, 8, 96, 129):
        for weight in (None, d.normal(width, dtype=F32), d.normal(width, dtype=BF16)):
            agree(norm.rms_norm, d, d.normal(rows, width), weight, 1e-20, exact_too=True)
    x = d.normal(rows, 96)
    x[1:2] = 0
    agree(norm.rms_norm, d, x, None, 1e-20)
    agree(norm.rms_norm, d, d.normal(rows, 3, 64)[:, 1], d.normal(64), 1e-6)  # rows apart
    for fmt in ("mxfp8", "mxfp4", "nvfp4"):
        agree(norm.rms_norm_quant, d, d.normal(rows, 96), d.normal(96, dtype=F32), 1e-20, fmt)


def test_rotations_agree(draw) -> None:
    rows, d = draw
    positions = d.ints(0, 64, rows)
    agree(rope.rope, d, d.normal(rows, 3, 40), positions, table(), exact_too=True)
    agree(rope.rope, d, d.normal(rows, 16), positions, table(), True, exact_too=True)
    agree(rope.q_norm_rope, d, d.normal(rows, 3, 40), positions, table(), exact_too=True)
    agree(rope.q_norm_rope, d, d.normal(rows, 3, 40), positions, table(), True, 1e-6)
    agree(rope.o_rope, d, d.normal(rows, 4, 24), positions, table(), 2, exact_too=True)


def test_position_outside_the_table_is_refused() -> None:
    with pytest.raises(IndexError, match="position 64 is outside"):
        run(rope.rope, torch.zeros(1, 16), torch.tensor([64]).int(), table())


def test_products_agree(draw) -> None:
    rows, d = draw
    for width, num_out in ((32, 1), (96, 7), (544, 40), (1056, 9)):
        x = d.normal(rows, width)
        for weight in (d.normal(num_out, width, dtype=F32), d.normal(num_out, width, dtype=BF16)):
            agree(linear.linear_bf16, d, x, weight, d.dtype, exact_too=True)
            agree(linear.linear_bf16, d, x, weight, F32, 0.37)
        for fmt in ("mxfp8", "mxfp4", "nvfp4"):
            weight = quant.quantize(d.normal(num_out, width, dtype=F32, scale=0.1), fmt)
            agree(linear.linear_mx, d, x, weight, d.dtype, exact_too=True)
            agree(linear.linear_mx, d, quant.quantize(x, "mxfp8"), weight, F32, d.normal(rows, num_out))
    agree(linear.linear_bf16, d, d.normal(rows, 13), d.normal(5, 13), d.dtype)
    agree(linear.linear_bf16, d, d.normal(rows, 0), d.normal(5, 0), d.dtype)


def test_grouped_output_products_agree(draw) -> None:
    rows, d = draw
    x = d.normal(rows, 3, 64)
    agree(linear.linear_grouped_o, d, x, d.normal(3, 20, 64, dtype=BF16), exact_too=True)
    agree(linear.linear_grouped_o, d, x, quant.quantize(d.normal(3, 20, 64, dtype=F32), "mxfp8"))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_quantised_weight_gives_the_bits_of_the_widened_one(fmt) -> None:
    d = Draw(F32, torch.Generator().manual_seed(3))
    x, weight = d.normal(9, 1088), quant.quantize(d.normal(37, 1088), fmt)
    widened = quant.dequantize(weight, F32)
    assert torch.equal(run(linear.linear_mx, x, weight, F32), run(linear.linear_bf16, x, widened, F32))


@pytest.mark.parametrize("kind", ["fp8", "fp4", "index", "f32"])
def test_records_agree(draw, kind) -> None:
    rows, d = draw
    cache = d.cache(kind, 64, pages=12)
    slots = torch.randperm(cache.num_slots, generator=d.g)[:rows].int()
    slots[::3] = -1
    positions = d.ints(0, 64, rows)
    for ratio in (1, 2):
        args = (d.normal(rows, 64), d.normal(64, dtype=F32), 1e-20, positions, table(), cache, slots, ratio)
        agree(kv.kv_norm_rope_store, d, *args)
        agree(kv.index_k_store, d, *args)
    for dtype in (F32, BF16):
        agree(kv.kv_gather, d, cache, d.slots(cache, rows, 5), dtype)
    agree(kv.kv_gather, d, cache, d.slots(cache, 1, rows)[0], torch.float64)


def test_slot_minus_one_reads_and_writes_nothing() -> None:
    d = Draw(F32, torch.Generator().manual_seed(0))
    cache = d.cache("fp8", 32)
    before = cache.data.clone()
    slots = torch.full((3,), -1, dtype=torch.int32)
    normed = run(kv.kv_norm_rope_store, d.normal(3, 32), torch.ones(32), 1e-20, slots + 1, table(), cache, slots)
    assert normed.shape == (3, 32) and torch.equal(cache.data, before)
    assert not run(kv.kv_gather, cache, slots, F32).any()


def test_slots_past_two_gibibytes_of_a_pool_are_reached() -> None:
    fmt = CacheFormat("f32", 4)
    stride = 2**31 // 3 + 16 & ~15
    pool = torch.empty(
        5 * stride, dtype=torch.uint8
    )  # touched in three places only: the rest is never backed by memory
    data = pool.as_strided((5, fmt.record_bytes), (stride, 1))
    cache = PagedCache(data, fmt, 1)
    x = torch.arange(4.0)[None]
    run(kv.index_k_store, x, torch.ones(4), 1e-20, torch.zeros(1).int(), table(1, 4), cache, torch.tensor([4]).int())
    got = run(kv.kv_gather, cache, torch.tensor([4]).int(), F32)
    assert torch.allclose(got, norm.rms_norm(x, None, 1e-20))


def test_a_slot_outside_the_pool_is_refused() -> None:
    cache = Draw(F32, torch.Generator().manual_seed(0)).cache("fp8", 32)
    with pytest.raises(IndexError, match="slot 36 is outside"):
        run(kv.kv_gather, cache, torch.tensor([36]).int(), F32)


def test_blocks_are_copied(draw) -> None:
    rows, d = draw
    for pool in (d.ints(0, 255, 80, 13).byte(), d.normal(80, 3, 4), d.normal(80, 6)[:, :3]):
        places = torch.randperm(80, generator=d.g).int()
        agree(kv.copy_blocks, d, pool, places[:rows], places[rows : 2 * rows])


@pytest.mark.parametrize("kinds", [("fp8", None), ("fp8", "fp4"), ("f32", "f32"), ("fp8", "fp8")], ids=str)
def test_attention_agrees(draw, kinds) -> None:
    rows, d = draw
    for num_heads, dim, window, selected in ((1, 32, 1, 1), (5, 64, 16, 30), (8, 32, 5, 0), (3, 32, 0, 7)):
        cache = d.cache(kinds[0], dim)
        slots = d.slots(cache, rows, window)
        slots[1:2] = -1
        other = None if kinds[1] is None else d.cache(kinds[1], dim, records=8)
        picked = None if other is None else d.slots(other, rows, selected)
        if picked is not None:
            picked[1:2] = -1
        args = (d.normal(rows, num_heads, dim), cache, slots, other, picked, dim**-0.5, d.normal(num_heads, dtype=F32))
        agree(attention.sparse_attn, d, *args, exact_too=True)


def test_row_without_keys_is_zero_even_beside_an_infinite_sink() -> None:
    d = Draw(F32, torch.Generator().manual_seed(0))
    none = torch.full((2, 3), -1, dtype=torch.int32)
    sink = torch.tensor([math.inf, -math.inf, 0.0])
    o, lse = run(attention.sparse_attn, d.normal(2, 3, 32), d.cache("fp8", 32), none, None, None, 1.0, sink)
    assert not o.any() and (lse == -math.inf).all()


def test_partial_attention_merges(draw) -> None:
    rows, d = draw
    o, lse = d.normal(4, rows, 3, 24, dtype=F32), d.normal(4, rows, 3, dtype=F32)
    lse[1], o[1] = -math.inf, 0
    lse[:, 1:2], o[:, 1:2] = -math.inf, 0
    agree(attention.attn_merge, d, o, lse, d.dtype)


def test_vision_attention_agrees(draw) -> None:
    rows, d = draw
    shape = rows, 3, 16
    cuts = torch.tensor([0, rows // 3, rows // 3, rows - rows // 4]).int()  # one image is empty, a tail is in none
    agree(vision.vision_attn, d, d.normal(*shape), d.normal(*shape), d.normal(*shape), cuts, 0.25)


def index_inputs(d, rows, quantised, num_heads=3, dim=32):
    cache = d.cache("index" if quantised else "f32", dim, pages=12, records=8)
    q = d.normal(rows, num_heads, dim)
    blocks = d.ints(0, 12, 3, 5)
    row_to_seq = d.ints(0, 3, rows).sort().values
    return (quant.quantize(q, "mxfp4") if quantised else q), cache, d.normal(rows, num_heads), blocks, row_to_seq


@pytest.mark.parametrize("quantised", [True, False])
def test_index_scores_agree(draw, quantised) -> None:
    rows, d = draw
    q, cache, weights, blocks, row_to_seq = index_inputs(d, rows, quantised)
    visible = d.ints(0, 41, rows)
    agree(index.index_logits_paged, d, q, cache, weights, visible, blocks, row_to_seq, 40)
    agree(index.index_logits_paged, d, q, cache, weights, visible, blocks, row_to_seq, 0)
    agree(index.index_logits_paged, d, q, cache, weights, visible, blocks, row_to_seq, 77)
    for block in (1, 4, 7):
        picked = d.ints(-1, 6, rows, 4).sort(1).values
        agree(index.index_logits_blocks, d, q, cache, weights, visible, picked, block, blocks, row_to_seq)
    starts = d.ints(0, 30, rows)
    ends = (starts + d.ints(-3, 20, rows)).clamp(0, 40).int()
    keys = d.normal(40, 32)
    agree(index.index_logits_ragged, d, q, keys, weights, starts, ends)
    agree(index.index_logits_ragged, d, q, quant.quantize(keys, "mxfp4"), weights, starts, ends)


@pytest.mark.parametrize("quantised", [True, False])
def test_packed_scores_have_the_bits_of_the_paged_ones(quantised) -> None:
    d = Draw(BF16, torch.Generator().manual_seed(1))
    q, cache, weights, blocks, row_to_seq = index_inputs(d, 6, quantised)
    visible = torch.full((6,), 39).int()
    whole = run(index.index_logits_paged, q, cache, weights, visible, blocks, row_to_seq, 40)
    picked = torch.arange(5).int().expand(6, 5)
    assert torch.equal(run(index.index_logits_blocks, q, cache, weights, visible, picked, 8, blocks, row_to_seq), whole)


def test_index_queries_agree(draw) -> None:
    rows, d = draw
    for fmt in (None, "mxfp4"):
        agree(index.index_q_quant, d, d.normal(rows, 3, 32), d.ints(0, 64, rows), table(), fmt)


def test_selection_agrees(draw) -> None:
    rows, d = draw
    for columns in (0, 1, 7, 40, 300):
        x = d.normal(rows, columns)
        x = torch.where(d.chance(0.3, rows, columns), (x * 2).round(), x)  # ties
        x = torch.where(d.chance(0.1, rows, columns), torch.tensor(-0.0, dtype=x.dtype), x)
        x = torch.where(d.chance(0.1, rows, columns), torch.tensor(0.0, dtype=x.dtype), x)
        for value in (math.nan, math.inf, -math.inf):
            x = torch.where(d.chance(0.1, rows, columns), torch.tensor(value, dtype=x.dtype), x)
        lens = d.ints(-1, columns + 3, rows)
        for k in (0, 1, 8, 64):
            agree(index.topk_select, d, x, k, lens)
        if d.dtype == F32:
            for block in (1, 4, 9):
                agree(index.block_max, d, x, lens, block)


def test_index_lists_agree(draw) -> None:
    rows, d = draw
    row_to_seq, _, positions = ragged(d, rows)
    tables, first = d.ints(0, 9, 3, 6), d.ints(0, 3, 3)
    for window in (1, 8):
        agree(index.build_swa_index, d, positions, row_to_seq, tables, first, 4, window)
    agree(index.build_dense_index, d, d.ints(0, 9, rows), 7)
    agree(index.concat_index, d, d.ints(0, 9, rows, 4), d.ints(0, 9, rows, 3))
    for ratio in (1, 2, 4):
        agree(index.visible_lens, d, positions, ratio)
    agree(index.logical_to_slot, d, d.ints(-1, 70, rows, 9), 8, d.ints(0, 99, 3, 6), row_to_seq)
    agree(index.logical_to_slot, d, d.ints(-1, 70, rows, 18)[:, ::2], 8, d.ints(0, 99, 3, 6), row_to_seq)
    agree(index.uniform_lens, d, positions, 5)
    assert torch.equal(run(index.concat_rows, (tables, tables[:1])), torch.cat((tables, tables[:1])))
    agree(index.blocks_to_positions, d, d.ints(-1, 24, rows, 5), d.ints(0, 50, rows, 6), 4)


def test_compressor_agrees(draw) -> None:
    rows, d = draw
    for ratio, ring in ((1, 1), (2, 5), (4, 9)):
        row_to_seq, bounds, positions = ragged(d, rows)
        state = d.normal(6, ring, 2, 24, dtype=F32)
        slots = torch.tensor([4, 1, 5]).int()
        args = d.normal(rows, 24, dtype=F32), d.normal(rows, 24, dtype=F32), state, slots
        agree(compress.kv_compress, d, *args, positions, row_to_seq, bounds, ratio, d.dtype)
        strided = d.normal(6, 2, ring, 2, 24, dtype=F32)[:, 1]
        args = args[0], args[1], strided, slots
        agree(compress.kv_compress, d, *args, positions, row_to_seq, bounds, ratio, d.dtype)


def test_compressor_leaves_padding_rows_out_of_the_state() -> None:
    d = Draw(F32, torch.Generator().manual_seed(0))
    gate, value, state = d.normal(7, 8), d.normal(7, 8), d.normal(3, 4, 2, 8)
    rows = torch.zeros(7).int()
    args = torch.tensor([2]).int(), torch.arange(7).int(), rows, torch.tensor([0, 4]).int(), 2, F32
    agree(compress.kv_compress, d, gate, value, state, *args)


def test_streams_agree(draw) -> None:
    rows, d = draw
    for streams, hidden in ((1, 8), (2, 33), (4, 160)):
        mixes = streams * (streams + 2)
        h, y = d.normal(rows, streams, hidden), d.normal(rows, hidden)
        fn, scale, base = (
            d.normal(mixes, streams * hidden, dtype=F32),
            d.normal(3, dtype=F32),
            d.normal(mixes, dtype=F32),
        )
        mix = d.normal(rows, mixes, dtype=F32)
        post, comb = d.normal(rows, streams, dtype=F32), d.normal(rows, streams, streams, dtype=F32)
        agree(mhc.mhc_prenorm_mix, d, h, fn, 1e-6)
        agree(mhc.mhc_split_sinkhorn, d, mix, scale, base, 20, 1e-6, exact_too=True)
        agree(mhc.mhc_apply, d, h, post, exact_too=True)
        agree(mhc.mhc_post, d, y, h, post, comb, exact_too=True)
        agree(mhc.mhc_expand, d, y, streams)
        agree(heads.stream_mean, d, h, exact_too=True)


def test_fused_step_has_the_bits_of_its_parts(draw) -> None:
    rows, d = draw
    y, h = d.normal(rows, 64), d.normal(rows, 4, 64)
    post, comb, read = d.normal(rows, 4, dtype=F32), d.normal(rows, 4, 4, dtype=F32), d.normal(rows, 4, dtype=F32)
    fn, scale, base = d.normal(24, 256, dtype=F32, scale=0.1), d.normal(3, dtype=F32), d.normal(24, dtype=F32)
    weight = d.normal(64, dtype=F32)
    got = run(mhc.mhc_step, y, h, post, comb, read, fn, scale, base, 20, 1e-6, weight, 1e-6)
    new = run(mhc.mhc_post, y, h, post, comb)
    parts = run(mhc.mhc_split_sinkhorn, run(mhc.mhc_prenorm_mix, new, fn, 1e-6), scale, base, 20, 1e-6)
    normed = run(norm.rms_norm, run(mhc.mhc_apply, new, read), weight, 1e-6)
    for a, b in zip(got, (new, normed, *parts), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_engram_agrees(draw) -> None:
    rows, d = draw
    row_to_seq, bounds, _ = ragged(d, rows)
    ids, history = d.ints(0, 50, rows), d.ints(-1, 50, 3, 3)
    token_map = d.ints(0, 30, 50)
    for blocked, older in ((None, None), (d.chance(0.2, rows), d.chance(0.2, 3, 3))):
        agree(engram.engram_ngrams, d, ids, row_to_seq, bounds, history, token_map, 2, blocked, older)
    agree(engram.engram_ngrams, d, ids, row_to_seq, bounds, history[:, :0], token_map, 2, None, None)
    ngrams = d.ints(0, 2**30, rows, 4)
    multipliers = torch.randint(-(2**62), 2**62, (2, 4), generator=d.g)
    primes = torch.tensor([61, 67, 71, 73, 79, 83]).repeat(2, 1)
    agree(engram.engram_hash, d, ngrams, multipliers, primes, primes.cumsum(1) - primes)
    table_ = d.normal(40, 32, dtype=F32)
    for stored in (table_, table_.bfloat16(), quant.quantize(table_, "mxfp8")):
        agree(engram.engram_fetch, d, stored, d.ints(0, 40, rows, 3), d.dtype)
    h, kv_ = d.normal(rows, 3, 40), d.normal(rows, 160)
    kv_[2:3] = 0
    for blocked in (None, d.chance(0.5, rows)):
        agree(engram.engram_gate, d, h, kv_, d.normal(3, 40), d.normal(3, 40), 1e-6, blocked, exact_too=True)


def test_router_agrees(draw) -> None:
    rows, d = draw
    for experts, k in ((1, 1), (8, 2), (37, 6), (3, 5)):
        logits = d.normal(rows, experts, dtype=F32, scale=4)
        bias, other = d.normal(experts, dtype=F32), d.normal(experts, dtype=F32)
        agree(moe.moe_gate, d, logits, bias, None, None, k, 1.5)
        agree(moe.moe_gate, d, logits, bias, other, d.chance(0.5, rows), k, 1.5)
        agree(moe.moe_gate, d, logits.round(), bias.round(), None, None, k, 1.5)  # ties


def routed(d, rows, experts=6, k=3):
    ids = torch.stack([torch.randperm(experts, generator=d.g)[:k] for _ in range(rows)]) if rows else torch.empty(0, k)
    ids = torch.where(d.chance(0.1, rows, k), -1, ids.long())
    ids[ids == 2] = 1  # an expert without rows
    return ids, d.normal(rows, k, dtype=F32)


def test_dispatch_products_and_combine_agree(draw) -> None:
    rows, d = draw
    ids, weights = routed(d, rows)
    x = d.normal(rows, 64)
    for values in (x, quant.quantize(x, "mxfp8")):
        got = run(moe.ep_dispatch, values, ids, weights, 6)
        want = moe.ep_dispatch(values, ids, weights, 6)
        used = int(want[2][-1])
        assert torch.equal(got[1][:used], want[1][:used]) and torch.equal(got[2], want[2])
        close(got[3], want[3], moe.ep_dispatch.tolerance)
        close(got[0][:used], want[0][:used], moe.ep_dispatch.tolerance)
    experts = d.normal(6, 20, 64, dtype=F32, scale=0.1)
    for weight in (experts, experts.bfloat16(), quant.quantize(experts, "mxfp4"), quant.quantize(experts, "mxfp8")):
        agree(moe.moe_grouped_gemm, d, want[0], weight, want[2], d.dtype)
    y = d.normal(rows * 3, 40)
    for bias in (None, d.normal(rows, 40)):
        agree(moe.ep_combine, d, y, want[3], bias, d.dtype)
    agree(moe.expert_shuffle, d, experts, torch.tensor([3, 3, 0]))
    agree(moe.expert_shuffle, d, quant.quantize(experts, "mxfp4"), torch.tensor([5, 1]))


def test_activation_agrees(draw) -> None:
    rows, d = draw
    both = d.normal(rows, 128, scale=2)
    for gate, up in ((both[:, :64], both[:, 64:]), (d.normal(rows, 64), d.normal(rows, 64))):
        for weight in (None, d.normal(rows, dtype=F32)):
            for fmt in (None, "mxfp8", "mxfp4"):
                agree(moe.swiglu_quant, d, gate, up, 1.5, weight, fmt)


def test_ends_agree(draw) -> None:
    rows, d = draw
    table_ = d.normal(50, 24)
    ids = d.ints(0, 50, rows)
    agree(heads.embedding, d, table_, ids, d.dtype)
    agree(heads.embedding, d, table_.bfloat16(), ids, F32)
    agree(heads.gather_rows, d, d.normal(50, 2, 3), ids)
    agree(
        heads.markov_logits, d, d.normal(rows, 50, dtype=F32), ids, d.normal(50, 16), d.normal(50, 16), exact_too=True
    )
    agree(heads.draft_confidence, d, d.normal(rows, 40), ids, d.normal(50, 16), d.normal(1, 56, scale=0.1), 1.7)


def test_step_correction_agrees(draw) -> None:
    rows, d = draw
    row_to_seq, bounds, positions = ragged(d, rows)
    for drafts in (0, 3):
        padded = torch.nn.functional.pad(positions + 8, (0, 2))
        args = (
            d.ints(0, 50, rows + 2), padded, d.ints(20, 60, 3), d.ints(-1, 30, rows + 2), d.ints(-1, 30, 2, rows + 2),
            bounds, torch.nn.functional.pad(row_to_seq, (0, 2)), torch.tensor([1, -1, 0]).int(),
            torch.tensor([4, 3]).int(), torch.tensor([1, 3]).int(), d.ints(0, 50, 2), d.ints(0, 50, 2, drafts),
            d.ints(0, 9, 3, 8), 8, d.ints(0, 9, 3, 12), d.ints(0, 2, 3), 4, (1, 2),
        )  # fmt: skip
        agree(step.advance_step, d, *args)
        strided = list(args)
        strided[4] = d.ints(-1, 30, 2, rows + 9)[:, : rows + 2]
        agree(step.advance_step, d, *strided)


def test_float64_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        run(norm.rms_norm, torch.zeros(1, 8, dtype=torch.float64), None, 1e-6)
