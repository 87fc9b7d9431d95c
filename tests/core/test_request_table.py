"""Rows of running requests: who owns one, what is in it, and how an old owner is told from a new one."""

import numpy as np
import pytest

from deepinfer import SamplingParams
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.request import Request
from deepinfer.core.request_table import RequestTable
from deepinfer.core.shapers import FixedShape

TRAITS = (
    "waits",
    "is_shaped",
    "follows_form",
    "wants_logprobs",
    "scores_prompt",
    "is_irregular",
    "is_recorded_by_token",
    "shares_output",
)


@pytest.fixture
def table():
    return RequestTable(3, 64, eos_token_ids=(1, 99))


@pytest.fixture
def blocks():
    return KVBlockManager(16, 4, num_slots=3)


def ids(*values):
    return np.array(values, dtype=np.int32)


def request(length=5, max_len=100, **params):
    return Request.new("r", list(range(length)), SamplingParams(**({"max_tokens": 7} | params)), 9, max_len, None)


def run(table, blocks, one, *stored):
    one.run(table, blocks, blocks.open(one.token_ids), *stored)
    return one.seq


def test_counters_are_the_requests_own_while_it_runs(table, blocks) -> None:
    one = request()
    assert (one.num_computed, one.planned_computed, one.planned_tokens, one.num_drafts) == (0, 0, 5, 0)
    seq = run(table, blocks, one, 4, 2)
    assert (one.num_computed, one.planned_computed, table.replay_end[seq], one.output.num_cached_tokens) == (2, 2, 4, 2)
    assert (table.num_prompt[seq], table.max_tokens[seq], table.num_tokens[seq], table.draw[seq]) == (5, 12, 5, -1)
    table.planned_tokens[seq] += 3
    table.num_drafts[seq] = 2
    assert (one.planned_tokens, one.num_drafts, one.num_planned_outputs) == (8, 2, 3)
    one.give_way()
    assert (one.seq, one.num_computed, one.planned_tokens, one.num_drafts) == (0, 0, 5, 0)
    assert one.output.timings.num_preemptions == 1


@pytest.mark.parametrize(("max_len", "most"), [(100, 12), (9, 9), (5, 5)])
def test_a_request_ends_at_its_own_limit_or_the_engines(table, blocks, max_len, most) -> None:
    seq = run(table, blocks, request(max_len=max_len), 0)
    assert (table.max_tokens[seq], table.may_generate[seq]) == (most, most > 5)


def test_an_old_owner_is_told_from_a_new_one(table, blocks) -> None:
    one = request()
    seq = run(table, blocks, one, 0)
    generation = int(table.generation[seq])
    assert table.is_current(one, generation)
    one.stop()
    assert not table.is_current(one, generation) and table.generation[seq] != generation
    blocks.free(seq)
    other = request()
    assert run(table, blocks, other, 0) == seq
    assert not table.is_current(other, generation)


def test_traits_follow_from_what_was_asked(table, blocks) -> None:
    def traits(one):
        seq = run(table, blocks, one, 0)
        found = {name for name in TRAITS if getattr(table, name)[seq]}
        one.stop()
        blocks.free(seq)
        return found

    assert traits(request()) == traits(request(stop_token_ids=(3,))) == set()
    assert traits(request(logprobs=1)) == {"wants_logprobs", "is_recorded_by_token"}
    assert traits(request(prompt_logprobs=0)) == {"scores_prompt", "is_irregular"}
    assert traits(request(stop=("x",))) == {"is_recorded_by_token"}
    assert traits(request(n=2)) == {"shares_output"}
    slow, shaped = request(), request()
    slow.chunk_size = 1
    shaped.shaper = FixedShape(SamplingParams(logit_bias={3: 1.0}), 64)
    assert traits(slow) == {"is_irregular"}
    assert traits(shaped) == {"is_shaped"}
    shaped.waits = True
    assert traits(shaped) == {"is_shaped", "is_recorded_by_token", "waits"}


def test_ids_that_end_somebody_are_counted_while_they_run(table, blocks) -> None:
    def ends():
        return {token: count for token, count in enumerate(table.stop_counts.tolist()) if count}

    assert ends() == {1: 1}  # 99 is no id of the vocabulary
    one, other = request(stop_token_ids=(3, 1)), request(stop_token_ids=(3, 3, 63))
    run(table, blocks, one, 0)
    run(table, blocks, other, 0)
    assert ends() == {1: 2, 3: 3, 63: 1}
    one.give_way()
    other.stop()
    assert ends() == {1: 1}


def test_ids_come_from_the_block_manager_until_the_request_stops(table, blocks) -> None:
    one, by_token = request(), request(logprobs=0)
    seq, other = run(table, blocks, one, 0), run(table, blocks, by_token, 0)
    for handle in (seq, other):
        blocks.pool.append(ids(handle), ids(2), ids(7, 8))
    assert one.completion.token_ids == [7, 8] and one.num_tokens == 7
    assert by_token.completion.token_ids == []  # the recorder writes them
    one.stop()
    blocks.free(seq)
    assert one.completion.token_ids == [7, 8] and one.token_ids.tolist() == [0, 1, 2, 3, 4, 7, 8]
