"""Steps that are launched ahead wait for nothing: every wait of the host is where a step is collected, or an error."""

from dataclasses import replace

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.backends.fake.errors import HostAccessError
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.core import logits_processors
from deepinfer.core.collector import StepCollector
from deepinfer.core.sampler import Sampler
from deepinfer.entrypoints import build
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops.errors import HostSyncError
from deepinfer.ops.registry import find_backend
from deepinfer.ops.sync_guard import SyncGuard

SMALL = {"block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 3, "max_model_len": 64}
PROMPTS = [[7, 9, 11, 3, 5], [2, 4, 6, 8], [1] * 9]
CAPTURE = {"a decode step is captured"}
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=12, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, top_k=9, seed=2, ignore_eos=True),
]


class WatchedGuard(SyncGuard):
    """Notes every wait with the part of the engine that it is in."""

    def __init__(self):
        super().__init__()
        self.part = "elsewhere"
        self.waits = []

    def check(self, call):
        self.waits.append((self.part, call))
        super().check(call)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "plain"
    make_tiny(folder, quant=False)
    return str(folder)


@pytest.fixture
def fake(tiny, monkeypatch):
    """Makes an `LLM` on a fake device, and gives the guard beside it."""
    made = []

    def make(**settings):
        runtime = FakeRuntime(3, memory_bytes=1 << 28)
        runtime.sync_guard = WatchedGuard()
        backend = replace(find_backend("fake"), runtime=lambda: runtime)
        monkeypatch.setattr(build, "find_backend", lambda name: backend)
        made.append(LLM(tiny, backend="fake", strict=True, verify_kernels=False, **(SMALL | settings)))
        return made[-1], runtime.sync_guard

    yield make
    for llm in made:
        llm.close()


def run(llm, guard, monkeypatch, params=PARAMS):
    """Results and the waits of a run, those of building the engine left out."""
    fetch = StepCollector._fetch

    def watched(self, launched):
        guard.part = "collecting"
        try:
            return fetch(self, launched)
        finally:
            guard.part = "elsewhere"

    monkeypatch.setattr(StepCollector, "_fetch", watched)
    guard.waits.clear()
    outputs = llm.generate(PROMPTS, params)
    assert [o.error for o in outputs] == [None] * len(PROMPTS)
    return outputs, guard.waits


@pytest.mark.parametrize("settings", [{}, {"speculation": "coupled"}, {"speculation": "rejection"}], ids=str)
def test_the_host_waits_for_nothing_but_the_step_that_it_collects(fake, monkeypatch, settings) -> None:
    llm, guard = fake(**settings)
    assert llm.stats.is_async
    outputs, waits = run(llm, guard, monkeypatch)
    assert all(len(o.outputs[0].token_ids) == 12 for o in outputs)
    assert waits
    assert {part for part, _ in waits} == {"collecting"}
    assert llm.stats.permitted_waits.keys() <= CAPTURE
    if settings:
        assert sum(llm.stats.speculation.verified) > 0


def test_the_scheduler_learns_costs_from_a_device_that_runs_behind(fake, monkeypatch) -> None:
    llm, guard = fake(speculation="coupled")
    run(llm, guard, monkeypatch)
    cost = llm.engine.step_cost
    assert cost.overlaps
    assert cost.step.num_steps > 5
    assert cost.step.seconds(4) > 0
    assert cost.draft.seconds(3) > 0
    assert cost.host_seconds > 0


def test_a_wait_in_a_launch_is_an_error_that_names_it(fake, monkeypatch) -> None:
    llm, _ = fake()
    draw = Sampler.draw

    def draw_and_look(self, logits, *args, **kwargs):
        self._runtime.to_host(logits)
        return draw(self, logits, *args, **kwargs)

    monkeypatch.setattr(Sampler, "draw", draw_and_look)
    with pytest.raises(HostSyncError, match="to_host would make the host wait during the launch of a step"):
        llm.generate(PROMPTS, PARAMS)


def test_an_item_in_a_launch_is_an_error_that_names_it(fake, monkeypatch) -> None:
    llm, _ = fake()
    draw = Sampler.draw

    def draw_and_look(self, logits, *args, **kwargs):
        logits[0, 0].item()
        return draw(self, logits, *args, **kwargs)

    monkeypatch.setattr(Sampler, "draw", draw_and_look)
    with pytest.raises(HostAccessError, match="item"):
        llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("settings", [{"sync_guard": False}, {"async_scheduling": False}], ids=str)
def test_the_guard_can_be_taken_away_and_is_not_there_without_launching_ahead(fake, monkeypatch, settings) -> None:
    llm, _ = fake(**settings)
    draw = Sampler.draw

    def draw_and_look(self, logits, *args, **kwargs):
        self._runtime.to_host(logits)
        return draw(self, logits, *args, **kwargs)

    monkeypatch.setattr(Sampler, "draw", draw_and_look)
    assert [o.error for o in llm.generate(PROMPTS, PARAMS)] == [None] * 3


def test_waits_that_a_request_asks_for_are_counted_apart(fake, monkeypatch) -> None:
    """A function of logits reads them on the host; penalties wait for tokens, between steps."""

    class Point:
        def load(self):
            return lambda argument, prompt, vocab_size: lambda ids, logits: logits

    monkeypatch.setattr(logits_processors, "_installed", lambda: {"same": Point()})
    llm, guard = fake(speculation="coupled", draft_schedule="fixed")
    params = [replace(PARAMS[0], logits_processors={"same": None}), PARAMS[1], PARAMS[2]]
    run(llm, guard, monkeypatch, params)
    stats = llm.stats
    assert stats.permitted_waits.keys() - CAPTURE == {"a user's function changes logits"}
    assert stats.permitted_waits["a user's function changes logits"] >= 3
    run(llm, guard, monkeypatch, [replace(PARAMS[0], presence_penalty=0.5), PARAMS[1], PARAMS[2]])
    assert llm.stats.permitted_waits == stats.permitted_waits
    assert llm.stats.num_host_waits > stats.permitted_waits["a user's function changes logits"]


def test_engram_tables_on_the_host_do_not_make_the_engine_wait_here(fake, monkeypatch) -> None:
    """The fake device fetches rows in its own time; a device that needs ids on the host permits that wait by name."""
    llm, guard = fake(engram="mmap", speculation="coupled")
    _, waits = run(llm, guard, monkeypatch)
    assert {part for part, _ in waits} == {"collecting"}
    assert llm.stats.permitted_waits.keys() <= CAPTURE
