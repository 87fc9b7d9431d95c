"""From logits to tokens: masks, filters, the draw, and logprobs of what was drawn.

Scores are fp32. Whoever calls these ops keeps this order, of which the first steps are `apply_bitmask` and the ops of
`ops.shaping`, and the last four are `process_logits`:

    grammar mask, allowed ids (`apply_bitmask`), bad words, min_tokens, logit bias (`adjust_logits`),
    penalties (`apply_penalties`), divide by temperature, min-p, top-k, top-p

The draw is Gumbel-max: the argmax over kept ids of score + g, where g is a fixed function of (seed, output index,
choice, token id). It is exact, needs no sum that could depend on an order, and gives the same token alone, in any batch
and under speculation. Backends agree on a token unless the two best sums of its row differ by less than `MIN_GAP`.

Source: Gumbel-max, e.g. Maddison et al., "A* sampling" (NeurIPS 2014); nucleus sampling, arXiv:1904.09751; min-p,
arXiv:2407.01082.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import sampling as sampling_cases
from deepinfer.ops.numeric import accumulate
from deepinfer.ops.philox import gumbel, random_words
from deepinfer.ops.results import New, float32_like, nothing
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_rows

MASS_ONE = 2**31
"""Probability 1 as an integer mass: sums of masses do not depend on the order of addition."""
MIN_GAP = 1e-4
"""Backends may pick different tokens only where the two best sums are closer than this."""

_SETTLED = "; cases hold no row whose two best sums or whose filter edge is that close"


@define_op(
    mutates=("logits",),
    tolerance=EXACT,
    determinism="D2",
    cases=sampling_cases.apply_bitmask_cases,
    touches={"logits": at_rows(lambda a: (a.rows >= 0).nonzero())},
    results=nothing,
)
def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set the logits of forbidden ids to -inf, in place.

    Args:
        logits: [N, V] float32.
        mask: [B, ceil(V / 32)] int32. Bit `v mod 32` of word `v div 32` is set where id v is allowed; bits past V are
            not read. A mask without any set bit leaves a row without a finite entry, which `sample` reports.
        rows: [N] int32, the row of `mask` for each row of logits; -1 is unconstrained.
    """
    num_ids = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask[:, :, None] >> bits) & 1).flatten(1)[:, :num_ids].bool()
    constrained = rows >= 0
    chosen = rows[constrained].long()
    logits[constrained] = logits[constrained].masked_fill(~allowed[chosen], -math.inf)


@define_op(
    tolerance=Tolerance(1e-6, 0.0, why="one fp32 division; kept ids must be equal" + _SETTLED),
    determinism="D2",
    cases=sampling_cases.process_logits_cases,
    results=float32_like("logits"),
)
def process_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores to draw from: logits over temperature, with -inf for every id that a filter removes.

    min-p keeps ids whose score is at most `-ln(min_p)` below the best score. Top-k keeps the k best of those, of equal
    scores the lower ids. Top-p takes fp32 probabilities over what both left, and keeps the shortest prefix, by score
    down and then id up, whose mass reaches `floor(top_p * 2^31)`; the mass of an id is `floor(p * 2^31)`. Floors lose
    up to 1 per id, so no prefix may reach a top_p close to 1: then all are kept. At least the best id is kept.

    Args:
        logits: [N, V] float32; -inf is an id that masks removed.
        temperature: [N] float32. 0 is greedy: the row is returned as it came.
        top_k: [N] int32; <= 0 or >= V is off.
        top_p: [N] float32; >= 1 is off.
        min_p: [N] float32 in [0, 1]; <= 0 is off.

    Returns:
        [N, V] float32. Rows with NaN or +inf, or without any finite entry, are returned as they came.
    """
    scores = _over_temperature(logits, temperature)
    untouched = (temperature <= 0) | ~_usable(scores)
    return torch.where(untouched[:, None], accumulate(logits), _filter(scores, top_k, top_p, min_p))


@define_op(
    tolerance=Tolerance(why=f"tokens are equal where the two best sums differ by {MIN_GAP}" + _SETTLED),
    determinism="D2",
    cases=sampling_cases.sample_cases,
    results=lambda new, a: new((a.logits.shape[0],), torch.int32),
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int = 0,
    anchor: Tensor | None = None,
) -> Tensor:
    """One token per row: filter as `process_logits` does, add the row's Gumbels, take the argmax (ties: lowest id).

    Args:
        logits: [N, V] float32, after masks, bias and penalties.
        temperature: [N] float32; 0 takes the argmax of the logits, ties to the lowest id, and ignores the filters.
        top_k: [N] int32, as in `process_logits`.
        top_p: [N] float32.
        min_p: [N] float32.
        seeds: [N] int64, the bits of the unsigned seed.
        output_index: [N] int32, output tokens of this choice before this one.
        choice: [N] int32.
        purpose: which random stream (`philox.Purpose`): TARGET, also for coupled drafts; DRAFT for independent drafts.
        anchor: [N] int32, output index of the first drafted token for DRAFT; None for 0.

    Returns:
        [N] int32. -1 marks a row with NaN or +inf, or without any finite entry.
    """
    sums = _sums(logits, temperature, top_k, top_p, min_p, seeds, output_index, choice, purpose, anchor)
    token = sums.argmax(1) if sums.shape[0] else sums.new_zeros(0)
    return torch.where(usable_rows(logits, temperature), token, -1).int()


def _logprobs(new: New, a: Any) -> tuple[Tensor, ...]:
    n, best = a.logits.shape[0], (a.logits.shape[0], a.num_top)
    own = new((n,), torch.float32), new((n,), torch.int32)
    return *own, new(best, torch.int32), new(best, torch.float32)


@define_op(
    tolerance=Tolerance(1e-5, 1e-5, why="fp32 exp, log and a sum over the vocabulary; ids and ranks must be equal"),
    determinism="D2",
    cases=sampling_cases.token_logprobs_cases,
    results=_logprobs,
)
def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprob and rank of a token per row, and the best `num_top` ids, from raw logits: no temperature, no filter.

    Args:
        logits: [N, V] float32, as the model gave them.
        tokens: [N] int32.
        num_top: 0 <= num_top <= V; the caller clamps.

    Returns:
        logprob [N] float32; rank [N] int32, 1 plus the ids that are better (greater, or equal with a lower id);
        top_ids [N, num_top] int32, best first, ties to the lower id; top_logprobs [N, num_top] float32.
        A token outside [0, V) has logprob NaN and rank 0. A row with NaN or +inf, or without any finite entry, has NaN
        and rank 0 for its token, and ids -1 and NaN as its best.
    """
    num_ids = logits.shape[1]
    wide = accumulate(logits)
    usable = _usable(wide)
    logprobs = wide.double().log_softmax(1)
    known = usable & (tokens >= 0) & (tokens < num_ids)
    index = tokens.long().clamp(0, num_ids - 1)[:, None]
    own = wide.gather(1, index)
    ids = torch.arange(num_ids, device=logits.device)
    better = (wide > own) | ((wide == own) & (ids < index))
    logprob = torch.where(known, logprobs.gather(1, index)[:, 0], math.nan)
    rank = torch.where(known, better.sum(1) + 1, 0).int()
    top_ids = wide.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    top_logprobs = torch.where(usable[:, None], logprobs.gather(1, top_ids), math.nan)
    return logprob.float(), rank, torch.where(usable[:, None], top_ids, -1).int(), top_logprobs.float()


