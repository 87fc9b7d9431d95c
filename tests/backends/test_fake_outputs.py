"""Results on the fake device: memory of the engine, for as long as it promises, and plans held to what they promise."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.backends.fake.errors import BrokenPromiseError, UnwrittenReadError, UseAfterFreeError
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.conformance.failures import find_case
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import Subject
from deepinfer.entrypoints import build
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops.backend import Availability, Backend, BindContext
from deepinfer.ops.errors import CaptureError
from deepinfer.ops.heads import gather_rows, known_ids
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.outputs import CheckingRuntime, OutputArena, StepArenas
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.step import rewind, shift


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def own(runtime):
    """The table of the fake backend's own plans."""
    return OpTable(find_backend("fake"), BindContext(runtime.device, runtime), strict=True, overrides={})


@dataclass
class Planted:
    """A capturable plan of `shift` that does `first`, and then what the fake device's own does."""

    runtime: FakeRuntime
    first: object
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = True

    def run(self, *inputs, out=None, **options):
        plan = own(self.runtime).bind(shift).plan
        other = self.first(self.runtime, inputs)
        return plan.run(*inputs, out=out if other is None else other)


def planted(first, runtime=None):
    runtime = runtime or FakeRuntime()
    backend = Backend("acme", "privateuseone", lambda: Availability(True))
    backend.implements_plan(shift)(lambda dims, ctx: Planted(runtime, first))
    return runtime, OpTable(backend, BindContext(runtime.device, runtime), overrides={}).bind(shift)


def test_only_a_device_that_checks_says_so():
    assert isinstance(FakeRuntime(), CheckingRuntime) and not isinstance(HostRuntime(), CheckingRuntime)


def test_an_honest_plan_passes():
    runtime, bound = planted(lambda runtime, inputs: None)
    assert runtime.to_host(bound(runtime.to_device(ids(1, 2)), 3)).tolist() == [4, 5]


BREACHES = {
    "allocated": lambda runtime, inputs: runtime.empty((3,), torch.int32),
    "allocated zeros": lambda runtime, inputs: runtime.zeros((3,), torch.int32),
    "a copy to the host": lambda runtime, inputs: runtime.to_host(inputs[0]),
    "a copy from the host": lambda runtime, inputs: runtime.write(inputs[0], ids(1, 2)),
    "synchronize": lambda runtime, inputs: runtime.synchronize(),
    "event.query": lambda runtime, inputs: runtime.event().query(),
}


@pytest.mark.parametrize("what", BREACHES)
def test_a_plan_that_breaks_its_promise_is_named(what):
    runtime, bound = planted(BREACHES[what])
    x = runtime.to_device(ids(1, 2))
    with pytest.raises(BrokenPromiseError, match=rf"shift.*{what.split()[0] if 'alloc' in what else what}"):
        bound(x, 3)
    assert runtime.to_host(x).tolist() == [1, 2], "the device goes on"


def test_what_another_thread_does_meanwhile_is_no_breach():
    def in_another_thread(runtime, inputs):
        with ThreadPoolExecutor(1) as other:
            other.submit(runtime.zeros, (3,), torch.int32).result()

    runtime, bound = planted(in_another_thread)
    assert runtime.to_host(bound(runtime.to_device(ids(1, 2)), 3)).tolist() == [4, 5]


def test_a_plan_that_ignores_out_is_named():
    kept = []
    runtime, bound = planted(lambda runtime, inputs: kept[0])
    kept.append(runtime.empty((2,), torch.int32))
    with pytest.raises(BrokenPromiseError, match="shift was given `out` and returned other memory"):
        bound(runtime.to_device(ids(1, 2)), 3)


def test_without_the_watch_its_result_is_seen_as_never_written():
    kept = []
    runtime, bound = planted(lambda runtime, inputs: kept[0])
    kept.append(runtime.empty((2,), torch.int32))
    loose = replace(bound, plan=bound.plan.plan)
    with pytest.raises(UnwrittenReadError, match="nothing has written"):
        runtime.to_host(loose(runtime.to_device(ids(1, 2)), 3))


def test_an_op_that_only_writes_in_place_may_not_allocate_either():
    runtime = FakeRuntime()
    backend = Backend("acme", "privateuseone", lambda: Availability(True))

    class Allocates(Planted):
        def run(self, *inputs, **options):
            self.runtime.empty((1,), torch.int32)

    backend.implements_plan(rewind)(lambda dims, ctx: Allocates(runtime, None))
    bound = OpTable(backend, BindContext(runtime.device, runtime), overrides={}).bind(rewind)
    with pytest.raises(BrokenPromiseError, match="rewind allocated"):
        bound(*(runtime.to_device(ids(0)) for _ in range(4)))


# Lifetimes


