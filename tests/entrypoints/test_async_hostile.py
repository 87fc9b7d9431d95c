"""Consumers that vanish, engines that fail, loops that close: nobody else notices, and nothing is left behind."""

import asyncio
import gc
import logging
import random
import threading

import numpy as np
import pytest

from deepinfer import LLM, AsyncLLM, EngineDeadError, SamplingParams, SessionClosedError
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft

SMALL = {"num_kv_blocks": 64, "block_size": 4, "window_page": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
ROOMY = SMALL | {"num_kv_blocks": 16_384}
LONG = SamplingParams(max_tokens=200, temperature=0)
ENDLESS = SamplingParams(max_tokens=20_000, temperature=0)
"""Takes many seconds, in a `ROOMY` engine: still runs where the event loop had to wait for a core."""
TWO = SamplingParams(max_tokens=2, temperature=0)

pytestmark = pytest.mark.usefixtures("one_thread")


async def collect(generator):
    return [output async for output in generator]


async def emptied(llm):
    """The counters after whatever was cancelled before this call; nothing is held."""
    stats = await llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    return stats


def seven(ids):
    """Logits that are best for 7."""
    return np.arange(8)


class Gated:
    """Logits that wait for leave, one row at a time."""

    def __init__(self):
        self.entered, self.leave = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, ids):
        self.entered.release()
        assert self.leave.acquire(timeout=60)
        return seven(ids)


class Failing(PuppetModel):
    """A puppet whose forward raises when told to."""

    def __init__(self):
        super().__init__(8, seven)
        self.failure = None

    def forward(self, *args):
        if self.failure is not None:
            raise self.failure
        return super().forward(*args)


class Unhappy(Exception):
    pass


# Consumers


async def consume(llm, rng, place, prompt, params):
    """A consumer of some character; its tokens if it stays to the end, None if it does not."""
    name = f"{place % 7}-{place}" if rng.random() < 0.5 else None
    kind = rng.choice(("cumulative", "delta", "final"))
    character = rng.choice(("stays", "stays", "breaks", "raises", "closes", "leaves", "aborts"))
    patience = rng.randrange(6)
    generator = llm.generate(prompt, params, name, output_kind=kind)
    ids = []
    try:
        async for output in generator:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            ids = ids if kind == "delta" else []
            ids += [token for choice in output.outputs for token in choice.token_ids]
            patience -= 1
            if patience < 0:
                if character == "breaks":
                    break
                if character == "raises":
                    raise Unhappy
                if character == "closes":
                    await generator.aclose()
                if character == "aborts" and name is not None:
                    await llm.abort(name)
                if character == "leaves":
                    return None
            if output.finished and output.outputs[0].finish_reason != "abort":
                return ids
    except Unhappy:
        return None
    return None


@pytest.mark.parametrize("seed", range(16))
def test_whoever_stays_gets_what_is_theirs_whoever_else_goes(seed) -> None:
    rng = random.Random(seed)
    num = 24
    prompts = [[rng.randrange(32) for _ in range(rng.randrange(1, 12))] for _ in range(num)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 25), seed=i) for i in range(num)]
    with LLM(HashModel(32), **SMALL) as sync:
        wanted = [result.outputs[0].token_ids for result in sync.generate(prompts, params)]
    settings = SMALL | {"num_kv_blocks": rng.choice((10, 16, 64)), "async_scheduling": rng.random() < 0.5}
    draft = ScriptedDraft(lambda ids: ([(ids[-1] * 7 + k) % 32 for k in range(4)], [0.9] * 4), 4)

    async def go():
        async with AsyncLLM(HashModel(32), draft=draft if rng.random() < 0.5 else None, **settings) as llm:
            tasks = [
                asyncio.create_task(consume(llm, random.Random(f"{seed} {i}"), i, prompt, p))
                for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
            ]
            for task in tasks:
                if rng.random() < 0.3:
                    for _ in range(rng.randrange(20)):
                        await asyncio.sleep(0)
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            gc.collect()  # generators that were left are closed by the loop
            for _ in range(3):
                await asyncio.sleep(0)
            await emptied(llm)
            (again,) = await collect(llm.generate([5], SamplingParams(max_tokens=3, seed=1), output_kind="final"))
            return results, again

    results, again = asyncio.run(go())
    assert again.error is None and len(again.outputs[0].token_ids) == 3
    for result, want in zip(results, wanted, strict=True):
        assert result is None or isinstance(result, asyncio.CancelledError) or result == want


