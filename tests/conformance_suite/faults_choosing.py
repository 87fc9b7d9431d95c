"""Planted faults in what chooses positions, and in the trunk."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.conformance.planting import Fault, planter
from deepinfer.ops import compress, engram, index, mhc

FAULTS: list[Fault] = []
fault = planter(FAULTS)


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


@fault(index.clip_window, "start +0")
def hides_the_first_visible_position(indices, positions, row_to_seq, starts):
    index.clip_window.reference(indices, positions, row_to_seq, starts + (starts > 0).int())


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
