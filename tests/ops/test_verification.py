from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose
from deepinfer.ops.sampling import sample
from deepinfer.ops.verification import verify


def filters(n: int, temperature=1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.full((n,), float(temperature)), torch.zeros(n).int(), torch.ones(n), torch.zeros(n)


def keys(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(n) + seed, torch.zeros(n).int(), torch.zeros(n).int()


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def one_by_one(logits: Tensor, temperature: float, seed: int) -> list[int]:
    """What plain sampling gives for consecutive rows of one request."""
    n = len(logits)
    index, zero = torch.arange(n).int(), torch.zeros(n).int()
    return sample(logits, *filters(n, temperature), torch.full((n,), seed), index, zero).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_emits_what_plain_sampling_draws(temperature):
    gen = torch.Generator().manual_seed(0)
    for trial in range(30):
        logits = torch.randn(5, 11, generator=gen) * 2
        plain = one_by_one(logits, temperature, seed=trial)
        wrong_at = trial % 6
        drafts = [*plain[:4], -1]
        if wrong_at < 4:
            drafts[wrong_at] = (plain[wrong_at] + 1) % 11
        count, tokens = verify(
            logits, packed([5]), torch.tensor(drafts).int(), *filters(1, temperature), *keys(1, trial)
        )
        emitted = min(wrong_at, 4) + 1
        assert count.tolist() == [emitted]
        assert tokens.tolist() == plain[:emitted] + [-1] * (5 - emitted)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_requests_do_not_see_each_other(mode):
    gen = torch.Generator().manual_seed(1)
    lengths = [3, 1, 0, 4]
    logits, draft_logits = torch.randn(8, 7, generator=gen), torch.randn(8, 7, generator=gen)
    drafts = torch.randint(0, 7, (8,), generator=gen).int()
    seeds, index, choice = keys(4, 5)
    count, tokens = verify(
        logits, packed(lengths), drafts, *filters(4), seeds, index, choice, mode=mode, draft_logits=draft_logits
    )
    start = 0
    for r, length in enumerate(lengths):
        rows, one = slice(start, start + length), slice(r, r + 1)
        alone = verify(
            logits[rows],
            packed([length]),
            drafts[rows],
            *filters(1),
            seeds[one],
            index[one],
            choice[one],
            mode=mode,
            draft_logits=draft_logits[rows],
        )
        assert torch.equal(alone[0], count[one]) and torch.equal(alone[1], tokens[rows])
        start += length
    assert count[2] == 0


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_broken_row_ends_its_request_and_no_other(mode):  # SA-5
    logits = torch.zeros(8, 5)
    logits[1] = math.nan
    plain = one_by_one(torch.zeros(4, 5), 1.0, seed=0), one_by_one(torch.zeros(4, 5), 1.0, seed=1)
    drafts = torch.tensor([*plain[0][:3], -1, *plain[1][:3], -1]).int()
    draft_logits = torch.zeros(8, 5)  # equal to the target: rejection keeps every draft, too
    count, tokens = verify(logits, packed([4, 4]), drafts, *filters(2), *keys(2), mode=mode, draft_logits=draft_logits)
    assert count.tolist() == [2, 4]
    assert tokens.tolist() == [plain[0][0], -1, -1, -1, *plain[1]]


def test_a_broken_row_after_a_wrong_draft_does_not_matter():
    logits = torch.zeros(3, 5)
    logits[2] = math.nan
    plain = one_by_one(logits[:2], 1.0, seed=0)
    drafts = torch.tensor([plain[0], (plain[1] + 1) % 5, -1]).int()
    count, tokens = verify(logits, packed([3]), drafts, *filters(1), *keys(1))
    assert count.tolist() == [2] and tokens.tolist() == [*plain, -1]


def test_a_missing_draft_ends_the_verification():
    logits = torch.zeros(4, 5)
    plain = one_by_one(logits, 1.0, seed=0)
    count, tokens = verify(logits, packed([4]), torch.tensor([plain[0], -1, plain[2], -1]).int(), *filters(1), *keys(1))
    assert count.tolist() == [2] and tokens.tolist() == [*plain[:2], -1, -1]


def test_the_last_row_has_no_draft():
    logits = torch.zeros(1, 5)
    plain = one_by_one(logits, 1.0, seed=0)
    count, tokens = verify(logits, packed([1]), torch.tensor(plain).int(), *filters(1), *keys(1))
    assert count.tolist() == [1] and tokens.tolist() == plain


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_results_do_not_depend_on_later_drafts(mode):
    gen = torch.Generator().manual_seed(2)
    logits, draft_logits = torch.randn(4, 6, generator=gen), torch.randn(4, 6, generator=gen)
    for trial in range(20):
        drafts = torch.randint(0, 6, (4,), generator=gen).int()
        changed = drafts.clone()
        changed[1:] = (changed[1:] + 1) % 6
        first = [
            verify(logits, packed([4]), d, *filters(1), *keys(1, trial), mode=mode, draft_logits=draft_logits)[1][0]
            for d in (drafts, changed)
        ]
        assert first[0] == first[1]


def test_rejection_emits_the_target_distribution():
    n, num_ids = 600, 5  # the CPU kernels repeat this with more
    target, drafted = torch.tensor([1.0, 0.0, -1.0, 0.5, -2.0]), torch.tensor([0.0, 1.0, 0.0, -1.0, -3.0])
    seeds, index, choice = keys(n)
    drafts = sample(drafted.expand(n, num_ids), *filters(n), seeds, index, choice, Purpose.DRAFT, index)
    rows = torch.stack((drafts, torch.full((n,), -1).int()), 1).flatten()
    count, tokens = verify(
        target.expand(2 * n, num_ids),
        packed([2] * n),
        rows,
        *filters(n),
        seeds,
        index,
        choice,
        mode="rejection",
        draft_logits=drafted.expand(2 * n, num_ids),
    )
    p, q = target.softmax(0), drafted.softmax(0)
    counts = torch.bincount(tokens[::2].long(), minlength=num_ids).double()
    assert float(((counts - p * n) ** 2 / (p * n)).sum()) < 30  # 4 degrees of freedom: p < 1e-5
    accepted = float((count == 2).double().mean())
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 0.09
    second = tokens[1::2][count == 2]
    counts = torch.bincount(second.long(), minlength=num_ids).double()
    assert float(((counts - p * len(second)) ** 2 / (p * len(second))).sum()) < 30


def test_coupled_acceptance_is_what_the_design_says():
    n, num_ids = 20_000, 5
    target, drafted = torch.tensor([1.0, 0.0, -1.0, 0.5, -2.0]), torch.tensor([0.0, 1.0, 0.0, -1.0, -3.0])
    a = sample(target.expand(n, num_ids), *filters(n), *keys(n))
    b = sample(drafted.expand(n, num_ids), *filters(n), *keys(n))
    p, q = target.softmax(0), drafted.softmax(0)
    ratios = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    assert abs(float((a == b).double().mean()) - float((1 / ratios.sum(1)).sum())) < 0.02


def test_rejection_of_a_draft_outside_the_vocabulary_draws_from_the_target():
    logits = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
    count, tokens = verify(
        logits,
        packed([2]),
        torch.tensor([7, -1]).int(),
        *filters(1),
        *keys(1),
        mode="rejection",
        draft_logits=torch.tensor([[9.0, 0.0], [0.0, 0.0]]),
    )
    assert count.tolist() == [1] and tokens.tolist() == [1, -1]


def test_no_requests_are_fine():
    count, tokens = verify(torch.zeros(0, 5), packed([]), torch.zeros(0).int(), *filters(0), *keys(0))
    assert count.shape == (0,) and tokens.shape == (0,)


def test_bad_modes_are_refused():
    args = (torch.zeros(1, 5), packed([1]), torch.zeros(1).int(), *filters(1), *keys(1))
    with pytest.raises(OpArgumentError, match="'greedy'"):
        verify(*args, mode="greedy")
    with pytest.raises(OpArgumentError, match="draft_logits"):
        verify(*args, mode="rejection")
