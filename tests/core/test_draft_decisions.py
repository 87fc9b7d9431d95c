"""Whether to draft, and for whom: the engine's decisions on devices whose speed is made up.

The device has a clock of its own, which the model and the draft move on by what they are said to cost; everything else
is the engine as it is, with `ScriptedDraft`.
"""

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.ops.backend import BindContext
from deepinfer.ops.host import HostEvent, HostRuntime
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.testing import PuppetModel, ScriptedDraft

VOCAB = 16
GREEDY = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("one_thread")


class ClockEvent(HostEvent):
    """Reached at the time of the made-up clock."""

    def __init__(self, runtime):
        super().__init__(runtime.sync_guard)
        self._runtime = runtime

    def record(self):
        self._reached = self._runtime.now


class ClockRuntime(HostRuntime):
    """Host memory and a clock that only tests move. Its seconds are long, so that the host's own work is nothing."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def event(self):
        return ClockEvent(self)


class TimedModel(PuppetModel):
    """Counts up, and takes the device `base` seconds, and `per_row` for each row on top."""

    def __init__(self, runtime, base, per_row):
        super().__init__(VOCAB, lambda ids: 10.0 * (np.arange(VOCAB) == (ids[-1] + 1) % VOCAB))
        self._runtime, self._base, self._per_row = runtime, base, per_row
        self.rows = []

    def forward(self, batch, caches, tap=None):
        rows = len(batch.input_ids)
        self.rows.append(rows)
        self._runtime.now += self._base + self._per_row * rows
        return super().forward(batch, caches, tap)


class TimedDraft(ScriptedDraft):
    """A scripted draft that takes the device so many seconds a pass."""

    def __init__(self, runtime, seconds, draft_fn, num_tokens):
        super().__init__(draft_fn, num_tokens)
        self._runtime, self._seconds = runtime, seconds

    def draft(self, *args, **kwargs):
        self._runtime.now += self._seconds
        return super().draft(*args, **kwargs)


def good(ids):
    """What will be chosen, and sure of it."""
    return [(ids[-1] + 1 + i) % VOCAB for i in range(3)], [0.98] * 3


def bad(ids):
    """Never what will be chosen, and sure of it all the same."""
    return [(ids[-1] + 5) % VOCAB] * 3, [0.98] * 3


def made(base, per_row, draft_fn, draft_seconds=0.0, **settings):
    """An engine on a device of that speed, and its model."""
    runtime = ClockRuntime()
    ops = OpTable(find_backend("cpu"), BindContext(runtime.device, runtime, True, 256), False, {})
    model = TimedModel(runtime, base, per_row)
    draft = TimedDraft(runtime, draft_seconds, draft_fn, 3)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "prefix_caching": False}
    config = EngineConfig(**(sizes | {"speculation": "coupled"} | settings))
    return Engine(draft.bind(model), config, ops), model


def run(engine, num_requests=4, params=GREEDY):
    for i in range(num_requests):
        engine.add_request(str(i), [1 + i], params)
    while engine.has_unfinished():
        engine.step()
    engine.close()
    return engine.speculation


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_good_draft_on_a_device_with_cheap_rows_is_used_in_full(rule, asynchronous) -> None:
    engine, model = made(1.0, 1e-4, good, 0.1, speculation=rule, async_scheduling=asynchronous)
    stats = run(engine)
    assert stats.num_steps_without_drafts == 0
    assert stats.acceptance() == [1.0] * 3
    assert min(stats.verified) > 0.9 * max(stats.verified)
    assert len(model.rows) < 400 / 3.5  # nearly four tokens a step


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("base", "per_row", "draft_fn", "draft_seconds"),
    [(1.0, 1e-2, bad, 0.1), (1e-3, 1.0, good, 0.1), (1.0, 1e-4, good, 20.0)],
    ids=["bad drafts", "dear rows", "a dear draft"],
)
def test_nothing_is_drafted_where_it_does_not_pay(base, per_row, draft_fn, draft_seconds, asynchronous) -> None:
    engine, _ = made(base, per_row, draft_fn, draft_seconds, async_scheduling=asynchronous)
    stats = run(engine)
    assert stats.num_steps_without_drafts > 0.85 * stats.num_steps


def test_a_fixed_schedule_drafts_all_the_same() -> None:
    engine, _ = made(1e-3, 1.0, bad, 20.0, draft_schedule="fixed")
    stats = run(engine, params=replace(GREEDY, max_tokens=40))
    assert stats.num_steps_without_drafts == 0
    assert stats.expected == [0.0] * 3
    assert min(stats.verified) > 0.9 * max(stats.verified)


def test_the_device_is_measured_with_its_drafts_apart() -> None:
    engine, _ = made(2.0, 0.25, good, 3.0)
    run(engine)
    cost = engine.step_cost
    for rows in (4, 10, 16):
        assert cost.step.seconds(rows) == pytest.approx(2.0 + 0.25 * rows, rel=0.03)
    assert cost.draft.seconds(4) == pytest.approx(3.0, rel=0.03)
    assert cost.host_seconds < 0.05


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_rows_go_to_requests_whose_drafts_are_trusted(rule, asynchronous) -> None:
    """Even requests draft well and say so, odd ones badly, and say so as well."""

    def draft_fn(ids):
        tokens, _ = good(ids) if ids[0] % 2 == 0 else bad(ids)
        return tokens, [0.95 if ids[0] % 2 == 0 else 0.05] * 3

    engine, _ = made(1.0, 0.2, draft_fn, 0.01, speculation=rule, async_scheduling=asynchronous)
    verified = {0: 0, 1: 0}
    launch = engine._runner.launch

    def watch(plan, previous, tap=None):
        launched = launch(plan, previous, tap)
        # The first steps measure, with all drafts of everybody; in the end the odd ones are alone.
        if engine.step_cost.step.num_steps > 15 and len(launched.draws) == 8:
            for request, count in zip(launched.draws, launched.num_drafts.tolist(), strict=True):
                verified[request.prompt_token_ids[0] % 2] += count
        return launched

    engine._runner.launch = watch
    stats = run(engine, 8, replace(GREEDY, max_tokens=150))
    assert verified[0] > 100
    assert verified[0] > 10 * verified[1]
    assert stats.num_steps_without_drafts > 50  # nobody drafts for the odd ones alone


def test_confidences_that_boast_are_shown_and_corrected() -> None:
    """Half of the drafts are right, all of them are sure: the draft's own word is off, the forecast is not."""

    def draft_fn(ids):
        tokens, confidences = good(ids)
        if np.random.default_rng(ids).random() < 0.5:
            tokens = [(t + 1) % VOCAB for t in tokens]
        return tokens, confidences

    engine, _ = made(1.0, 1e-3, draft_fn, 0.01)
    stats = run(engine)
    assert stats.acceptance()[0] == pytest.approx(0.5, abs=0.07)
    assert stats.confidence_error()[0] == pytest.approx(0.48, abs=0.07)
    assert abs(stats.forecast_error()[0]) < 0.1
    lines = stats.lines()
    assert lines[0].split() == ["place", "verified", "accepted", "confidence", "forecast"]
    assert len(lines) == 4
    assert float(lines[1].split()[3]) == pytest.approx(0.98, abs=1e-3)


@pytest.mark.parametrize("given", [(2.0,), (2.0, 2.0, 2.0)])
def test_temperatures_reach_the_draft(given) -> None:
    engine, _ = made(1.0, 1e-3, good, confidence_temperature=given)
    stats = run(engine, params=replace(GREEDY, max_tokens=40))
    cooler = 1 / (1 + (0.02 / 0.98) ** 0.5)
    assert stats.promised[0] / stats.verified[0] == pytest.approx(cooler, rel=1e-4)


def test_temperatures_of_another_number_are_refused() -> None:
    with pytest.raises(Exception, match="confidence_temperature has 2 values; a draft of 3 tokens takes 1 or as many"):
        made(1.0, 1e-3, good, confidence_temperature=(1.0, 2.0))
