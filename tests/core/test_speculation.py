"""Speculation cannot change an answer, whatever the draft, the schedule and the order of steps."""

import math

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.core.errors import ConfigError
from deepinfer.testing import PuppetModel, ScriptedDraft

VOCAB = 24


def target(ids):
    """Logits that depend on the last three tokens and the length, with exact ties now and then."""
    rng = np.random.default_rng([len(ids) % 7, *ids[-3:]])
    return np.round(rng.normal(size=VOCAB) * 2, 1)


def drafter(quality, num_tokens):
    """Proposes the target's best token with probability `quality`, else noise; confidences are noise as well."""

    def draft(ids):
        rng = np.random.default_rng([99, len(ids), ids[-1]])
        known, tokens = list(ids), []
        for _ in range(num_tokens):
            best = int(np.argmax(target(known)))
            tokens.append(best if rng.random() < quality else int(rng.integers(VOCAB)))
            known.append(tokens[-1])
        return tokens, rng.random(num_tokens).tolist()

    return draft


PROMPTS = [[1], [2, 3, 4], [5] * 9, [6, 7], [8, 9, 10, 11], [12]]
PARAMS = [
    SamplingParams(max_tokens=23, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=17, temperature=1.0, seed=3, logprobs=0),
    SamplingParams(max_tokens=29, temperature=0.8, top_k=5, seed=4),
    SamplingParams(max_tokens=1, seed=5, logprobs=1),
    SamplingParams(max_tokens=40, temperature=1.4, top_p=0.8, min_p=0.02, seed=6, logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.3, stop_token_ids=[3, 4, 5], seed=7, logprobs=1),
]


def facts(output):
    completion = output.outputs[0]
    entries = completion.logprobs and [{t: (e.logprob, e.rank) for t, e in x.items()} for x in completion.logprobs]
    return completion.token_ids, completion.finish_reason, entries, completion.cumulative_logprob, output.error


def run(draft=None, **settings):
    with LLM(PuppetModel(VOCAB, target, eos_token_ids=(0,)), max_model_len=128, draft=draft, **settings) as llm:
        got = [facts(o) for o in llm.generate(PROMPTS, PARAMS)]
        stats = llm.stats
        assert stats.num_free_blocks == stats.num_blocks
        llm.engine.blocks.pool.check()
        return got, stats


@pytest.fixture(scope="module")
def plain():
    return run()[0]


@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_coupled_gives_the_plain_answer_at_any_length_and_quality(plain, num_drafts, quality) -> None:  # LD-1
    draft = ScriptedDraft(drafter(quality, num_drafts), num_drafts)
    assert run(draft, draft_schedule="fixed")[0] == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_schedule": "adaptive"},
        {"async_scheduling": True},
        {"async_scheduling": True, "draft_schedule": "fixed", "num_drafts": 2},
        {"max_num_batched_tokens": 7, "draft_schedule": "fixed"},
        {"max_num_seqs": 2, "async_scheduling": True, "draft_schedule": "fixed"},
        {"block_size": 8, "num_kv_blocks": 9, "draft_schedule": "fixed"},
        {"block_size": 8, "num_kv_blocks": 9, "draft_schedule": "fixed", "async_scheduling": True},
    ],
    ids=str,
)
def test_coupled_gives_the_plain_answer_under_any_schedule(plain, settings) -> None:
    assert run(ScriptedDraft(drafter(0.7, 5), 5), **settings)[0] == plain


def test_a_perfect_draft_saves_steps() -> None:
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(PuppetModel(VOCAB, target), draft=ScriptedDraft(drafter(1.0, 4), 4), draft_schedule="fixed") as llm:
        llm.generate([[1, 2]], greedy)
        assert llm.stats.num_steps == 1 + math.ceil(39 / 5)
        assert llm.engine.speculation.acceptance() == [1.0] * 4


def test_speculation_without_a_draft_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="speculation='coupled' needs a draft, and puppet has none"):
        LLM(PuppetModel(VOCAB, target), speculation="coupled")


def noisy(ids):
    """A draft that is near the target and chosen with the target's own noise."""
    rng = np.random.default_rng([5, len(ids), ids[-1]])
    known, rows = list(ids), []
    for _ in range(4):
        rows.append(target(known) + rng.normal(size=VOCAB) * 0.3)
        known.append(int(np.argmax(rows[-1])))
    return [int(np.argmax(row)) for row in rows], [0.5] * 4, np.array(rows)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_acceptance_is_the_same_with_asynchronous_steps(rule) -> None:
    """Drafts are drawn with the noise of the very places they are for, whatever was rejected before."""
    rates = []
    for asynchronous in (False, True):
        with LLM(
            PuppetModel(VOCAB, target),
            draft=ScriptedDraft(noisy, 4),
            speculation=rule,
            draft_schedule="fixed",
            async_scheduling=asynchronous,
            max_model_len=256,
        ) as llm:
            llm.generate([[1], [2, 3], [4] * 5], SamplingParams(max_tokens=200, seed=9))
            rates.append(llm.engine.speculation.acceptance()[0])
    assert rates[0] > 0.5
    assert rates[1] == pytest.approx(rates[0], abs=0.08)
