"""Prefix reuse in the engine: what is stored is found, and results are bit for bit those of an engine without it."""

import random

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.request import Request
from deepinfer.core.request_table import RequestTable
from deepinfer.core.scheduler import Scheduler
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.registry import LoadOptions, load_model
from deepinfer.testing import HashModel, NullModel, ScriptedDraft
from deepinfer.testing.facts import RequestFacts
from deepinfer.testing.workloads import cpu_ops

BLOCK = 16
SETTINGS = {"backend": "cpu", "block_size": BLOCK, "window_page": 4, "max_model_len": 512, "max_num_seqs": 4}
FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "engram_layer_ids": [1],
}

pytestmark = pytest.mark.usefixtures("one_thread")


def text(seed, length, vocab=64):
    rng = random.Random(f"prefix {seed}")
    return [rng.randrange(3, vocab) for _ in range(length)]


def sampling(max_tokens=8, **settings):
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "logprobs": 2, "ignore_eos": True} | settings)


def open_llm(model=None, **settings):
    return LLM(model or HashModel(64), **{"num_kv_blocks": 64} | SETTINGS | settings)


def alone(prompts, params, model=None, **settings):
    """Facts of each prompt in an engine without prefix reuse."""
    with open_llm(model, prefix_caching=False, **settings) as llm:
        return [RequestFacts.of(output) for output in llm.generate(prompts, params)]


def is_sound(llm):
    pool = llm.session.engine.blocks.pool
    pool.check()
    return (pool.num_free_blocks, pool.num_free_pages) == (pool.num_blocks, pool.num_window_pages)


@pytest.fixture(scope="module", params=["quant", "plain"])
def real_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four_layers") / "model"
    make_tiny(folder, seed=3, quant=request.param == "quant", shards=1, text_fields=FOUR_LAYERS)
    return load_model(folder, cpu_ops(), LoadOptions(max_model_len=256), Tokenizer.from_dir(folder))