@pytest.mark.parametrize("how", ["cancel", "timeout", "raise", "aclose", "forget"])
def test_an_id_is_free_again_at_once(how) -> None:
    """The result of the aborted request must not reach the one that took its id."""

    async def go():
        async with AsyncLLM(PuppetModel(8, seven), **ROOMY) as llm:
            for _ in range(20):
                generator = llm.generate([1], ENDLESS, "a", output_kind="delta")
                await anext(generator)
                if how == "cancel":
                    task = asyncio.create_task(collect(generator))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                elif how == "timeout":
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await collect(generator)
                elif how == "raise":
                    with pytest.raises(Unhappy):
                        await generator.athrow(Unhappy())
                elif how == "aclose":
                    await generator.aclose()
                else:
                    del generator
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                (whole,) = await collect(llm.generate([2], SamplingParams(max_tokens=3), "a", output_kind="final"))
                assert whole.error is None and whole.outputs[0].finish_reason == "length"
            await emptied(llm)

    asyncio.run(go())


@pytest.mark.parametrize("old_stays", [True, False])
def test_an_abort_and_a_new_request_of_its_id_between_two_steps(old_stays) -> None:
    """Nor must it be aborted when the consumer of the first goes, whose result is on the way."""
    gated = Gated()

    async def go():
        async with AsyncLLM(PuppetModel(8, gated), **SMALL) as llm:
            old = asyncio.create_task(collect(llm.generate([1], LONG, "a")))
            await asyncio.to_thread(gated.entered.acquire)
            aborted = asyncio.create_task(llm.abort("a"))
            await asyncio.sleep(0)
            new = asyncio.create_task(collect(llm.generate([2], TWO, "a")))
            while llm._thread._commands.qsize() < 2:  # to abort the old, and to add the new
                await asyncio.sleep(0)
            if not old_stays:
                old.cancel()
            never_queued = asyncio.create_task(collect(llm.generate([3], LONG, "b")))
            await asyncio.sleep(0)
            never_queued.cancel()
            for _ in range(10):
                gated.leave.release()
            assert await aborted == 1
            if old_stays:
                assert (await old)[-1].outputs[0].finish_reason == "abort"
            assert (await new)[-1].outputs[0].token_ids == [7, 7] and (await new)[-1].error is None
            await emptied(llm)

    asyncio.run(go())


