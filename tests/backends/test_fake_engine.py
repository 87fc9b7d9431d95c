"""The whole engine on the fake device: equal to the CPU in every order of work, and planted bugs are found."""

from dataclasses import replace

import pytest

from deepinfer import LLM, SamplingParams, StructuredOutput
from deepinfer.backends.fake.errors import (
    HostAccessError,
    HostBufferReuseError,
    HostReadError,
    UnorderedAccessError,
)
from deepinfer.backends.fake.faults import Fault, FaultPlan
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.core.runner import StepRunner
from deepinfer.core.sampler import Sampler
from deepinfer.entrypoints import build
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops.errors import DeviceLostError, LaunchError, OutOfDeviceMemoryError, RankLostError
from deepinfer.ops.registry import find_backend

SMALL = {"block_size": 16, "max_num_batched_tokens": 12, "max_num_seqs": 3, "max_model_len": 64}
MIXED = [
    (5, SamplingParams(max_tokens=5, temperature=0, logprobs=2)),
    (21, SamplingParams(max_tokens=4, temperature=1, seed=1)),
    (9, SamplingParams(max_tokens=6, temperature=0.8, top_k=9, seed=2, logprobs=0)),
    (14, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "plain"
    make_tiny(folder, quant=False)
    return str(folder)


@pytest.fixture
def fake(plain, monkeypatch):
    """Makes an `LLM` on a fake device, and gives its runtime beside it."""
    made = []

    def make(seed=0, *, model=plain, faults=None, memory_bytes=1 << 28, detect=True, **settings):
        runtime = FakeRuntime(seed, faults=faults, memory_bytes=memory_bytes, detect=detect, patience=0.02)
        backend = replace(find_backend("fake"), runtime=lambda: runtime)
        monkeypatch.setattr(build, "find_backend", lambda name: backend)
        made.append(LLM(model, backend="fake", strict=True, **(SMALL | settings)))
        return made[-1], runtime

    return make


def prompts(lengths):
    return [[(7 * i + 3 * n) % 256 for i in range(n)] for n in lengths]


def generate(llm, work=MIXED):
    results = llm.generate(prompts(n for n, _ in work), [p for _, p in work])
    assert [r.error for r in results] == [None] * len(work)
    return [
        (r.outputs[0].token_ids, r.outputs[0].finish_reason, r.outputs[0].logprobs, r.prompt_logprobs) for r in results
    ]


def on_cpu(model, work=MIXED, **settings):
    with LLM(model, backend="cpu", **(SMALL | settings)) as llm:
        return generate(llm, work)


@pytest.fixture(scope="module")
def wanted(plain):
    return on_cpu(plain)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_has_the_bits_of_the_cpu(fake, wanted, seed):
    llm, runtime = fake(seed)
    assert generate(llm) == wanted
    assert runtime.log
    llm.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_changes_nothing(fake, plain, asynchronous):
    work = [(14, SamplingParams(max_tokens=6, seed=1)), (15, SamplingParams(max_tokens=6, temperature=0, logprobs=1))]
    llm, _ = fake(seed=7, num_kv_blocks=3, async_scheduling=asynchronous, prefix_caching=False)
    assert generate(llm, work) == on_cpu(plain, work)
    assert llm.stats.num_preemptions > 0
    llm.close()


def test_logits_of_chunks_and_decode_rows_have_the_bits_of_the_cpu(fake, plain):
    llm, _ = fake(seed=3)
    ids = prompts([15])[0]
    got = llm.logits(ids, chunk_size=4, decode_from=13)
    llm.close()
    with LLM(plain, backend="cpu", **SMALL) as host:
        assert got.equal(host.logits(ids))


def test_quantised_weights_and_the_backend_by_name(tmp_path):
    make_tiny(tmp_path / "quant", quant=True)
    work = [(9, SamplingParams(max_tokens=2, temperature=0)), (4, SamplingParams(max_tokens=3, temperature=1, seed=5))]
    with LLM(str(tmp_path / "quant"), backend="fake", **SMALL) as llm:
        got = generate(llm, work)
    assert got == on_cpu(str(tmp_path / "quant"), work)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_speculation_has_the_bits_of_the_cpu(fake, plain, rule):
    work = [(5, SamplingParams(max_tokens=6, temperature=0)), (9, SamplingParams(max_tokens=6, temperature=1, seed=2))]
    llm, _ = fake(seed=4, speculation=rule, draft_schedule="fixed")
    got = generate(llm, work)
    llm.close()
    assert got == on_cpu(plain, work, speculation=rule, draft_schedule="fixed", async_scheduling=True)


def test_memory_comes_back(fake):
    llm, runtime = fake()
    generate(llm, MIXED[:1])
    runtime.synchronize()
    free = runtime.memory_info().free_bytes
    generate(llm, MIXED[1:3])
    runtime.synchronize()
    assert abs(runtime.memory_info().free_bytes - free) < 1 << 14  # the last step's tensors differ in size
    llm.close()


# Planted bugs


class NoEvent:
    """An event that somebody forgot."""

    def record(self):
        pass

    wait = synchronize = record

    def query(self):
        return True


def test_a_metadata_buffer_that_is_written_too_early_is_found(fake):
    """Steps that draw nothing are not waited for, so only the event stands between a copy and the next step's rows."""
    llm, _ = fake()
    llm.engine.executor._sent = [NoEvent(), NoEvent()]
    with pytest.raises(HostBufferReuseError, match="pinned host buffer"):
        generate(llm, [(60, SamplingParams(max_tokens=1, temperature=0))])


def test_without_the_bug_the_same_prompt_runs(fake):
    llm, _ = fake()
    generate(llm, [(60, SamplingParams(max_tokens=1, temperature=0))])
    llm.close()


def test_tokens_that_are_read_without_a_wait_are_found(fake, monkeypatch):
    llm, _ = fake()
    monkeypatch.setattr(FakeRuntime, "to_host", lambda self, tensor: self.to_host_later(tensor).tensor)
    with pytest.raises(HostReadError, match="before the host waited"):
        generate(llm)


def test_sampling_on_a_stream_that_does_not_wait_is_found(fake, monkeypatch):
    draw = StepRunner._draw
    for seed in range(3):
        llm, runtime = fake(seed)
        side = runtime.stream()

        def draw_aside(self, *args, runtime=runtime, side=side):
            with runtime.use_stream(side):
                draw(self, *args)

        monkeypatch.setattr(StepRunner, "_draw", draw_aside)
        with pytest.raises(UnorderedAccessError, match="on stream 1 reads memory"):
            generate(llm, MIXED[:1])


def test_arithmetic_outside_an_op_is_found(fake, monkeypatch):
    draw = Sampler.draw
    llm, _ = fake()
    monkeypatch.setattr(Sampler, "draw", lambda self, logits, *rest: draw(self, logits[[0]], *rest))
    with pytest.raises(HostAccessError, match="__getitem__"):
        generate(llm, MIXED[:1])


# Faults


def test_a_failed_launch_reaches_the_caller(fake):
    llm, _ = fake(faults=FaultPlan([Fault("failed_launch", at=3, name="sparse_attn")]))
    with pytest.raises(LaunchError, match="sparse_attn"):
        generate(llm)
    llm.close()


def test_a_lost_device_reaches_the_caller(fake):
    llm, _ = fake(faults=FaultPlan([Fault("lost_device", at=2, name="sample")]))
    with pytest.raises(DeviceLostError, match="sample"):
        generate(llm)


def test_a_dead_rank_reaches_the_caller(fake):
    llm, _ = fake(faults=FaultPlan([Fault("dead_rank", at=5, name="ep_dispatch", rank=2)]))
    with pytest.raises(RankLostError, match="rank 2"):
        generate(llm)


def test_a_model_that_does_not_fit_says_so(fake):
    with pytest.raises(OutOfDeviceMemoryError, match="do not fit"):
        fake(memory_bytes=1 << 18)


def test_masks_reach_the_device_in_time(fake, plain) -> None:
    """Constrained rows from buffers that take turns, beside plain requests."""
    forms = [StructuredOutput(regex="[a-f]{2,9}-[0-9]{1,3}"), None, StructuredOutput(choice=["yes", "no"]), None]
    work = [
        (n, SamplingParams(max_tokens=9, seed=n, structured_output=form))
        for n, form in zip((5, 9, 7, 4), forms, strict=True)
    ]
    llm, _ = fake(3)
    assert generate(llm, work) == on_cpu(plain, work)
    assert llm.stats.num_grammar_steps > 4
