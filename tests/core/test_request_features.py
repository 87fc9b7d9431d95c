"""Every feature of a request, against an oracle written independently, in every mode of the engine."""

import dataclasses
import random

import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.testing import HashModel, ScriptedDraft
from deepinfer.testing.slow_oracle import slow_answer
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, LETTERS = 384, 1, list(range(67, 93))

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "drafts": {"async_scheduling": False, "speculation": "coupled", "draft_schedule": "fixed"},
    "async drafts": {"async_scheduling": True, "speculation": "coupled", "draft_schedule": "fixed"},
    "async drafts, tiny pool": {
        "async_scheduling": True,
        "speculation": "coupled",
        "draft_schedule": "fixed",
        "num_kv_blocks": 16,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
    },
    "sync, tiny pool": {
        "async_scheduling": False,
        "num_kv_blocks": 16,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 12,
    },
    "one row": {"async_scheduling": True, "max_num_batched_tokens": 1, "max_num_seqs": 1},
}

FEATURES = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "presence": {"temperature": 0.0, "presence_penalty": 1.9, "allowed_token_ids": LETTERS[:6]},
    "frequency, SA-6": {"frequency_penalty": 2.0, "allowed_token_ids": LETTERS[:4]},
    "negative frequency, SA-6": {"frequency_penalty": -2.0, "allowed_token_ids": LETTERS[:4]},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7, "allowed_token_ids": [*LETTERS[:3], 5, 6]},
    "penalties together": {
        "presence_penalty": 0.7,
        "frequency_penalty": -0.3,
        "repetition_penalty": 0.6,
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
    },
    "bias": {"logit_bias": {80: 6.5, 81: 6.0, 82: -100.0}, "logprobs": 3},
    "bias against allowed": {"logit_bias": {80: 50.0}, "allowed_token_ids": LETTERS[:5]},
    "bad words": {"temperature": 0.0, "allowed_token_ids": LETTERS[:3], "bad_words": ["ab", " c", "aac"]},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": LETTERS, "logit_bias": {t: 4.0 for t in LETTERS}},
    "min_tokens and eos": {"min_tokens": 5, "logit_bias": {EOS: 60.0}},
    "eos": {"logit_bias": {EOS: 5.5}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 6.0}},
    "stop ids": {"stop_token_ids": LETTERS[:9], "logprobs": 0},
    "stop ids, shown": {"stop_token_ids": LETTERS[:9], "include_stop_str_in_output": True},
    "processed": {"logprobs": 4, "logprobs_mode": "processed_logprobs", "top_k": 7, "temperature": 0.8, "top_p": 0.9},
    "processed, greedy": {"logprobs": 1, "logprobs_mode": "processed_logprobs", "temperature": 0.0},
    "logprobs of ids, SA-8": {"logprob_token_ids": [0, VOCAB - 1, 70]},
    "logprobs of ids and best": {"logprob_token_ids": [5], "logprobs": 2},
    "golden": {"golden_token_ids": [70, 71, -1, 73, -1], "logprobs": 2},
    "golden, processed": {
        "golden_token_ids": [70, 71, 72],
        "logprobs": 1,
        "logprobs_mode": "processed_logprobs",
        "frequency_penalty": 1.0,
        "top_k": 300,
    },
    "golden ends": {"golden_token_ids": [70, EOS, 72]},
    "thinking, closed by force": {"thinking_budget": 4, "logprobs": 0},
    "thinking, none allowed": {"thinking_budget": 0},
    "thinking, reopened": {"thinking_budget": 3, "logit_bias": {376: 5.0, 377: 4.0}},
    "no text": {"detokenize": False, "logprobs": 2},
    "specials shown": {"skip_special_tokens": False, "logit_bias": {376: 6.0, 2: 6.0}},
    "filters": {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "presence_penalty": -1.0},
    "three choices": {"n": 3, "logprobs": 1},
    "choices with penalties": {"n": 2, "frequency_penalty": 1.5, "allowed_token_ids": LETTERS[:5], "logprobs": 0},
    "choices with a stop": {"n": 4, "stop_token_ids": LETTERS},
    "prompt logprobs": {"prompt_logprobs": 1, "n": 2, "presence_penalty": 1.0, "logprobs": 1},
}


@pytest.fixture(scope="module")
def tokenizer(pytestconfig):
    return Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")


@pytest.fixture(scope="module")
def model():
    return HashModel(VOCAB, eos_token_ids=(EOS,))


def requests_of(seed, model, tokenizer):
    """(prompt, params) by feature; stop strings are cut from what the answer is without them."""
    rng = random.Random(seed)
    found = {}
    for name, options in FEATURES.items():
        prompt = [rng.choice([5, 6, *LETTERS]) for _ in range(rng.choice([1, 2, 9, 17]))]
        if "thinking" in options or "thinking_budget" in options:
            prompt.append(376)
        options = {"max_tokens": rng.choice([8, 14]), "seed": rng.randrange(1 << 64), **options}
        found[name] = prompt, SamplingParams(**options)
    for number in range(6):
        options = {
            "max_tokens": 16,
            "seed": rng.randrange(1 << 64),
            "allowed_token_ids": [*LETTERS[:8], 250, 300, 340],
            "include_stop_str_in_output": number % 2 == 0,
            "min_tokens": [0, 0, 0, 6, 9, 1][number],
            "logprobs": 1,
        }
        prompt = [rng.choice(LETTERS) for _ in range(5)]
        text = expected(model, prompt, SamplingParams(**options), tokenizer)[0].text
        stops = []
        for size in (1, 2, 3):
            start = rng.randrange(max(len(text) - size, 1))
            stops.append(text[start : start + size] or "x")
        found[f"stop strings {number}"] = prompt, SamplingParams(**options, stop=[*stops[number % 3 :], "never seen"])
    return found


