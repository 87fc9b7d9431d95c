"""References: right in float64, bits of a row its own, equal to an independent sum, for shapes that Hypothesis picks.

Every case of every op runs its reference in float32 and in float64 (the suite does so for reference rows only).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.conformance.batches import batch_of
from deepinfer.conformance.compare import compare
from deepinfer.conformance.runner import REFERENCE_FLOAT, _float64, definer, make_case
from deepinfer.ops.attention import attn_merge, sparse_attn
from deepinfer.ops.cases.common import cache_of, packed
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.compress import kv_compress
from deepinfer.ops.formats import GROUP, QTensor
from deepinfer.ops.index import block_max, index_logits_paged, topk_select
from deepinfer.ops.kv import kv_gather
from deepinfer.ops.linear import linear_bf16, linear_mx
from deepinfer.ops.mhc import mhc_split_sinkhorn
from deepinfer.ops.moe import ep_combine, ep_dispatch, moe_gate, moe_grouped_gemm
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import dequantize, e4m3_value, quantize, ue8m0_value
from deepinfer.ops.rope import plain_frequencies, rope, rope_table

SEEDS = st.integers(0, 2**31 - 1)
few = settings(max_examples=25, deadline=None)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", defined_ops())
def test_float32_agrees_with_float64(name) -> None:
    op = defined_ops()[name]
    for case in op.cases():
        if case.tag == "small":
            for check in _float64(op, make_case(op, case), definer(op)):
                assert check.ok, f"{case.name}: {check.detail}"


@pytest.mark.parametrize(
    "name", [n for n, op in defined_ops().items() if op.determinism != "D0" and not op.tolerance.exact]
)
def test_the_suite_knows_the_rows_of_every_op_that_promises_something_of_them(name) -> None:
    """An exact op without rows moves what its indices name: equal bits in every case say all there is to say."""
    op = defined_ops()[name]
    assert any(batch_of(op, case) is not None for case in op.cases()), "cases name no rows, and no batch is registered"


# --- norms, rotations, quantisers -----------------------------------------------------------------------------------


@few
@given(SEEDS, st.integers(1, 9), st.integers(1, 70))
def test_rms_norm_has_unit_mean_square(seed, rows, width) -> None:
    x = torch.randn(rows, width, generator=generator(seed)) * 10.0 ** torch.randint(
        -5, 9, (rows, 1), generator=generator(seed)
    )
    y = rms_norm(x, None, 1e-20)
    assert torch.allclose(y.square().mean(-1), torch.ones(rows), atol=1e-5)


@few
@given(SEEDS, st.integers(1, 9), st.integers(1, 3))
def test_rope_is_a_rotation_and_its_conjugate_undoes_it(seed, rows, heads) -> None:
    gen = generator(seed)
    x = torch.randn(rows, heads, 24, generator=gen, dtype=torch.float64)
    table = rope_table(500, plain_frequencies(16, 10000.0)).double()
    positions = torch.randint(0, 500, (rows,), generator=gen).int()
    turned = rope(x, positions, table)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    assert torch.equal(turned[..., :8], x[..., :8])
    assert torch.allclose(rope(turned, positions, table, True), x, atol=1e-6)
    first = (
        torch.complex(x[..., 8], x[..., 9])
        * torch.polar(torch.ones(rows), positions.float()).to(torch.complex128)[:, None]
    )
    assert torch.allclose(turned[..., 8], first.real, atol=1e-4) and torch.allclose(
        turned[..., 9], first.imag, atol=1e-4
    )


@few
@given(SEEDS, st.sampled_from(["mxfp8", "mxfp4", "nvfp4"]), st.integers(1, 6), st.integers(1, 40))
def test_quantising_takes_the_nearest_code_and_is_idempotent(seed, fmt, rows, half_width) -> None:
    gen = generator(seed)
    exponent = torch.randint(-20, 20, (rows, 1), generator=gen) if fmt != "nvfp4" else torch.zeros(rows, 1)
    x = torch.randn(rows, 2 * half_width, generator=gen) * torch.exp2(exponent.float())
    packed_ = quantize(x, fmt)
    y = dequantize(packed_, torch.float64)
    values = e4m3_value if fmt == "nvfp4" else ue8m0_value
    unit = values(packed_.scale, torch.float64).repeat_interleave(GROUP[fmt], -1)[:, : x.shape[1]]
    codes = torch.arange(256, dtype=torch.uint8) if fmt == "mxfp8" else torch.arange(16, dtype=torch.uint8)
    grid = e4m3_value(codes, torch.float64)
    if fmt != "mxfp8":
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    grid = grid[grid.isfinite()]
    best = (x.double()[..., None] - grid * unit[..., None]).abs().amin(-1)
    assert torch.all((x.double() - y).abs() <= best * (1 + 1e-12) + 1e-300)
    again = quantize(y.float(), fmt)
    if fmt != "nvfp4":
        assert torch.equal(dequantize(again, torch.float64), y)


def test_scales_of_powers_of_two_do_not_grow() -> None:
    """A group whose largest value is a power of two times the top code keeps that exponent: no logarithm rounds it."""
    for exponent in range(-100, 100):
        x = torch.full((1, 32), 6.0 * 2.0**exponent)
        assert int(quantize(x, "mxfp4").scale) == 127 + exponent


# --- attention ------------------------------------------------------------------------------------------------------


@few
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_attention_is_one_softmax_over_named_records_and_the_sink(seed, rows, heads, window, topk, compressed) -> None:
    gen = generator(seed)
    first = cache_of(gen, "f32", 16, 4, 4, poison="nan")
    second = cache_of(gen, "f32", 16, 4, 4, poison="nan") if compressed else None
    slots = [torch.randint(-1, 12, (rows, n), generator=gen).int() for n in (window, topk)]
    slots = [torch.where(s >= 0, s + 4, s) for s in slots]
    q, sink = torch.randn(rows, heads, 16, generator=gen), torch.randn(heads, generator=gen)
    o, lse = sparse_attn(q, first, slots[0], second, slots[1] if compressed else None, 0.25, sink)
    for t in range(rows):
        named = [(first, s) for s in slots[0][t].tolist() if s >= 0]
        named += [(second, s) for s in slots[1][t].tolist() if s >= 0] if compressed else []
        for h in range(heads):
            keys = [kv_gather(c, torch.tensor([s]).int(), torch.float64)[0] for c, s in named]
            weights = [math.exp(0.25 * float(q[t, h].double() @ key)) for key in keys]
            total = sum(weights)
            want = sum((w * key for w, key in zip(weights, keys, strict=True)), torch.zeros(16, dtype=torch.float64))
            want = want / (total + math.exp(float(sink[h])))
            assert torch.allclose(o[t, h].double(), want, atol=1e-5)
            assert math.isclose(float(lse[t, h]), math.log(total) if total else -math.inf, rel_tol=1e-5, abs_tol=1e-5)


@few
@given(SEEDS, st.integers(1, 4), st.integers(1, 6))
def test_merged_splits_equal_one_pass(seed, rows, splits) -> None:
    gen = generator(seed)
    cache = cache_of(gen, "f32", 16, 6, 4)
    q = torch.randn(rows, 2, 16, generator=gen)
    slots = torch.randint(4, cache.num_slots, (rows, 12), generator=gen).int()
    none = torch.full((2,), -torch.inf)
    whole, lse = sparse_attn(q, cache, slots, None, None, 0.25, none)
    parts = [sparse_attn(q, cache, part, None, None, 0.25, none) for part in slots.tensor_split(splits, 1)]
    merged, total = attn_merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.float32)
    assert torch.allclose(merged, whole, atol=1e-5) and torch.allclose(total, lse, atol=1e-5)


# --- choosing -------------------------------------------------------------------------------------------------------


@few
@given(SEEDS, st.integers(1, 5), st.integers(1, 40), st.integers(1, 12))
def test_topk_takes_the_best_and_of_equals_the_first(seed, rows, columns, k) -> None:
    gen = generator(seed)
    x = torch.randint(-3, 4, (rows, columns), generator=gen).float()
    lens = torch.randint(0, columns + 1, (rows,), generator=gen).int()
    got = topk_select(x, k, lens)
    for row in range(rows):
        order = sorted(range(int(lens[row])), key=lambda c, r=row: (-float(x[r, c]), c))
        want = sorted(order[:k])
        assert got[row].tolist() == want + [-1] * (k - len(want))


@few
@given(SEEDS, st.integers(1, 4), st.integers(1, 30), st.integers(1, 9))
def test_block_scores_force_the_newest_block(seed, rows, columns, block) -> None:
    gen = generator(seed)
    logits = torch.randn(rows, columns, generator=gen)
    lens = torch.randint(0, columns + 1, (rows,), generator=gen).int()
    scores, number = block_max(logits, lens, block)
    for row, length in enumerate(lens.tolist()):
        assert int(number[row]) == -(-length // block)
        for b in range(scores.shape[1]):
            part = logits[row, b * block : min((b + 1) * block, length)]
            newest = length and b == (length - 1) // block
            want = math.inf if newest else float(part.max()) if len(part) else -math.inf
            assert float(scores[row, b]) == want


@few
@given(SEEDS, st.integers(1, 4), st.integers(1, 3))
def test_index_scores_are_weighted_relu_dots(seed, rows, heads) -> None:
    gen = generator(seed)
    cache = cache_of(gen, "f32", 16, 5, 4, poison="nan")
    table = torch.tensor([[3, 1, 4, 2]]).int()
    q, w = torch.randn(rows, heads, 16, generator=gen), torch.randn(rows, heads, generator=gen)
    visible = torch.randint(0, 17, (rows,), generator=gen).int()
    got = index_logits_paged(q, cache, w, visible, table, torch.zeros(rows).int(), 16)
    for t in range(rows):
        for j in range(16):
            key = kv_gather(cache, (table[0, j // 4] * 4 + j % 4)[None].int(), torch.float64)[0]
            want = float((w[t].double() * (q[t].double() @ key).relu()).sum()) if j < visible[t] else -math.inf
            assert math.isclose(float(got[t, j]), want, rel_tol=1e-4, abs_tol=1e-4) or float(got[t, j]) == want


# --- products and experts -------------------------------------------------------------------------------------------


@few
@given(SEEDS, st.integers(1, 9), st.integers(1, 40), st.integers(1, 90))
def test_a_row_of_a_product_does_not_see_its_neighbours(seed, rows, n, k) -> None:
    gen = generator(seed)
    x, weight = torch.randn(rows, k, generator=gen), torch.randn(n, k, generator=gen)
    whole = linear_bf16(x, weight, torch.float32)
    alone = torch.cat([linear_bf16(x[i : i + 1], weight, torch.float32) for i in range(rows)])
    assert torch.equal(whole, alone)
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, atol=1e-3)


@few
@given(SEEDS, st.integers(0, 9), st.integers(2, 7), st.data())
def test_dispatched_products_combine_to_the_sum_over_choices(seed, rows, experts, data) -> None:
    gen = generator(seed)
    k = data.draw(st.integers(1, experts))
    x = torch.randn(rows, 32, generator=gen)
    weight = torch.randn(experts, 8, 32, generator=gen)
    ids, w = moe_gate(torch.randn(rows, experts, generator=gen), torch.zeros(experts), None, None, k, 1.5)
    ids = torch.where(torch.rand(ids.shape, generator=gen) < 0.2, -1, ids)
    sent, row_weights, psum, handle = ep_dispatch(x, ids, w, experts)
    y = moe_grouped_gemm(sent, weight, psum, torch.float32) * row_weights[:, None]
    got = ep_combine(y, handle, None, torch.float32)
    for t in range(rows):
        parts = [w[t, c] * (weight[e] @ x[t]) for c, e in enumerate(ids[t].tolist()) if e >= 0]
        assert torch.allclose(got[t], sum(parts, torch.zeros(8)), atol=1e-3)


@pytest.mark.parametrize("logit", [-1e4, -60.0, 0.0, 90.0, 1e4])
def test_router_affinities_do_not_overflow(logit) -> None:
    _, weights = moe_gate(torch.full((1, 4), logit), torch.zeros(4), None, None, 2, 1.5)
    assert torch.isfinite(weights).all()
    if logit > -1e3:
        assert torch.allclose(weights, torch.full((1, 2), 0.75))


def test_products_of_quantised_operands_use_their_values() -> None:
    gen = generator(4)
    x, w = quantize(torch.randn(5, 64, generator=gen), "mxfp8"), quantize(torch.randn(7, 64, generator=gen), "mxfp4")
    want = dequantize(x, torch.float64) @ dequantize(w, torch.float64).T
    assert torch.allclose(linear_mx(x, w, torch.float32).double(), want, atol=1e-4)
    assert isinstance(x, QTensor)


# --- compressor, streams --------------------------------------------------------------------------------------------


@few
@given(SEEDS, st.integers(1, 4), st.integers(1, 25), st.data())
def test_the_compressor_pools_complete_groups_whatever_the_chunks(seed, ratio, total, data) -> None:
    gen = generator(seed)
    gate, value = torch.randn(total, 8, generator=gen), torch.randn(total, 8, generator=gen)
    state = torch.full((2, ratio + 3, 2, 8), torch.nan)
    got, start = [], 0
    while start < total:
        size = data.draw(st.integers(1, total - start))
        meta = packed((size,), (start + size,))
        rows = slice(start, start + size)
        positions, row_to_seq, cu = meta["positions"], meta["row_to_seq"], meta["cu_seqlens_q"]
        slots = torch.ones(1).int()
        got.append(kv_compress(gate[rows], value[rows], state, slots, positions, row_to_seq, cu, ratio, torch.float32))
        start += size
    pooled = torch.cat(got)
    for position in range(total):
        if (position + 1) % ratio:
            assert not pooled[position].any()
        else:
            group = slice(position + 1 - ratio, position + 1)
            want = (gate[group].softmax(0) * value[group]).sum(0)
            assert torch.allclose(pooled[position], want, atol=1e-5)


@few
@given(SEEDS, st.integers(1, 5), st.integers(2, 4))
def test_stream_matrices_are_nearly_doubly_stochastic(seed, rows, streams) -> None:
    gen = generator(seed)
    mix = torch.randn(rows, 2 * streams + streams**2, generator=gen)
    pre, post, comb = mhc_split_sinkhorn(mix, torch.ones(3), torch.zeros(mix.shape[1]), 20, 1e-6)
    assert torch.allclose(comb.sum(1), torch.ones(rows, streams), atol=1e-3)
    assert torch.allclose(comb.sum(2), torch.ones(rows, streams), atol=2e-2)
    assert ((pre > 0) & (pre < 1.001)).all() and ((post > 0) & (post < 2)).all()


def test_tolerance_of_the_float_check_is_tighter_than_any_contract() -> None:
    assert REFERENCE_FLOAT.rtol < 2**-8
    assert not compare(torch.ones(3), torch.ones(3), REFERENCE_FLOAT).failures
