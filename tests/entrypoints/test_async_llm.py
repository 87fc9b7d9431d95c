"""`AsyncLLM` gives what `LLM` gives, in the kinds of output that it names, to any number of coroutines."""

import asyncio
import gc
import importlib.util
import inspect
import json
import threading

import numpy as np
import pytest

from deepinfer import LLM, AsyncLLM, ChatOutput, RequestError, SamplingParams, SessionClosedError, StructuredOutput
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft
from deepinfer.testing.workloads import cpu_ops

SMALL = {"num_kv_blocks": 64, "block_size": 4, "window_page": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
KINDS = ("cumulative", "delta", "final")
HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine(tokenizer):
    """Makes engines whose model thinks out loud and then answers, letter by letter, at temperature 0."""

    def make(text="why not</think>0123456789 the end", **settings):
        said = [*tokenizer.encode(text, parse_special=True), tokenizer.eos_token_id]
        starts = {tokenizer.token_to_id("<think>"), tokenizer.bos_token_id}

        def logits(ids):
            row = np.zeros(384)
            begin = max((i for i, t in enumerate(ids) if t in starts), default=0)
            if ids[begin] == tokenizer.bos_token_id:
                begin = 1
            row[said[min(len(ids) - 1 - begin, len(said) - 1)]] = 4.0
            return row

        config = EngineConfig(model="models/tiny", block_size=16, max_model_len=1024, num_kv_blocks=128, **settings)
        return Engine(PuppetModel(384, logits, eos_token_ids=(tokenizer.eos_token_id,)), config, cpu_ops(), tokenizer)

    return make


@pytest.fixture
def llms(engine, tokenizer):
    """Makes an `LLM` and an `AsyncLLM` on equal engines of their own."""
    made = []

    def make(*args, **settings):
        chat = chat_format("DeepseekV41ForCausalLM")
        made.append(LLM.from_engine(engine(*args, **settings), tokenizer=tokenizer, chat=chat))
        made.append(AsyncLLM.from_engine(engine(*args, **settings), tokenizer=tokenizer, chat=chat))
        return made[-2:]

    yield make
    for llm in made:
        getattr(llm, "close", getattr(llm, "shutdown", None))()


async def collect(generator):
    return [output async for output in generator]


def joined(outputs, place=0):
    """The choices of "delta" outputs put together: text, ids and logprobs by index."""
    whole = {}
    for output in outputs:
        for choice in output.outputs:
            text, ids, logprobs = whole.get(choice.index, ("", [], []))
            whole[choice.index] = (text + choice.text, ids + choice.token_ids, logprobs + (choice.logprobs or []))
    return whole


def same(result, wanted):
    """A result's content; what is left out are the clock's marks."""
    names = ("prompt", "prompt_token_ids", "outputs", "prompt_logprobs", "finished", "seed", "num_cached_tokens")
    assert {name: getattr(result, name) for name in names} == {name: getattr(wanted, name) for name in names}
    assert str(result.error) == str(wanted.error)


PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0, logprobs=2),
    SamplingParams(max_tokens=9, n=3, logprobs=1, temperature=2.0),
    SamplingParams(max_tokens=6, prompt_logprobs=1, frequency_penalty=1.5),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
    SamplingParams(max_tokens=30, temperature=0, stop=["345", "the"]),
    SamplingParams(max_tokens=30, temperature=0, stop=["89 t"], include_stop_str_in_output=True, n=2),
    SamplingParams(max_tokens=3, seed=7, min_p=0.01, logit_bias={40: 3.0}),
]
PROMPTS = ["Once upon", "a time", "there", "was a king who", "had", "text", "three", [5, 6, 7]]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_llm_bit_by_bit(llms, kind) -> None:
    sync, llm = llms()
    prompts, params = [*PROMPTS, "", [9999]], [*PARAMS, PARAMS[0], PARAMS[0]]
    wanted = sync.generate(prompts, params)

    async def go():
        generators = [llm.generate(p, q, output_kind=kind) for p, q in zip(prompts, params, strict=True)]
        return await asyncio.gather(*map(collect, generators))

    for outputs, want in zip(asyncio.run(go()), wanted, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind != "delta":
            same(outputs[-1], want)
        assert kind != "final" or len(outputs) == 1
        if kind != "final":
            assert "".join(output.delta for output in outputs) == "".join(o.text for o in want.outputs[:1])
        assert joined(outputs if kind == "delta" else outputs[-1:]) == {
            choice.index: (choice.text, choice.token_ids, choice.logprobs or []) for choice in want.outputs
        }
        last = {c.index: (c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs if c.finish_reason}
        assert last == {c.index: (c.finish_reason, c.stop_reason) for c in want.outputs}


def test_speculation_and_little_memory_change_nothing() -> None:
    """Several tokens a step, drafts that are wrong, and preemption."""
    settings = SMALL | {"num_kv_blocks": 12, "async_scheduling": True}
    prompts = [[i % 32, 3, i * 5 % 32] for i in range(10)]
    params = [SamplingParams(max_tokens=10 + i % 7, logprobs=1, n=1 + i % 2) for i in range(10)]

    def draft(ids):
        return [(ids[-1] * 7 + k) % 32 for k in range(4)], [0.9] * 4

    with LLM(HashModel(32), **SMALL) as sync:
        wanted = sync.generate(prompts, params)

    async def go():
        async with AsyncLLM(HashModel(32), draft=ScriptedDraft(draft, 4), **settings) as llm:
            generators = [llm.generate(p, q, output_kind="delta") for p, q in zip(prompts, params, strict=True)]
            results = await asyncio.gather(*map(collect, generators))
            return results, await llm.stats()

    results, stats = asyncio.run(go())
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
    for outputs, want in zip(results, wanted, strict=True):
        assert joined(outputs) == {c.index: (c.text, c.token_ids, c.logprobs or []) for c in want.outputs}


def test_outputs_belong_to_the_caller(llms) -> None:
    _, llm = llms()

    async def go():
        outputs = []
        async for output in llm.generate("x", SamplingParams(max_tokens=5, temperature=0, logprobs=1)):
            outputs.append((output, list(output.outputs[0].token_ids)))
            output.outputs[0].token_ids.append(-7)
            output.outputs[0].logprobs.clear()
        return outputs

    outputs = asyncio.run(go())
    assert [ids for _, ids in outputs] == [outputs[-1][1][: len(ids)] for _, ids in outputs]
    assert len(outputs[-1][1]) == 5 and all(output.outputs[0].token_ids[-1] == -7 for output, _ in outputs)


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_what_a_caller_does_to_the_prompt_of_an_output_does_not_reach_the_engine(llms, kind) -> None:
    sync, llm = llms()
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=1)
    want = sync.generate("Once upon", params)[0]

    async def go():
        given, ids = [], []
        async for output in llm.generate("Once upon", params, output_kind=kind):
            ids = output.outputs[0].token_ids if kind == "cumulative" else ids + output.outputs[0].token_ids
            given.append(list(output.prompt_logprobs or []))
            (output.prompt_logprobs or []).clear()
            output.prompt_token_ids.clear()
        return given, ids

    given, ids = asyncio.run(go())
    assert ids == want.outputs[0].token_ids
    scores = [entries for entries in given if entries]
    assert scores == [want.prompt_logprobs] * (1 if kind == "delta" else len(given))


def test_a_slow_consumer_holds_up_nobody_and_gets_one_piece(llms) -> None:
    _, llm = llms()
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)

    async def go():
        slow = llm.generate("x", params, output_kind="delta")
        first = await anext(slow)
        others = await asyncio.gather(*(collect(llm.generate("x", params, output_kind="final")) for _ in range(5)))
        while (await llm.stats()).num_running:
            await asyncio.sleep(0)
        return [first, *(await collect(slow))], others

    pieces, others = asyncio.run(go())
    assert len(pieces) == 2  # the first step's, and all the rest as one
    ((text, ids, logprobs),) = joined(pieces).values()
    assert len(ids) == len(logprobs) == 20 and text == others[0][0].outputs[0].text
    assert pieces[0].outputs[0].token_ids == ids[: len(pieces[0].outputs[0].token_ids)]


