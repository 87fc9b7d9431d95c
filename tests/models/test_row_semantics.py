"""Row semantics of the whole engine on the CPU: what a request gets does not depend on what else runs, or how.

The oracle is the request alone in one prefill chunk. Everything here must equal it bit for bit.
"""

import random

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

NUM_REQUESTS = 32


@pytest.fixture(scope="module", params=[True, False], ids=["quant", "plain"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, seed=11, quant=request.param)
    return str(folder)


def workload(vocab):
    rng = random.Random(5)
    prompts = [[rng.randrange(3, vocab - 20) for _ in range(rng.randrange(1, 70))] for _ in range(NUM_REQUESTS)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([-1, 5, 40]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            max_tokens=rng.randrange(1, 10),
            logprobs=2,
            prompt_logprobs=1,
            ignore_eos=True,
        )
        for i in range(NUM_REQUESTS)
    ]
    return prompts, params


def facts(output):
    """Everything a request got, floats as they are."""
    assert output.error is None, output.error
    completion = output.outputs[0]
    return (
        completion.token_ids,
        [{t: (e.logprob, e.rank) for t, e in entry.items()} for entry in completion.logprobs],
        completion.cumulative_logprob,
        [e and {t: (p.logprob, p.rank) for t, p in e.items()} for e in output.prompt_logprobs],
    )


def run(checkpoint, prompts, params, **settings):
    settings = {"dtype": "bfloat16", "max_model_len": 256, "block_size": 32, "window_page": 8} | settings
    with LLM(checkpoint, backend="cpu", **settings) as llm:
        return [facts(o) for o in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """Each request alone, one engine for all of them, one chunk."""
    prompts, params = workload(300)
    alone = []
    with LLM(checkpoint, backend="cpu", max_model_len=256, block_size=32, window_page=8) as llm:
        for prompt, param in zip(prompts, params, strict=True):
            alone.append(facts(llm.generate([prompt], [param])[0]))
    return prompts, params, alone


@pytest.mark.parametrize("budget", [8, 33, 64, 2048])
def test_any_budget_equals_alone(checkpoint, oracle, budget) -> None:
    prompts, params, alone = oracle
    assert run(checkpoint, prompts, params, max_num_batched_tokens=budget) == alone


@pytest.mark.parametrize("num_seqs", [1, 5])
def test_any_number_of_places_equals_alone(checkpoint, oracle, num_seqs) -> None:
    prompts, params, alone = oracle
    assert run(checkpoint, prompts, params, max_num_seqs=num_seqs) == alone


def test_any_order_equals_alone(checkpoint, oracle) -> None:
    prompts, params, alone = oracle
    order = list(range(NUM_REQUESTS))
    random.Random(9).shuffle(order)
    got = run(checkpoint, [prompts[i] for i in order], [params[i] for i in order], max_num_batched_tokens=40)
    assert got == [alone[i] for i in order]


def test_preemption_equals_alone(checkpoint, oracle) -> None:
    """Six blocks of 32 tokens for 32 requests: most are preempted and computed again."""
    prompts, params, _ = oracle
    settings = {"max_model_len": 96, "block_size": 32, "window_page": 8, "num_kv_blocks": 6}
    with LLM(checkpoint, backend="cpu", **settings) as llm:
        long = [p.__class__(**{**vars(p), "max_tokens": 25}) for p in params]
        tight = [facts(o) for o in llm.generate(prompts, long)]
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_free_blocks == 6
    roomy = run(checkpoint, prompts, long, max_model_len=96)
    assert tight == roomy


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_equals_alone(checkpoint, oracle, threads) -> None:
    prompts, params, alone = oracle
    before = torch.get_num_threads()
    try:
        assert run(checkpoint, prompts, params, num_threads=threads) == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_any_block_size_equals_alone(checkpoint, oracle, block_size) -> None:
    prompts, params, alone = oracle
    assert run(checkpoint, prompts, params, block_size=block_size, window_page=2) == alone
