"""Random numbers and orders inside sampling kernels: Philox words, Gumbels, and keys that sort as scores do."""

from __future__ import annotations

import triton.language as tl

from deepinfer.backends.nvidia.launch import device_function


@device_function
def philox(quad: tl.tensor, index: tl.tensor, stream: tl.tensor, anchor: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Four words (uint32) of Philox4x32-10 per element of `quad`.

    Args:
        quad: uint32, first word of the counter.
        index: uint32 scalar, the second.
        stream: uint32 scalar, the third.
        anchor: uint32 scalar, the fourth.
        seed: int64 scalar; its halves are the key, the low one first.
    """
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = quad
    c1 = tl.zeros_like(quad) + index
    c2 = tl.zeros_like(quad) + stream
    c3 = tl.zeros_like(quad) + anchor
    first = tl.full(quad.shape, 0xD2511F53, tl.uint32)
    second = tl.full(quad.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, first)
        low0 = c0 * first
        high1 = tl.umulhi(c2, second)
        low1 = c2 * second
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = (key0.to(tl.int64) + 0x9E3779B9).to(tl.uint32)
        key1 = (key1.to(tl.int64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@device_function
def uniform(word: tl.tensor) -> tl.tensor:
    """min((float(w) + 0.5) * 2^-32, 1 - 2^-24) in float32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(u, 0.999999940395355224609375)


@device_function
def gumbel(word: tl.tensor) -> tl.tensor:
    """-log(-log1p(-u)), by way of float64, in which 1 - u loses nothing that float32 would show."""
    u = uniform(word).to(tl.float64)
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@device_function
def words_from(
    first: tl.tensor, index: tl.tensor, stream: tl.tensor, anchor: tl.tensor, seed: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Words (uint32) of the BLOCK ids from `first`, a multiple of four, on."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = philox(quad, index, stream, anchor, seed)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@device_function
def gumbel_of(token: tl.tensor, index: tl.tensor, stream: tl.tensor, anchor: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """The Gumbel (float32) of one id."""
    w0, w1, w2, w3 = philox((token // 4).to(tl.uint32), index, stream, anchor, seed)
    place = token % 4
    return gumbel(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))


@device_function
def earliest(word: tl.tensor) -> tl.tensor:
    """At most -log1p(-u), whose negative logarithm is the Gumbel: three terms of its series, and no logarithm.

    The most that score + Gumbel can be is then score - log(earliest), which is near it where u is small. The ids that
    are in question for the best sum have a small u unless they are few.
    """
    u = uniform(word)
    return u * tl.fma(u, tl.fma(u, 0.3333333, 0.5), 1.0)


@device_function
def arrive(
    soonest: tl.tensor, second: tl.tensor, tile: tl.tensor, arrival: tl.tensor, first: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Per lane, the two earliest arrivals of the tiles so far, and where the tile of the earliest begins."""
    second = tl.minimum(second, tl.maximum(soonest, arrival))
    tile = tl.where(arrival < soonest, first, tile)
    return tl.minimum(soonest, arrival), second, tile


@device_function
def rivals(soonest: tl.tensor, second: tl.tensor, latest: tl.tensor) -> tl.tensor:
    """How many of the lanes' arrivals are not behind `latest`."""
    return tl.sum((soonest <= latest).to(tl.int32) + (second <= latest).to(tl.int32), 0)


@device_function
def better(
    best: tl.tensor, chosen: tl.tensor, value: tl.tensor, token: tl.tensor, eligible: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The best value so far and its lowest id, with a tile more."""
    high = tl.max(tl.where(eligible, value, float("-inf")), 0)
    winner = tl.min(tl.where(eligible & (value == high), token, 0x7FFFFFFF), 0)
    take = (high > best) | ((high == best) & (winner < chosen))
    return tl.where(take, high, best), tl.where(take, winner, chosen)


@device_function
def order_key(score: tl.tensor) -> tl.tensor:
    """int32 that sorts as float32 scores do; both zeros have one key. Not for NaN."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@device_function
def score_of(key: tl.tensor) -> tl.tensor:
    """The score (float32) that a key of `order_key` is of."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@device_function
def request_of(row: tl.tensor, cu_seqlens: tl.tensor, requests: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The request that a packed row belongs to; `requests` behind the last."""
    ended = 0
    for first in range(0, requests, BLOCK):
        at = first + tl.arange(0, BLOCK)
        end = tl.load(cu_seqlens + 1 + at, mask=at < requests, other=0x7FFFFFFF)
        ended += tl.sum((end <= row).to(tl.int32), 0)
    return ended