def test_the_event_loop_runs_while_a_step_does() -> None:
    entered, gate = threading.Event(), threading.Event()

    def logits(ids):
        entered.set()
        assert gate.wait(60)
        return np.arange(8)

    async def go():
        async with AsyncLLM(PuppetModel(8, logits), **SMALL) as llm:
            task = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=2, temperature=0))))
            await asyncio.to_thread(entered.wait, 60)
            # The engine is inside a step that cannot end before this coroutine goes on.
            late = asyncio.create_task(collect(llm.generate([2], SamplingParams(max_tokens=1, temperature=0))))
            gone = asyncio.create_task(collect(llm.generate([3], SamplingParams(max_tokens=9))))
            aborted = asyncio.create_task(llm.abort("no such"))
            for _ in range(50):
                await asyncio.sleep(0)
            gone.cancel()
            assert not task.done() and not late.done() and not aborted.done()
            gate.set()
            assert (await task)[-1].outputs[0].token_ids == [7, 7]
            assert (await late)[-1].outputs[0].token_ids == [7]
            assert await aborted == 0
            with pytest.raises(asyncio.CancelledError):
                await gone

    asyncio.run(go())


def test_two_hundred_requests_at_once_and_two_engines() -> None:
    prompts = [[i % 32, i // 32, 5] for i in range(200)]
    params = [SamplingParams(max_tokens=1 + i % 9, seed=i) for i in range(200)]
    with LLM(HashModel(32), **SMALL) as sync:
        wanted = [r.outputs[0].token_ids for r in sync.generate(prompts, params)]

    async def go():
        async with AsyncLLM(HashModel(32), **SMALL) as one, AsyncLLM(HashModel(32), **SMALL) as two:
            generators = [
                (one, two)[i % 2].generate(p, q, output_kind=KINDS[i % 3])
                for i, (p, q) in enumerate(zip(prompts, params, strict=True))
            ]
            results = await asyncio.gather(*map(collect, generators))
            for llm in (one, two):
                stats = await llm.stats()
                assert (stats.num_finished, stats.num_free_blocks) == (100, stats.num_blocks)
        return [joined(r if i % 3 == 1 else r[-1:])[0][1] for i, r in enumerate(results)]

    assert asyncio.run(go()) == wanted


def test_event_loops_of_several_threads_may_share_one() -> None:
    with LLM(HashModel(32), **SMALL) as sync:
        wanted = [sync.generate([[i]], SamplingParams(seed=i))[0].outputs[0].token_ids for i in range(4)]
    llm = AsyncLLM(HashModel(32), **SMALL)
    got = {}

    def work(i):
        got[i] = asyncio.run(collect(llm.generate([i], SamplingParams(seed=i))))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    llm.shutdown()
    assert [got[i] for i in range(4)] == wanted


# Conversations


DSML = (
    "hm</think>On it.\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get">\n<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "options", "params"),
    [
        ("why not</think>0123 the end", {}, {}),
        ("plain</answer>", {"thinking": False}, {}),
        (DSML, {"tools": [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]}, {}),
        ("why not</think>0123 the end", {}, {"stop": ["3 t"]}),
        ("why not</think>0123 the end", {}, {"stop": ["y n"], "include_stop_str_in_output": True}),
        ("why not</think>0123 the end", {}, {"max_tokens": 3}),
        ("why not</think>0123 the end", {}, {"detokenize": False}),
        ("why not</think>0123 the end", {}, {"skip_special_tokens": False, "stop": ["the"]}),
        ("né, 中文🙂</think>é🙂!", {}, {"max_tokens": 16}),
    ],
)
def test_a_conversation_is_taken_apart_as_it_grows(llms, kind, text, options, params) -> None:
    sync, llm = llms(text)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 400, "n": 2} | params)
    (want,) = sync.chat(HI, params, **options)
    outputs = asyncio.run(collect(llm.chat(HI, params, output_kind=kind, **options)))
    assert all(isinstance(output, ChatOutput) and len(output.messages) == len(output.outputs) for output in outputs)
    if kind != "delta":
        assert outputs[-1].messages == want.messages
        same(outputs[-1], want)
    for place, message in enumerate(want.messages):
        told = [(c, m) for o in outputs for c, m in zip(o.outputs, o.messages, strict=True) if c.index == place]
        if kind == "delta":
            assert "".join(m.content for _, m in told) == message.content
            assert "".join(m.reasoning_content or "" for _, m in told) == (message.reasoning_content or "")
            assert sum((m.tool_calls for _, m in told), ()) == message.tool_calls
        if kind == "cumulative":
            for _, m in told:  # what was shown is never taken back
                assert message.content.startswith(m.content)
                assert (message.reasoning_content or "").startswith(m.reasoning_content or "")
        last = next(m for c, m in told if c.finish_reason is not None)
        assert (last.note, last.num_reasoning_tokens) == (message.note, message.num_reasoning_tokens)


