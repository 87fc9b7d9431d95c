"""Writing, reading and copying cache records."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import caches
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import PagedCache
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import read_records, write_records
from deepinfer.ops.results import like, nothing
from deepinfer.ops.rope import rope
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_records, at_rows

STORE = Tolerance(
    2**-7,
    1e-6,
    off_by_one=1e-3,
    single=(1e-5, 1e-6),
    why="exact given equal norms; a bf16 ulp of the norm may move a code by one",
)


@define_op(
    mutates=("cache",),
    tolerance=STORE,
    determinism="D2",
    cases=caches.kv_norm_rope_store_cases,
    dims={"dim": "kv:1", "kind": "cache"},
    rules=Rules(padding={"slots": -1}),
    touches={"cache": at_records("slots"), "cos_sin": at_rows(lambda a: a.positions // a.ratio * a.ratio)},
    results=like("kv"),
)
def kv_norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
) -> Tensor:
    """Normalise, rotate, quantise and store one key/value vector per row.

    Args:
        kv: [T, D] bfloat16 or float32.
        weight: [D] of the norm.
        eps: of the norm.
        positions: [T] int32, token positions. A compressed entry rotates at its group's first token,
            `position // ratio * ratio`.
        cos_sin: [P, Dr] float32.
        cache: [slots, D] where records go.
        slots: [T] int32; -1 writes nothing. Slots that are not -1 differ.
        ratio: tokens per record.

    Returns:
        [T, D]: the normed rows before rotation (index keys are made of them), dtype of `kv`.
    """
    normed = rms_norm(kv, weight, eps)
    write_records(cache, slots, rope(normed, positions // ratio * ratio, cos_sin))
    return normed


@define_op(
    mutates=("cache",),
    tolerance=STORE,
    determinism="D2",
    cases=caches.index_k_store_cases,
    dims={"dim": "k:1", "kind": "cache"},
    rules=Rules(padding={"slots": -1}),
    touches={"cache": at_records("slots"), "cos_sin": at_rows(lambda a: a.positions // a.ratio * a.ratio)},
    results=nothing,
)
def index_k_store(
    k: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: PagedCache,
    slots: Tensor,
    ratio: int = 1,
) -> None:
    """Normalise, rotate, quantise and store one index key per row.

    Args:
        k: [T, D] bfloat16 or float32.
        weight: [D] of the norm.
        eps: of the norm.
        positions: [T] int32, as in `kv_norm_rope_store`.
        cos_sin: [P, Dr] float32.
        cache: [slots, D] where records go.
        slots: [T] int32; -1 writes nothing. Slots that are not -1 differ.
        ratio: tokens per record.
    """
    kv_norm_rope_store(k, weight, eps, positions, cos_sin, cache, slots, ratio)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=caches.kv_gather_cases,
    dims={"dim": "cache:1", "kind": "cache"},
    touches={"cache": at_records("slots")},
    results=lambda new, a: new((*a.slots.shape, a.cache.format.head_dim), a.dtype),
)
def kv_gather(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise records into a dense tensor; exact.

    Args:
        cache: [slots, D] paged records.
        slots: [...] int32; -1 gives a zero row.
        dtype: bfloat16 or float32.

    Returns:
        [..., D] of `dtype`.
    """
    values = read_records(cache, slots.clamp(min=0), dtype)
    return torch.where((slots >= 0)[..., None], values, torch.zeros((), dtype=dtype, device=values.device))


@define_op(
    mutates=("pool",),
    tolerance=EXACT,
    determinism="D1",
    cases=caches.copy_blocks_cases,
    rules=Rules(nan="bytes are moved, whatever they mean"),
    touches={"pool": at_rows("sources", "destinations", written="destinations")},
    results=nothing,
)
def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks or pages inside a pool.

    Args:
        pool: [blocks, ...]; uint8 blocks and pages, or states of any dtype.
        sources: [n] int32.
        destinations: [n] int32, all different, none of them a source.
    """
    pool[destinations.long()] = pool[sources.long()]
