"""The whole engine on a device that PyTorch does not know and that has three ops of its own.

All tensors are the fake device's, which raise at any call of torch, so whatever ran on them ran through copies.
"""

import json
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from deepinfer import LLM, SamplingParams
from deepinfer.backends.fake.errors import HostAccessError
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.entrypoints import build
from deepinfer.entrypoints.cli import app
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops import fallback
from deepinfer.ops.backend import FunctionPlan
from deepinfer.ops.errors import MissingOpsError
from deepinfer.ops.fallback import THROUGH_HOST, HostPlan
from deepinfer.ops.registry import find_backend

NATIVE = {"rms_norm", "linear_bf16", "topk_select"}
SMALL = {"block_size": 16, "max_num_batched_tokens": 12, "max_num_seqs": 3, "max_model_len": 64}
MIXED = [
    (5, SamplingParams(max_tokens=3, temperature=0, logprobs=2)),
    (21, SamplingParams(max_tokens=2, temperature=1, seed=1, logit_bias={3: 1.5}, presence_penalty=0.5)),
    (14, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    for quant in (False, True):
        make_tiny(folder / str(quant), quant=quant)
    return folder


class CountingRuntime(FakeRuntime):
    """Counts the bytes of copies while `counts` is not None."""

    counts = None

    def to_host_later(self, tensor):
        self._count("to_host", tensor)
        return super().to_host_later(tensor)

    def to_device(self, host):
        self._count("to_device", host)
        return super().to_device(host)

    def write(self, target, host):
        self._count("write", host)
        super().write(target, host)

    def _count(self, what, tensor):
        if self.counts is not None:
            self.counts[what] += tensor.numel() * tensor.element_size()


def few(name, runtime=None):
    """A backend that has lost all implementations but those of `NATIVE`."""
    backend = find_backend(name)
    kept = [i for i in backend.implementations if i.op.name in NATIVE]
    make = backend.runtime if runtime is None else lambda: runtime
    return replace(backend, implementations=kept, runtime=make)


@pytest.fixture
def engine(tiny, monkeypatch):
    def make(name, *, runtime=None, quant=False, **settings):
        backend = few(name, runtime)
        monkeypatch.setattr(build, "find_backend", lambda _: backend)
        return LLM(str(tiny / str(quant)), backend=name, verify_kernels=False, **(SMALL | settings))

    return make


def generate(llm, work=MIXED):
    prompts = [[(7 * i + 3 * n) % 256 for i in range(n)] for n, _ in work]
    results = llm.generate(prompts, [p for _, p in work])
    assert [r.error for r in results] == [None] * len(work)
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs, r.prompt_logprobs) for r in results]


@pytest.mark.parametrize("settings", [{}, {"quant": True}, {"speculation": "coupled"}, {"num_kv_blocks": 3}], ids=str)
def test_it_has_the_bits_of_the_same_ops_on_the_cpu(engine, settings):
    with engine("cpu", **settings) as llm:
        want = generate(llm)
    with engine("fake", **settings) as llm:
        assert generate(llm) == want
        rows = llm.session.engine._ops.rows()
        stats = llm.stats
    by_op = {op: implementation for op, _, implementation in rows}
    assert {op for op, implementation in by_op.items() if implementation.startswith("fake.")} == NATIVE & set(by_op)
    assert {i for op, i in by_op.items() if op not in NATIVE} == {THROUGH_HOST}
    assert stats.num_generated_tokens == 6


def test_steps_are_not_asynchronous_and_the_reason_is_told(engine, caplog):
    with caplog.at_level("WARNING"), engine("fake", async_scheduling=True) as llm:
        core, stats = llm.session.engine, llm.stats
        assert not core.is_async and not stats.is_async
        count = len(core._ops.through_host)
        assert count > 40 and stats.sync_reason.startswith(f"{count} ops run on references, for which the host waits")
        assert "sparse_attn" in core._ops.through_host and "sparse_attn" in core._ops.not_capturable
        assert "rms_norm" not in core._ops.not_capturable
    assert [r.getMessage() for r in caplog.records if "not asynchronous" in r.getMessage()]
    with engine("cpu", async_scheduling=True) as llm:
        assert llm.stats.is_async and llm.stats.sync_reason == ""


def copied_by(engine, blocks):
    runtime = CountingRuntime()
    with engine("fake", runtime=runtime, num_kv_blocks=blocks, prefix_window_pages=4 * blocks) as llm:
        runtime.counts = Counter()
        generate(llm, MIXED[:2])
        pool = llm.session.engine.executor.caches.num_bytes
        return runtime.counts, pool


def test_what_is_copied_follows_the_rows_of_steps_and_not_the_pools(engine):
    small, pool = copied_by(engine, 12)
    large, larger_pool = copied_by(engine, 96)
    assert larger_pool > 6 * pool
    assert small == large and small["to_host"] > 0 and small["write"] > 0


def test_whole_pools_would_be_noticed(engine, monkeypatch):
    """Teeth of the test above."""
    monkeypatch.setattr(fallback, "runs", lambda where, arguments, count: [(0, count)] if count else [])
    small, _ = copied_by(engine, 12)
    large, _ = copied_by(engine, 96)
    assert large["to_host"] > small["to_host"] and large["write"] > small["write"]


def test_a_reference_on_the_tensors_themselves_would_be_found(engine, monkeypatch):
    monkeypatch.setattr(HostPlan, "run", lambda self, *args, **options: FunctionPlan(self.op.reference).run(*args))
    with engine("fake") as llm, pytest.raises((HostAccessError, ImportError)):  # torch looks for a module of the device
        generate(llm)


def test_the_list_of_backends_says_where_references_run(monkeypatch):
    backend = few("fake")
    monkeypatch.setattr("deepinfer.ops.registry.discover_backends", lambda: {"fake": backend})
    told = CliRunner().invoke(app, ["backends", "--backend", "fake", "--json"])
    ops = {op["op"]: op for op in json.loads(told.output)[0]["ops"]}
    assert ops["sparse_attn"]["implementation"] == THROUGH_HOST and not ops["sparse_attn"]["native"]
    assert ops["rms_norm"]["implementation"] == "fake.rms_norm"
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["backends", "--backend", "fake"]).output
    assert "reference (through the host)" in printed
    assert f"3 of {len(ops)} ops are native; references run through the host" in printed


def test_strict_refuses_and_names_the_gaps(engine):
    with pytest.raises(MissingOpsError, match="sparse_attn") as caught:
        engine("fake", strict=True)
    assert not NATIVE & set(caught.value.missing)
