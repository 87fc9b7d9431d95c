"""Which ids of a row a request's filters keep, found without sorting.

min-p, top-k and top-p each keep a prefix of one order: score down, then id up. A prefix is a cut, a key and the last id
that is kept of those that have it, and cuts are found by bisection over keys with integer counts and integer masses. So
nothing depends on an order of addition but the sum of the softmax, which goes through a row from its first id to its
last.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.backends.nvidia.draws import order_key, request_of
from deepinfer.backends.nvidia.launch import device_function, kernel
from deepinfer.backends.nvidia.tensors import next_pow2

MASS_ONE = tl.constexpr(2147483648.0)
LOWEST = tl.constexpr(-2147483648)
_TILE: Final = 2048
"""Ids that a program looks at in one step."""


class Cuts(NamedTuple):
    """What filters found out about each row.

    Attributes:
        key: [N] int32, kept are ids with a greater key,
        limit: [N] int32, and those with this key up to this id.
        top: [N] float32, the best score.
        total: [N] float32, sum of exp(score - top) over kept ids, where it was asked for.
        usable: [N] int32, 0 for a row that `sample` marks.
    """

    key: Tensor
    limit: Tensor
    top: Tensor
    total: Tensor
    usable: Tensor


@device_function
def _scores(
    logits: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    pitch: tl.tensor,
    divisor: tl.tensor,
    ids: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Ids of a tile and their scores; -inf behind the last id."""
    token = first + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * pitch + token, mask=token < ids, other=float("-inf"))
    return token, tl.div_rn(raw, divisor)


