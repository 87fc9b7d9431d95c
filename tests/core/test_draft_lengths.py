"""How rows are spent on drafts: against brute force, by price, under a budget, and not at all where it does not pay."""

import numpy as np
import pytest

from deepinfer.core._native import best_count, rank_drafts
from deepinfer.core.confidence import Forecast
from deepinfer.core.draft_lengths import DraftLengths
from deepinfer.core.step_cost import CycleCost


def ints(*values):
    return np.array(values, np.int32)


def gains_of(*rows):
    return np.array(rows, np.float32)


def cost_of(base, per_row, *, per_context=0.0, draft=0.0, host=0.0, max_rows=512):
    """A cost model that has seen a device whose steps take `base + per_row * rows + per_context * context`."""
    cost = CycleCost(max_rows, 64)
    cost.host_seconds = host
    rng = np.random.default_rng(0)
    for _ in range(400):
        rows, length = int(rng.integers(1, max_rows)), int(rng.integers(0, 5000))
        cost.step.observe(rows, rows * length, base + per_row * rows + per_context * rows * length)
        cost.draft.observe(int(rng.integers(1, 64)), 0, draft)
    return cost


def lengths(cost, gains, *, share=None, contexts=None, other_rows=0, max_rows=512, available=None):
    gains = np.asarray(gains, np.float32)
    count, num_drafts = gains.shape
    chooser = DraftLengths(num_drafts, max_rows, cost)
    return chooser.choose(
        Forecast(gains if share is None else share, gains),
        np.full(count, num_drafts, np.int32) if available is None else available,
        np.zeros(count, np.int32) if contexts is None else contexts,
        other_rows,
    ).tolist()


def pays(cost, gains, **options):
    gains = np.asarray(gains, np.float32)
    chooser = DraftLengths(gains.shape[1], options.get("max_rows", 512), cost)
    return chooser.pays(gains, np.zeros(len(gains), np.int32), options.get("other_rows", 0))


# -- order and number


def test_drafts_come_by_gain_and_equal_ones_in_their_own_order() -> None:
    order = rank_drafts(gains_of([0.9, 0.5, 0.5], [0.9, 0.8, 0.1]), ints(0, 0), 1e-6, 0.0)
    assert order.tolist() == [0, 3, 4, 1, 2, 5]


def test_drafts_behind_much_context_come_later() -> None:
    gains = gains_of([0.9, 0.8], [0.6, 0.5])
    assert rank_drafts(gains, ints(1000, 0), 1e-6, 0.0).tolist() == [0, 1, 2, 3]
    assert rank_drafts(gains, ints(1000, 0), 1e-6, 1e-9).tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_order_is_that_of_a_stable_sort(seed) -> None:
    rng = np.random.default_rng(seed)
    gains = np.minimum.accumulate(np.round(rng.random((40, 6)) * 64) / 64, axis=1).astype(np.float32)
    order = rank_drafts(gains, np.zeros(40, np.int32), 0.0, 0.0)
    assert order.tolist() == np.argsort(-gains.ravel(), kind="stable").tolist()


def test_what_is_no_gain_comes_last() -> None:
    gains = gains_of([np.nan, 0.1], [-5.0, -6.0], [0.9, 0.2])
    assert rank_drafts(gains, ints(0, 0, 0), 1e-6, 0.0).tolist() == [4, 5, 1, 0, 2, 3]


