"""What confidences are worth: calibration, which block the host knows, and what a forecast may depend on."""

import numpy as np
import pytest

from deepinfer.core._native import add_reliability, add_verified, enter_block, forecast_drafts
from deepinfer.core.confidence import Calibration, ConfidenceBook, Forecaster

SEQS = np.array([3, 1], np.int32)


def ints(*values):
    return np.array(values, np.int32)


def book_of(*rows):
    """Confidences by handle, row 0 nobody's."""
    return np.array([[np.nan] * len(rows[0]), *rows], np.float32)


def play(calibration, truth, confidences, rounds=400, requests=32, seed=0):
    """Verify whole blocks whose confidences are `confidences(rng)` and that are kept as `truth(confidences)` says."""
    rng = np.random.default_rng(seed)
    seqs = np.arange(1, requests + 1, dtype=np.int32)
    for _ in range(rounds):
        book = np.vstack([np.full((1, 3), np.nan), confidences(rng, requests)]).astype(np.float32)
        keep = rng.random((requests, 3)) < truth(book[1:])
        accepted = np.cumprod(keep, axis=1).sum(1).astype(np.int32)
        calibration.observe(book, seqs, np.full(requests, 3, np.int32), accepted)


def test_without_evidence_confidences_are_believed() -> None:
    found = Calibration(3).predict(book_of([0.9, 0.5, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]), ints(1, 2, 3))
    assert found == pytest.approx(np.array([[0.9, 0.45, 0.45], [1, 1, 0], [0, 0, 0]]), abs=1e-6)


def test_confidences_out_of_range_are_held_to_it() -> None:
    found = Calibration(2).predict(book_of([7.0, 0.5], [-3.0, 0.5], [np.inf, -np.inf]), ints(1, 2, 3))
    assert found == pytest.approx(np.array([[1, 0.5], [0, 0], [1, 0]]))


def test_boasting_is_corrected() -> None:
    calibration = Calibration(3)
    play(calibration, lambda c: c * 0.5, lambda rng, n: rng.uniform(0.5, 1, (n, 3)))
    found = calibration.predict(book_of([0.8, 0.8, 0.8]), ints(1))[0]
    assert found == pytest.approx([0.4, 0.16, 0.064], abs=0.03)


def test_confidences_that_mean_nothing_give_the_plain_rate() -> None:
    calibration = Calibration(3)
    play(calibration, lambda c: np.full(c.shape, 0.6), lambda rng, n: rng.uniform(0, 1, (n, 3)))
    low, high = calibration.predict(book_of([0.05, 0.05, 0.05], [0.95, 0.95, 0.95]), ints(1, 2))
    assert low[0] == pytest.approx(0.6, abs=0.05)
    assert high[0] == pytest.approx(0.6, abs=0.05)


def test_confidences_that_are_right_stay_believed() -> None:
    calibration = Calibration(3)
    play(calibration, lambda c: c, lambda rng, n: rng.uniform(0, 1, (n, 3)))
    low, high = calibration.predict(book_of([0.1, 0.5, 0.5], [0.9, 0.9, 0.9]), ints(1, 2))
    assert low == pytest.approx([0.1, 0.05, 0.025], abs=0.04)
    assert high == pytest.approx([0.9, 0.81, 0.729], abs=0.05)


def test_drafts_that_were_not_verified_teach_nothing() -> None:
    sums = np.zeros((5, 3))
    add_verified(book_of([0.5, 0.5, 0.5]), ints(1), ints(2), ints(1), sums)
    assert sums.tolist() == [[1, 1, 0], [0.5, 0.25, 0], [0.25, 0.0625, 0], [0.5, -0.25, 0], [0.25, -0.0625, 0]]


@pytest.mark.parametrize("stands_in", [False, True])
def test_forecasts_never_rise_along_a_row(stands_in) -> None:
    rng = np.random.default_rng(3)
    book, other = rng.random((2, 200, 5)).astype(np.float32)
    coefficients = np.array([rng.normal(0, 0.3, 5), rng.normal(1, 0.5, 5)])
    found = forecast_drafts(book, np.arange(200, dtype=np.int32), coefficients, other if stands_in else None)
    assert (np.diff(found, axis=1) <= 0).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_with_a_stand_in_a_forecast_depends_on_no_confidence_at_or_behind_its_place() -> None:
    rng = np.random.default_rng(4)
    calibration = Calibration(4)
    one = rng.random(4).astype(np.float32)
    stand_in = np.tile(rng.random(4).astype(np.float32), (3, 1))
    for place in range(4):
        other = one.copy()
        other[place:] = rng.random(4 - place)
        first, second = calibration.predict(book_of(one, other), ints(1, 2), stand_in)
        assert first[: place + 1].tolist() == second[: place + 1].tolist()
        first, second = calibration.predict(book_of(one, other), ints(1, 2))
        assert first[place] != second[place], "without a stand-in it does"