def test_chat_takes_what_llm_takes() -> None:
    for name in ("generate", "chat"):
        wanted = inspect.signature(getattr(LLM, name)).parameters.keys() - {"prompts", "progress", "use_tqdm"}
        assert wanted <= inspect.signature(getattr(AsyncLLM, name)).parameters.keys()
    assert inspect.signature(AsyncLLM).parameters == inspect.signature(LLM).parameters


def test_a_conversation_that_cannot_be_rendered_is_its_own_error(llms) -> None:
    _, llm = llms()
    (output,) = asyncio.run(collect(llm.chat([{"role": "nobody", "content": "x"}], request_id="mine")))
    assert output.error.code == "invalid_chat" and output.messages == [] and output.finished
    assert output.request_id == "mine"


# What is refused


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
    params = SamplingParams(max_tokens=6, temperature=0)

    async def go():
        first = llm.generate("x", params, "a")
        start = await anext(first)
        (second,) = await collect(llm.generate("x", params, "a"))
        rest = await collect(first)
        (third,) = await collect(llm.generate("x", params, "a", output_kind="final"))
        return start, second, rest, third

    start, second, rest, third = asyncio.run(go())
    assert second.error.code == "duplicate_request_id" and second.request_id == "a"
    assert start.error is None and rest[-1].outputs == third.outputs and len(third.outputs[0].token_ids) == 6


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


