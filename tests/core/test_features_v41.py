"""Features of requests with the real model's own draft, on the CPU and on the fake device that finds host reads."""

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 6, "max_model_len": 64, "num_kv_blocks": 20}
WORK = [
    (9, SamplingParams(max_tokens=10, seed=1, logprobs=1)),
    (17, SamplingParams(max_tokens=10, seed=2, frequency_penalty=1.5, repetition_penalty=1.3, logprobs=2)),
    (20, SamplingParams(max_tokens=8, seed=3, n=3, presence_penalty=1.0, logprobs=0, prompt_logprobs=1)),
    (5, SamplingParams(max_tokens=9, seed=4, allowed_token_ids=range(40, 70), logit_bias={50: 1.0}, min_tokens=4)),
    (12, SamplingParams(max_tokens=9, temperature=0, golden_token_ids=[60, -1, 62], logprob_token_ids=[1, 2])),
    (7, SamplingParams(max_tokens=9, temperature=0.7, seed=6, logprobs=2, logprobs_mode="processed_logprobs", top_k=9)),
    (6, SamplingParams(max_tokens=12, seed=7, stop=["a", "b", "c"], bad_words=["d", "e"], thinking_budget=3)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(path, seed=2, quant=False, shards=1)
    return str(path)


def answers(folder, **settings):
    prompts = [[(7 * i + 3 * n) % 256 + 3 for i in range(n)] for n, _ in WORK]
    with LLM(folder, **(SMALL | settings)) as llm:
        results = llm.generate(prompts, [params for _, params in WORK])
        stats = llm.stats
        assert llm.engine.blocks.num_free_slots == llm.engine.blocks.pool.num_slots
    assert [r.error for r in results] == [None] * len(WORK)
    return [(r.outputs, r.prompt_logprobs) for r in results], stats


@pytest.fixture(scope="module")
def wanted(folder):
    return answers(folder, backend="cpu", async_scheduling=False, prefix_caching=False)[0]


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("cpu", {"speculation": "coupled", "draft_schedule": "fixed", "async_scheduling": True}),
        ("cpu", {"speculation": "coupled", "num_kv_blocks": 4, "max_num_batched_tokens": 9}),
        ("fake", {"speculation": "coupled", "draft_schedule": "fixed", "async_scheduling": True}),
        ("fake", {"async_scheduling": True, "num_kv_blocks": 5}),
    ],
)
def test_answers_are_those_of_the_plain_engine(folder, wanted, backend, settings) -> None:
    got, stats = answers(folder, backend=backend, **settings)
    assert got == wanted
    assert (stats.num_host_waits > 0) == ("speculation" in settings)