def test_a_stand_in_takes_the_place_of_a_confidence_in_its_own_signal_alone() -> None:
    found = Calibration(3).predict(book_of([0.9, 0.8, 0.7]), ints(1), book_of([0.5, 0.6, 0.2]))
    assert found[0] == pytest.approx([0.5, 0.5, 0.9 * 0.8 * 0.2], rel=1e-6)  # 0.9 * 0.6 is more than the place before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidences": np.zeros((3, 2))}, "confidences has shape .3, 2. and dtype float64; need .* float32"),
        ({"seqs": ints(3)}, "seqs names row 3 of confidences, which has 3"),
        ({"seqs": ints(-1)}, "seqs names row -1"),
        ({"coefficients": np.zeros((3, 2))}, "coefficients has shape .3, 2.*of .2, 2."),
        ({"stand_in": np.zeros((2, 2), np.float32)}, "stand_in has shape .2, 2.*of .3, 2."),
        ({"confidences": np.zeros((2, 3), np.float32).T}, "C-contiguous"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(change, message) -> None:
    arguments = {"confidences": np.zeros((3, 2), np.float32), "seqs": ints(1), "coefficients": np.zeros((2, 2))}
    with pytest.raises(ValueError, match=message):
        forecast_drafts(**(arguments | change))


# -- which block is known


def book_with(*blocks, owners=(7, 7)):
    """A book of two requests, whose blocks have arrived one after the other."""
    book = ConfidenceBook(4, len(blocks[0]) if blocks else 1)
    book.claim(SEQS, np.array(owners))
    for block in blocks:
        book.drafted(SEQS)
        book.arrived(SEQS, np.array([block, block], np.float32))
    return book


def test_a_block_is_current_once_its_confidences_have_arrived() -> None:
    book = book_with([0.5, 0.25])
    assert book.newest[3].tolist() == [0.5, 0.25]
    assert book.are_current(SEQS).tolist() == [True, True]
    book.drafted(SEQS[:1])
    assert book.are_current(SEQS).tolist() == [False, True]


def test_a_step_in_flight_leaves_the_block_before_as_the_newest_that_is_known() -> None:
    book = book_with()
    book.drafted(SEQS)
    book.drafted(SEQS)
    book.arrived(SEQS, np.array([[0.1], [0.2]], np.float32))
    assert not book.are_current(SEQS).any()
    book.arrived(SEQS, np.array([[0.3], [0.4]], np.float32))
    assert book.are_current(SEQS).all()
    assert (book.older[3].item(), book.newest[3].item()) == pytest.approx((0.1, 0.3))


def test_a_new_owner_of_a_handle_starts_like_anybody() -> None:
    book = book_with([1.0])
    book.drafted(SEQS)
    book.claim(SEQS, np.array([8, 7]))
    usual = 0.7 + 0.05 * 0.3
    assert (book.newest[3].item(), book.recent[3].item(), book.older[3].item()) == pytest.approx((usual,) * 3)
    assert book.newest[1].item() == 1
    assert book.are_current(SEQS).tolist() == [True, False]


def test_a_timid_block_speaks_for_the_next_one_alone() -> None:
    """Without that, a request whose newest block says "do not draft" would never be drafted for again."""
    book = book_with(*[[0.9]] * 50, [0.1])
    assert book.recent[3].item() == pytest.approx(0.1)
    book.skipped(SEQS)
    assert book.recent[3].item() == pytest.approx(0.9 - 0.2 * 0.8, abs=1e-3)
    assert book.newest[3].item() == pytest.approx(0.1)  # it is verified still
    book.drafted(SEQS)
    book.arrived(SEQS, np.full((2, 1), 0.5, np.float32))
    assert book.older[3].item() == pytest.approx(0.74, abs=1e-3)


def test_a_request_that_is_always_timid_stays_so() -> None:
    book = book_with(*[[0.05]] * 30)
    book.skipped(SEQS)
    assert book.recent[3].item() == pytest.approx(0.05, abs=0.01)


def test_confidences_are_held_to_probabilities() -> None:
    """What is not a number says nothing good."""
    assert book_with([np.nan, 7.0, -1.0, np.inf]).newest[3].tolist() == [0, 1, 0, 1]


# -- what a forecast may look at


def forecaster(rejection, *blocks, flying=0):
    """Two requests whose blocks arrived one after the other, and as many more on their way."""
    made = Forecaster(4, 3, rejection=rejection)
    made.book.claim(SEQS, np.array([7, 7]))
    for block in blocks:
        made.book.drafted(SEQS)
        made.book.arrived(SEQS, np.array([block, block], np.float32))
    for _ in range(flying):
        made.book.drafted(SEQS)
    return made


def test_coupled_looks_at_all_there_is() -> None:
    forecast = forecaster(False, [0.1, 0.1, 0.1], [0.9, 0.8, 0.5]).of_drafted(SEQS)
    assert forecast.share[0] == pytest.approx([0.9, 0.72, 0.36], rel=1e-5)
    assert forecast.budget is forecast.share


def test_rejection_shares_by_what_comes_before_and_counts_by_earlier_blocks() -> None:
    forecast = forecaster(True, [0.5, 0.5, 0.5], [0.9, 0.8, 0.1]).of_drafted(SEQS)
    assert forecast.share[0] == pytest.approx([0.5, 0.9 * 0.5, 0.9 * 0.8 * 0.5], rel=1e-5)
    assert forecast.budget[0] == pytest.approx([0.5, 0.25, 0.125], rel=1e-5)


def test_rejection_never_depends_on_drafts_at_or_behind_a_place() -> None:
    """The number of drafts not at all, and a place's share not on confidences from it on."""
    one = forecaster(True, [0.5, 0.5, 0.5], [0.9, 0.8, 0.1]).of_drafted(SEQS)
    other = forecaster(True, [0.5, 0.5, 0.5], [0.9, 0.2, 0.7]).of_drafted(SEQS)
    assert (one.budget == other.budget).all()
    assert (one.share[:, :2] == other.share[:, :2]).all()
    assert (one.share[:, 2] != other.share[:, 2]).all()


@pytest.mark.parametrize("rejection", [False, True])
def test_with_a_step_in_flight_the_block_before_is_all_that_is_known(rejection) -> None:
    forecast = forecaster(rejection, [0.5, 0.5, 0.5], [0.9, 0.8, 0.5], flying=1).of_drafted(SEQS)
    assert forecast.share is forecast.budget
    assert forecast.share[0] == pytest.approx([0.9, 0.72, 0.36], rel=1e-5)


@pytest.mark.parametrize("rejection", [False, True])
def test_requests_that_wait_and_others_are_judged_by_what_is_known_of_each(rejection) -> None:
    made = forecaster(rejection, [0.5, 0.5, 0.5], [0.9, 0.8, 0.5])
    made.book.drafted(SEQS[:1])  # the first request has a block in flight
    forecast = made.of_drafted(SEQS)
    assert forecast.share[0] == pytest.approx([0.9, 0.72, 0.36], rel=1e-5)
    alone = forecaster(rejection, [0.5, 0.5, 0.5], [0.9, 0.8, 0.5]).of_drafted(SEQS)
    assert forecast.share[1].tolist() == alone.share[1].tolist()
    assert forecast.budget[1].tolist() == alone.budget[1].tolist()


def test_a_block_is_entered_for_its_handles_alone_and_nothing_but_a_number_counts() -> None:
    book = ConfidenceBook(4, 2)
    book.recent[:] = 0.25
    old = {name: getattr(book, name).copy() for name in ("newest", "recent", "older", "_habit")}
    given = np.array([[np.nan, 2.0, 9.0], [-np.inf, 0.5, 9.0]], np.float32)  # a block may be longer than what is used
    book.arrived(ints(4, 2), given)
    assert book.newest[[4, 2]].tolist() == book.recent[[4, 2]].tolist() == [[0.0, 1.0], [0.0, 0.5]]
    assert (book.older[[4, 2]] == 0.25).all()
    assert book._habit[4] == pytest.approx(0.8 * 0.7 + 0.2 * np.array([0.0, 1.0]))
    assert book._usual == pytest.approx(0.95 * 0.7 + 0.05 * np.array([0.0, 0.75]))
    for name, before in old.items():
        assert (getattr(book, name)[[0, 1, 3]] == before[[0, 1, 3]]).all(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqs": ints(5)}, "seqs names row 5"),
        ({"confidences": np.zeros((1, 1), np.float32)}, "confidences has 1 columns; need 2"),
        ({"confidences": np.zeros((2, 2), np.float32)}, "confidences has shape"),
        ({"usual": np.zeros(3, np.float32)}, "usual has shape"),
        ({"habit": np.zeros((5, 2))}, "habit has shape"),
    ],
)
def test_a_block_of_another_shape_changes_nothing(change, message) -> None:
    arrays = {name: np.zeros((5, 2), np.float32) for name in ("newest", "recent", "older", "habit")}
    arrays |= {"usual": np.zeros(2, np.float32), "seqs": ints(1), "confidences": np.ones((1, 2), np.float32)} | change
    with pytest.raises(ValueError, match=message):
        enter_block(**arrays, habit_weight=0.5, usual_weight=0.5)
    assert not any(arrays[name].any() for name in ("newest", "recent", "older", "habit", "usual"))


def test_drafts_are_binned_up_to_the_first_that_was_dropped() -> None:
    sums = np.zeros((3, 2))
    confidences = np.array([[0.25, 0.5, 1.0], [0.75, np.nan, 0.5]], np.float32)
    add_reliability(confidences, ints(3, 1), ints(1, 1), sums)
    assert sums.tolist() == [[1, 2], [1, 1], [0.25, 1.25]]
    with pytest.raises(ValueError, match="verified has shape"):
        add_reliability(confidences, ints(3), ints(1, 1), sums)
    with pytest.raises(ValueError, match="sums"):
        add_reliability(confidences, ints(3, 1), ints(1, 1), np.zeros((2, 2)))
    assert sums.sum() == 6.5