# Ends


def test_an_aborted_request_gives_what_there_is(llms) -> None:
    _, llm = llms()
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)

    async def go():
        generators = [llm.generate("x", params, name) for name in "abc"]
        await asyncio.gather(*map(anext, generators))
        assert await llm.abort("a") == 1 and await llm.abort(["b", "nobody", "a"]) == 1
        first, second = [(await collect(g))[-1] for g in generators[:2]]
        assert (await anext(generators[2])).error is None
        await generators[2].aclose()
        return first, second, await llm.stats()

    first, second, stats = asyncio.run(go())
    for output in (first, second):
        assert output.outputs[0].finish_reason == "abort" and output.finished and output.error is None
        assert 0 < len(output.outputs[0].token_ids) < 1000
    assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_shutdown_ends_generators_with_a_typed_error(llms) -> None:
    _, llm = llms()
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)

    async def go():
        generators = [llm.generate("x", params) for _ in range(3)]
        await asyncio.gather(*map(anext, generators))
        await llm.aclose()
        for generator in generators:
            with pytest.raises(SessionClosedError, match="closed"):
                await collect(generator)
        with pytest.raises(SessionClosedError):
            await anext(llm.generate("x"))
        with pytest.raises(SessionClosedError):
            await llm.abort("x")

    asyncio.run(go())
    llm.shutdown()
    assert not llm.is_running


def test_shutdown_from_the_event_loop_does_not_wait_for_it(llms) -> None:
    _, llm = llms()

    async def go():
        task = asyncio.create_task(collect(llm.generate("x", SamplingParams(max_tokens=900, ignore_eos=True))))
        await asyncio.sleep(0)
        llm.shutdown()
        with pytest.raises(SessionClosedError):
            await task

    asyncio.run(go())


