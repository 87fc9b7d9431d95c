"""Several answers to one prompt: they share its KV, draw from streams of their own, and leave nothing behind."""

import numpy as np
import pytest

from deepinfer import SamplingParams
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.errors import RequestError
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft
from deepinfer.testing.workloads import cpu_ops

VOCAB = 64

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(model=None, **settings):
    settings = {"block_size": 4, "window_page": 2, "max_model_len": 80, "num_kv_blocks": 200, **settings}
    return Engine(model or HashModel(VOCAB, eos_token_ids=(0,)), EngineConfig(**settings), cpu_ops())


def drain(engine, limit=3000):
    done = {}
    for _ in range(limit):
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
        if not engine.has_unfinished():
            break
    engine.blocks.pool.check()
    assert engine.blocks.num_free_blocks == engine.blocks.pool.num_blocks
    assert engine.blocks.num_free_slots == engine.blocks.pool.num_slots
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine._requests
    return done


def rows_run(engine):
    """Rows of all steps from now on, and the most blocks held."""
    total = [0, 0]
    launch = engine._runner.launch

    def counted(plan, *rest):
        total[0] += int(plan.query_lens.sum())
        total[1] = max(total[1], engine.blocks.pool.num_blocks - engine.blocks.num_free_blocks)
        return launch(plan, *rest)

    engine._runner.launch = counted
    return total


PROMPTS = [[7], [7, 8], list(range(1, 10)), list(range(20)), list(range(1, 41))]


@pytest.fixture(scope="module")
def alone():
    """Each choice computed by itself, with its index in the random counter."""
    found = {}
    for place, prompt in enumerate(PROMPTS):
        for choice in range(5):
            engine = engine_of(prefix_caching=False, async_scheduling=False)
            engine.add_request("x", prompt, SamplingParams(max_tokens=9, seed=11, n=1, logprobs=1))
            engine._requests["x"][0].choice = choice
            request = engine._requests["x"][0]
            request.output.outputs *= choice + 1
            found[place, choice] = drain(engine)["x"].outputs[choice]
    return found


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 5}, {"num_kv_blocks": 20}])
def test_choices_are_what_they_are_alone(alone, asynchronous, drafts, settings) -> None:
    model = HashModel(VOCAB, eos_token_ids=(0,))
    if drafts:
        sequences = [PROMPTS[place] + c.token_ids for (place, _), c in alone.items()]

        def guess(ids):
            ahead = next((s[len(ids) :] for s in sequences if s[: len(ids)] == ids), [])[:3]
            return ahead, [0.5] * len(ahead)

        model = ScriptedDraft(guess, 3).bind(model)
        settings = {**settings, "speculation": "coupled", "draft_schedule": "fixed"}
    engine = engine_of(model, async_scheduling=asynchronous, **settings)
    for place, prompt in enumerate(PROMPTS):
        engine.add_request(str(place), prompt, SamplingParams(max_tokens=9, seed=11, n=5, logprobs=1))
    done = drain(engine)
    for place in range(len(PROMPTS)):
        outputs = done[str(place)].outputs
        assert [c.index for c in outputs] == list(range(5))
        for choice, got in enumerate(outputs):
            want = alone[place, choice]
            assert (got.token_ids, got.logprobs, got.finish_reason, got.cumulative_logprob) == (
                want.token_ids,
                want.logprobs,
                want.finish_reason,
                want.cumulative_logprob,
            )
        assert len({tuple(c.token_ids) for c in outputs}) == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_is_computed_once(asynchronous) -> None:
    engine = engine_of(prefix_caching=False, async_scheduling=asynchronous)
    total = rows_run(engine)
    engine.add_request("x", list(range(41)), SamplingParams(max_tokens=1, n=8, seed=1))
    drain(engine)
    assert total == [40 + 8, 10 + 8]  # ten full blocks of the prompt shared, one each to go on


def test_blocks_are_shared_until_they_differ() -> None:
    engine = engine_of(prefix_caching=False, async_scheduling=False)
    engine.add_request("x", list(range(38)), SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True))
    while len(engine.scheduler.running) < 3:
        engine.step()
    tables = [engine.blocks.pool.blocks(r.seq).tolist() for r in engine.scheduler.running]
    assert len({tuple(t[:9]) for t in tables}) == 1 and len({t[9] for t in tables}) == 3


