"""Captured decode steps on the fake device: the bits of eager ones, what a step moves, what cannot be captured."""

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.backends.fake.errors import HostBufferReuseError
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.backends.fake.tensor import FakeTensor
from deepinfer.core import graph_sizes, step_graphs
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.graph_memory import GraphMemory
from deepinfer.entrypoints import build
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops.backend import BindContext
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.testing import HashModel
from deepinfer.testing.on_fake import OnFake
from deepinfer.testing.workloads import Workload, cpu_ops, oracle, run

SMALL = {"block_size": 16, "max_num_batched_tokens": 12, "max_num_seqs": 3, "max_model_len": 64}
MIXED = [
    (5, SamplingParams(max_tokens=12, temperature=0, logprobs=2)),
    (21, SamplingParams(max_tokens=8, temperature=1, seed=1)),
    (9, SamplingParams(max_tokens=11, temperature=0.8, top_k=9, seed=2, logprobs=0)),
]
SHAPED = [
    (9, SamplingParams(max_tokens=9, temperature=0, presence_penalty=0.5, logprobs=1)),
    (12, SamplingParams(max_tokens=9, temperature=1, seed=1, logit_bias={3: 4.0}, allowed_token_ids=[3, 4, 5, 6])),
    (10, SamplingParams(max_tokens=9, temperature=0.9, seed=2, min_tokens=6, stop_token_ids=(7,))),
]

WORK = {"mixed": MIXED, "shaped": SHAPED}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "plain"
    make_tiny(folder, quant=False)
    return str(folder)


@pytest.fixture(scope="module")
def wanted(plain):
    """What a host without graphs and drafts gives, by kind of work."""
    with LLM(plain, backend="cpu", **SMALL) as llm:
        return {name: generate(llm, work) for name, work in WORK.items()}


