"""How requests of an `AsyncLLM` end before their time, and how it ends itself: aborts, shutdown, being forgotten."""

import asyncio
import gc
import threading

import pytest

from deepinfer import AsyncLLM, SamplingParams, SessionClosedError
from deepinfer.testing import HashModel

SMALL = {"num_kv_blocks": 64, "block_size": 4, "window_page": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
ROOMY = SMALL | {"num_kv_blocks": 16_384}
ENDLESS = SamplingParams(max_tokens=20_000, temperature=0, ignore_eos=True)
"""Takes many seconds, in a `ROOMY` engine: still runs where the event loop had to wait for a core."""

pytestmark = pytest.mark.usefixtures("one_thread")


async def collect(generator):
    return [output async for output in generator]


def test_an_aborted_request_gives_what_there_is() -> None:
    async def go():
        async with AsyncLLM(HashModel(32), **ROOMY) as llm:
            generators = [llm.generate([5], ENDLESS, name) for name in "abc"]
            await asyncio.gather(*map(anext, generators))
            assert await llm.abort("a") == 1 and await llm.abort(["b", "nobody", "a"]) == 1
            first, second = [(await collect(g))[-1] for g in generators[:2]]
            assert (await anext(generators[2])).error is None
            await generators[2].aclose()
            return first, second, await llm.stats()

    first, second, stats = asyncio.run(go())
    for output in (first, second):
        assert output.outputs[0].finish_reason == "abort" and output.finished and output.error is None
        assert 0 < len(output.outputs[0].token_ids) < 20_000
    assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_shutdown_ends_generators_with_a_typed_error() -> None:
    llm = AsyncLLM(HashModel(32), **ROOMY)

    async def go():
        generators = [llm.generate([5], ENDLESS) for _ in range(3)]
        await asyncio.gather(*map(anext, generators))
        await llm.aclose()
        for generator in generators:
            with pytest.raises(SessionClosedError, match="closed"):
                await collect(generator)
        with pytest.raises(SessionClosedError):
            await anext(llm.generate([5]))
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
