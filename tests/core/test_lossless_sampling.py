"""Distributions: what speculation emits is what the target alone would, by either rule and under any schedule.

Chi-square of 10^5 draws and of their pairs against the target, with a device whose costs are made up, so that the
confidence scheduler is at work and every run repeats.
"""

import math

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.core.confidence import Forecast
from deepinfer.testing.flat import FlatDraft, FlatModel, always, odd_before, odd_itself

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIDENCES = {"flat": always(0.6), "odd before": odd_before, "odd itself": odd_itself}
TOKENS_CRITICAL, PAIRS_CRITICAL = 20.5, 73.0
"""Chi-square that chance exceeds once in 1,000 with 5 degrees of freedom, and once in 5,000 with 35."""


def draw_many(
    target,
    draft=None,
    *,
    confidence=odd_before,
    num_drafts=3,
    at_once=1000,
    num_requests=1000,
    length=100,
    price=None,
    careless=None,
    **settings,
):
    """Tokens [num_requests, length], and what became of drafts.

    Args:
        target: logits.
        draft: logits; None draws without speculation.
        confidence: of the drafts.
        num_drafts: of a block.
        at_once: requests of a step.
        num_requests: requests in all.
        length: tokens of each.
        price: of a draft for each request, as a share of what a step costs in any case; None verifies all.
        careless: breaks the forecaster, to show that it would be noticed.
        settings: of the engine.
    """
    model = FlatModel(target, FlatDraft(draft, num_drafts, confidence) if draft is not None else None)
    settings.setdefault("draft_schedule", "fixed" if price is None else "adaptive")
    settings.setdefault("speculation", "off" if draft is None else "coupled")
    sizes = {"max_num_seqs": at_once, "max_num_batched_tokens": 8192, "max_model_len": 512}
    with LLM(model, backend="cpu", **sizes, **settings) as llm:
        if price is not None:
            llm.engine.step_cost.assume(1.0, price / at_once)
            if careless is not None:
                careless(llm.engine._drafting._forecaster)
        outputs = llm.generate([[0]] * num_requests, SamplingParams(max_tokens=length))
        return np.array([o.outputs[0].token_ids for o in outputs]), llm.engine.speculation


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pair_with_distance(distance):
    """Target and draft logits over 6 ids whose distributions have about this total variation."""
    rng = np.random.default_rng(8)
    p = rng.normal(size=6)
    direction = rng.normal(size=6)
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        tv = np.abs(softmax(p) - softmax(p + middle * direction)).sum() / 2
        low, high = (middle, high) if tv < distance else (low, middle)
    return p, p + low * direction


def chi_squares(tokens, p):
    """Of the tokens, and of pairs of neighbours, against independent draws from p."""
    counts = np.bincount(tokens.ravel(), minlength=6)
    pairs = np.bincount((tokens[:, :-1] * 6 + tokens[:, 1:]).ravel(), minlength=36)
    found = []
    for seen, share in ((counts, p), (pairs, np.outer(p, p).ravel())):
        expected = share * seen.sum()
        found.append(((seen - expected) ** 2 / expected).sum())
    return found


def assert_follows(tokens, p):
    alone, pairs = chi_squares(tokens, p)
    assert alone < TOKENS_CRITICAL
    assert pairs < PAIRS_CRITICAL, "neighbours are not independent"


# -- rejection


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("distance", [0.05, 0.2, 0.5])
def test_rejection_follows_the_target_with_scheduled_lengths(distance, confidence, asynchronous) -> None:
    target, draft = pair_with_distance(distance)
    tokens, stats = draw_many(
        target,
        draft,
        confidence=CONFIDENCES[confidence],
        price=0.7,
        speculation="rejection",
        async_scheduling=asynchronous,
    )
    assert tokens.size == 100_000
    assert stats.verified[0] > stats.verified[1] > 0, "lengths are scheduled"
    assert_follows(tokens, softmax(target))


@pytest.mark.parametrize("distance", [0.05, 0.2, 0.5])
def test_rejection_follows_the_target_with_all_drafts_verified(distance) -> None:
    target, draft = pair_with_distance(distance)
    tokens, _ = draw_many(target, draft, speculation="rejection")
    assert_follows(tokens, softmax(target))


