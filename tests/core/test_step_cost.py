"""The cost model: what it makes of no evidence, of little, of changes and of outliers."""

import numpy as np
import pytest

from deepinfer.core.step_cost import CycleCost, StepCost, StepMarks
from deepinfer.ops.host import HostRuntime

ROWS = np.array([1, 2, 7, 8, 100, 1000, 2048])


def fed(cost, steps):
    """A cost model that has also seen its warm-up steps, which take a hundred times as long."""
    for _ in range(2):
        cost.observe(5, 0, 100.0)
    for rows, context, seconds in steps:
        cost.observe(rows, context, seconds)
    return cost


def test_nothing_is_known_before_the_first_steps() -> None:
    cost = StepCost(2048)
    assert not cost.is_known
    assert (cost.seconds(ROWS) == 0).all()
    assert cost.prices(5, 10) == (0, 0)


def test_the_first_steps_do_not_count() -> None:
    assert fed(StepCost(64), [(8, 0, 1e-3)] * 8).seconds(8) == pytest.approx(1e-3, rel=1e-3)


def test_times_of_zero_are_forgotten_once_there_are_others() -> None:
    cost = fed(StepCost(64), [(8, 0, 0.0)] * 20)
    assert cost.is_known and (cost.seconds([1, 8, 64]) == 0).all()
    for _ in range(400):
        cost.observe(8, 0, 1e-3)
    assert cost.seconds(8) == pytest.approx(1e-3, rel=2e-2)


def test_one_number_of_rows_makes_a_flat_curve() -> None:
    """Rows that were never tried are not thought dear, so that they are tried."""
    cost = fed(StepCost(2048), [(48, 0, 2e-3)] * 10)
    assert cost.seconds(ROWS) == pytest.approx(np.full(7, 2e-3), rel=1e-3)
    assert cost.prices(48, 100)[0] == pytest.approx(0, abs=1e-9)


def test_two_numbers_of_rows_make_a_straight_line() -> None:
    cost = fed(StepCost(1024), [(8, 0, 1e-3), (48, 0, 2e-3)] * 10)
    assert cost.seconds([8, 28, 48]) == pytest.approx([1e-3, 1.5e-3, 2e-3], rel=2e-2)
    assert cost.prices(8, 40)[0] == pytest.approx(1e-3 / 40, rel=2e-2)


def test_a_curve_that_bends_is_followed() -> None:
    """Experts fill up: the first rows are dear, later ones cheap."""
    cost = StepCost(1024)
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(0, 10, 600)).astype(int).tolist()
    fed(cost, [(rows, 0, 1e-3 + 1e-3 * min(rows, 64) / 64 + 1e-6 * rows) for rows in sizes])
    for rows in (32, 64, 128, 512):
        assert cost.seconds(rows) == pytest.approx(1e-3 + 1e-3 * min(rows, 64) / 64 + 1e-6 * rows, rel=0.03)
    assert cost.prices(512, 100)[0] < cost.prices(16, 16)[0] / 5


def test_rows_and_context_are_told_apart() -> None:
    cost = StepCost(512)
    rng = np.random.default_rng(1)
    steps = []
    for _ in range(300):
        rows, length = int(rng.integers(1, 300)), int(rng.integers(0, 100_000))
        steps.append((rows, rows * length, 1e-3 + 2e-5 * rows + 3e-12 * rows * length))
    fed(cost, steps)
    assert cost.seconds(100, 100 * 51_200) == pytest.approx(1e-3 + 2e-3 + 3e-12 * 5.12e6, rel=1e-2)
    row, context = cost.prices(100, 50)
    assert row == pytest.approx(2e-5, rel=2e-2)
    assert context == pytest.approx(3e-12, rel=2e-2)


def test_context_never_makes_a_step_cheaper() -> None:
    cost = fed(StepCost(64), [(8, 1e6 * i, 1e-3 - 1e-6 * i) for i in range(50)])
    assert cost.prices(8, 8)[1] == 0
    assert cost.seconds(8, 1e9) == pytest.approx(float(cost.seconds(8)))


def test_noise_never_makes_more_rows_cheaper() -> None:
    rng = np.random.default_rng(2)
    cost = fed(StepCost(256), [(int(r), 0, float(rng.uniform(1e-3, 2e-3))) for r in rng.integers(1, 256, 200)])
    assert (np.diff(cost.seconds(np.arange(1, 257))) >= 0).all()


def test_a_device_that_becomes_slower_is_noticed() -> None:
    cost = fed(StepCost(64), [(8, 0, 1e-3)] * 100 + [(8, 0, 2e-3)] * 300)
    assert cost.seconds(8) == pytest.approx(2e-3, rel=2e-2)


def test_a_single_hiccup_hardly_counts() -> None:
    cost = fed(StepCost(64), [(8, 0, 1e-3)] * 100 + [(8, 0, 10.0)] + [(8, 0, 1e-3)] * 15)
    assert cost.seconds(8) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 2048])
def test_steps_of_any_size_can_be_asked_about(max_rows) -> None:
    cost = fed(StepCost(max_rows), [(1, 0, 1e-3), (max_rows, 0, 2e-3)] * 10)
    assert np.isfinite(cost.seconds(np.arange(0, max_rows + 2))).all()


def test_a_host_that_plans_ahead_is_free_while_the_device_is_slower() -> None:
    def cycle(overlaps):
        cost = CycleCost(64, 8)
        cost.overlaps = overlaps
        fed(cost.step, [(8, 0, 1e-3), (48, 0, 6e-3)] * 10)
        fed(cost.draft, [(8, 0, 5e-4)] * 10)
        cost.observe_host(cycle=4e-3, waited=1e-3, device=1.5e-3)
        return cost.seconds([8, 48], 0, 8)

    assert cycle(True) == pytest.approx([3e-3, 6.5e-3], rel=0.02)  # the host's 3 ms, the device's 6.5
    assert cycle(False) == pytest.approx([2.5e-3 + 1.5e-3, 2.5e-3 + 6.5e-3], rel=0.02)


def test_what_is_assumed_stays() -> None:
    cost = CycleCost(64, 8)
    cost.assume(1.0, 0.5, draft=2.0)
    assert cost.step.is_known
    fed(cost.step, [(8, 0, 1e-3)] * 20)
    fed(cost.draft, [(8, 0, 1e-3)] * 20)
    cost.observe_host(cycle=5.0, waited=0.0, device=1.0)
    assert cost.seconds([1, 4, 64], 0, 8) == pytest.approx([3.5, 5.0, 35.0])
    assert cost.seconds(4, 1e9, 0) == pytest.approx(3.0)


def test_marks_measure_the_step_and_the_draft_apart() -> None:
    runtime = HostRuntime()
    marks = StepMarks.begin(runtime)
    marks.drawn.record()
    assert marks.seconds()[1] == 0
    marks.note_drafts(runtime)
    step, draft = marks.seconds()
    assert step > 0 and draft > 0
