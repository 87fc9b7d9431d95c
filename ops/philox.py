"""Philox4x32-10, the source of every random number of the engine, and the uniforms and Gumbels made of its words.

Counter-based, so a number is a function of what it is for and never of when, where or in which batch it was drawn: the
key is a request's seed, the counter says which token id, which output token, which choice and which purpose. Words are
exact on every backend; floats made of them are fp32.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the layout of the counter is ours.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
UNIFORM_MAX = 1.0 - 2.0**-24
"""The largest fp32 below 1: keeps `log1p(-u)` finite."""


class Purpose(IntEnum):
    """What a word is drawn for; part of the counter, so streams of one request never meet."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per counter.

    Args:
        counter: four int64 tensors of 32-bit values, shapes that broadcast.
        key: two int64 tensors of 32-bit values, shapes that broadcast with them.

    Returns:
        Four int64 tensors of 32-bit values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def random_words(
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int,
    num_ids: int,
    anchor: Tensor | None = None,
) -> Tensor:
    """One word per row and token id: word `v mod 4` of counter `(v div 4, k, purpose + 256 * choice, anchor)`.

    Args:
        seeds: [N] int64, the bits of the unsigned seed.
        output_index: [N] int32, `k`: output tokens of this choice before this one.
        choice: [N] int32, which of the request's `n` choices.
        purpose: a `Purpose`.
        num_ids: V, words per row.
        anchor: [N] int32, `k` of the first drafted token for DRAFT; None for 0.

    Returns:
        [N, V] int64 of 32-bit values.
    """
    seeds = seeds.long()[:, None]
    quads = torch.arange((num_ids + 3) // 4, dtype=torch.int64, device=seeds.device)[None, :]
    zero = torch.zeros_like(seeds)
    counter = (
        quads + zero,
        (output_index.long()[:, None] & MASK32) + zero,
        ((purpose + 256 * choice.long()[:, None]) & MASK32) + zero,
        zero if anchor is None else anchor.long()[:, None] & MASK32,
    )
    words = philox4x32(counter, (seeds & MASK32, (seeds >> 32) & MASK32))
    return torch.stack(words, 2).flatten(1)[:, :num_ids]


def uniform(words: Tensor) -> Tensor:
    """Words to uniforms in (0, 1), fp32: `min((float(w) + 0.5) * 2^-32, 1 - 2^-24)`."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=UNIFORM_MAX)


def gumbel(words: Tensor) -> Tensor:
    """Words to standard Gumbels, fp32: `-log(-log1p(-u))`, between -2.82 and 22.88."""
    return -(-(-uniform(words)).log1p()).log()


def _multiply(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low half of a 32 x 32 bit product, in int64 without overflow."""
    upper = x * (multiplier >> 16)
    lower = x * (multiplier & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & MASK32
    return high, low
