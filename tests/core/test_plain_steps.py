"""Steps in which the same requests draw one token each and want nothing but ids take a short way; nobody may notice."""

from collections import Counter
from dataclasses import replace

import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import HashModel
from deepinfer.testing.workloads import cpu_ops

SETTINGS = {"max_num_seqs": 4, "max_model_len": 64, "num_kv_blocks": 16, "block_size": 16, "max_num_batched_tokens": 32}
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=1.0, seed=1),
    SamplingParams(max_tokens=30, temperature=0.7, seed=2, stop_token_ids=(3, 4, 5)),
]


@pytest.fixture
def make(monkeypatch):
    """Makes engines that count how their steps are recorded."""
    engines = []

    def build(model=None, **settings):
        engine = Engine(model or HashModel(64, eos_token_ids=(0,)), EngineConfig(**(SETTINGS | settings)), cpu_ops())
        counts, record = Counter(), engine._collector._record_plain

        def counted(launched, collected):
            is_plain = record(launched, collected)
            counts[is_plain] += 1
            return is_plain

        monkeypatch.setattr(engine._collector, "_record_plain", counted)
        engines.append(engine)
        return engine, counts

    yield build
    for engine in engines:
        engine.close()


def finish(engine, changed=None):
    while engine.has_unfinished():
        outputs = engine.step()
        if changed is not None:
            changed.append([output.request_id for output in outputs])


def answers(engine, params=PARAMS, prompts=((1, 2), (7, 8, 9), (5,))):
    results = [engine.add_request(str(i), list(p), s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    finish(engine)
    return [(list(r.outputs[0].token_ids), r.outputs[0].finish_reason, r.error) for r in results]


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=["one by one", "launched ahead"])
def test_the_short_way_gives_what_the_long_way_gives(make, settings):
    """Wanting logprobs makes every step one of the long way."""
    engine, counts = make(**settings)
    long_way, long_counts = make(**settings)
    mine = answers(engine)
    assert mine == answers(long_way, [replace(p, logprobs=0) for p in PARAMS])
    assert {reason for _, reason, _ in mine} <= {"stop", "length"} and len(mine[1][0]) <= 9
    assert counts[True] > 5 and long_counts[True] == 0
    assert engine.stats().num_generated_tokens == long_way.stats().num_generated_tokens
    assert engine.stats().num_steps == sum(counts.values())


def test_every_step_gives_back_who_drew(make):
    engine, counts = make(HashModel(64))
    for i in range(3):
        engine.add_request(str(i), [1 + i], replace(PARAMS[0], ignore_eos=True))
    changed = []
    finish(engine, changed)
    assert changed[:-1] == [["0", "1", "2"]] * (len(changed) - 1) and len(changed) == 20
    assert counts[True] == 20 - 2 - 1  # not the first two, nor the one in which all reach their limit


def test_live_results_grow_with_every_plain_step(make):
    engine, counts = make()
    output = engine.add_request("a", [1, 2], replace(PARAMS[0], ignore_eos=True))
    lengths = []
    while engine.has_unfinished():
        engine.step()
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == list(range(1, 21)) and counts[True] > 10
    assert output.outputs[0].finish_reason == "length"


def test_who_comes_or_goes_in_between_changes_nothing_for_the_others(make):
    engine, counts = make()
    want = answers(make()[0], [replace(PARAMS[0], ignore_eos=True)], [(1, 2)])[0]
    output = engine.add_request("a", [1, 2], replace(PARAMS[0], ignore_eos=True))
    for number in range(12):
        if number == 4:
            engine.add_request("b", [9, 9, 9], replace(PARAMS[0], ignore_eos=True))
        if number == 9:
            engine.abort("b")
        engine.step()
    finish(engine)
    assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason, output.error) == want
    assert counts[True] > 6 and counts[False] > 4


def test_a_row_without_a_token_ends_its_own_request(make):
    """NaN comes in the middle of plain steps."""
    engine, counts = make(HashModel(64, nan_every=37))
    results = [engine.add_request(str(i), [1 + i], replace(PARAMS[0], max_tokens=40)) for i in range(4)]
    finish(engine)
    errors = [r.error.code if r.error is not None else None for r in results]
    assert "numerical_error" in errors and set(errors) <= {None, "numerical_error"}
    assert counts[True] > 0


def test_what_was_recorded_on_the_short_way_serves_a_later_prompt(make):
    engine, counts = make(prefix_caching=True)
    first = engine.add_request("a", list(range(1, 20)), replace(PARAMS[0], max_tokens=30, ignore_eos=True))
    finish(engine)
    assert counts[True] > 20
    text = [*range(1, 20), *first.outputs[0].token_ids]
    again = engine.add_request("b", text[:40], replace(PARAMS[0], max_tokens=4, ignore_eos=True))
    finish(engine)
    assert again.num_cached_tokens == 32  # two blocks, the second one filled by plain steps
    assert list(again.outputs[0].token_ids) == text[40:44]


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=["one by one", "launched ahead"])
def test_memory_that_runs_out_between_equal_plans_preempts_as_ever(make, settings, monkeypatch):
    """The plan is repeated until no block is left for somebody's next row."""
    params = [replace(PARAMS[0], max_tokens=40, ignore_eos=True)] * 3
    want = answers(make()[0], params)
    engine, counts = make(num_kv_blocks=7, **settings)
    repeated, plan = Counter(), engine.scheduler._plan_as_before
    monkeypatch.setattr(engine.scheduler, "_plan_as_before", lambda: counted(repeated, plan()))
    assert answers(engine, params) == want
    assert engine.stats().num_preemptions > 0 and repeated[True] > 20 and counts[True] > 20
    assert engine.stats().num_free_blocks == 7


def test_equal_plans_end_where_somebody_reaches_the_limit(make, monkeypatch):
    engine, _ = make(async_scheduling=True)
    repeated, plan = Counter(), engine.scheduler._plan_as_before
    monkeypatch.setattr(engine.scheduler, "_plan_as_before", lambda: counted(repeated, plan()))
    limits = (6, 9, 17)
    got = answers(engine, [replace(PARAMS[0], max_tokens=limit, ignore_eos=True) for limit in limits])
    assert [len(ids) for ids, _, _ in got] == list(limits)
    assert repeated[True] >= 8
    # nobody ran a row behind its last token
    assert engine.stats().num_steps <= max(limits) + 1


def counted(counts, plan):
    counts[plan is not None] += 1
    return plan
