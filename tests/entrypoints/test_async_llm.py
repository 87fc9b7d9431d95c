"""`AsyncLLM` gives what `LLM` gives, in the kinds of output that it names, to any number of coroutines."""

import asyncio
import importlib.util
import inspect
import json
import threading

import numpy as np
import pytest

from deepinfer import LLM, AsyncLLM, ChatOutput, SamplingParams, StructuredOutput
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft

SMALL = {"num_kv_blocks": 64, "block_size": 4, "window_page": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
KINDS = ("cumulative", "delta", "final")
HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_slow_consumer_holds_up_nobody_and_gets_one_piece(llms, monkeypatch) -> None:
    _, llm = llms()
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)
    engine, given, taken = llm._thread._engine, [], threading.Event()
    step = engine.step

    def step_behind_the_first_piece():
        assert not given or taken.wait(60)
        outputs = step()
        given.extend(outputs)
        return outputs

    monkeypatch.setattr(engine, "step", step_behind_the_first_piece)

    async def go():
        slow = llm.generate("x", params, output_kind="delta")
        first = await anext(slow)
        taken.set()
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