def test_a_stored_prefix_up_to_the_last_token_needs_no_fork() -> None:
    engine = engine_of(async_scheduling=False)
    prompt = list(range(1, 18))
    engine.add_request("a", prompt, SamplingParams(max_tokens=2, seed=1))
    while engine.has_unfinished():
        engine.step()
    total = rows_run(engine)
    engine.add_request("x", prompt, SamplingParams(max_tokens=1, n=3, seed=1))
    done = drain(engine)
    assert done["x"].num_cached_tokens == 16 and total[0] == 3
    assert all(c.finish_reason for c in done["x"].outputs)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("steps", range(9))
def test_a_cancel_at_any_time_frees_everything(steps, asynchronous) -> None:
    engine = engine_of(async_scheduling=asynchronous, max_num_batched_tokens=8, num_kv_blocks=30)
    engine.add_request("x", list(range(20)), SamplingParams(max_tokens=20, n=4, seed=1, ignore_eos=True))
    engine.add_request("y", list(range(5)), SamplingParams(max_tokens=6, seed=2))
    done = {output.request_id: output for _ in range(steps) for output in engine.step()}
    assert engine.abort("x") and not engine.abort("x")
    done |= drain(engine)
    assert [c.finish_reason for c in done["x"].outputs] == ["abort"] * 4 and done["y"].error is None
    engine = engine_of(prefix_caching=False)
    engine.add_request("y", list(range(5)), SamplingParams(max_tokens=6, seed=2))
    assert drain(engine)["y"].outputs == done["y"].outputs


def test_close_with_choices_that_never_ran() -> None:
    engine = engine_of(max_num_batched_tokens=2)
    engine.add_request("x", list(range(20)), SamplingParams(max_tokens=20, n=4))
    engine.step()
    engine.close()
    assert not engine._requests and engine.blocks.num_free_slots == engine.blocks.pool.num_slots


def test_no_tokens_wanted_gives_as_many_empty_answers() -> None:
    for prompt in ([5], [5, 6, 7]):
        engine = engine_of()
        engine.add_request("x", prompt, SamplingParams(max_tokens=0, n=3, prompt_logprobs=0))
        done = drain(engine)["x"]
        assert [c.finish_reason for c in done.outputs] == ["length"] * 3
        assert len(done.prompt_logprobs) == len(prompt)


def test_prompt_logprobs_come_once_and_equal_those_of_one_answer() -> None:
    many, one = (engine_of(max_num_batched_tokens=7, num_kv_blocks=20) for _ in range(2))
    many.add_request("x", list(range(30)), SamplingParams(max_tokens=8, n=4, seed=3, prompt_logprobs=2))
    one.add_request("x", list(range(30)), SamplingParams(max_tokens=8, seed=3, prompt_logprobs=2))
    many, one = drain(many)["x"], drain(one)["x"]
    assert many.prompt_logprobs == one.prompt_logprobs and len(one.prompt_logprobs) == 30
    assert many.outputs[0] == one.outputs[0]


def test_an_error_ends_its_own_answer_and_is_told() -> None:
    def logits(ids):
        row = np.zeros(VOCAB)
        return np.full(VOCAB, np.nan) if len(ids) > 5 and sum(ids[3:]) % 5 == 0 else row

    settings = {"num_kv_blocks": 100, "async_scheduling": True}
    engine = engine_of(PuppetModel(VOCAB, logits), **settings)
    engine.add_request("x", [1, 2, 3], SamplingParams(max_tokens=6, n=12, seed=5))
    done = drain(engine)["x"]
    reasons = [c.finish_reason for c in done.outputs]
    assert set(reasons) == {"error", "length"} and done.error.code == "numerical_error"
    again = engine_of(PuppetModel(VOCAB, logits), max_num_seqs=2, **settings)
    again.add_request("x", [1, 2, 3], SamplingParams(max_tokens=6, n=12, seed=5))
    other = drain(again)["x"]
    assert other.outputs == done.outputs and other.error.message == done.error.message


def test_greedy_answers_are_equal() -> None:
    engine = engine_of()
    engine.add_request("x", [3, 4, 5], SamplingParams(max_tokens=6, n=3, temperature=0))
    assert len({tuple(c.token_ids) for c in drain(engine)["x"].outputs}) == 1


def test_logits_of_a_prompt_are_those_of_one_request() -> None:
    engine = engine_of()
    with pytest.raises(RequestError, match="n is 2"):
        engine.add_request("x", [1], SamplingParams(n=2), return_logits=True)
    assert not engine.has_unfinished()