def test_a_request_cancelled_before_it_is_queued_never_runs() -> None:
    async def go():
        async with AsyncLLM(PuppetModel(8, seven), **SMALL) as llm:
            tasks = [asyncio.create_task(collect(llm.generate([1], LONG))) for _ in range(9)]
            for i, task in enumerate(tasks):
                for _ in range(i // 3):
                    await asyncio.sleep(0)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            never_begun = llm.generate([1], LONG)
            await never_begun.aclose()
            stats = await emptied(llm)
            assert stats.num_finished <= 9

    asyncio.run(go())


def test_a_closed_event_loop_frees_its_requests() -> None:
    gated = Gated()
    llm = AsyncLLM(PuppetModel(8, gated), **SMALL)
    loop = asyncio.new_event_loop()
    generators = [llm.generate([i], SamplingParams(max_tokens=150, temperature=0)) for i in range(2)]
    for _ in range(20):
        gated.leave.release()

    async def begin():
        await asyncio.gather(*map(anext, generators))

    loop.run_until_complete(begin())
    loop.close()  # while both run, and nobody has closed the generators
    for _ in range(20):  # far fewer rows than they would need
        gated.leave.release()

    async def check():
        while (await llm.stats()).num_running:  # noticed with the first step's news
            await asyncio.sleep(0.01)
        await emptied(llm)
        gated.leave.release(100)
        return (await collect(llm.generate([3], TWO)))[-1].outputs[0].token_ids

    assert asyncio.run(check()) == [7, 7]
    llm.shutdown()


def test_a_loop_that_closes_while_its_requests_wait_frees_them_too() -> None:
    llm = AsyncLLM(PuppetModel(8, seven), **(SMALL | {"max_num_seqs": 1}))

    async def leave_some():
        generators = [llm.generate([i], LONG) for i in range(6)]
        tasks = [asyncio.create_task(collect(g)) for g in generators]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(leave_some())  # cancels the rest

    async def check():
        await emptied(llm)

    asyncio.run(check())
    llm.shutdown()


# The engine


def test_a_row_that_is_no_number_ends_its_own_request() -> None:
    def logits(ids):
        return np.full(8, np.nan) if ids[0] == 3 and len(ids) == 4 else seven(ids)

    async def go():
        async with AsyncLLM(PuppetModel(8, logits), **SMALL) as llm:
            generators = [llm.generate([i], SamplingParams(max_tokens=6), output_kind="delta") for i in (2, 3, 4)]
            results = await asyncio.gather(*map(collect, generators))
            await emptied(llm)
            return results

    results = asyncio.run(go())
    assert [r[-1].error.code if r[-1].error else None for r in results] == [None, "numerical_error", None]
    assert [sum(len(o.outputs[0].token_ids) for o in r) for r in results] == [6, 3, 6]
    assert results[1][-1].outputs[0].finish_reason == "error"


def test_a_step_that_fails_ends_all_generators_and_the_next_request_runs(caplog) -> None:
    model = Failing()

    async def go():
        async with AsyncLLM(model, **ROOMY) as llm:
            generators = [llm.generate([i], ENDLESS, str(i)) for i in range(3)]
            await asyncio.gather(*map(anext, generators))
            model.failure = RuntimeError("the device fell off")
            results = await asyncio.gather(*map(collect, generators))
            model.failure = None
            assert llm.is_running
            (after,) = await collect(llm.generate([1], TWO, "0", output_kind="final"))
            await emptied(llm)
            return [r[-1] for r in results], after

    with caplog.at_level(logging.ERROR):
        results, after = asyncio.run(go())
    for output in results:
        assert output.error.code == "engine_error" and "RuntimeError: the device fell off" in output.error.message
        assert output.outputs[0].finish_reason == "error" and output.finished
    assert after.error is None and after.outputs[0].token_ids == [7, 7]
    assert "the device fell off" in caplog.text  # with its traceback


def test_an_engine_that_cannot_go_on_says_so_to_everybody(monkeypatch, caplog) -> None:
    gated = Gated()

    async def go():
        llm = AsyncLLM(PuppetModel(8, gated), **SMALL)
        generators = [llm.generate([i], LONG, output_kind="delta") for i in range(3)]
        tasks = [asyncio.create_task(collect(g)) for g in generators]
        await asyncio.to_thread(gated.entered.acquire)
        late = asyncio.create_task(collect(llm.generate([5])))
        asked = asyncio.create_task(llm.abort("x"))
        for _ in range(50):
            await asyncio.sleep(0)

        def broken():
            raise MemoryError("none left")

        monkeypatch.setattr(llm._thread._engine, "step", broken)
        gated.leave.release(100)
        results = await asyncio.gather(*tasks, late, asked, return_exceptions=True)
        assert not llm.is_running
        for call in (lambda: collect(llm.generate([1])), llm.stats, lambda: llm.abort("a")):
            with pytest.raises(EngineDeadError, match="MemoryError: none left") as caught:
                await call()
            assert isinstance(caught.value.__cause__, MemoryError)
        llm.shutdown()
        return results

    with caplog.at_level(logging.ERROR):
        results = asyncio.run(go())
    assert results[-1] == 0 or isinstance(results[-1], EngineDeadError)
    assert all(isinstance(result, EngineDeadError) for result in results[:-1])
    assert len({id(result) for result in results[:-1]}) == len(results) - 1
    assert "the engine has failed" in caplog.text


def test_what_a_caller_gets_wrong_is_raised_to_that_caller_alone() -> None:
    """A prompt whose ids are no ids is found by the reader; what only the engine can find ends nobody else."""

    class Odd(SamplingParams):
        def validate(self, vocab_size: int) -> None:
            raise ZeroDivisionError("odd")

    async def go():
        async with AsyncLLM(PuppetModel(8, seven), **SMALL) as llm:
            good = asyncio.create_task(collect(llm.generate([1], SamplingParams(max_tokens=5, temperature=0))))
            with pytest.raises(ZeroDivisionError, match="odd"):
                await collect(llm.generate([1], Odd()))
            assert (await good)[-1].outputs[0].token_ids == [7] * 5
            await emptied(llm)

    asyncio.run(go())


def test_shutdown_with_everything_live(monkeypatch) -> None:
    """Requests that run, that wait, that are not queued yet, and commands behind the last one."""
    gated = Gated()

    async def go():
        llm = AsyncLLM(PuppetModel(8, gated), **(SMALL | {"max_num_seqs": 2}))
        tasks = [asyncio.create_task(collect(llm.generate([i], LONG))) for i in range(5)]
        await asyncio.to_thread(gated.entered.acquire)
        post, told = llm._thread._post, threading.Event()

        def watched(command):
            post(command)
            if command.run == llm._thread._begin_to_stop:
                told.set()

        monkeypatch.setattr(llm._thread, "_post", watched)
        stopped = asyncio.create_task(llm.aclose())
        twice = asyncio.create_task(llm.aclose())
        while not told.is_set():
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(collect(llm.generate([i], LONG))) for i in range(3)]
        aborts = [asyncio.create_task(llm.abort("0")) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        tasks[0].cancel()
        gated.leave.release(1000)
        await stopped
        await twice
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, SessionClosedError) for result in results[1:])
        for abort in await asyncio.gather(*aborts, return_exceptions=True):
            assert isinstance(abort, SessionClosedError) or abort in (0, 1)
        engine = llm._thread._engine
        assert engine.blocks.num_free_blocks == engine.blocks.pool.num_blocks

    asyncio.run(go())


def test_a_body_that_raises_inside_async_with_closes_all() -> None:
    async def go():
        async with AsyncLLM(PuppetModel(8, seven), **SMALL) as llm:
            async for _ in llm.generate([1], LONG):
                raise Unhappy

    before = threading.active_count()
    with pytest.raises(Unhappy):
        asyncio.run(go())
    assert threading.active_count() <= before