@device_function
def kept_ids(score: tl.tensor, token: tl.tensor, key: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Which ids of a tile a cut keeps."""
    own = order_key(score)
    return (own > key) | ((own == key) & (token <= limit))


@device_function
def _tie_limit(
    logits: tl.tensor,
    row: tl.tensor,
    pitch: tl.tensor,
    divisor: tl.tensor,
    ids: tl.tensor,
    key: tl.tensor,
    count: tl.tensor,
    last: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The id of the `count`-th tie at `key`, by id up and not behind `last`."""
    limit = last
    seen = tl.zeros((), tl.int64)
    for first in range(0, ids, BLOCK):
        token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
        tie = ((order_key(score) == key) & (token < ids)).to(tl.int32)
        place = seen + tl.cumsum(tie, 0)
        found = (tie != 0) & (place == count)
        limit = tl.minimum(limit, tl.min(tl.where(found, token, last), 0))
        seen += tl.sum(tie, 0)
    return limit


@device_function
def _neighbours(own: tl.tensor, reaches: tl.tensor, misses: tl.tensor, above: tl.tensor, below: tl.tensor) -> tl.tensor:
    """Per lane, the lowest key so far that reaches a threshold and the highest that misses it.

    A bisection that goes on from keys that exist ends when one is left, long before thresholds meet.
    """
    above = tl.minimum(above, tl.where(reaches, own, above))
    below = tl.maximum(below, tl.where(misses, own, below))
    return above, below


@device_function
def _total(
    logits: tl.tensor,
    row: tl.tensor,
    pitch: tl.tensor,
    divisor: tl.tensor,
    ids: tl.tensor,
    top: tl.tensor,
    key: tl.tensor,
    limit: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of exp(score - top) over the ids that a cut keeps."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, ids, BLOCK):
        token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
        sums += tl.where(kept_ids(score, token, key, limit), tl.exp(score - top), 0.0)
    return tl.sum(sums, 0)


@kernel
def _cut(
    keys: tl.tensor,
    limits: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    usables: tl.tensor,
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    cu_seqlens: tl.tensor,
    pitch: tl.int64,
    ids: tl.int32,
    requests: tl.int32,
    BLOCK: tl.constexpr,
    WANT_TOTAL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    owner = row
    if cu_seqlens is not None:
        owner = tl.minimum(request_of(row, cu_seqlens, requests, 128), requests - 1).to(tl.int64)
    heat = tl.load(temperature + owner)
    divisor = tl.where(heat > 0.0, heat, 1.0)
    # what passes over a row find is kept per lane and put together once, behind the last tile
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, ids, BLOCK):
        token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
        bad = (score != score) | (score == float("inf"))
        broken += bad.to(tl.int32)
        best = tl.maximum(best, tl.where(bad, float("-inf"), score))
    top = tl.max(best, 0)
    usable = (tl.sum(broken, 0) == 0) & (top > float("-inf"))
    key = tl.full((), LOWEST, tl.int32)
    limit = ids
    total = 0.0
    if usable & (heat > 0.0):
        share = tl.load(min_p + owner)
        floor = float("-inf")
        if share > 0.0:
            floor = tl.log(tl.minimum(share, 1.0).to(tl.float64)).to(tl.float32)
            lowest = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
            for first in range(0, ids, BLOCK):
                token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
                own = tl.where((score - top >= floor) & (token < ids), order_key(score), 0x7FFFFFFF)
                lowest = tl.minimum(lowest, own)
            key = tl.min(lowest, 0)
        highest = order_key(top).to(tl.int64)
        most = tl.load(top_k + owner)
        if (most > 0) & (most < ids):
            low = key.to(tl.int64)
            high = highest
            # the greatest key that at least `most` ids reach; the lowest one where there are fewer
            while low < high:
                middle = low + (high - low + 1) // 2
                counts = tl.zeros((BLOCK,), tl.int32)
                above = tl.zeros((BLOCK,), tl.int64) + highest
                below = tl.zeros((BLOCK,), tl.int64) + low
                for first in range(0, ids, BLOCK):
                    token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
                    own = order_key(score).to(tl.int64)
                    reaches = (own >= middle) & (token < ids)
                    counts += reaches.to(tl.int32)
                    above, below = _neighbours(own, reaches, (own < middle) & (token < ids), above, below)
                enough = tl.sum(counts, 0) >= most
                low = tl.where(enough, tl.min(above, 0), low)
                high = tl.where(enough, high, tl.max(below, 0))
            # of the ids at the cut, which may be the lowest key that min-p left, the first ones that are still wanted
            better = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, ids, BLOCK):
                token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
                better += ((order_key(score) > low) & (token < ids)).to(tl.int32)
            limit = _tie_limit(logits, row, pitch, divisor, ids, low, most - tl.sum(better, 0), ids, BLOCK)
            key = low.to(tl.int32)
        mass = tl.load(top_p + owner)
        if (mass < 1.0) | WANT_TOTAL:
            total = _total(logits, row, pitch, divisor, ids, top, key, limit, BLOCK)
        if mass < 1.0:
            target = (mass.to(tl.float64) * MASS_ONE).to(tl.int64)
            low = key.to(tl.int64)
            high = highest
            # the greatest key whose ids and all better ones have the mass
            while low < high:
                middle = low + (high - low + 1) // 2
                held = tl.zeros((BLOCK,), tl.int64)
                above = tl.zeros((BLOCK,), tl.int64) + highest
                below = tl.zeros((BLOCK,), tl.int64) + low
                for first in range(0, ids, BLOCK):
                    token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
                    own = order_key(score).to(tl.int64)
                    kept = kept_ids(score, token, key, limit)
                    reaches = kept & (own >= middle)
                    part = tl.div_rn(tl.exp(score - top), total) * MASS_ONE
                    held += tl.where(reaches, part, 0.0).to(tl.int64)
                    above, below = _neighbours(own, reaches, kept & (own < middle), above, below)
                enough = tl.sum(held, 0) >= target
                low = tl.where(enough, tl.min(above, 0), low)
                high = tl.where(enough, high, tl.max(below, 0))
            betters = tl.zeros((BLOCK,), tl.int64)
            eaches = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, ids, BLOCK):
                token, score = _scores(logits, row, first, pitch, divisor, ids, BLOCK)
                kept = kept_ids(score, token, key, limit)
                part = tl.where(kept, tl.div_rn(tl.exp(score - top), total) * MASS_ONE, 0.0).to(tl.int64)
                own = order_key(score)
                betters += tl.where(own > low, part, 0)
                eaches = tl.maximum(eaches, tl.where(own == low, part, 0))
            each = tl.max(eaches, 0)
            if each > 0:
                # of equal ids as many as it takes to reach the mass, the best id of the row always
                wanted = tl.maximum((target - tl.sum(betters, 0) + each - 1) // each, 1)
                last = tl.where(low > key, ids, limit)
                limit = _tie_limit(logits, row, pitch, divisor, ids, low, wanted, last, BLOCK)
                key = low.to(tl.int32)
            if WANT_TOTAL:
                total = _total(logits, row, pitch, divisor, ids, top, key, limit, BLOCK)
    tl.store(keys + row, key)
    tl.store(limits + row, limit)
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(usables + row, tl.where(usable, 1, 0))


def id_tile(ids: int) -> int:
    """Ids that a program takes at once."""
    return min(max(next_pow2(ids), 16), _TILE)


CUT_BYTES: Final = 5 * 4
"""Bytes of `Cuts` per row."""


def room_for_cuts(rows: int, room: Tensor) -> Cuts:
    """`Cuts` in the first bytes of [n] uint8."""
    words = room[: rows * CUT_BYTES].view(torch.int32).view(5, rows)
    return Cuts(words[0], words[1], words[2].view(torch.float32), words[3].view(torch.float32), words[4])


class FindCuts(Protocol):
    """What finds cuts: `find_cuts`, or what a backend has instead of it."""

    def __call__(
        self,
        cuts: Cuts,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        want_total: bool = False,
    ) -> None:
        """See `find_cuts`."""
        ...


def find_cuts(
    cuts: Cuts,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    want_total: bool = False,
) -> None:
    """Fill `cuts` for [N, V] logits with neighbouring ids; one program per row.

    Args:
        cuts: written.
        logits: [N, V] float32 rows.
        temperature: packed, as the others, one per row; with `cu_seqlens` one per request.
        top_k: as `process_logits`.
        top_p: as `process_logits`.
        min_p: as `process_logits`.
        cu_seqlens: rows of each request, or None.
        want_total: the sum of the softmax is needed also where no filter needs it.
    """
    rows, ids = logits.shape
    _cut(
        (rows,),
        *cuts,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        cu_seqlens,
        logits.stride(0),
        ids,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        BLOCK=id_tile(ids),
        WANT_TOTAL=want_total,
        num_warps=16,
    )
