"""Scheduling policy, seen from outside: which rows run in which step, and who waits or gives way.

The model writes down what each step asks of it. One step at a time, no stored prefixes: what is planned is what runs.
"""

import random
from itertools import pairwise

import pytest

from deepinfer import SamplingParams
from deepinfer.testing import HashModel

PLAIN = {"async_scheduling": False, "prefix_caching": False}

pytestmark = pytest.mark.usefixtures("one_thread")


class Diary(HashModel):
    """Writes down each step as (first position, rows) of each sequence."""

    def __init__(self):
        super().__init__(64)
        self.steps = []

    def forward(self, batch, caches, tap=None):
        bounds = batch.cu_seqlens_q.tolist()
        self.steps.append([(int(batch.positions[a]), b - a) for a, b in pairwise(bounds)])
        return super().forward(batch, caches, tap)


@pytest.fixture
def bench(make_engine):
    """Makes an engine and a function that adds requests, all of them long."""

    def make(**settings):
        engine = make_engine(Diary(), **(PLAIN | settings))

        def add(name, length, max_tokens=50, **options):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, **options.pop("params", {}))
            engine.add_request(name, [ord(name[0]) % 64] * length, params, **options)

        return engine, add

    return make


def run(engine, count):
    """The next steps of an engine, as its model saw them."""
    steps = engine.model.steps
    del steps[:]
    for _ in range(count):
        engine.step()
    return list(steps)


def running(engine):
    return [r.request_id for r in engine.scheduler.running]


def waiting(engine):
    return [r.request_id for r in engine.scheduler.waiting]


def test_a_prompt_runs_in_chunks_of_the_budget_and_then_decodes(bench) -> None:
    engine, add = bench(max_num_batched_tokens=4)
    add("a", 10)
    assert run(engine, 5) == [[(0, 4)], [(4, 4)], [(8, 2)], [(10, 1)], [(11, 1)]]