def expected(model, prompt, params, tokenizer):
    return [
        slow_answer(
            lambda ids: model.expected_logits(ids)[-1],
            prompt,
            params,
            seed=params.seed,
            choice=choice,
            eos=(EOS,),
            tokenizer=tokenizer,
        )
        for choice in range(params.n)
    ]


@pytest.fixture(scope="module")
def truth(model, tokenizer):
    requests = requests_of(1, model, tokenizer)
    return {
        name: (prompt, params, expected(model, prompt, params, tokenizer))
        for name, (prompt, params) in requests.items()
    }


def draft_for(truth, count=4, quality=0.75):
    """Drafts that are mostly what the answer goes on with."""
    sequences = [[*prompt, *a.token_ids] for prompt, _, answers in truth.values() for a in answers]

    def guess(ids):
        rng = random.Random(str(ids))
        known = [s for s in sequences if s[: len(ids)] == ids and len(s) > len(ids)]
        ahead = (rng.choice(known)[len(ids) : len(ids) + count] if known else []) + [1] * count
        tokens = [t if rng.random() < quality else rng.choice([0, 1, 70, VOCAB - 1]) for t in ahead[:count]]
        return tokens, [0.5] * count

    return ScriptedDraft(guess, count)


def run(model, tokenizer, truth, mode, *, order=None):
    settings = {"num_kv_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 64, **mode}
    if settings.get("speculation"):
        model = draft_for(truth).bind(model)
    engine = Engine(
        model, EngineConfig(block_size=4, window_page=2, max_model_len=64, **settings), cpu_ops(), tokenizer
    )
    before = engine.blocks.num_free_blocks, engine.blocks.num_free_pages, engine.blocks.num_free_slots
    for name in order or truth:
        prompt, params, _ = truth[name]
        engine.add_request(name, prompt, params)
    done = {}
    for _ in range(4000):
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
        if not engine.has_unfinished():
            break
    assert before == (engine.blocks.num_free_blocks, engine.blocks.num_free_pages, engine.blocks.num_free_slots)
    engine.blocks.pool.check()
    stats = dataclasses.replace(engine.stats())
    engine.close()
    return done, stats


def facts(output):
    return [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs, c.cumulative_logprob)
        for c in output.outputs
    ], output.prompt_logprobs


@pytest.fixture(scope="module")
def plain_run(model, tokenizer, truth):
    return run(model, tokenizer, truth, MODES["sync"])[0]


def test_features_do_what_the_slow_oracle_does(truth, plain_run) -> None:
    for name, (_, params, answers) in truth.items():
        output = plain_run[name]
        assert output.error is None, (name, output.error)
        assert [c.index for c in output.outputs] == list(range(params.n))
        for got, want in zip(output.outputs, answers, strict=True):
            assert got.token_ids == want.token_ids, name
            assert (got.text, got.finish_reason, got.stop_reason) == (
                want.text,
                want.finish_reason,
                want.stop_reason,
            ), name
            if not params.wants_logprobs:
                assert got.logprobs is None
                continue
            assert len(got.logprobs) == len(want.logprobs) == len(got.token_ids)  # ST-1
            for entry, other in zip(got.logprobs, want.logprobs, strict=True):
                assert entry.keys() == other.keys(), name
                assert all(np.isclose(entry[t].logprob, other[t], atol=1e-4) for t in other), name


def test_features_are_all_seen(truth) -> None:
    """The workload reaches what it is for."""
    reasons = {a.finish_reason for _, _, answers in truth.values() for a in answers}
    assert reasons == {"stop", "length"}
    stopped = [a for _, _, answers in truth.values() for a in answers if isinstance(a.stop_reason, str)]
    assert len(stopped) >= 4
    assert any(377 in a.token_ids for a in truth["thinking, closed by force"][2])


@pytest.mark.parametrize("mode", [name for name in MODES if name != "sync"])
def test_modes_change_nothing(mode, model, tokenizer, truth, plain_run) -> None:
    done, stats = run(model, tokenizer, truth, MODES[mode])
    for name in truth:
        assert facts(done[name]) == facts(plain_run[name]), name
    assert (stats.num_host_waits > 0) == ("drafts" in mode)
    assert (stats.num_preemptions > 0) == ("tiny pool" in mode)


def test_order_of_arrival_changes_nothing(model, tokenizer, truth, plain_run) -> None:
    done, _ = run(model, tokenizer, truth, MODES["async drafts"], order=sorted(truth, reverse=True))
    for name in truth:
        assert facts(done[name]) == facts(plain_run[name]), name
