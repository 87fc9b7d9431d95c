"""What an `AsyncLLM` refuses, and what names and salts of requests mean to it."""

import asyncio

import pytest

from deepinfer import RequestError, SamplingParams

HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.usefixtures("one_thread")


async def collect(generator):
    return [output async for output in generator]


def test_faults_of_a_request_are_its_last_output(llms) -> None:
    _, llm = llms()

    async def go():
        bad = [
            llm.generate(""),
            llm.generate([9999], request_id="far"),
            llm.generate("x", SamplingParams(logit_bias={384: 1.0})),
            llm.generate("x", cache_salt=5),
            llm.generate({"prompt": "x", "cache_salt": ["a"]}),
            llm.generate({"prompt": "x", "prompt_token_ids": [1]}),
        ]
        return await asyncio.gather(*map(collect, bad))

    results = asyncio.run(go())
    assert [len(outputs) for outputs in results] == [1] * 6
    assert [outputs[0].error.code for outputs in results] == [
        "empty_prompt",
        "token_out_of_range",
        "invalid_parameter",
        "invalid_parameter",
        "invalid_parameter",
        "invalid_prompt",
    ]
    assert all(isinstance(outputs[0].error, RequestError) and outputs[0].finished for outputs in results)
    assert [outputs[0].request_id for outputs in results[:3]] == ["0", "far", "2"]


def test_arguments_of_unknown_kinds_are_refused_at_the_call(llms) -> None:
    _, llm = llms()
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
        llm.generate("x", {"max_tokens": 3})
    with pytest.raises(TypeError, match="request_id must be a string, got int"):
        llm.generate("x", request_id=3)
    with pytest.raises(ValueError, match="output_kind must be one of 'cumulative', 'delta', 'final', got 'deltas'"):
        llm.chat(HI, output_kind="deltas")


def test_a_live_id_is_refused_and_the_first_goes_on(llms) -> None:  # KV-5
    _, llm = llms()
    # long enough to be live until the second one is refused, however late this task is woken
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

    async def go():
        first = llm.generate("x", params, "a")
        start = await anext(first)
        (second,) = await collect(llm.generate("x", params, "a"))
        rest = await collect(first)
        (third,) = await collect(llm.generate("x", params, "a", output_kind="final"))
        return start, second, rest, third

    start, second, rest, third = asyncio.run(go())
    assert second.error.code == "duplicate_request_id" and second.request_id == "a"
    assert start.error is None and rest[-1].outputs == third.outputs and len(third.outputs[0].token_ids) == 400


def test_numbers_given_as_ids_do_not_meet_ids_that_were_made_up(llms) -> None:
    _, llm = llms()

    async def go():
        # long enough to be live until the other one has ended, however late this task is woken
        mine = llm.generate("x", SamplingParams(max_tokens=900, ignore_eos=True), "1")
        await anext(mine)
        made_up = await collect(llm.generate("y"))
        assert await llm.abort("1") == 1
        return made_up, await collect(mine)

    made_up, mine = asyncio.run(go())
    assert made_up[-1].error is None and mine[-1].error is None
    assert made_up[-1].request_id != "1" == mine[-1].request_id


def test_salts_keep_prefixes_apart(llms) -> None:
    sync, llm = llms()
    prompt = list(range(40, 90))
    greedy = SamplingParams(max_tokens=1, temperature=0)
    salted = {"prompt_token_ids": prompt, "cache_salt": "b"}

    async def go():
        asks = [(prompt, None), (prompt, "a"), (salted, "a"), (prompt, "a"), (prompt, "b"), (prompt, None)]
        return [(await collect(llm.generate(p, greedy, cache_salt=s)))[-1].num_cached_tokens for p, s in asks]

    assert asyncio.run(go()) == [0, 0, 0, 48, 48, 48]
    results = [sync.generate([prompt], greedy, cache_salt=salt)[0] for salt in ("a", "b", "a")]
    assert [result.num_cached_tokens for result in results] == [0, 0, 48]
    assert sync.generate(salted, greedy)[0].num_cached_tokens == 48
    assert [p.num_cached_tokens for p in sync.stream(prompt, greedy, cache_salt="c")] == [0]
    first, again, other = (sync.chat([HI[0] | {"content": "Hi" * 40}], greedy, cache_salt=s)[0] for s in "xxy")
    assert (first.num_cached_tokens, again.num_cached_tokens > 0, other.num_cached_tokens) == (0, True, 0)
