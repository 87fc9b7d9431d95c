from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.ops.sampling import (
    MASS_ONE,
    apply_bitmask,
    best_gap,
    process_logits,
    sample,
    token_logprobs,
)

INF, NAN = math.inf, math.nan


def filters(n: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.full((n,), float(temperature)),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), float(top_p)),
        torch.full((n,), float(min_p)),
    )


def keys(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(n) + seed, torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)


def kept(logits: Tensor, **options: float) -> list[int]:
    scores = process_logits(logits[None], *filters(1, **options))[0]
    return scores.isfinite().nonzero()[:, 0].tolist()


def brute_force(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, an id at a time."""
    scores = [float(torch.tensor(x) / torch.tensor(temperature)) for x in logits]
    best = max(scores)
    ids = [v for v, s in enumerate(scores) if s > -INF and (min_p <= 0 or s - best >= math.log(min_p))]
    ids.sort(key=lambda v: (-scores[v], v))
    if 0 < top_k < len(logits):
        ids = ids[:top_k]
    if top_p < 1:
        total = sum(math.exp(scores[v] - best) for v in ids)
        mass, prefix = 0, []
        for v in ids:
            prefix.append(v)
            p = float(torch.tensor(math.exp(scores[v] - best) / total, dtype=torch.float32))
            mass += math.floor(p * MASS_ONE)
            if mass >= math.floor(top_p * MASS_ONE):
                break
        ids = prefix
    return sorted(ids)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.03125])
@pytest.mark.parametrize("top_k", [0, 1, 4, 100])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_equal_brute_force(top_k, top_p, min_p):
    gen = torch.Generator().manual_seed(top_k * 7 + 1)
    for temperature in (0.5, 1.0, 1.75):
        logits = (torch.randn(23, generator=gen) * 3).round(decimals=1)  # with ties
        logits[3] = -INF
        want = brute_force(logits.tolist(), temperature, top_k, top_p, min_p)
        assert kept(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) == want


def test_top_k_breaks_ties_by_lower_id():
    assert kept(torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0]), top_k=3) == [0, 1, 4]


def test_both_zeros_tie():
    assert kept(torch.tensor([-0.0, 0.0, -0.0, -1.0]), top_k=2) == [0, 1]


def test_top_p_stops_at_the_id_that_reaches_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.74) == [0, 1]
    assert kept(logits, top_p=0.85) == [0, 1, 2]


def test_top_p_is_measured_on_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.55) == [0]  # 0.4 of 0.7


def test_top_p_counts_ties_by_lower_id():
    assert kept(torch.zeros(8), top_p=0.5) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.0, "top_k": 1, "min_p": 1.0}]
)
def test_filters_keep_at_least_the_best_id(options):
    assert kept(torch.tensor([1.0, 3.0, 2.0]), **options) == [1]


def test_filters_that_are_off_change_nothing():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    for options in ({"top_k": -1}, {"top_k": 9}, {"top_k": 10**6}, {"top_p": 2.0}, {"min_p": -1.0}):
        assert torch.equal(process_logits(logits, *filters(4, **options)), logits)


def test_greedy_rows_are_left_as_they_are():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(process_logits(logits, *filters(1, temperature=0, top_k=1, top_p=0.1)), logits)


def test_greedy_ties_go_to_the_lowest_id():  # D-11
    logits = torch.tensor([[0.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    for seed in range(20):
        assert sample(logits, *filters(2, temperature=0), *keys(2, seed)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "row",
    [[NAN, 1.0, 2.0], [NAN] * 3, [0.0, INF, 1.0], [-INF] * 3],
    ids=["a NaN", "all NaN", "+inf", "nothing finite"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_marked_and_its_neighbours_are_not_touched(row, temperature):  # SA-5
    logits = torch.tensor([[0.0, 1.0, 2.0], row, [2.0, 1.0, 0.0]])
    tokens = sample(logits, *filters(3, temperature=temperature), *keys(3))
    alone = [sample(logits[i : i + 1], *filters(1, temperature=temperature), *keys(1, i)) for i in (0, 2)]
    assert tokens.tolist() == [int(alone[0]), -1, int(alone[1])]


def test_a_row_that_overflows_at_its_temperature_is_marked():
    tokens = sample(torch.tensor([[1e38, 0.0]]), *filters(1, temperature=1e-5), *keys(1))
    assert tokens.tolist() == [-1]


def test_masked_ids_are_never_drawn():
    logits = torch.tensor([[-INF, 0.0, -INF, -INF, 0.0]]).expand(2000, 5)
    assert set(sample(logits, *filters(2000), *keys(2000)).tolist()) == {1, 4}


def test_draws_follow_the_softmax():
    n, scores = 100_000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])
    tokens = sample(scores.expand(n, 8), *filters(n, temperature=1.25), *keys(n, 99))
    assert chi_square(tokens, (scores / 1.25).softmax(0), n) < 40  # 7 degrees of freedom: p < 1e-5


def test_draws_over_output_indices_of_one_seed_follow_the_softmax():  # SA-2
    n, scores = 100_000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])
    seeds = torch.full((n,), 5)
    tokens = sample(scores.expand(n, 8), *filters(n), seeds, torch.arange(n).int(), torch.zeros(n).int())
    assert chi_square(tokens, scores.softmax(0), n) < 40
    pairs = tokens[:-1].long() * 8 + tokens[1:]  # neighbours are independent
    p = scores.softmax(0)
    assert chi_square(pairs, torch.outer(p, p).flatten(), n - 1) < 63 + 5 * math.sqrt(2 * 63)


def test_draws_with_filters_follow_the_kept_ids():
    n, scores = 50_000, torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, 2.5])
    p = torch.tensor([3.0, -INF, -INF, -INF, -INF, 2.5]).softmax(0)
    tokens = sample(scores.expand(n, 6), *filters(n, top_k=2), *keys(n))
    assert chi_square(tokens, p, n) < 25


def test_a_seeded_row_is_the_same_in_any_company():  # SA-1, SA-3
    gen = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 128, generator=gen)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 1.3, 1.0])
    top_k = torch.tensor([0, 0, 64, 1000, 5, -1], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 1.0])
    args = (temperature, top_k, top_p, torch.zeros(6), *keys(6, 42))
    together = sample(logits, *args)
    for order in (list(range(6)), [5, 3, 1, 0, 2, 4], [2], [1, 2]):
        assert torch.equal(sample(logits[order], *(a[order] for a in args)), together[order])


def test_purpose_anchor_and_choice_name_other_streams():
    n = 64
    logits, options = torch.zeros(n, 1000), filters(n)
    seeds, index, choice = keys(n)
    draws = [
        sample(logits, *options, seeds, index, choice),
        sample(logits, *options, seeds, index, choice, 1),
        sample(logits, *options, seeds, index, choice, 1, index + 5),
        sample(logits, *options, seeds, index, choice + 1),
        sample(logits, *options, seeds, index + 1, choice),
    ]
    for i, a in enumerate(draws):
        assert all(int((a == b).sum()) < 5 for b in draws[:i])


def test_best_gap_is_the_distance_of_the_two_best_sums():
    logits = torch.tensor([[0.0, 0.0], [NAN, 0.0], [0.0, -INF]])
    gap = best_gap(logits, *filters(3), *keys(3))
    assert 0 < gap[0] < 30 and gap[1] == INF and gap[2] == INF


def test_no_rows_are_fine():
    empty = torch.zeros(0, 7)
    assert sample(empty, *filters(0), *keys(0)).shape == (0,)
    assert process_logits(empty, *filters(0)).shape == (0, 7)
    assert [tuple(x.shape) for x in token_logprobs(empty, torch.zeros(0).int(), 3)] == [(0,), (0,), (0, 3), (0, 3)]


def test_bitmask_forbids_ids_of_constrained_rows_only():
    logits = torch.arange(3.0)[:, None] + torch.zeros(3, 35)
    mask = torch.zeros(2, 2, dtype=torch.int32)
    mask[1, 0], mask[1, 1] = -(2**31) | 1, 0b100  # ids 0, 31 and 34
    apply_bitmask(logits, mask, torch.tensor([1, -1, 0], dtype=torch.int32))
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [0, 31, 34]
    assert (logits[1] == 1.0).all()
    assert (logits[2] == -INF).all()


def test_logprobs_are_the_raw_log_softmax_and_ranks_break_ties_by_id():
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0]])
    logprob, rank, top_ids, top = token_logprobs(logits, torch.tensor([2], dtype=torch.int32), 4)
    want = logits.double().log_softmax(1)[0]
    assert rank.tolist() == [4]
    assert top_ids.tolist() == [[1, 3, 0, 2]]
    torch.testing.assert_close(logprob.double(), want[2:3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(top[0].double(), want[[1, 3, 0, 2]], rtol=1e-6, atol=1e-6)


def test_logprobs_of_ids_outside_the_vocabulary_are_not_those_of_others():  # SA-8
    logits = torch.zeros(2, 4)
    logprob, rank, top_ids, _ = token_logprobs(logits, torch.tensor([-1, 4], dtype=torch.int32), 1)
    assert logprob.isnan().all() and rank.tolist() == [0, 0] and top_ids.tolist() == [[0], [0]]


def test_logprobs_of_a_broken_row_are_nan():
    logits = torch.tensor([[0.0, NAN], [0.0, 0.0]])
    logprob, rank, top_ids, top = token_logprobs(logits, torch.zeros(2).int(), 2)
    assert logprob[0].isnan() and rank.tolist() == [0, 1] and top_ids.tolist() == [[-1, -1], [0, 1]]
    assert top[0].isnan().all() and float(logprob[1]) == pytest.approx(-math.log(2))


def test_masked_ids_have_logprob_minus_infinity():
    logprob, rank, _, _ = token_logprobs(torch.tensor([[0.0, -INF]]), torch.tensor([1], dtype=torch.int32), 0)
    assert logprob.tolist() == [-INF] and rank.tolist() == [2]


def chi_square(tokens: Tensor, p: Tensor, n: int) -> float:
    """Pearson's statistic; ids without probability must not occur."""
    counts = torch.bincount(tokens.long(), minlength=len(p)).double()
    possible = p > 0
    assert counts[~possible].sum() == 0
    want = p[possible].double() * n
    return float(((counts[possible] - want) ** 2 / want).sum())
