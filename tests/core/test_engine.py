"""The engine's promises to one request, and that no request is another's trouble. Scripted models, so all is exact."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.core.errors import ConfigError
from deepinfer.testing import HashModel, PuppetModel
from deepinfer.testing.facts import RequestFacts

GREEDY = SamplingParams(temperature=0, max_tokens=4)

pytestmark = pytest.mark.usefixtures("one_thread")


def answers(outputs):
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


# What ends a request


def test_max_tokens_ends_with_length(make_engine, count_up, ask) -> None:
    output = ask(make_engine(count_up()), [[1, 2, 3]])["0"]
    choice = output.outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([4, 5, 6, 7], "length", None)
    assert output.finished and output.error is None and output.prompt_token_ids == [1, 2, 3]


def test_eos_ends_with_stop_and_is_part_of_the_ids(make_engine, count_up, ask) -> None:
    choice = ask(make_engine(count_up(eos_token_ids=(5,))), [[3]])["0"].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([4, 5], "stop", None)


def test_ignored_eos_does_not_end(make_engine, count_up, ask) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert ask(make_engine(count_up(eos_token_ids=(5,))), [[3]], params)["0"].outputs[0].token_ids == [4, 5, 6]


def test_a_stop_id_ends_and_is_named(make_engine, count_up, ask) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[6], ignore_eos=True)
    choice = ask(make_engine(count_up(eos_token_ids=(5,))), [[3]], params)["0"].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([4, 5, 6], "stop", 6)


def test_the_models_length_ends_with_length(make_engine, count_up, ask) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    engine = make_engine(count_up(), max_model_len=10)
    for size, want in ((7, 3), (9, 1), (10, 0)):
        output = ask(engine, [[1] * size], params)["0"]
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (want, "length")


def test_the_pools_size_bounds_the_length(make_engine, count_up, ask) -> None:
    engine = make_engine(count_up(), num_kv_blocks=3, block_size=4)
    assert engine.max_len == 12
    assert len(ask(engine, [[1] * 5], SamplingParams(temperature=0, max_tokens=100))["0"].outputs[0].token_ids) == 7
    with pytest.raises(RequestError, match="the prompt has 13 tokens; this engine takes 12"):
        engine.add_request("x", [1] * 13, GREEDY)


def test_more_length_than_the_model_has_is_a_config_error(make_engine, count_up) -> None:
    with pytest.raises(ConfigError, match="max_model_len 9 exceeds the model's 8 positions"):
        make_engine(count_up(max_position=8), max_model_len=9)


# Scoring and logprobs


@pytest.mark.parametrize("length", [1, 2, 50])
def test_max_tokens_zero_scores_the_prompt_only(make_engine, ask, length) -> None:
    """D-1: 0 is 0, in prompts of one chunk and of several."""
    model = HashModel(32)
    prompt = [i % 32 for i in range(length)]
    output = ask(make_engine(model), [prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))["0"]
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert len(output.prompt_logprobs) == length and output.prompt_logprobs[0] is None
    logits = model.expected_logits(prompt)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry[prompt[i + 1]].logprob == pytest.approx(float(logprobs[i, prompt[i + 1]]), abs=1e-5)
        best = next(token for token, p in entry.items() if p.rank == 1)
        assert best == logprobs[i].argmax()


def test_logprobs_are_of_raw_logits_and_include_the_sampled_token(make_engine, ask) -> None:
    """D-2: the argument works. A temperature and a filter do not change what the model said."""
    model = PuppetModel(8, lambda ids: np.arange(8.0))
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=6, logprobs=2)
    choice = ask(make_engine(model), [[1]], params)["0"].outputs[0]
    norm = math.log(sum(math.exp(i) for i in range(8)))
    assert len(choice.logprobs) == 6
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert set(entry) == {7, 6, token}
        assert all(p.logprob == pytest.approx(t - norm, abs=1e-5) and p.rank == 8 - t for t, p in entry.items())
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == total


def test_without_asking_there_are_no_logprobs(make_engine, count_up, ask) -> None:
    output = ask(make_engine(count_up()), [[1, 2]])["0"]
    assert output.outputs[0].logprobs is output.outputs[0].cumulative_logprob is output.prompt_logprobs is None


def test_more_logprobs_than_ids_give_all_ids(make_engine, ask) -> None:
    """SA-4."""
    model = HashModel(8)
    params = [SamplingParams(max_tokens=2, logprobs=9, prompt_logprobs=99, seed=1), GREEDY]
    outputs = ask(make_engine(model), [[1, 2], [3]], params)
    assert [len(e) for e in outputs["0"].outputs[0].logprobs] == [8, 8]
    assert len(outputs["0"].prompt_logprobs[1]) == 8
    assert outputs["1"].error is None


# Refusals


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ([], "empty_prompt", "at least one"),
        ([1, 32], "token_out_of_range", r"prompt_token_ids\[1\] is 32; ids run from 0 to 31"),
        ([1, 2, -1], "token_out_of_range", r"prompt_token_ids\[2\] is -1"),
        ([0] * 257, "prompt_too_long", "257 tokens; this engine takes 256"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_runs(make_engine, count_up, ask, prompt, code, message) -> None:
    """AP-2 among them."""
    engine = make_engine(count_up())
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request("bad", prompt, GREEDY)
    assert caught.value.code == code
    assert not engine.has_unfinished()
    assert ask(engine, [[1]])["0"].outputs[0].token_ids == [2, 3, 4, 5]


def test_a_live_id_is_refused_a_second_time_and_an_ended_one_is_free(make_engine, count_up, drain) -> None:
    """KV-5."""
    engine = make_engine(count_up())
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(RequestError, match="'a' is live") as caught:
        engine.add_request("a", [9], GREEDY)
    assert caught.value.code == "duplicate_request_id"
    engine.step()
    with pytest.raises(RequestError, match="'a' is live"):
        engine.add_request("a", [9], GREEDY)
    assert answers(drain(engine)) == {"a": [2, 3, 4, 5]}
    engine.add_request("a", [9], GREEDY)
    assert answers(drain(engine)) == {"a": [10, 11, 12, 13]}


def test_an_id_outside_the_vocabulary_in_parameters_is_refused(make_engine, count_up) -> None:
    engine = make_engine(count_up())
    for params in (SamplingParams(stop_token_ids=[32]), SamplingParams(logit_bias={32: 1.0})):  # SA-7
        with pytest.raises(RequestError, match="ids of this model run from 0 to 31"):
            engine.add_request("a", [1], params)
    for ids in ([-1], [32]):  # SA-8
        with pytest.raises(RequestError, match="ids of this model run from 0 to 31"):
            engine.add_request("a", [1], SamplingParams(logprob_token_ids=ids))
    assert not engine.has_unfinished()


def test_one_bad_prompt_of_a_hundred_is_an_error_in_its_place(count_up) -> None:
    """AP-1 and D-5: one result per prompt, in order, whatever is wrong with one."""
    prompts = [[i % 30] for i in range(100)]
    prompts[57], prompts[58] = [1] * 65, [31, 32]
    with LLM(count_up(), backend="cpu", max_model_len=64, num_kv_blocks=64, block_size=4) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.stats.num_free_blocks == 64
    assert [o.error.code if o.error else None for o in outputs[56:60]] == [
        *(None, "prompt_too_long", "token_out_of_range", None)
    ]
    good = [i for i in range(100) if i not in (57, 58)]
    assert all(outputs[i].outputs[0].token_ids[0] == i % 30 + 1 for i in good)


# Cancelling


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_moment_frees_everything(make_engine, count_up, drain, steps) -> None:
    """While it waits, in the middle of its prompt, while it decodes; twice is once."""
    engine = make_engine(count_up(), max_num_batched_tokens=4, max_num_seqs=2)
    for name, prompt in (("a", [1] * 9), ("b", [2] * 6), ("c", [3])):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=5))
    done = {}
    for _ in range(steps):
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert [engine.abort("a"), engine.abort("a"), engine.abort("nobody")] == [True, False, False]
    assert engine.has_unfinished()
    done |= drain(engine)
    assert done["a"].outputs[0].finish_reason == "abort" and done["a"].finished and done["a"].error is None
    assert answers(done)["b"] == [3, 4, 5, 6, 7] and answers(done)["c"] == [4, 5, 6, 7, 8]
    assert engine.blocks.num_free_blocks == 64 and engine.blocks.num_free_slots == 2


def test_abort_of_the_last_request_still_gives_its_result(make_engine, count_up) -> None:
    engine = make_engine(count_up())
    engine.add_request("a", [1], GREEDY)
    engine.abort("a")
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]
    assert not engine.has_unfinished() and engine.step() == []


def test_close_aborts_what_is_left(make_engine, count_up) -> None:
    engine = make_engine(count_up())
    for i in range(12):
        engine.add_request(str(i), [i], GREEDY)
    engine.step()
    engine.close()
    assert engine.blocks.num_free_blocks == 64 and not engine.scheduler.has_work


# Sampling in mixed company


def test_a_seeded_request_is_the_same_beside_an_unseeded_one(make_engine, ask) -> None:
    """SA-1: four times, in both orders."""
    model = PuppetModel(64, lambda ids: np.zeros(64))
    seeded, free = SamplingParams(seed=42, max_tokens=8), SamplingParams(max_tokens=8)
    found = set()
    for _ in range(4):
        engine = make_engine(model)
        found.add(tuple(answers(ask(engine, [[1], [2]], [seeded, free]))["0"]))
        found.add(tuple(answers(ask(engine, [[2], [1]], [free, seeded]))["1"]))
    assert len(found) == 1


def test_unseeded_requests_draw_from_different_streams(make_engine, ask) -> None:
    """SA-2: sixteen equal prompts; any two agree about as often as chance says, and a repeat of all is equal."""
    model = PuppetModel(16, lambda ids: np.zeros(16))
    params = SamplingParams(max_tokens=40)
    first, again = (answers(ask(make_engine(model, max_num_seqs=16), [[1]] * 16, params)) for _ in range(2))
    assert first == again
    drawn = np.array(list(first.values()))
    assert len({tuple(row) for row in drawn}) == 16
    agree = np.mean([(drawn[i] == drawn[j]).mean() for i in range(16) for j in range(i)])
    assert abs(agree - 1 / 16) < 0.02
    lagged = (drawn[:, 1:] == drawn[:, :-1]).mean()
    assert abs(lagged - 1 / 16) < 0.04


def test_greedy_beside_top_k_equals_both_alone(make_engine, ask) -> None:
    """SA-3."""
    model = HashModel(128)
    params = [SamplingParams(temperature=0, max_tokens=8), SamplingParams(top_k=64, seed=3, max_tokens=8)]
    together = answers(ask(make_engine(model), [[1], [2]], params))
    alone = [answers(ask(make_engine(model), [[i + 1]], params[i]))["0"] for i in range(2)]
    assert list(together.values()) == alone


def test_greedy_takes_the_lowest_of_equals(make_engine, ask) -> None:
    """D-11."""
    model = PuppetModel(16, lambda ids: [1.0 if t in (3, 7, 11) else 0.0 for t in range(16)])
    assert answers(ask(make_engine(model), [[1]]))["0"] == [3] * 4


@pytest.mark.parametrize("bad", [[math.nan] * 32, [math.inf] + [0.0] * 31, [0.0] * 31 + [math.nan], [-math.inf] * 32])
def test_a_row_without_finite_logits_ends_its_request_alone(make_engine, ask, bad) -> None:
    """SA-5: neighbours get what they get without it, and its blocks come back."""

    def logits(ids):
        return bad if 13 in ids else 10.0 * (np.arange(32) == (ids[-1] + 1) % 32)

    engine = make_engine(PuppetModel(32, logits))
    prompts = [[1], [10], [13, 1], [20]]
    outputs = ask(engine, prompts, SamplingParams(temperature=0, max_tokens=5, logprobs=1))
    assert answers(outputs) == {"0": [2, 3, 4, 5, 6], "1": [11, 12, 13], "2": [], "3": [21, 22, 23, 24, 25]}
    for request_id, count in (("1", 3), ("2", 0)):
        output = outputs[request_id]
        assert output.error.code == "numerical_error" and output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].logprobs) == count
    assert engine.blocks.num_free_blocks == 64


def test_logits_of_a_prompt_that_are_not_finite_are_an_error(count_up) -> None:
    model = PuppetModel(4, lambda ids: [math.nan] * 4 if len(ids) == 3 else [0.0] * 4)
    with LLM(model, backend="cpu", num_kv_blocks=8, block_size=4) as llm:
        assert llm.logits([1, 2]).shape == (2, 4)
        with pytest.raises(RequestError, match="not finite"):
            llm.logits([1, 2, 3, 0, 1])
        assert llm.stats.num_free_blocks == 8


def test_shuffled_crowds_get_equal_bits(make_engine, ask) -> None:
    """LD-2: 64 requests, five orders, several numbers of places."""
    rng = random.Random(4)
    model = HashModel(64)
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 9))] for _ in range(64)]
    params = [SamplingParams(seed=i, max_tokens=rng.randint(1, 6), logprobs=2) for i in range(64)]
    found = Counter()
    for places in (1, 7, 44, 45, 64):
        order = rng.sample(range(64), 64)
        engine = make_engine(model, max_num_seqs=places, max_num_batched_tokens=64, num_kv_blocks=300)
        outputs = ask(engine, [prompts[i] for i in order], [params[i] for i in order])
        found.update((i, RequestFacts.of(outputs[str(place)])) for place, i in enumerate(order))
    assert len(found) == 64 and set(found.values()) == {5}


# Memory


def test_a_tight_pool_gives_what_a_big_one_gives(make_engine, ask) -> None:
    """KV-2: three long requests in a pool for little more than one."""
    model = HashModel(64)
    params = SamplingParams(seed=5, max_tokens=30, logprobs=1, prompt_logprobs=0)
    prompts = [[i, *range(8)] for i in range(3)]
    tight = make_engine(model, num_kv_blocks=11)
    found = [
        [RequestFacts.of(o) for o in ask(engine, prompts, params).values()]
        for engine in (tight, make_engine(model, num_kv_blocks=64, max_model_len=44))
    ]
    assert tight.stats().num_preemptions > 0
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))


def test_preemptions_are_counted_where_they_happened(make_engine, ask) -> None:
    engine = make_engine(HashModel(64), num_kv_blocks=11)
    outputs = ask(engine, [[i, *range(8)] for i in range(3)], SamplingParams(seed=5, max_tokens=30))
    assert sum(o.timings.num_preemptions for o in outputs.values()) == engine.stats().num_preemptions
    assert outputs["0"].timings.num_preemptions == 0  # the oldest never gives way


def test_a_request_larger_than_the_pool_does_not_block_others(make_engine, count_up, ask) -> None:
    """KV-3."""
    engine = make_engine(count_up(), num_kv_blocks=3)
    with pytest.raises(RequestError, match="KV cache of 3 blocks of 4") as caught:
        engine.add_request("big", [1] * 16, GREEDY)
    assert caught.value.code == "prompt_too_long"
    assert answers(ask(engine, [[1], [2], [3]])) == {str(i): [i + 2, i + 3, i + 4, i + 5] for i in range(3)}


@pytest.mark.parametrize("blocks", [7, 8])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_a_request_that_fills_the_pool_lets_the_next_one_run(
    make_engine, count_up, ask, blocks, steps
) -> None:
    """KV-4."""
    engine = make_engine(count_up(), num_kv_blocks=8, max_num_batched_tokens=8)
    engine.add_request("big", [1] * (4 * blocks), SamplingParams(temperature=0, max_tokens=50))
    for _ in range(steps):
        engine.step()
    engine.abort("big")
    assert answers(ask(engine, [[1]]))["0"] == [2, 3, 4, 5]


def test_counters_describe_what_was_returned(make_engine, ask) -> None:
    """ST-4: also with preemptions, cancellations and errors."""
    engine = make_engine(HashModel(64, eos_token_ids=(0,), nan_every=60), num_kv_blocks=12)
    prompts = [[i, *range(i)] for i in range(12)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(seed=i, max_tokens=20))
    outputs = []
    for step in range(10_000):
        if not engine.has_unfinished():
            break
        if step == 9:
            engine.abort("3")
        outputs += [o for o in engine.step() if o.finished]
    stats = engine.stats()
    assert len(outputs) == stats.num_finished == 12
    assert stats.num_generated_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert stats.num_prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs if o.timings.scheduled)
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert stats.num_preemptions > 0


def test_timings_are_in_order(make_engine, count_up, ask) -> None:
    timings = ask(make_engine(count_up()), [[1]])["0"].timings
    assert 0 < timings.arrival <= timings.scheduled <= timings.first_token <= timings.finished


def test_two_engines_share_a_model_and_a_process(make_engine, ask) -> None:
    model = HashModel(64)
    one, two = make_engine(model), make_engine(model, block_size=2, window_page=1, num_kv_blocks=99)
    for i in range(6):
        for engine in (one, two):
            engine.add_request(str(i), [i, 7, i], SamplingParams(seed=i, max_tokens=9))
    done = {0: {}, 1: {}}
    while one.has_unfinished() or two.has_unfinished():
        for which, engine in enumerate((one, two)):
            done[which] |= {o.request_id: o for o in engine.step() if o.finished}
    assert (
        answers(done[0])
        == answers(done[1])
        == answers(
            ask(
                make_engine(model),
                [[i, 7, i] for i in range(6)],
                [SamplingParams(seed=i, max_tokens=9) for i in range(6)],
            )
        )
    )


def test_a_failing_step_ends_what_is_live_with_a_typed_error_and_the_engine_goes_on() -> None:
    failing = {"at": 3}

    def logits(ids):
        failing["at"] -= 1
        if failing["at"] == 0:
            raise RuntimeError("the device is gone")
        return np.arange(8, dtype=np.float32)

    for asynchronous in (False, True):
        failing["at"] = 3
        with LLM(PuppetModel(8, logits), async_scheduling=asynchronous) as llm:
            engine = llm.engine
            engine.add_request("a", [1, 2], SamplingParams(max_tokens=9))
            engine.add_request("b", [3], SamplingParams(max_tokens=9, prompt_logprobs=1))
            engine.add_request("c", [4], SamplingParams(max_tokens=9))
            engine.abort("c")
            with pytest.raises(RuntimeError, match="the device is gone"):
                for _ in range(9):
                    engine.step()
            ended = {o.request_id: o for o in engine.step()}
            assert {"a", "b"} <= ended.keys()
            for request_id in ("a", "b"):
                assert ended[request_id].error.code == "engine_error"
                assert "RuntimeError: the device is gone" in ended[request_id].error.message
            assert not engine.has_unfinished()
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
            engine.blocks.pool.check()
            again = llm.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0.0))
            assert again[0].error is None and again[0].outputs[0].token_ids == [7, 7]