@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (2, 0)])
def test_nothing_to_gain_has_an_order(shape) -> None:
    gains = np.zeros(shape, np.float32)
    assert rank_drafts(gains, np.zeros(len(gains), np.int32), 1e-6, 1e-9).tolist() == list(range(gains.size))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_number_is_the_best_of_all(seed, overlaps) -> None:
    rng = np.random.default_rng(seed)
    cost = cost_of(1e-3, 10 ** rng.uniform(-6, -3), per_context=1e-9, draft=2e-4, host=8e-4)
    cost.overlaps = overlaps
    gains = np.minimum.accumulate(rng.random((12, 5)), axis=1).astype(np.float32)
    contexts = rng.integers(0, 5000, 12).astype(np.int32)
    order = rank_drafts(gains, contexts, *cost.step.prices(15, 60))
    best, rate = best_count(gains, contexts, order, 50, 3, **cost.curve(12))
    rates = []
    for count in range(51):
        taken = order[:count]
        context = float(contexts.sum() + contexts[taken // 5].sum())
        rates.append((12 + gains.ravel()[taken].sum()) / float(cost.seconds(15 + count, context, 12)))
    assert rate == pytest.approx(max(rates), rel=1e-6)
    assert rates[best] == pytest.approx(max(rates), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": ints(0, 1, 2, 4)}, "order names draft 4 of 4"),
        ({"order": ints(0, 1)}, "order has shape .2,."),
        ({"most": 5}, "most is 5 of 4 drafts"),
        ({"most": -1}, "most is -1"),
        ({"contexts": ints(1)}, "contexts has shape"),
        ({"knots": np.ones(1), "seconds": np.ones(1)}, "knots has 1 entries"),
        ({"seconds": np.ones(3)}, "seconds has shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message) -> None:
    arguments = {
        "gains": np.ones((2, 2), np.float32),
        "contexts": ints(0, 0),
        "order": ints(0, 1, 2, 3),
        "most": 4,
        "other_rows": 0,
        "knots": np.array([1.0, 2.0]),
        "seconds": np.ones(2),
        "context_price": 0.0,
        "draft_seconds": 0.0,
        "host_seconds": 0.0,
        "overlaps": False,
    }
    with pytest.raises(ValueError, match=message):
        best_count(**(arguments | change))


# -- lengths


def test_cheap_rows_and_good_drafts_are_all_verified() -> None:
    assert lengths(cost_of(1e-2, 1e-6), [[0.9, 0.8, 0.7]] * 4) == [3] * 4


def test_dear_rows_and_bad_drafts_are_not_verified() -> None:
    assert lengths(cost_of(1e-5, 1e-3), [[0.1, 0.01, 0.0]] * 4) == [0] * 4


def test_rows_go_to_those_who_gain_most() -> None:
    found = lengths(cost_of(1e-3, 1e-4), [[0.95, 0.9, 0.85], [0.05, 0.01, 0.0], [0.9, 0.02, 0.01]])
    assert found == [3, 0, 1]


def test_who_has_much_context_gets_fewer() -> None:
    cost = cost_of(1e-3, 1e-6, per_context=2e-7)
    found = lengths(cost, [[0.6, 0.5, 0.4]] * 2, contexts=ints(5000, 10))
    assert found[0] < found[1]


def test_no_more_rows_than_a_step_has() -> None:
    found = lengths(cost_of(1e-2, 1e-7), [[0.9, 0.8, 0.7], [0.95, 0.5, 0.4]], max_rows=10, other_rows=5)
    assert sum(found) == 3
    assert lengths(cost_of(1e-2, 1e-7), [[0.9, 0.8]] * 2, max_rows=2) == [0, 0]


def test_no_more_drafts_than_there_are() -> None:
    assert lengths(cost_of(1e-2, 1e-7), [[0.9, 0.8, 0.7]] * 3, available=ints(3, 1, 0)) == [3, 1, 0]


def test_the_number_follows_the_budget_and_who_gets_them_the_share() -> None:
    """Under the rejection rule the confidences of the blocks in question must not decide how many are verified."""
    cost = cost_of(1e-3, 1e-4)
    budget = gains_of([0.9, 0.9, 0.9], [0.0, 0.0, 0.0])
    for share, wanted in (
        (gains_of([0.9, 0.9, 0.9], [0.5, 0.5, 0.5]), [3, 0]),
        (gains_of([0.1, 0.1, 0.1], [0.2, 0.2, 0.2]), [0, 3]),
        (gains_of([1.0, 0.2, 0.1], [1.0, 0.3, 0.0]), [1, 2]),
    ):
        assert lengths(cost, budget, share=share) == wanted


def test_changing_the_share_from_a_place_on_changes_no_length_below_it() -> None:
    """The causal rule end to end: whether draft i is verified does not follow from forecasts behind it."""
    rng = np.random.default_rng(7)
    cost = cost_of(1e-3, 5e-5)
    for _ in range(200):
        budget = np.minimum.accumulate(rng.random((6, 4)), axis=1).astype(np.float32)
        share = np.minimum.accumulate(rng.random((6, 4)), axis=1).astype(np.float32)
        place = int(rng.integers(0, 4))
        other = share.copy()
        other[2, place + 1 :] = np.minimum(np.minimum.accumulate(rng.random(3 - place)), share[2, place])
        before, after = lengths(cost, budget, share=share), lengths(cost, budget, share=other)
        assert (before[2] > place) == (after[2] > place)


# -- whether to draft


def test_drafting_pays_with_cheap_rows_and_good_drafts() -> None:
    assert pays(cost_of(1e-2, 1e-6), [[0.9, 0.8]] * 8)


def test_drafting_does_not_pay_with_dear_rows() -> None:
    assert not pays(cost_of(1e-5, 1e-3), [[0.9, 0.8]] * 8)


def test_a_draft_that_costs_more_than_it_saves_is_not_made() -> None:
    assert pays(cost_of(1e-3, 1e-6, draft=1e-4), [[0.6, 0.4]] * 4)
    assert not pays(cost_of(1e-3, 1e-6, draft=1e-2), [[0.6, 0.4]] * 4)


def test_a_slow_host_makes_drafting_pay() -> None:
    """A step of 10 ms of Python is not made longer by a row of 0.1 ms."""
    assert not pays(cost_of(1e-4, 1e-4), [[0.5]] * 4)
    assert pays(cost_of(1e-4, 1e-4, host=1e-2), [[0.5]] * 4)


def test_a_full_step_has_no_room_to_draft_for() -> None:
    assert not pays(cost_of(1e-2, 1e-6, max_rows=64), [[0.9]] * 32, max_rows=64, other_rows=32)


def test_nothing_is_decided_before_costs_are_known() -> None:
    """The first steps verify all, none and half of the drafts, so that the price of a row shows."""
    cost = CycleCost(512, 64)
    chooser = DraftLengths(4, 512, cost)
    gains = gains_of([0.9, 0.8, 0.7, 0.6], [0.1, 0.1, 0.1, 0.1])
    sums = []
    for _ in range(6):
        assert chooser.pays(gains, ints(0, 0), 0)
        sums.append(int(chooser.choose(Forecast(gains, gains), ints(4, 4), ints(0, 0), 0).sum()))
    assert sums == [8, 0, 4] * 2


def test_not_drafting_is_tried_again_ever_more_rarely() -> None:
    cost = cost_of(1e-5, 1e-3)
    chooser = DraftLengths(2, 512, cost)
    gains = gains_of([0.1, 0.01], [0.1, 0.01])
    tries = []
    for step in range(1, 1000):
        if chooser.pays(gains, ints(0, 0), 0):
            tries.append(step)
            assert chooser.choose(Forecast(gains, gains), ints(2, 2), ints(0, 0), 0).tolist() == [2, 2]
    assert tries == [64, 64 + 128, 64 + 128 + 256, 64 + 128 + 256 + 512]


def test_places_that_are_never_verified_are_tried_again() -> None:
    cost = cost_of(1e-3, 1e-4)
    chooser = DraftLengths(3, 512, cost)
    gains = gains_of([0.9, 0.9, 0.0])
    found = [int(chooser.choose(Forecast(gains, gains), ints(3), ints(0), 0)[0]) for _ in range(200)]
    assert found.count(2) == 198
    assert [step for step, length in enumerate(found, 1) if length == 3] == [64, 192]