def test_decode_rows_come_first_and_prompts_share_the_rest(bench) -> None:
    engine, add = bench(max_num_batched_tokens=8)
    add("a", 2)
    add("b", 3)
    assert run(engine, 1) == [[(0, 2), (0, 3)]]
    add("c", 9)
    add("d", 9)
    assert run(engine, 3) == [
        [(2, 1), (3, 1), (0, 6)],
        [(3, 1), (4, 1), (6, 3), (0, 3)],
        [(4, 1), (5, 1), (9, 1), (3, 5)],
    ]


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_no_step_exceeds_the_budget_and_none_leaves_rows_unused(bench, budget) -> None:
    engine, add = bench(max_num_batched_tokens=budget, max_num_seqs=4)
    lengths = (5, 9, 2, 14)
    for name, length in zip("abcd", lengths, strict=True):
        add(name, length, max_tokens=1)
    sizes = [sum(count for _, count in step) for step in run(engine, -(-sum(lengths) // budget))]
    assert sum(sizes) == sum(lengths) and not engine.scheduler.has_work
    assert set(sizes[:-1]) <= {budget}


def test_a_request_may_ask_for_smaller_chunks_and_single_rows(bench) -> None:
    engine, add = bench()
    add("a", 7, chunk_size=3)
    assert run(engine, 4) == [[(0, 3)], [(3, 3)], [(6, 1)], [(7, 1)]]
    engine, add = bench()
    add("a", 5, decode_from=3)
    assert run(engine, 4) == [[(0, 3)], [(3, 1)], [(4, 1)], [(5, 1)]]


def test_requests_start_in_order_of_arrival_while_places_last(bench) -> None:
    engine, add = bench(max_num_seqs=2)
    for name in "abcd":
        add(name, 2, max_tokens=1 if name == "a" else 50)
    run(engine, 1)
    assert (running(engine), waiting(engine)) == (["b"], ["c", "d"])
    run(engine, 1)
    assert (running(engine), waiting(engine)) == (["b", "c"], ["d"])


def test_a_request_starts_when_all_it_knows_and_one_token_fit(bench) -> None:
    """Five blocks of four: beside two blocks, a prompt of 12 needs four and waits; one of 11 does not."""
    for length, starts in ((12, False), (11, True)):
        engine, add = bench(num_kv_blocks=5, max_num_batched_tokens=64)
        add("a", 7)
        add("b", length)
        run(engine, 1)
        assert running(engine) == (["a", "b"] if starts else ["a"])


def test_a_long_request_is_not_overtaken_for_ever(bench) -> None:
    """It waits at the head, and those behind it with it, until memory is free."""
    engine, add = bench(num_kv_blocks=4, max_num_seqs=4)
    add("a", 4, max_tokens=3)
    add("b", 12, max_tokens=1)
    add("c", 1, max_tokens=1)
    run(engine, 1)
    assert (running(engine), waiting(engine)) == (["a"], ["b", "c"])
    run(engine, 2)
    assert waiting(engine) == ["b", "c"]
    assert run(engine, 1) == [[(0, 12)]]


def test_the_cheapest_younger_request_gives_way(bench) -> None:
    engine, add = bench(num_kv_blocks=6, max_num_batched_tokens=64)
    add("a", 7, max_tokens=9)
    add("b", 7, max_tokens=9)
    add("c", 3, max_tokens=9)
    run(engine, 1)
    assert running(engine) == ["a", "b", "c"] and engine.blocks.num_free_blocks == 1
    run(engine, 1)  # c took the last block; nobody has given way yet
    assert engine.stats().num_preemptions == 0
    run(engine, 1)  # a needs a third one
    assert engine.stats().num_preemptions == 1
    assert (running(engine), waiting(engine)) == (["a", "b"], ["c"])


def test_who_has_nobody_younger_gives_way_itself(bench) -> None:
    engine, add = bench(num_kv_blocks=4, max_num_batched_tokens=64)
    add("a", 8, max_tokens=5)
    add("b", 4, max_tokens=9)
    run(engine, 1)
    assert running(engine) == ["a"]  # 9 tokens and 5 tokens need five blocks
    engine, add = bench(num_kv_blocks=4, max_num_batched_tokens=64)
    add("a", 7, max_tokens=50)
    add("b", 3, max_tokens=50)
    run(engine, 2)
    assert running(engine) == ["a", "b"]
    run(engine, 4)
    assert engine.stats().num_preemptions == 1
    assert (running(engine), waiting(engine)) == (["a"], ["b"])


def test_who_gave_way_comes_back_before_anybody_new(bench) -> None:
    engine, add = bench(num_kv_blocks=4, max_num_batched_tokens=64)
    add("a", 7, max_tokens=6)
    add("b", 3, max_tokens=50)
    run(engine, 6)
    add("c", 1)
    assert waiting(engine) == ["b", "c"]
    while waiting(engine)[:1] == ["b"]:
        assert "c" not in running(engine)
        run(engine, 1)
    assert running(engine)[0] == "b"


def test_a_resumed_request_computes_prompt_and_answer_again(bench) -> None:
    engine, add = bench(num_kv_blocks=4, max_num_batched_tokens=64)
    add("a", 7, max_tokens=8)
    add("b", 3, max_tokens=9)
    steps = run(engine, 16)
    again = [step[0] for step in steps if step[0][0] == 0][1:]
    assert len(again) == 1 and again[0][1] > 3
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("seed", range(5))
def test_the_oldest_advances_in_every_step(bench, seed) -> None:
    """However tight the pool: so there is no livelock."""
    rng = random.Random(seed)
    engine, add = bench(num_kv_blocks=8, block_size=2, window_page=2, max_num_batched_tokens=rng.choice([2, 5, 16]))
    for name in "abcdef":
        add(name, rng.randint(1, 4), max_tokens=rng.randint(8, 12))
    while engine.has_unfinished():
        oldest = (engine.scheduler.running or list(engine.scheduler.waiting))[0]
        before = oldest.num_computed
        run(engine, 1)
        assert oldest.output.finished or oldest.num_computed > before
        assert oldest.output.timings.num_preemptions == 0 or oldest.request_id != "a"
    assert engine.stats().num_preemptions > 0