def best_gap(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int = 0,
    anchor: Tensor | None = None,
) -> Tensor:
    """How far the best sum of each row is above the second: below `MIN_GAP` two backends may pick different tokens.

    Arguments as in `sample`.

    Returns:
        [N] float32; inf for greedy rows, unusable rows and rows with one candidate.
    """
    sums = _sums(logits, temperature, top_k, top_p, min_p, seeds, output_index, choice, purpose, anchor)
    drawn = (temperature > 0) & usable_rows(logits, temperature)
    if sums.shape[1] < 2:
        return torch.full_like(temperature, math.inf)
    best = sums.topk(2, dim=1).values
    return torch.where(drawn, best[:, 0] - best[:, 1], math.inf)


def usable_rows(logits: Tensor, temperature: Tensor) -> Tensor:
    """[N] bool: no NaN, no +inf (also not after division by the temperature), at least one finite entry."""
    return _usable(_over_temperature(logits, temperature))


def _sums(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int,
    anchor: Tensor | None,
) -> Tensor:
    """What `sample` takes the argmax of: [N, V]."""
    scores = process_logits(logits, temperature, top_k, top_p, min_p)
    noise = gumbel(random_words(seeds, output_index, choice, purpose, logits.shape[1], anchor))
    return torch.where((temperature > 0)[:, None], scores + noise, scores)


def _over_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    return accumulate(logits) / torch.where(temperature > 0, temperature, 1.0)[:, None]


def _usable(scores: Tensor) -> Tensor:
    broken = scores.isnan() | (scores == math.inf)
    return ~broken.any(1) & scores.isfinite().any(1)


def _filter(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """min-p, top-k and top-p on [N, V] scores; removed ids become -inf."""
    num_rows, num_ids = scores.shape
    if num_rows == 0:
        return scores
    floor = torch.where(min_p > 0, min_p.clamp(max=1.0), 0.0).log()[:, None]
    scores = torch.where(scores - scores.amax(1, keepdim=True) >= floor, scores, -math.inf)
    ranked, order = scores.sort(dim=1, descending=True, stable=True)  # stable: of equal scores the lower id comes first
    place = torch.arange(num_ids, device=scores.device)
    limit = torch.where((top_k <= 0) | (top_k >= num_ids), num_ids, top_k)[:, None]
    ranked = torch.where(place < limit, ranked, -math.inf)
    mass = (ranked.double().softmax(1).float().double() * MASS_ONE).nan_to_num().floor().long()
    target = torch.where(top_p >= 1, 2.0 * MASS_ONE, (top_p.double() * MASS_ONE).floor()).long()[:, None]
    kept = (mass.cumsum(1) - mass < target) | (place == 0)
    return torch.full_like(scores, -math.inf).scatter(1, order, torch.where(kept, ranked, -math.inf))