def test_a_forgotten_one_ends_its_thread() -> None:
    def count_threads():
        return sum(thread.name == "deepinfer-engine" for thread in threading.enumerate())

    before = count_threads()
    llm = AsyncLLM(HashModel(32), **SMALL)
    assert asyncio.run(collect(llm.generate([1])))[-1].finished and count_threads() == before + 1
    del llm
    gc.collect()
    assert count_threads() == before


# A checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny(folder, seed=1, quant=False)
    return folder


def test_a_checkpoint_says_the_same_either_way(tiny) -> None:
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "seed": 5}
    prompts = [f"prompt number {i}" for i in range(9)]
    params = SamplingParams(max_tokens=7, logprobs=1)
    with LLM(tiny, **settings) as sync:
        wanted = sync.generate(prompts, params)
        (chat,) = sync.chat(HI, SamplingParams(max_tokens=9, seed=1))

    async def go():
        async with AsyncLLM(tiny, **settings) as llm:
            results = await asyncio.gather(
                *(collect(llm.generate(p, params, output_kind="final")) for p in prompts),
                collect(llm.chat(HI, SamplingParams(max_tokens=9, seed=1))),
            )
            return [outputs[-1] for outputs in results]

    *results, message = asyncio.run(go())
    for result, want in zip(results, wanted, strict=True):
        same(result, want)
    assert (message.content, message.reasoning_content) == (chat.content, chat.reasoning_content)


def test_a_form_that_is_asked_for_holds_while_it_grows(tiny) -> None:
    pytest.importorskip("xgrammar")
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema | {"additionalProperties": False}}}
    params = SamplingParams(max_tokens=60, seed=3)
    with LLM(tiny, **settings) as sync:
        (want,) = sync.chat(HI, params, response_format=form, thinking=False)

    async def go():
        async with AsyncLLM(tiny, **settings) as llm:
            options = {"response_format": form, "thinking": False}
            gone = asyncio.create_task(collect(llm.chat(HI, params, **options)))
            bad = llm.chat(HI, params, response_format={**form, "json_schema": {"name": "f", "schema": {"type": "x"}}})
            outputs = await collect(llm.chat(HI, params, output_kind="delta", **options))
            gone.cancel()
            (refused,) = await collect(bad)
            stats = await llm.stats()
            return outputs, refused, stats

    outputs, refused, stats = asyncio.run(go())
    assert "".join(output.messages[0].content for output in outputs) == want.content
    assert json.loads(want.content)["a"] in ("x", "y")
    assert refused.error.code == "invalid_structured_output"
    assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_the_example_runs(tiny, pytestconfig, capsys) -> None:
    path = pytestconfig.rootpath / "examples" / "async_streaming.py"
    spec = importlib.util.spec_from_file_location("async_streaming", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    asyncio.run(example.main(str(tiny)))
    said = capsys.readouterr().out.splitlines()
    assert {line.split(":")[0] for line in said} == {"story", "empty", "chat", "patience"}
    assert "empty: empty_prompt: the prompt is empty; send at least one character" in said
    assert sum(line.endswith(" length") or line.endswith(" stop") for line in said if line.startswith("story")) == 1


def test_schema_is_read_before_the_engine_has_the_request(llms, monkeypatch) -> None:
    """A large schema takes a while to become a grammar: that must not come between two steps."""
    from deepinfer.core.grammar import service

    where = []
    read = service.source_of

    def watched(*args):
        where.append(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr(service, "source_of", watched)
    _, llm = llms("no</think>12")

    async def ask():
        async with llm:
            params = SamplingParams(max_tokens=8, structured_output=StructuredOutput(json_schema={"const": 12}))
            return [[out async for out in llm.generate([5, 6], params)][-1] for _ in range(2)]

    first, second = asyncio.run(ask())
    assert first.error is None and second.error is None
    assert len(where) == 1, "the second request's form is known"
    assert "deepinfer-engine" not in where[0]
