"""Planted faults: implementations with one mistake each, and the named case that must catch it.

A fault is a plausible slip of somebody who writes kernels. Most are the reference with one line wrong. The suite is
worth its name only while every one of them is caught, by the case that says so and by the check that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import attention, compress, engram, index, kv, linear, mhc, moe, norm, quant, rope
from deepinfer.ops.formats import PagedCache, QTensor
from deepinfer.ops.quant import e2m1_value, ue8m0_value, unpack_nibbles
from deepinfer.ops.spec import OpSpec


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what is wrong.
        op: the contract it breaks.
        case: the case that catches it.
        check: the question of that case that it fails.
        run: the broken implementation.
    """

    name: str
    op: OpSpec[..., Any]
    case: str
    check: str
    run: Callable[..., Any]


FAULTS: list[Fault] = []


def fault(op: OpSpec[..., Any], case: str, check: str = "value") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant the decorated function; its name says what is wrong."""

    def plant(run: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(run.__name__.replace("_", " "), op, case, check, run))
        return run

    return plant


# --- norms, rotations, quantisers -----------------------------------------------------------------------------------


@fault(norm.rms_norm, "21 rows, f32")
def eps_of_another_model(x, weight, eps):
    return norm.rms_norm.reference(x, weight, 1e-6)


@fault(norm.rms_norm, "21 rows, f32", "layout")
def takes_any_view_for_packed_memory(x, weight, eps):
    return norm.rms_norm.reference(x.as_strided(x.shape, _packed(x)), weight, eps)


@fault(norm.rms_norm, "21 rows, f32", "arguments")
def normalises_in_place(x, weight, eps):
    return x.copy_(norm.rms_norm.reference(x, weight, eps)).clone()


@fault(norm.rms_norm, "21 rows, f32", "aliasing")
def returns_its_argument(x, weight, eps):
    return x.copy_(norm.rms_norm.reference(x, weight, eps))


@fault(norm.rms_norm, "21 rows, bf16")
def leaves_the_ragged_tail_unwritten(x, weight, eps):
    out = torch.empty_like(x)
    whole = x.shape[0] // 4 * 4
    out[:whole] = norm.rms_norm.reference(x[:whole], weight, eps)
    return out


@fault(norm.rms_norm, "MN-5 no rows, bf16", "runs")
def launches_an_empty_grid(x, weight, eps):
    if x.numel() == 0:
        raise RuntimeError("invalid configuration argument")
    return norm.rms_norm.reference(x, weight, eps)


@fault(norm.rms_norm, "21 rows, f32", "D0")
def adds_in_the_order_threads_arrive(x, weight, eps):
    return norm.rms_norm.reference(x[:, torch.randperm(x.shape[1])].sort(1).values * 0 + x, weight, eps) * (
        1 + torch.randn(x.shape) * 1e-7
    )


_STALE: dict[Any, Tensor] = {}


@fault(norm.rms_norm, "two rows, f32", "D1")
def keeps_the_result_of_an_equal_shape(x, weight, eps):
    if x.shape[0] != 2 or x.shape not in _STALE:
        _STALE[x.shape] = norm.rms_norm.reference(x, weight, eps)
    return _STALE[x.shape].clone()


@fault(norm.rms_norm, "21 rows, bf16", "D1")
def one_statistic_for_a_tile_with_nan(x, weight, eps):
    out = norm.rms_norm.reference(x, weight, eps)
    for start in range(0, x.shape[0], 8):
        tile = slice(start, start + 8)
        if x[tile].isnan().all(1).any():
            out[tile] = torch.nan
    return out


@fault(norm.rms_norm_quant, "21 rows, mxfp8, bf16")
def quantises_before_rounding_to_bf16(x, weight, eps, fmt):
    y = norm.rms_norm.reference(x.float(), weight, eps)
    return quant.quantize.reference(y, fmt), y.to(x.dtype)


@fault(rope.rope, "21 rows, f32")
def pairs_halves_of_the_channels(x, positions, cos_sin, conjugate=False):
    width = cos_sin.shape[1]
    keep, turn = x[..., :-width], x[..., -width:]
    paired = turn.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = rope.rope.reference(torch.cat((keep, paired), -1), positions, cos_sin, conjugate)[..., -width:]
    return torch.cat((keep, turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)), -1)


@fault(rope.rope, "21 rows, f32, back")
def never_rotates_back(x, positions, cos_sin, conjugate=False):
    return rope.rope.reference(x, positions, cos_sin)


@fault(rope.q_norm_rope, "MN-6 normalise off, 21 rows, bf16")
def always_normalises_the_query(q, positions, cos_sin, normalise=False, eps=1e-20):
    return rope.q_norm_rope.reference(q, positions, cos_sin, True, eps)


@fault(quant.quantize, "scale edges, mxfp8")
def rounds_the_scale_through_log2(x, fmt):
    exact = quant.quantize.reference(x, fmt)
    if fmt != "mxfp8":
        return exact
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=1e-4)
    scale = ((amax / 448).log2() + 1e-4).ceil().add(127).clamp(0, 254).nan_to_num(255).to(torch.uint8)
    wide = ue8m0_value(scale).repeat_interleave(32, -1)
    codes = (x.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return QTensor(codes, scale, fmt)


@fault(quant.quantize, "midpoints, mxfp4")
def ties_go_away_from_zero(x, fmt):
    exact = quant.quantize.reference(x, fmt)
    up = quant.quantize.reference(x.float() * (1 + 2**-20), fmt)
    return QTensor(up.data, exact.scale, fmt)


@fault(quant.quantize, "21 rows, mxfp4, f32")
def swaps_the_nibbles(x, fmt):
    out = quant.quantize.reference(x, fmt)
    return out if fmt == "mxfp8" else QTensor((out.data << 4) | (out.data >> 4), out.scale, fmt)


@fault(quant.quantize, "21 rows, mxfp8, bf16")
def hides_nan_behind_a_scale(x, fmt):
    return quant.quantize.reference(x.nan_to_num(0.0, 0.0, 0.0), fmt)


@fault(quant.quantize, "tiny values, mxfp4")
def flushes_subnormals(x, fmt):
    return quant.quantize.reference(torch.where(x.float().abs() < 2.0**-120, 0.0, x.float()), fmt)


@fault(quant.quantize, "21 rows, mxfp8, f32", "D2")
def one_scale_for_the_whole_tensor_when_it_is_small(x, fmt):
    if x.shape[0] < 3:
        x = x.clone()
        x[..., 0] = x.abs().nan_to_num(0, 0, 0).amax()
    return quant.quantize.reference(x, fmt)


@fault(quant.dequantize, "every code and scale, mxfp8, f32")
def takes_exponent_zero_for_zero(x, dtype):
    out = quant.dequantize.reference(x, dtype)
    zero = (x.scale == 0).repeat_interleave(32, -1)[..., : out.shape[-1]] if x.fmt == "mxfp8" else None
    return out if zero is None else torch.where(zero & out.isfinite(), torch.zeros((), dtype=dtype), out)


@fault(quant.dequantize, "every code and scale, mxfp4, f32")
def reads_e2m1_as_a_signed_integer(x, dtype):
    if x.fmt != "mxfp4":
        return quant.dequantize.reference(x, dtype)
    code = unpack_nibbles(x.data)
    value = torch.where(code >= 8, -(16 - code.float()) / 2, e2m1_value(code))
    return (value * ue8m0_value(x.scale).repeat_interleave(32, -1)[..., : value.shape[-1]]).to(dtype)


# --- caches and attention -------------------------------------------------------------------------------------------


@fault(kv.kv_norm_rope_store, "21 rows, bf16 to fp8")
def writes_slot_zero_for_no_slot(kv_, weight, eps, positions, cos_sin, cache, slots, ratio=1):
    return kv.kv_norm_rope_store.reference(kv_, weight, eps, positions, cos_sin, cache, slots.clamp(min=0), ratio)


@fault(kv.kv_norm_rope_store, "ratio 2")
def rotates_an_entry_at_its_last_token(kv_, weight, eps, positions, cos_sin, cache, slots, ratio=1):
    return kv.kv_norm_rope_store.reference(kv_, weight, eps, positions, cos_sin, cache, slots)


@fault(kv.kv_norm_rope_store, "21 rows, f32 to f32")
def returns_the_rotated_rows(kv_, weight, eps, positions, cos_sin, cache, slots, ratio=1):
    normed = kv.kv_norm_rope_store.reference(kv_, weight, eps, positions, cos_sin, cache, slots, ratio)
    return rope.rope.reference(normed, positions // ratio * ratio, cos_sin)


@fault(kv.kv_norm_rope_store, "MN-3 page offsets past 2^31, fp8")
def stores_with_32_bit_offsets(kv_, weight, eps, positions, cos_sin, cache, slots, ratio=1):
    return kv.kv_norm_rope_store.reference(kv_, weight, eps, positions, cos_sin, _wrapped(cache), slots, ratio)


@fault(kv.index_k_store, "21 rows, bf16 to index")
def interleaves_a_sectioned_page(k, weight, eps, positions, cos_sin, cache, slots, ratio=1):
    values = rope.rope.reference(norm.rms_norm.reference(k, weight, eps), positions // ratio * ratio, cos_sin)
    packed = quant.quantize.reference(values, "mxfp4")
    size = cache.format.record_bytes
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            record = torch.cat((packed.data[row], packed.scale[row]))
            page, offset = slot // cache.records, slot % cache.records * size
            cache.data[page, offset : offset + size] = record


@fault(kv.kv_gather, "MN-2 holes, fp4")
def gathers_slot_zero_for_a_hole(cache, slots, dtype):
    return kv.kv_gather.reference(cache, slots.clamp(min=0), dtype)


@fault(kv.kv_gather, "MN-3 page offsets past 2^31, packed, fp8")
def gathers_with_32_bit_offsets(cache, slots, dtype):
    return kv.kv_gather.reference(cache, _wrapped_slots(cache, slots), dtype)


@fault(kv.copy_blocks, "MN-3 offsets past 2^31")
def copies_with_32_bit_offsets(pool, sources, destinations):
    stride = pool.stride(0) % 2**31 if pool.stride(0) * pool.shape[0] > 2**31 else pool.stride(0)
    near = min(pool.shape[0], 2**31 // max(stride, 1))
    kept = destinations < near
    pool[destinations[kept].long()] = pool[sources[kept].long()]


def _attention(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    def run(q, window_cache, window_slots, kv_cache, kv_slots, softmax_scale, attn_sink):
        args = dict(
            q=q,
            window_cache=window_cache,
            window_slots=window_slots,
            kv_cache=kv_cache,
            kv_slots=kv_slots,
            softmax_scale=softmax_scale,
            attn_sink=attn_sink,
        )
        change(args)
        return attention.sparse_attn.reference(**args)

    return run


@fault(attention.sparse_attn, "sinks of size 20")
def drops_the_sink(*args):
    return _attention(lambda a: a.update(attn_sink=torch.full_like(a["attn_sink"], -torch.inf)))(*args)


@fault(attention.sparse_attn, "13 rows, f32, f32 and f32")
def scales_the_sink_like_a_score(*args):
    return _attention(lambda a: a.update(attn_sink=a["attn_sink"] * a["softmax_scale"]))(*args)


@fault(attention.sparse_attn, "13 rows, bf16, fp8 and fp4")
def counts_the_sink_in_lse(*args):
    o, lse = attention.sparse_attn.reference(*args)
    return o, torch.logaddexp(lse, args[-1].expand_as(lse))


@fault(attention.sparse_attn, "MN-2 50% of slots are -1, page 0 is nan")
def attends_to_slot_zero_for_no_slot(*args):
    return _attention(lambda a: a.update(window_slots=a["window_slots"].clamp(min=0)))(*args)


@fault(attention.sparse_attn, "MN-2 50% of slots are -1, page 0 is huge")
def multiplies_a_masked_key_by_zero_after_a_wrong_maximum(*args):
    o, lse = attention.sparse_attn.reference(*args)
    q, window, slots = args[0], args[1], args[2]
    scores = torch.einsum("thd,tkd->thk", q.float(), kv.kv_gather.reference(window, slots.clamp(min=0), torch.float32))
    top = (scores * args[5]).amax(-1)
    return torch.where((top > lse + 60)[..., None], 0.0, o).to(o.dtype), lse


@fault(attention.sparse_attn, "MN-2 100% of slots are -1, page 0 is nan")
def divides_zero_by_zero_in_an_empty_row(*args):
    o, lse = attention.sparse_attn.reference(*args)
    return torch.where((lse == -torch.inf)[..., None], torch.nan, o).to(o.dtype), lse


@fault(attention.sparse_attn, "13 rows, f32, f32 and f32")
def counts_duplicate_slots_once(*args):
    def change(a):
        slots = a["kv_slots"].clone()
        for row in slots:
            seen = set()
            for column, slot in enumerate(row.tolist()):
                if slot in seen:
                    row[column] = -1
                seen.add(slot)
        a.update(kv_slots=slots)

    return _attention(change)(*args)


@fault(attention.sparse_attn, "window 9")
def reads_whole_tiles_of_the_window_only(*args):
    return _attention(lambda a: a.update(window_slots=a["window_slots"][:, : a["window_slots"].shape[1] // 8 * 8]))(
        *args
    )


@fault(attention.sparse_attn, "MN-3 page offsets past 2^31, packed")
def attends_with_32_bit_offsets(*args):
    return _attention(lambda a: a.update(window_slots=_wrapped_slots(a["window_cache"], a["window_slots"])))(*args)


@fault(attention.sparse_attn, "13 rows, f32, f32 and f32", "D2")
def splits_the_keys_by_the_number_of_rows(*args):
    q, window_slots, kv_slots = args[0], args[2], args[4]
    if kv_slots is None or len(q) >= 8:
        return attention.sparse_attn.reference(*args)
    none = torch.full_like(args[6], -torch.inf)
    empty = torch.full_like(window_slots, -1)
    first = attention.sparse_attn.reference(q, args[1], window_slots, None, None, args[5], none)
    second = attention.sparse_attn.reference(q, args[1], empty, args[3], kv_slots, args[5], none)
    o, lse = (torch.stack((a, b)) for a, b in zip(first, second, strict=True))
    merged, total = attention.attn_merge.reference(o.float(), lse, torch.float32)
    share = (total.exp() / (total.exp() + args[6].exp()))[..., None]
    return torch.where((total == -torch.inf)[..., None], 0.0, merged * share).to(q.dtype), total


@fault(attention.attn_merge, "2 splits, 21 rows, f32")
def merges_empty_splits_to_nan(o, lse, out_dtype):
    merged, total = attention.attn_merge.reference(o, lse, out_dtype)
    return torch.where((lse == -torch.inf).all(0)[..., None], torch.nan, merged), total


# --- choosing positions ---------------------------------------------------------------------------------------------


@fault(index.build_swa_index, "length window +1")
def window_one_short(positions, row_to_seq, window_tables, window_first_page, window_page, window):
    out = index.build_swa_index.reference(positions, row_to_seq, window_tables, window_first_page, window_page, window)
    out[:, 0] = -1
    return out


@fault(index.build_swa_index, "length window +0, freed pages")
def forgets_that_pages_were_freed(positions, row_to_seq, window_tables, window_first_page, window_page, window):
    first = torch.zeros_like(window_first_page)
    return index.build_swa_index.reference(positions, row_to_seq, window_tables, first, window_page, window)


@fault(index.build_swa_index, "MN-2 holes are -1, not slot 0")
def gives_slots_of_page_zero_for_a_hole(positions, row_to_seq, window_tables, window_first_page, window_page, window):
    full = torch.where(window_tables == 0, 10**6, window_tables)
    out = index.build_swa_index.reference(positions, row_to_seq, full, window_first_page, window_page, window)
    return torch.where(out >= 10**6 * window_page, out - 10**6 * window_page, out)


@fault(index.visible_lens, "MN-4 64 consecutive positions, ratio 2")
def counts_an_open_group(positions, ratio):
    return (positions // ratio + 1).int()


@fault(index.logical_to_slot, "21 rows, blocks of 4")
def turns_none_into_slot_zero(indices, block_size, block_table, row_to_seq):
    index.logical_to_slot.reference(indices.clamp_(min=0), block_size, block_table, row_to_seq)


@fault(index.logical_to_slot, "MN-3 slots close to 2^31")
def multiplies_in_float32(indices, block_size, block_table, row_to_seq):
    position = indices.clamp(min=0).long()
    block = block_table[row_to_seq.long()].gather(1, (position // block_size).clamp(max=block_table.shape[1] - 1))
    slot = (block.float() * block_size + position % block_size).long().clamp(max=2**31 - 1)
    indices.copy_(torch.where(indices >= 0, slot, -1))


@fault(index.topk_select, "ties, f32")
def ties_go_to_the_larger_index(x, k, lens):
    flipped = index.topk_select.reference(
        torch.where(torch.arange(x.shape[1]) < lens[:, None], x.float(), -torch.inf).flip(1), k, lens * 0 + x.shape[1]
    )
    mirrored = torch.where(flipped >= 0, x.shape[1] - 1 - flipped, x.shape[1]).sort(1).values
    return torch.where(mirrored < x.shape[1], mirrored, -1).int()


@fault(index.topk_select, "broken, f32")
def nan_wins(x, k, lens):
    return index.topk_select.reference(torch.where(x.isnan(), torch.inf, x), k, lens)


@fault(index.topk_select, "21 rows, f32")
def selects_behind_the_length(x, k, lens):
    return index.topk_select.reference(x, k, torch.full_like(lens, x.shape[1]))


@fault(index.topk_select, "close values")
def sorts_by_the_upper_half_of_the_bits(x, k, lens):
    return index.topk_select.reference(x.bfloat16(), k, lens)


@fault(index.block_max, "21 rows, 37 by 8")
def does_not_force_the_newest_block(logits, lens, block):
    scores, number = index.block_max.reference(logits, lens, block)
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % block), value=-torch.inf)
    best = padded.unflatten(1, (-1, block)).nan_to_num(-torch.inf, torch.inf).amax(-1)
    return torch.where(scores == torch.inf, best, scores), number


@fault(index.index_logits_paged, "NaN behind the visible keys")
def masks_by_adding_minus_infinity(q, cache, weights, visible, block_table, row_to_seq, num_columns):
    every = torch.full_like(visible, min(num_columns, block_table.shape[1] * cache.records))
    out = index.index_logits_paged.reference(q, cache, weights, every, block_table, row_to_seq, num_columns)
    return out + torch.where(torch.arange(num_columns) < visible[:, None], 0.0, -torch.inf)


@fault(index.index_logits_paged, "21 rows, index, weights f32")
def weighs_before_relu(q, cache, weights, visible, block_table, row_to_seq, num_columns):
    flipped = index.index_logits_paged.reference(q, cache, weights.abs(), visible, block_table, row_to_seq, num_columns)
    return torch.where(flipped.isfinite(), flipped, -torch.inf)


@fault(index.index_logits_blocks, "21 rows, index, weights f32")
def scores_a_block_behind_the_visible_entries(q, cache, weights, visible, blocks, candidate, block_table, row_to_seq):
    last = torch.full_like(visible, block_table.shape[1] * cache.records)
    return index.index_logits_blocks.reference(q, cache, weights, last, blocks, candidate, block_table, row_to_seq)


# --- products and experts -------------------------------------------------------------------------------------------


@fault(linear.linear_bf16, "21 rows, f32 x f32 to f32", "D2")
def lets_the_library_choose_by_the_number_of_rows(x, weight, out_dtype, out_scale=1.0):
    half = x.shape[1] // 2
    if x.shape[0] > 4:
        return linear.linear_bf16.reference(x, weight, out_dtype, out_scale)
    parts = (
        linear.linear_bf16.reference(x[:, a:b], weight[:, a:b], torch.float32) for a, b in ((0, half), (half, None))
    )
    return (sum(parts) * out_scale).to(out_dtype)


@fault(linear.linear_mx, "accumulator, mxfp8")
def forgets_the_accumulator(x, weight, out_dtype, acc=None):
    return linear.linear_mx.reference(x, weight, out_dtype)


@fault(linear.linear_mx, "21 rows, mxfp8 x mxfp4 to f32")
def sums_in_bf16(x, weight, out_dtype, acc=None):
    left, right = quant.dequantize.reference(x, torch.bfloat16), quant.dequantize.reference(weight, torch.bfloat16)
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.bfloat16)
    for column in range(left.shape[1]):
        total += left[:, column, None] * right[None, :, column]
    return total.to(out_dtype)


@fault(moe.moe_gate, "ties go to the smaller id")
def ties_go_to_the_larger_expert(logits, bias, image_bias, image_mask, k, scale):
    ids, weights = moe.moe_gate.reference(logits.flip(1), bias.flip(0), None, None, k, scale)
    return logits.shape[1] - 1 - ids, weights


@fault(moe.moe_gate, "21 rows")
def weighs_by_the_biased_score(logits, bias, image_bias, image_mask, k, scale):
    ids, _ = moe.moe_gate.reference(logits, bias, image_bias, image_mask, k, scale)
    s = (torch.nn.functional.softplus(logits).sqrt() + bias).gather(1, ids)
    return ids, s / (s.sum(1, keepdim=True) + 1e-20) * scale


@fault(moe.moe_gate, "large logits")
def softplus_overflows(logits, bias, image_bias, image_mask, k, scale):
    ids, _ = moe.moe_gate.reference(logits, bias, image_bias, image_mask, k, scale)
    s = logits.exp().log1p().sqrt().gather(1, ids)
    return ids, s / (s.sum(1, keepdim=True) + 1e-20) * scale


@fault(moe.moe_gate, "21 rows, images")
def chooses_for_images_as_for_text(logits, bias, image_bias, image_mask, k, scale):
    return moe.moe_gate.reference(logits, bias, None, None, k, scale)


@fault(moe.ep_combine, "21 rows, f32")
def adds_row_zero_for_no_choice(y, handle, bias, out_dtype):
    return moe.ep_combine.reference(y, moe.DispatchHandle(handle.slot_to_row.clamp(min=0)), bias, out_dtype)


@fault(moe.ep_dispatch, "one expert takes all, bf16")
def does_not_keep_the_order_of_tokens(x, expert_ids, weights, num_experts):
    rows, row_weights, psum, handle = moe.ep_dispatch.reference(
        x.flip(0), expert_ids.flip(0), weights.flip(0), num_experts
    )
    return rows, row_weights, psum, moe.DispatchHandle(handle.slot_to_row.flip(0))


@fault(moe.moe_grouped_gemm, "ragged, f32 x mxfp4 to f32")
def skips_an_expert_without_rows(x, weight, psum, out_dtype):
    ends = psum.tolist()
    counts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    squeezed = torch.tensor([c for c in counts if c] + [0] * counts.count(0)).cumsum(0).int()
    return moe.moe_grouped_gemm.reference(x, weight, squeezed, out_dtype)


@fault(moe.moe_grouped_gemm, "ragged, f32 x mxfp4 to f32")
def reads_rows_behind_the_last_end(x, weight, psum, out_dtype):
    out = moe.moe_grouped_gemm.reference(x, weight, psum, out_dtype)
    return out + (x * 0).sum().to(out_dtype)


@fault(moe.swiglu_quant, "21 rows, f32 to f32")
def clamps_the_gate_from_below(gate, up, limit, row_weight, fmt):
    return moe.swiglu_quant.reference(gate.clamp(min=-limit / 20), up, limit, row_weight, fmt)


@fault(moe.swiglu_quant, "21 rows, f32 to f32, weighted")
def forgets_the_routing_weight(gate, up, limit, row_weight, fmt):
    return moe.swiglu_quant.reference(gate, up, limit, None, fmt)


# --- trunk ----------------------------------------------------------------------------------------------------------


@fault(mhc.mhc_post, "21 rows, f32")
def sums_over_the_wrong_stream_index(y, h, post, comb):
    return mhc.mhc_post.reference(y, h, post, comb.transpose(1, 2))


@fault(mhc.mhc_split_sinkhorn, "21 rows, f32, 2 iterations")
def one_iteration_too_many(mix, scale, base, iters, eps):
    return mhc.mhc_split_sinkhorn.reference(mix, scale, base, iters + 1, eps)


@fault(compress.kv_compress, "MN-4 residue 1 of ratio 2")
def pools_across_sequences(gate, value, state, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype):
    one = torch.tensor([0, len(gate)], dtype=torch.int32)
    out = compress.kv_compress.reference(
        gate, value, state.clone(), state_slots[:1], positions, row_to_seq * 0, one, ratio, out_dtype
    )
    compress.kv_compress.reference(
        gate, value, state, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype
    )
    return out


@fault(compress.kv_compress, "MN-4 residue 1 of ratio 2")
def groups_from_the_start_of_the_chunk(
    gate, value, state, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype
):
    first = positions[cu_seqlens_q[:-1].long().clamp(max=max(len(positions) - 1, 0))]
    shifted = positions - first[row_to_seq.long()]
    return compress.kv_compress.reference(
        gate, value, state, state_slots, shifted, row_to_seq, cu_seqlens_q, ratio, out_dtype
    )


@fault(compress.kv_compress, "MN-1 forty tokens", "D2")
def forgets_the_open_group_between_steps(
    gate, value, state, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype
):
    scratch = state.clone()
    out = compress.kv_compress.reference(
        gate, value, scratch, state_slots, positions, row_to_seq, cu_seqlens_q, ratio, out_dtype
    )
    whole = cu_seqlens_q.diff() >= 40
    state[state_slots[whole].long()] = scratch[state_slots[whole].long()]
    return out


@fault(engram.engram_hash, "products wrap in 64 bits")
def takes_the_remainder_of_the_dividend(ngrams, multipliers, primes, offsets):
    depth, heads = ngrams.shape[1], primes.shape[1] // (ngrams.shape[1] - 1)
    products = ngrams.long()[None] * multipliers[:, None]
    mixed, rows = products[..., 0], []
    for n in range(1, depth):
        mixed = mixed ^ products[..., n]
        part = slice((n - 1) * heads, n * heads)
        rows.append(torch.fmod(mixed[..., None], primes[:, None, part]) + offsets[:, None, part])
    return torch.cat(rows, -1).int()


@fault(engram.engram_ngrams, "decode rows")
def reads_the_history_oldest_first(input_ids, row_to_seq, cu_seqlens_q, history, *rest):
    return engram.engram_ngrams.reference(input_ids, row_to_seq, cu_seqlens_q, history.flip(1), *rest)


@fault(engram.engram_gate, "zero rows of streams, f32")
def gives_zero_the_sign_zero(h, kv_, q_weight, k_weight, eps, blocked=None):
    out = engram.engram_gate.reference(h, kv_, q_weight, k_weight, eps, blocked)
    value = kv_[:, -h.shape[2] :][:, None]
    still = (kv_[:, : -h.shape[2]] == 0).all(-1)[:, None, None]
    return torch.where(still, h + 0.5 * value, out)


@fault(engram.engram_fetch, "MN-3 row offsets past 2^31")
def fetches_with_32_bit_offsets(table, rows, out_dtype):
    stride = table.stride(0) * table.element_size() if isinstance(table, Tensor) else 1
    wrapped = torch.where(rows.long() * stride >= 2**31, 0, rows)
    return engram.engram_fetch.reference(table, wrapped, out_dtype)


def _packed(x: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(x.shape, device="meta").stride())


def _wrapped(cache: PagedCache) -> PagedCache:
    """A strided cache as a kernel sees it whose byte offsets wrap at 2^31."""
    reach = max(2**31 // cache.data.stride(0), 1)
    if reach >= cache.data.shape[0]:
        return cache
    pages = torch.arange(cache.data.shape[0]) % reach
    return PagedCache(cache.data[pages].clone(), cache.format, cache.records)


def _wrapped_slots(cache: PagedCache, slots: Tensor) -> Tensor:
    """Slots whose byte offsets wrap at 2^31."""
    reach = max(2**31 // cache.data.stride(0), 1) * cache.records
    return torch.where(slots >= 0, slots % reach, -1)