def test_rejection_follows_the_target_with_few_requests_at_once() -> None:
    """Each request has a say in how many drafts its step verifies."""
    target, draft = pair_with_distance(0.2)
    tokens, stats = draw_many(
        target,
        draft,
        confidence=odd_itself,
        at_once=32,
        num_requests=256,
        length=400,
        price=0.7,
        speculation="rejection",
    )
    assert stats.verified[0] > stats.verified[1] > 0
    assert_follows(tokens, softmax(target))


def look_at_the_draft_itself(forecaster):
    """Choose a draft by its own confidence, which may tell what it is."""
    forecaster._stand_in = lambda: None


def count_by_the_block_itself(forecaster):
    """Let all confidences of a block decide how many drafts are verified."""
    careful = forecaster.of_drafted

    def careless(seqs):
        return Forecast(careful(seqs).share, forecaster._earlier.predict(forecaster.book.newest, seqs))

    forecaster.of_drafted = careless


@pytest.mark.parametrize(
    ("careless", "sizes"),
    [
        (look_at_the_draft_itself, {"length": 10}),
        (count_by_the_block_itself, {"at_once": 1, "num_requests": 4, "length": 400}),
    ],
)
def test_a_rule_that_looks_ahead_is_noticed(careless, sizes) -> None:
    """The same draws with and without a breach of the causal rule: the tests above have teeth."""
    target, draft = pair_with_distance(0.2)
    options = {"confidence": odd_itself, "price": 0.7, "speculation": "rejection", **sizes}
    assert_follows(draw_many(target, draft, **options)[0], softmax(target))
    tokens, _ = draw_many(target, draft, careless=careless, **options)
    assert chi_squares(tokens, softmax(target))[0] > 2 * TOKENS_CRITICAL


# -- coupled


def test_draws_without_speculation_follow_the_target() -> None:
    target, _ = pair_with_distance(0.2)
    assert_follows(draw_many(target)[0], softmax(target))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("price", [0.1, 0.7, 5.0])
def test_coupled_is_the_plain_text_under_any_schedule(price, confidence, asynchronous) -> None:
    target, draft = pair_with_distance(0.2)
    sizes = {"num_requests": 200, "at_once": 100, "length": 60}
    tokens, stats = draw_many(
        target,
        draft,
        confidence=CONFIDENCES[confidence],
        num_drafts=5,
        price=price,
        async_scheduling=asynchronous,
        **sizes,
    )
    assert stats.verified[0] > 0
    assert tokens.tolist() == draw_many(target, **sizes)[0].tolist()


@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("distance", [0.05, 0.5])
def test_coupled_is_the_plain_text_at_any_length(num_drafts, distance) -> None:
    target, draft = pair_with_distance(distance)
    sizes = {"num_requests": 50, "at_once": 50, "length": 60}
    tokens, _ = draw_many(target, draft, num_drafts=num_drafts, **sizes)
    assert tokens.tolist() == draw_many(target, **sizes)[0].tolist()


# -- acceptance


def coupled_acceptance(p, q):
    """a(p, q): the chance that two Gumbel-max draws with the same noise agree."""
    return sum(1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p))) for v in range(len(p)))


@pytest.mark.parametrize("distance", [0.05, 0.2, 0.5])
def test_acceptance_is_what_theory_says(distance) -> None:
    """Within 3 standard errors over 10^4 drafts and more, at every place of the block."""
    target, draft = pair_with_distance(distance)
    p, q = softmax(target), softmax(draft)
    rates = {}
    for rule, expected in (("coupled", coupled_acceptance(p, q)), ("rejection", np.minimum(p, q).sum())):
        _, stats = draw_many(target, draft, speculation=rule)
        reached = stats.verified[0]
        assert reached > 10_000
        for place, kept in enumerate(stats.accepted):  # acceptance at a place, given that all before it were kept
            error = math.sqrt(expected * (1 - expected) / reached)
            # the end of a request cuts blocks short, so that a few drafts behind kept ones are never verified
            cut = (stats.verified[place - 1] - stats.verified[place]) / reached if place else 0.0
            assert -3 * error - cut < kept / reached - expected < 3 * error, (rule, place, kept / reached, expected)
            rates.setdefault(rule, kept / reached)
            reached = kept
    assert rates["coupled"] > (1 - distance) / (1 + distance) - 0.01
    print(f"TV {distance}: coupled accepts {rates['coupled'] / rates['rejection']:.3f} of what rejection does")
