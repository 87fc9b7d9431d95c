"""What the CPU kernels promise beyond the contracts; agreement with the references is the suite's to check."""

import math

import pytest
import torch

from deepinfer.backends.cpu import BACKEND
from deepinfer.ops import attention, index, kv, linear, mhc, norm, quant, rope
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.formats import CacheFormat, PagedCache

BACKEND.load()
IMPLEMENTATIONS = {i.op.name: i for i in BACKEND.implementations}

F32, BF16 = torch.float32, torch.bfloat16


def run(op, *args, **kwargs):
    return IMPLEMENTATIONS[op.name].bind({}, None).run(*args, **kwargs)


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(1)


def normal(gen, *shape, dtype=F32, scale=1.0):
    return (torch.randn(shape, generator=gen) * scale).to(dtype)


def filled_cache(gen, kind, dim, pages=9, records=4):
    """A pool whose rows lie apart, as pools that are views into wider blocks do."""
    fmt = CacheFormat(kind, dim)
    need = records * fmt.record_bytes
    cache = PagedCache(torch.zeros(pages, need + 48, dtype=torch.uint8)[:, 16 : 16 + need], fmt, records)
    quant.write_records(cache, torch.arange(cache.num_slots), normal(gen, cache.num_slots, dim))
    return cache


def table(positions=64, width=16):
    return rope.rope_table(positions, rope.plain_frequencies(width, 1e4))


def test_every_op_has_a_kernel() -> None:
    assert set(IMPLEMENTATIONS) == set(defined_ops())


def test_position_outside_the_table_is_refused() -> None:
    with pytest.raises(IndexError, match="position 64 is outside"):
        run(rope.rope, torch.zeros(1, 16), torch.tensor([64]).int(), table())


def test_a_slot_outside_the_pool_is_refused(gen) -> None:
    with pytest.raises(IndexError, match="slot 36 is outside"):
        run(kv.kv_gather, filled_cache(gen, "fp8", 32), torch.tensor([36]).int(), F32)


def test_float64_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        run(norm.rms_norm, torch.zeros(1, 8, dtype=torch.float64), None, 1e-6)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_quantised_weight_gives_the_bits_of_the_widened_one(gen, fmt) -> None:
    x, weight = normal(gen, 9, 1088), quant.quantize(normal(gen, 37, 1088), fmt)
    widened = quant.dequantize(weight, F32)
    assert torch.equal(run(linear.linear_mx, x, weight, F32), run(linear.linear_bf16, x, widened, F32))


def test_row_without_keys_is_zero_even_beside_an_infinite_sink(gen) -> None:
    none = torch.full((2, 3), -1, dtype=torch.int32)
    sink = torch.tensor([math.inf, -math.inf, 0.0])
    o, lse = run(
        attention.sparse_attn, normal(gen, 2, 3, 32), filled_cache(gen, "fp8", 32), none, None, None, 1.0, sink
    )
    assert not o.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("quantised", [True, False])
def test_packed_scores_have_the_bits_of_the_paged_ones(gen, quantised) -> None:
    cache = filled_cache(gen, "index" if quantised else "f32", 32, pages=12, records=8)
    q, weights = normal(gen, 6, 3, 32, dtype=BF16), normal(gen, 6, 3, dtype=BF16)
    q = quant.quantize(q, "mxfp4") if quantised else q
    blocks = torch.randint(0, 12, (3, 5), generator=gen).int()
    row_to_seq = torch.randint(0, 3, (6,), generator=gen).int().sort().values
    visible = torch.full((6,), 39).int()
    whole = run(index.index_logits_paged, q, cache, weights, visible, blocks, row_to_seq, 40)
    picked = torch.arange(5).int().expand(6, 5)
    assert torch.equal(run(index.index_logits_blocks, q, cache, weights, visible, picked, 8, blocks, row_to_seq), whole)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_fused_step_has_the_bits_of_its_parts(gen, rows, dtype) -> None:
    y, h = normal(gen, rows, 64, dtype=dtype), normal(gen, rows, 4, 64, dtype=dtype)
    post, comb, read = normal(gen, rows, 4), normal(gen, rows, 4, 4), normal(gen, rows, 4)
    fn, scale, base = normal(gen, 24, 256, scale=0.1), normal(gen, 3), normal(gen, 24)
    weight = normal(gen, 64)
    got = run(mhc.mhc_step, y, h, post, comb, read, fn, scale, base, 20, 1e-6, weight, 1e-6)
    new = run(mhc.mhc_post, y, h, post, comb)
    parts = run(mhc.mhc_split_sinkhorn, run(mhc.mhc_prenorm_mix, new, fn, 1e-6), scale, base, 20, 1e-6)
    normed = run(norm.rms_norm, run(mhc.mhc_apply, new, read), weight, 1e-6)
    for a, b in zip(got, (new, normed, *parts), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