@pytest.mark.parametrize("speculation", ["off", "coupled"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_shared_prefix_of_five_blocks_is_computed_once(speculation, asynchronous) -> None:
    """Case KV-1: with speculation on, the hit rate was 0 for ever and nobody was told."""
    shared = text("shared", 5 * BLOCK)
    prompts = [shared + text(i, 11) for i in range(2)]
    settings = {"speculation": speculation, "async_scheduling": asynchronous}

    def draft():
        return ScriptedDraft(lambda ids: ([sum(ids) % 64] * 3, [0.5] * 3), 3) if speculation != "off" else None

    with open_llm(draft=draft(), **settings) as llm:
        outputs = [llm.generate([prompt], sampling(20))[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == [0, 5 * BLOCK]
        assert llm.stats.prefix_hit_tokens == 5 * BLOCK
        assert is_sound(llm)
    assert [RequestFacts.of(output) for output in outputs] == alone(prompts, sampling(20))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 47])
def test_an_equal_prompt_reuses_all_full_blocks_before_its_last_token(length) -> None:
    prompt = text(length, length)
    with open_llm(max_num_batched_tokens=7) as llm:
        first, second = (llm.generate([prompt], sampling())[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // BLOCK * BLOCK)
    assert RequestFacts.of(first) == RequestFacts.of(second) == alone([prompt], sampling())[0]


def test_prompts_that_part_anywhere_get_their_own_text() -> None:
    """Every place of two blocks, in one engine: also the blocks of one prompt's answer are in the index."""
    base = text("base", 3 * BLOCK)
    prompts = [base[:n] + text(n, 5) for n in range(3 * BLOCK)]
    with open_llm(num_kv_blocks=400) as llm:
        outputs = [llm.generate([prompt], sampling(3))[0] for prompt in [base, *prompts]][1:]
        assert is_sound(llm)
    assert [output.num_cached_tokens for output in outputs] == [n // BLOCK * BLOCK for n in range(3 * BLOCK)]
    assert [RequestFacts.of(output) for output in outputs] == alone(prompts, sampling(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_model_continues_stored_prefixes_bit_for_bit(real_model, temperature) -> None:
    shared = text("shared", 43, 300)
    prompts = [shared[:n] + text(n, 6, 300) for n in (43, 16, 40, 32, 33, 43)]
    params = sampling(temperature=temperature)
    with open_llm(real_model, max_model_len=96, max_num_batched_tokens=24) as llm:
        outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
        assert is_sound(llm)
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 32, 32, 32, 48 // BLOCK * BLOCK]
    assert [RequestFacts.of(o) for o in outputs] == alone(prompts, params, real_model, max_model_len=96)


def test_the_next_turn_of_a_chat_continues_the_answer() -> None:
    turn, cached = text("turn", 30), []
    with open_llm() as llm:
        for i in range(4):
            output = llm.generate([turn], sampling(25))[0]
            assert RequestFacts.of(output) == alone([turn], sampling(25))[0]
            cached.append((output.num_cached_tokens, len(turn)))
            turn = turn + output.outputs[0].token_ids + text(i, 12)
    # All tokens of the turn before are found but those of its last, open block, the newest of which never ran.
    assert cached == [(0, 30), (48, 67), (80, 104), (128, 141)]


def test_a_preempted_request_resumes_where_it_stopped() -> None:
    prompts = [text(i, 33) for i in range(3)]
    params = sampling(40)
    with open_llm(num_kv_blocks=9, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats
        assert stats.num_preemptions > 0
        assert stats.prefix_hit_tokens >= 2 * BLOCK
        assert is_sound(llm)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]  # of the first time they ran
    assert [RequestFacts.of(output) for output in outputs] == alone(prompts, params)


def test_a_tiny_pool_gives_up_what_is_stored() -> None:
    prompts = [text(i % 5, 4 * BLOCK) + text(i, 9) for i in range(20)]
    with open_llm(num_kv_blocks=7, max_model_len=7 * BLOCK, prefix_window_pages=0) as llm:
        outputs = llm.generate(prompts, sampling())
        counts = llm.session.engine.blocks.pool.prefix_stats()
        assert counts["evicted_blocks"] > 20
        assert is_sound(llm)
    assert [RequestFacts.of(output) for output in outputs] == alone(prompts, sampling())


def test_a_request_that_fits_only_with_what_is_stored_waits_for_nobody() -> None:
    """Six of eight blocks are shared: both run at once, which their tokens together do not fit into."""
    prompts = [text("long", 6 * BLOCK) + text(i, 3) for i in range(2)]
    with open_llm(num_kv_blocks=8) as llm:
        llm.generate([prompts[0][:-1]], sampling(1))
        outputs = llm.generate(prompts, sampling(10))
        assert llm.stats.num_preemptions == 0
        assert llm.stats.num_steps <= 1 + 10 + 2
    assert [output.num_cached_tokens for output in outputs] == [6 * BLOCK, 6 * BLOCK]


def submit(llm, prompt, params=None, **options):
    """One request with options that `generate` does not take."""
    engine = llm.session.engine
    engine.add_request("x", prompt, params or sampling(), **options)
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                return output
    return None


def test_salts_and_opting_out_separate_requests() -> None:
    prompt = text("salt", 40)
    with open_llm() as llm:
        salts = [None, "a", "b", "a", "", None]
        assert [submit(llm, prompt, cache_salt=s).num_cached_tokens for s in salts] == [0, 0, 0, 32, 32, 32]
        other = text("other", 40)
        assert submit(llm, other, use_prefix=False).num_cached_tokens == 0
        assert submit(llm, other).num_cached_tokens == 0
        assert submit(llm, other, use_prefix=False).num_cached_tokens == 0


def test_logits_and_prompt_logprobs_neither_read_nor_fill() -> None:
    prompt, model = text("scored", 40), HashModel(64)
    with open_llm(model) as llm:
        pool = llm.session.engine.blocks.pool
        for _ in range(2):
            assert (llm.logits(prompt).numpy() == model.expected_logits(prompt)).all()
            scored = llm.generate([prompt], sampling(prompt_logprobs=1))[0]
            assert (scored.num_cached_tokens, len(scored.prompt_logprobs)) == (0, 40)
        assert pool.prefix_stats()["held_blocks"] == 0
        llm.generate([prompt], sampling())
        assert pool.prefix_stats()["held_blocks"] == 2
        assert llm.generate([prompt], sampling(prompt_logprobs=1))[0].num_cached_tokens == 0
        assert llm.stats.prefix_misses["disabled"] == 5


class Sick(HashModel):
    """Gives no finite number for rows at a position while it is ill."""

    position = None

    def forward(self, batch, caches, tap=None):
        logits = super().forward(batch, caches, tap)
        logits[batch.positions[batch.logits_rows.long()] == self.position] = torch.nan
        return logits


def test_what_a_request_without_finite_logits_stored_is_not_used() -> None:
    model, prompt = Sick(64), text("sick", 40)
    with open_llm(model) as llm:
        well = llm.generate([prompt[:20]], sampling())[0]
        model.position = 60
        ill = llm.generate([prompt], sampling(30))[0]
        assert (ill.error.code, ill.num_cached_tokens, len(ill.outputs[0].token_ids)) == ("numerical_error", 16, 21)
        model.position = None
        again = llm.generate([prompt], sampling(30))[0]
        assert again.num_cached_tokens == 0
        assert llm.generate([prompt], sampling(30))[0].num_cached_tokens == 32
        assert is_sound(llm)
    assert [RequestFacts.of(well)] == alone([prompt[:20]], sampling())
    assert [RequestFacts.of(again)] == alone([prompt], sampling(30))


def test_a_neighbour_of_a_sick_request_is_untouched() -> None:
    model, shared = Sick(64), text("shared", 32)
    prompts = [shared + text(0, 12), shared + text(1, 5)]
    with open_llm(model) as llm:
        llm.generate([shared], sampling(1))
        model.position = 50  # the second one ends at 36 + 10
        outputs = llm.generate(prompts, [sampling(30), sampling(10)])
        assert [output.error is None for output in outputs] == [False, True]
        assert is_sound(llm)
    assert RequestFacts.of(outputs[1]) == alone(prompts, [sampling(30), sampling(10)])[1]


def test_statistics_name_the_causes_of_misses() -> None:
    with open_llm(max_num_batched_tokens=32) as llm:
        for prompt in (text(1, 5), text(2, 40), [*text(2, 40), 3], text(3, 40)):
            llm.generate([prompt], sampling(1))
        stats = llm.stats
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (5 + 40 + 41 + 40, 32)
        assert stats.prefix_misses == {"no_block": 2, "no_pages": 0, "too_short": 1, "disabled": 0}
        pool = llm.session.engine.blocks.pool
        hog = pool.open(np.zeros(1, dtype=np.int32))
        assert pool.reserve(hog, pool.num_window_pages * 4)  # sequences may take all that is kept
        pool.close(hog)
        llm.generate([text(3, 40)], sampling(1))
        assert llm.stats.prefix_misses["no_pages"] == 1


def test_reuse_can_be_turned_off_and_models_without_records_have_none() -> None:
    for model, settings in ((HashModel(64), {"prefix_caching": False}), (NullModel(64), {})):
        with open_llm(model, **settings) as llm:
            outputs = [llm.generate([text(0, 40)], sampling(2))[0] for _ in range(2)]
            assert [output.num_cached_tokens for output in outputs] == [0, 0]
            assert llm.stats.prefix_misses["disabled"] == 2


def test_a_refused_request_is_looked_up_again_only_when_memory_came_back() -> None:
    blocks = KVBlockManager(8, 4, num_slots=4, prefix_caching=True)
    lookups = []
    match = blocks.match
    blocks.match = lambda tokens, *rest, **options: lookups.append(len(tokens)) or match(tokens, *rest, **options)
    scheduler = Scheduler(blocks, RequestTable(4, 64), max_num_seqs=4, max_rows=16)
    for name, length in (("a", 15), ("b", 18)):
        request = Request.new(name, text(name, length), sampling(), 0, 64, None)
        request.use_prefix = True
        scheduler.add(request)
    first = scheduler.plan()
    assert first is not None
    assert [r.request_id for r in first.requests] == ["a"]
    for _ in range(5):
        scheduler.plan()
    assert lookups == [15, 18]
    scheduler.finish(first.requests[0])
    second = scheduler.plan()
    assert second is not None
    assert [r.request_id for r in second.requests] == ["b"]
    assert lookups == [15, 18, 18]
