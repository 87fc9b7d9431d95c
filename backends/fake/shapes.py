"""What each op returns, known before it runs: shapes and dtypes of its results from its arguments.

One entry per op, from the `Returns:` section of its contract; the device thread holds every result against it. The host
waits for an op without an entry, so a new op works at once, and only `index_logits_ragged`, whose size depends on
values, has a reason to stay without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops.formats import GROUP, QTensor, QuantFormat
from deepinfer.ops.moe import DispatchHandle

New = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes one result."""
Arguments = Any
"""The op's arguments as attributes."""

_F32, _I32, _U8 = torch.float32, torch.int32, torch.uint8


def _codes(new: New, shape: tuple[int, ...], fmt: QuantFormat) -> QTensor:
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    scales = -(-shape[-1] // GROUP[fmt])
    return QTensor(new((*shape[:-1], width), _U8), new((*shape[:-1], scales), _U8), fmt)


def _like(new: New, x: Tensor) -> Tensor:
    return new(tuple(x.shape), x.dtype)


def _nothing(new: New, a: Arguments) -> None:
    return None


def _rows(new: New, x: Tensor | QTensor, count: int) -> Tensor | QTensor:
    """`count` rows like those of x."""
    if isinstance(x, QTensor):
        data = new((count, *x.data.shape[1:]), x.data.dtype)
        return QTensor(data, new((count, *x.scale.shape[1:]), x.scale.dtype), x.fmt, x.layout)
    return new((count, *x.shape[1:]), x.dtype)


def _split(new: New, mix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = mix.shape
    streams = int((width + 1) ** 0.5) - 1
    return new((rows, streams), _F32), new((rows, streams), _F32), new((rows, streams, streams), _F32)


def _dispatch(new: New, a: Arguments) -> Any:
    tokens, k = a.expert_ids.shape
    handle = DispatchHandle(new((tokens, k), _I32))
    return _rows(new, a.x, tokens * k), new((tokens * k,), _F32), new((a.num_experts,), _I32), handle


def _mhc_step(new: New, a: Arguments) -> Any:
    rows, streams, hidden = a.h.shape
    small = new((rows, streams), _F32), new((rows, streams), _F32), new((rows, streams, streams), _F32)
    return _like(new, a.h), new((rows, hidden), a.h.dtype), *small


def _block_max(new: New, a: Arguments) -> Any:
    return new((a.logits.shape[0], -(-a.logits.shape[1] // a.block)), _F32), new((a.logits.shape[0],), _I32)


def _moe_gate(new: New, a: Arguments) -> Any:
    shape = a.logits.shape[0], min(a.k, a.logits.shape[1])
    return new(shape, torch.int64), new(shape, _F32)


def _token_logprobs(new: New, a: Arguments) -> Any:
    n = a.logits.shape[0]
    return new((n,), _F32), new((n,), _I32), new((n, a.num_top), _I32), new((n, a.num_top), _F32)


def _o_rope(new: New, a: Arguments) -> Any:
    rows, heads, dim = a.o.shape
    return new((rows, a.num_groups, heads // a.num_groups * dim), a.o.dtype)


def _draft_rows(new: New, a: Arguments) -> Any:
    count = a.anchor_ids.shape[0] * a.num_tokens
    return *(new((count,), _I32) for _ in range(5)), new((count, a.num_tokens), _I32)


RESULTS: Final[Mapping[str, Callable[[New, Arguments], Any]]] = {
    "rms_norm": lambda new, a: _like(new, a.x),
    "rms_norm_quant": lambda new, a: (_codes(new, tuple(a.x.shape), a.fmt), _like(new, a.x)),
    "quantize": lambda new, a: _codes(new, tuple(a.x.shape), a.fmt),
    "dequantize": lambda new, a: new(a.x.shape, a.dtype),
    "rope": lambda new, a: _like(new, a.x),
    "q_norm_rope": lambda new, a: _like(new, a.q),
    "o_rope": _o_rope,
    "linear_mx": lambda new, a: new((a.x.shape[0], a.weight.shape[0]), a.out_dtype),
    "linear_bf16": lambda new, a: new((a.x.shape[0], a.weight.shape[0]), a.out_dtype),
    "linear_grouped_o": lambda new, a: new((*a.x.shape[:2], a.weight.shape[1]), a.x.dtype),
    "kv_norm_rope_store": lambda new, a: _like(new, a.kv),
    "index_k_store": _nothing,
    "kv_gather": lambda new, a: new((*a.slots.shape, a.cache.format.head_dim), a.dtype),
    "copy_blocks": _nothing,
    "sparse_attn": lambda new, a: (_like(new, a.q), new(tuple(a.q.shape[:2]), _F32)),
    "attn_merge": lambda new, a: (new(tuple(a.o.shape[1:]), a.out_dtype), new(tuple(a.o.shape[1:3]), _F32)),
    "vision_attn": lambda new, a: _like(new, a.q),
    "kv_compress": lambda new, a: new(tuple(a.value.shape), a.out_dtype),
    "build_swa_index": lambda new, a: new((a.positions.shape[0], a.window), _I32),
    "clip_window": _nothing,
    "build_dense_index": lambda new, a: new((a.visible_lens.shape[0], a.num_columns), _I32),
    "concat_index": lambda new, a: new((a.first.shape[0], a.first.shape[1] + a.second.shape[1]), _I32),
    "visible_lens": lambda new, a: new(tuple(a.positions.shape), _I32),
    "uniform_lens": lambda new, a: new((a.like.shape[0],), _I32),
    "concat_rows": lambda new, a: _rows(new, a.parts[0], sum(p.shape[0] for p in a.parts)),
    "logical_to_slot": _nothing,
    "index_q_quant": lambda new, a: _like(new, a.q) if a.fmt is None else _codes(new, tuple(a.q.shape), a.fmt),
    "index_logits_paged": lambda new, a: new((a.q.shape[0], a.num_columns), _F32),
    "index_logits_blocks": lambda new, a: new((a.q.shape[0], a.blocks.shape[1] * a.candidate_block), _F32),
    "block_max": _block_max,
    "topk_select": lambda new, a: new((a.x.shape[0], a.k), _I32),
    "blocks_to_positions": lambda new, a: new(tuple(a.indices.shape), _I32),
    "moe_gate": _moe_gate,
    "ep_dispatch": _dispatch,
    "moe_grouped_gemm": lambda new, a: new((a.x.shape[0], a.weight.shape[-2]), a.out_dtype),
    "swiglu_quant": lambda new, a: _like(new, a.gate) if a.fmt is None else _codes(new, tuple(a.gate.shape), a.fmt),
    "ep_combine": lambda new, a: new((a.handle.slot_to_row.shape[0], a.y.shape[1]), a.out_dtype),
    "expert_shuffle": lambda new, a: _rows(new, a.weight, a.source.shape[0]),
    "mhc_prenorm_mix": lambda new, a: new((a.h.shape[0], a.fn.shape[0]), _F32),
    "mhc_split_sinkhorn": lambda new, a: _split(new, a.mix),
    "mhc_apply": lambda new, a: new((a.h.shape[0], a.h.shape[2]), a.h.dtype),
    "mhc_post": lambda new, a: _like(new, a.h),
    "mhc_expand": lambda new, a: (
        new((a.x.shape[0], a.streams, a.x.shape[1]), a.x.dtype),
        new((a.x.shape[0], a.streams), _F32),
    ),
    "mhc_step": _mhc_step,
    "engram_ngrams": lambda new, a: new((a.input_ids.shape[0], a.history.shape[1] + 1), _I32),
    "engram_hash": lambda new, a: new((a.primes.shape[0], a.ngrams.shape[0], a.primes.shape[1]), _I32),
    "engram_fetch": lambda new, a: new((a.rows.shape[0], a.rows.shape[1] * a.table.shape[1]), a.out_dtype),
    "engram_gate": lambda new, a: _like(new, a.h),
    "embedding": lambda new, a: new((prod(a.input_ids.shape), a.weight.shape[1]), a.out_dtype),
    "gather_rows": lambda new, a: _rows(new, a.x, a.rows.shape[0]),
    "markov_logits": lambda new, a: new(tuple(a.base.shape), _F32),
    "draft_confidence": lambda new, a: new((a.hidden.shape[0],), _F32),
    "stream_mean": lambda new, a: new((a.h.shape[0], a.h.shape[2]), a.h.dtype),
    "apply_bitmask": _nothing,
    "process_logits": lambda new, a: new(tuple(a.logits.shape), _F32),
    "sample": lambda new, a: new((a.logits.shape[0],), _I32),
    "token_logprobs": _token_logprobs,
    "adjust_logits": _nothing,
    "apply_penalties": _nothing,
    "put_rows": _nothing,
    "logprobs_of": lambda new, a: (new(tuple(a.ids.shape), _F32), new(tuple(a.ids.shape), _I32)),
    "verify": lambda new, a: (new((a.cu_seqlens.shape[0] - 1,), _I32), new((a.logits.shape[0],), _I32)),
    "advance_step": _nothing,
    "advance_history": _nothing,
    "rewind": _nothing,
    "last_emitted": lambda new, a: new((a.starts.shape[0],), _I32),
    "gather_ids": lambda new, a: new((a.rows.shape[0],), _I32),
    "known_ids": lambda new, a: new((a.token_ids.shape[0],), _I32),
    "shift": lambda new, a: new((a.values.shape[0],), _I32),
    "concat_columns": lambda new, a: new((a.parts[0].shape[0], sum(p.shape[1] for p in a.parts)), a.parts[0].dtype),
    "draft_rows": _draft_rows,
}
