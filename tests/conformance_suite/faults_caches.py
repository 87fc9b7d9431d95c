"""Planted faults in stores, gathers and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.planting import Fault, planter
from deepinfer.ops import attention, kv, norm, quant, rope
from deepinfer.ops.formats import PagedCache

FAULTS: list[Fault] = []
fault = planter(FAULTS)


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