@pytest.fixture
def fake(plain, monkeypatch):
    """Makes an `LLM` on a fake device."""
    made = []

    def make(seed=0, *, backend=None, runtime=None, **settings):
        backend = backend or find_backend("fake")
        runtime = runtime or FakeRuntime(seed, memory_bytes=1 << 28, patience=0.02)
        backend = replace(backend, runtime=lambda: runtime)
        monkeypatch.setattr(build, "find_backend", lambda name: backend)
        made.append(LLM(plain, backend="fake", strict=True, **(SMALL | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def generate(llm, work=MIXED):
    prompts = [[(7 * i + 3 * n) % 256 for i in range(n)] for n, _ in work]
    results = llm.generate(prompts, [params for _, params in work])
    assert [r.error for r in results] == [None] * len(work)
    return [(r.outputs[0].token_ids, r.outputs[0].finish_reason, r.outputs[0].logprobs) for r in results]


SETTINGS = {
    "launched ahead": {},
    "one after the other": {"async_scheduling": False},
    "all drafts": {"speculation": "coupled", "draft_schedule": "fixed"},
    "all drafts, one after the other": {"speculation": "coupled", "draft_schedule": "fixed", "async_scheduling": False},
    "as many drafts as pay": {"speculation": "coupled", "num_drafts": 2},
    "one shape": {"graph_batch_sizes": (12,), "speculation": "coupled", "num_drafts": 3},
    "preemption": {"num_kv_blocks": 4, "speculation": "coupled", "draft_schedule": "fixed"},
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_graphs_have_the_bits_of_eager_steps(fake, wanted, settings, work):
    llm = fake(seed=1, **settings)
    assert generate(llm, WORK[work]) == wanted[work]
    stats = llm.stats
    assert stats.num_graph_steps > 0 and stats.num_graphs > 0 and stats.graph_reason == ""
    assert stats.num_graph_steps + sum(stats.num_eager_steps.values()) == stats.num_steps
    assert set(stats.num_eager_steps) <= {"prompt rows", "the first step of its shape"}
    if "num_kv_blocks" in settings:
        assert stats.num_preemptions > 0


def test_contexts_have_graphs_of_their_own(fake, monkeypatch):
    monkeypatch.setattr(graph_sizes, "CONTEXT_STEP", 16)
    work = [(5, SamplingParams(max_tokens=30, temperature=0, logprobs=0))]
    llm = fake()
    assert generate(llm, work) == generate(fake(graphs=False), work)
    assert llm.stats.num_graph_steps > 20 and llm.stats.num_eager_steps["the first step of its shape"] == 3


def test_shapes_that_are_given_up_are_captured_again(fake, wanted, monkeypatch):
    monkeypatch.setattr(step_graphs, "MAX_SHAPES", 1)
    llm = fake()
    assert generate(llm) == wanted["mixed"]
    graphs = llm.stats.num_graphs
    assert generate(llm) == wanted["mixed"]
    assert llm.stats.num_graphs > graphs > 0


@pytest.mark.parametrize("seeds", [range(i, i + 6) for i in (0, 6, 12, 18)], ids=str)
def test_workloads_get_what_each_request_gets_alone(seeds):
    """Speculation, preemption, stored prefixes, chunks, cancellation: one wrong record shows."""
    graph_steps = 0
    for seed in seeds:
        model, workload = HashModel(64, eos_token_ids=(0,), nan_every=101), Workload.generate(seed)
        truth = oracle(workload, model)
        engines = []
        runtime = FakeRuntime(seed, memory_bytes=1 << 28)
        ops = OpTable(find_backend("fake"), BindContext(runtime.device, runtime, True, 4096), True, {})

        def place(model, ops=ops, engines=engines):
            engines.append(OnFake(model, ops))
            return engines[-1]

        facts = run(workload, model, ops, truth=truth, place=place)
        assert not facts.leaks
        for mine, alone in zip(facts.requests, truth, strict=True):
            assert mine.difference(alone) is None, f"workload {seed}"
        graph_steps += facts.num_graph_steps
    assert graph_steps > 10


# What a step moves


class CountingRuntime(FakeRuntime):
    """Counts copies, allocations and replays."""

    def __init__(self):
        super().__init__(memory_bytes=1 << 28)
        self.counts = Counter()

    def to_device(self, host):
        self.counts["in"] += 1
        return super().to_device(host)

    def write_later(self, target, host):
        self.counts["in"] += 1
        super().write_later(target, host)

    def to_host_later(self, tensor):
        self.counts["out"] += 1
        return super().to_host_later(tensor)

    def allocate(self, shape, dtype, account):
        self.counts["memory"] += 1
        return super().allocate(shape, dtype, account)

    def capture(self, step):
        replay = super().capture(step)

        def counted():
            self.counts["replays"] += 1
            replay()

        return counted


def steps_of(runtime, **wants):
    """Captured steps of three requests, of which 20 are counted; how many of those were replays."""
    ops = OpTable(find_backend("fake"), BindContext(runtime.device, runtime, True, 4096), True, {})
    model = OnFake(HashModel(64), ops)
    engine = Engine(model, EngineConfig(max_num_seqs=4, max_model_len=256, num_kv_blocks=16), ops)
    for i in range(3):
        engine.add_request(str(i), [1 + i, 2], SamplingParams(max_tokens=60, temperature=1.0, seed=i, **wants))
    for _ in range(8):
        engine.step()
    before = engine.stats().num_graph_steps
    runtime.counts.clear()
    for _ in range(20):
        engine.step()
    replayed = engine.stats().num_graph_steps - before
    engine.close()
    return replayed


def test_a_captured_step_is_one_copy_in_one_graph_one_copy_out_and_no_memory():
    runtime = CountingRuntime()
    assert steps_of(runtime) == 20
    assert runtime.counts == {"in": 20, "out": 20, "replays": 20}


def test_a_step_with_work_between_model_and_draw_is_two_graphs():
    runtime = CountingRuntime()
    replayed = steps_of(runtime, logprobs=1)
    assert replayed > 5 and runtime.counts["replays"] == 2 * replayed


# What cannot be captured


class TrustingRuntime(FakeRuntime):
    """A device that holds no plan against its promises, as hard ones do."""

    def watch(self, op, plan):
        return plan


class Allocating:
    """A plan that says it can be captured, and allocates."""

    capturable, scratch_bytes, persistent_bytes = True, 0, 0

    def __init__(self, plan, runtime):
        self._plan, self._runtime = plan, runtime

    def run(self, *inputs, **options):
        self._runtime.empty((3,), torch.float32)
        return self._plan.run(*inputs, **options)


def test_an_op_that_breaks_its_promise_is_named_and_steps_go_on_without_graphs(fake, wanted, caplog):
    backend = find_backend("fake")
    (honest,) = (i for i in backend.implementations if i.op is rms_norm)
    liar = replace(honest, name="fake.liar", bind=lambda d, c: Allocating(honest.bind(d, c), c.runtime), priority=9)
    backend = replace(backend, implementations=[*backend.implementations, liar])
    with caplog.at_level(logging.WARNING):
        llm = fake(backend=backend, runtime=TrustingRuntime(memory_bytes=1 << 28))
        got = generate(llm)
    assert got == wanted["mixed"]
    (said,) = (r.message for r in caplog.records if "captured" in r.message)
    stats = llm.stats
    for text in (said, stats.graph_reason):
        assert "allocation of [3] while a graph is captured" in text
        assert "op rms_norm was called (implementation fake.liar)" in text
    assert stats.num_eager_steps["a step could not be captured"] > 5
    assert stats.num_graph_steps == 0


def test_a_model_that_allocates_is_run_without_graphs(caplog):
    class Careless(OnFake):
        def forward(self, batch, caches, tap=None):
            self._runtime.zeros((2,), torch.float32)
            return super().forward(batch, caches, tap)

    results = []
    for graphs in (True, False):
        runtime = FakeRuntime(memory_bytes=1 << 28)
        ops = OpTable(find_backend("fake"), BindContext(runtime.device, runtime, True, 4096), True, {})
        settings = EngineConfig(max_num_seqs=4, max_model_len=256, num_kv_blocks=16, graphs=graphs)
        engine = Engine(Careless(HashModel(64), ops), settings, ops)
        results.append([engine.add_request(str(i), [1 + i, 2], SamplingParams(max_tokens=9, seed=i)) for i in range(3)])
        while engine.has_unfinished():
            engine.step()
        assert ("allocation of [2]" in engine.stats().graph_reason) == graphs
        engine.close()
    mine, theirs = ([list(r.outputs[0].token_ids) for r in found] for found in results)
    assert mine == theirs and all(len(ids) == 9 for ids in mine)


def test_what_does_not_fit_is_not_captured(fake, wanted, monkeypatch):
    monkeypatch.setattr(step_graphs, "GraphMemory", lambda runtime, _: GraphMemory(runtime, limit_bytes=0))
    llm = fake(speculation="coupled", draft_schedule="fixed")
    assert generate(llm) == wanted["mixed"]
    assert llm.stats.num_graph_steps == 0 and llm.stats.graph_reason == ""
    assert set(llm.stats.num_eager_steps) == {"prompt rows", "results exceed the memory of graphs"}


def test_steps_that_are_too_large_run_as_they_are(fake, wanted):
    llm = fake(max_graph_rows=2)
    assert generate(llm) == wanted["mixed"]
    assert llm.stats.num_eager_steps["too many rows"] > 0 and llm.stats.num_graph_steps > 0


def test_why_nothing_is_captured(fake):
    assert fake(graphs=False).stats.graph_reason == "graphs=False"
    assert "rejection" in fake(speculation="rejection").stats.graph_reason
    assert "graph_batch_sizes" in fake(graph_batch_sizes=(600,)).stats.graph_reason
    engine = Engine(HashModel(64), EngineConfig(num_kv_blocks=4, max_model_len=64), cpu_ops())
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().graph_reason == "backend cpu has no graphs" and engine.stats().num_eager_steps == {}


def test_ops_that_cannot_be_captured_are_named(fake, wanted):
    backend = find_backend("fake")
    (good,) = (i for i in backend.implementations if i.op is rms_norm)
    dull = replace(good, name="fake.dull", bind=lambda d, c: replace(good.bind(d, c), capturable=False), priority=9)
    llm = fake(backend=replace(backend, implementations=[*backend.implementations, dull]))
    assert llm.stats.graph_reason == "1 ops cannot be captured: rms_norm"
    assert generate(llm, MIXED[:1]) == wanted["mixed"][:1]


# Copies into memory that exists


def test_a_late_write_reads_pinned_memory_when_it_runs():
    runtime = FakeRuntime()
    target, host = runtime.zeros((4,), torch.int32), runtime.pinned((4,), torch.int32)
    host.copy_(torch.arange(4, dtype=torch.int32))
    runtime.write_later(target[1:3], host[1:3])
    assert isinstance(target, FakeTensor) and runtime.to_host(target).tolist() == [0, 1, 2, 0]
    host.fill_(5)  # the copy is done
    runtime.write_later(target, host)
    host.fill_(6)
    with pytest.raises(HostBufferReuseError, match="wait on an event recorded behind the copy"):
        runtime.synchronize()


def test_a_late_write_of_pageable_memory_reads_it_now():
    for runtime in (FakeRuntime(), HostRuntime()):
        target, host = runtime.zeros((3,), torch.int32), np.arange(3, dtype=np.int32)
        runtime.write_later(target, torch.from_numpy(host))
        host[:] = 7
        assert runtime.to_host(target).tolist() == [0, 1, 2]
