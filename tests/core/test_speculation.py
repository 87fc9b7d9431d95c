"""Speculation cannot change an answer, accepts as often as theory says, and stops when it does not pay."""

import itertools
import math

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.core.errors import ConfigError
from deepinfer.core.speculation import LengthPolicy, StepCost
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


# -- acceptance against theory: distributions that do not depend on the context


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pair_with_distance(distance):
    """Target and draft logits over 6 ids whose distributions have about this total variation."""
    rng = np.random.default_rng(8)
    p = rng.normal(size=6)
    direction = rng.normal(size=6)
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        tv = np.abs(softmax(p) - softmax(p + middle * direction)).sum() / 2
        low, high = (middle, high) if tv < distance else (low, middle)
    return p, p + low * direction


def coupled_acceptance(p, q):
    """a(p, q): the chance that two Gumbel-max draws with the same noise agree."""
    return sum(1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p))) for v in range(len(p)))


def sample_many(p_logits, q_logits, rule, confidences, num_requests=60, length=300, num_drafts=3):
    """Tokens and acceptance of a context-free target and draft."""

    def draft(ids):
        return [0] * num_drafts, confidences(ids, num_drafts), np.tile(q_logits, (num_drafts, 1))

    params = SamplingParams(max_tokens=length)
    with LLM(
        PuppetModel(len(p_logits), lambda ids: p_logits),
        draft=ScriptedDraft(draft, num_drafts),
        speculation=rule,
        draft_schedule="fixed",
        max_model_len=512,
    ) as llm:
        outputs = llm.generate([[0]] * num_requests, params)
        stats = llm.engine.speculation
    tokens = np.array(list(itertools.chain.from_iterable(o.outputs[0].token_ids for o in outputs)))
    return tokens, stats


def by_last_token(ids, num_drafts):
    """Confidences that depend on earlier tokens, as a trap for rules that look at later drafts."""
    return [0.9 if ids[-1] % 2 else 0.1] * num_drafts


def flat(ids, num_drafts):
    return [0.5] * num_drafts


@pytest.mark.parametrize("distance", [0.05, 0.2, 0.5])
def test_acceptance_is_what_theory_says(distance) -> None:
    p_logits, q_logits = pair_with_distance(distance)
    p, q = softmax(p_logits), softmax(q_logits)
    rates = {}
    for rule, expected in (("coupled", coupled_acceptance(p, q)), ("rejection", np.minimum(p, q).sum())):
        _, stats = sample_many(p_logits, q_logits, rule, flat)
        tried = stats.verified[0]
        assert tried > 3_000
        reached = tried
        for place in range(len(stats.accepted)):  # acceptance at a place, given all before it were kept
            rate = stats.accepted[place] / reached
            error = math.sqrt(expected * (1 - expected) / reached)
            # drafts cut off by the end of a request are verified nowhere, so later places see a little fewer
            assert abs(rate - expected) < 3.5 * error + 0.01 * place, (rule, place, rate, expected)
            rates.setdefault(rule, rate)
            reached = stats.accepted[place]
    assert rates["coupled"] > (1 - distance) / (1 + distance) - 0.03
    print(f"TV {distance}: coupled accepts {rates['coupled'] / rates['rejection']:.3f} of what rejection does")


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("distance", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("confidences", [flat, by_last_token])
def test_draws_follow_the_target(rule, distance, confidences) -> None:
    """Chi-square of the token counts, and of pairs of neighbours, against the target alone."""
    p_logits, q_logits = pair_with_distance(distance)
    p = softmax(p_logits)
    tokens, _ = sample_many(p_logits, q_logits, rule, confidences)
    counts = np.bincount(tokens, minlength=6)
    chi = ((counts - len(tokens) * p) ** 2 / (len(tokens) * p)).sum()
    assert chi < 20.5, chi  # 5 degrees of freedom, 1 in 1,000
    pairs = np.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36)
    both = np.outer(p, p).ravel() * (len(tokens) - 1)
    assert ((pairs - both) ** 2 / both).sum() < 73, "neighbours are not independent"  # 35 degrees, about 1 in 5,000


# -- the length policy


def policy_with(acceptance, base, per_row, draft_seconds=0.0):
    policy = LengthPolicy(len(acceptance), adaptive=True)
    rng = np.random.default_rng(0)
    for _ in range(400):
        kept = 0
        while kept < len(acceptance) and rng.random() < acceptance[kept]:
            kept += 1
        policy.observe(len(acceptance), kept)
        rows = int(rng.integers(1, 100))
        policy.cost.observe(rows, 0, base + per_row * rows)
        policy.observe_draft(draft_seconds)
    return policy


def test_cost_model_recovers_what_rows_and_context_cost() -> None:
    cost = StepCost()
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows, context = int(rng.integers(1, 300)), int(rng.integers(0, 100_000))
        cost.observe(rows, context, 1e-3 + 2e-5 * rows + 3e-6 * context / 1024)
    assert cost.step(100, 51_200) == pytest.approx(1e-3 + 2e-3 + 1.5e-4, rel=1e-3)


def test_cheap_rows_and_good_drafts_are_all_verified() -> None:
    assert policy_with([0.9] * 5, base=1e-2, per_row=1e-6).length(8, 0) == 5


def test_dear_rows_and_bad_drafts_are_not_drafted_at_all() -> None:
    assert policy_with([0.1] * 5, base=1e-5, per_row=1e-3).length(64, 0) == 0


def test_a_draft_that_costs_more_than_it_saves_is_not_made() -> None:
    assert policy_with([0.6] * 5, base=1e-3, per_row=1e-6).length(4, 0) > 0
    assert policy_with([0.6] * 5, base=1e-3, per_row=1e-6, draft_seconds=1e-2).length(4, 0) == 0


def test_not_drafting_is_tried_again_after_a_while() -> None:
    policy = policy_with([0.1] * 5, base=1e-5, per_row=1e-3)
    lengths = [policy.length(64, 0) for _ in range(200)]
    assert 0 < sum(n > 0 for n in lengths) < 10


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