def test_a_result_is_good_until_the_next_step_but_one():
    runtime = FakeRuntime()
    table, arenas = own(runtime), StepArenas(runtime)
    add, x = table.bind(shift), runtime.to_device(ids(1, 2))
    with table.outputs.taken_from(arenas.new):
        arenas.begin_step()
        first = add(x, 1)
        view = first[1:]
        arenas.begin_step()
        second = add(first, 1)
        assert runtime.to_host(first).tolist() == [2, 3]
        arenas.begin_step()
        third = add(second, 1)
        assert runtime.to_host(third).tolist() == [4, 5]
        for stale in (first, view):
            with pytest.raises(UseAfterFreeError, match="a step whose memory a later one has"):
                runtime.to_host(stale)
        add(first, 1)  # as late as the device finds it, the engine is told
        with pytest.raises(UseAfterFreeError, match="shift used"):
            runtime.synchronize()
        assert runtime.to_host(third).tolist() == [4, 5]


def test_stale_results_are_poison_where_nothing_is_detected():
    runtime = FakeRuntime(detect=False)
    arena = OutputArena(runtime)
    stale = arena.new((3,), torch.float32)
    runtime.write(stale, torch.ones(3))
    arena.begin()
    assert runtime.to_host(stale).isnan().all()


def test_memory_that_is_used_again_is_the_same_and_counted_once():
    runtime = FakeRuntime()
    arena = OutputArena(runtime)
    before = runtime.memory_info().free_bytes
    seen = set()
    for _ in range(5):
        arena.begin()
        seen.add(arena.new((64,), torch.float32).allocation.block.address)
    runtime.synchronize()
    assert len(seen) == 1 and before - runtime.memory_info().free_bytes == 256
    del arena
    runtime.synchronize()
    assert runtime.memory_info().free_bytes == before


def test_a_step_with_an_arena_can_be_captured_and_replayed():
    runtime = FakeRuntime()
    table, arena = own(runtime), OutputArena(runtime)
    gather, add, known = table.bind(gather_rows), table.bind(shift), table.bind(known_ids)
    x, rows = runtime.to_device(ids(5, -1, 7)), runtime.to_device(ids(2, 1))
    results = []

    def step():
        results[:] = [known(add(gather(x, rows), 1), 9)]

    with table.outputs.taken_from(arena.new):
        with pytest.raises(CaptureError, match="allocation"):
            runtime.capture(step)
        arena.begin()
        step()
        arena.begin()
        replay = runtime.capture(step)
    for values, want in ((ids(5, -1, 7), [8, 0]), (ids(0, -3, 1), [2, 9])):
        runtime.write(x, values)
        replay()
        assert runtime.to_host(results[0]).tolist() == want


# The suite


class Waits(Planted):
    """Keeps its promise as long as nobody captures it."""

    def run(self, *inputs, out=None, **options):
        self.runtime.event().synchronize()
        return own(self.runtime).bind(shift).plan.run(*inputs, out=out)


def test_the_suite_captures_and_replays_what_says_that_it_can_be():
    runtime = FakeRuntime()
    made = make_case(shift, find_case(shift, "by 5"))
    good = run_case(Subject(shift, "planted", True, Planted(runtime, lambda *_: None), runtime), made)
    assert good.status == "pass" and "capture" in {check.name for check in good.checks}
    bad = run_case(Subject(shift, "planted", True, Waits(runtime, None), runtime), made)
    assert bad.status == "fail"
    assert "CaptureError: event.synchronize" in next(check.detail for check in bad.checks if not check.ok)


# The engine


SMALL = {"block_size": 16, "max_num_batched_tokens": 12, "max_num_seqs": 3, "max_model_len": 64}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    make_tiny(tmp_path / "tiny", quant=False)

    def make(**settings):
        backend = replace(find_backend("fake"), runtime=lambda: FakeRuntime(seed=1))
        monkeypatch.setattr(build, "find_backend", lambda _: backend)
        return LLM(str(tmp_path / "tiny"), backend="fake", strict=True, verify_kernels=False, **(SMALL | settings))

    return make


def generate(llm):
    work = [SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=6, temperature=1, seed=3)]
    return [r.outputs[0].token_ids for r in llm.generate([[1, 2, 3], [4, 5, 6, 7]], work)]


def test_steps_of_an_engine_take_turns_on_the_same_memory(engine, monkeypatch):
    made = []
    with engine() as llm:
        new = FakeRuntime.empty
        begin = StepArenas.begin_step
        monkeypatch.setattr(FakeRuntime, "empty", lambda self, *args: made[-1].append(args) or new(self, *args))
        monkeypatch.setattr(StepArenas, "begin_step", lambda self: made.append([]) or begin(self))
        generate(llm)
    assert len(made) >= 6
    first, steady = made[0], made[4]
    assert len(first) > 300, "what the ops of a step return"
    assert len(steady) < 50, "what a decode step sends to the device, and nothing for results"


@pytest.mark.parametrize("settings", [{"async_scheduling": True}, {"speculation": "coupled", "async_scheduling": True}])
def test_an_engine_with_one_arena_too_few_is_found(engine, monkeypatch, settings):
    """Teeth: while a step flies, the one before it must not lose its results."""
    with engine(**settings) as llm:
        want = generate(llm)
    monkeypatch.setattr(StepArenas, "begin_step", lambda self: self._arenas[0].begin())
    llm = engine(**settings)
    with pytest.raises(UseAfterFreeError):
        assert generate(llm) == want
