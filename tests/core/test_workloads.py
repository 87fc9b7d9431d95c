"""Random workloads: every request gets, bit for bit, what it gets alone in a fresh engine.

`pytest tests/core/test_workloads.py --workloads 100000` runs more, `--workload-seed 123` repeats one.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer import LLM
from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, Tag
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.registry import LoadOptions, load_model
from deepinfer.testing import HashModel
from deepinfer.testing.facts import ChoiceFacts, RequestFacts
from deepinfer.testing.hash_model import EARLY, LATE, OPEN, PAIRS, TOKENS
from deepinfer.testing.workloads import (
    PlannedRequest,
    Shape,
    Workload,
    WorkloadError,
    check,
    cpu_ops,
    oracle,
    run,
    scripted_draft,
)

PER_TEST = 100
REAL_PER_TEST = 10
REAL_SHARE = 60 / 2000
TEXT_SHARE = 100 / 2000
DATA = Path(__file__).parents[1] / "data"
FORM_SHARE = 200 / 2000
TEXTS = ("e", "t", "th", "5", "a ")
FORMS = (
    StructuredOutput(regex="[a-f]{2,9}-[0-9]{1,3}x?"),
    StructuredOutput(choice=["yes", "yes, but", "no"]),
    StructuredOutput(json_object=True, max_whitespace=1),
    StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 4}},
            "required": ["n"],
        },
        max_whitespace=0,
    ),
    StructuredOutput(grammar='root ::= item ("," item)*\nitem ::= [a-z] [0-9]? | "(" root ")"'),
    StructuredOutput(grammar='root ::= [a-e]+ Token("｜DSML｜")'),
    StructuredOutput(structural_tag=StructuralTag([Tag("<e", {"type": "boolean"}, ">")], ["<"], at_least_one=True)),
    StructuredOutput(regex="[0-9]{2}", trigger_token_ids=[20, 21], bound_token_id=30),
)

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


def pytest_generate_tests(metafunc):
    config = metafunc.config
    count, only = config.getoption("--workloads", 2000), config.getoption("--workload-seed", None)
    plans = {
        "seeds": (count, PER_TEST),
        "text_seeds": (int(count * TEXT_SHARE), PER_TEST),
        "form_seeds": (int(count * FORM_SHARE), PER_TEST),
        "real_seeds": (int(count * REAL_SHARE), REAL_PER_TEST),
    }
    for name, (total, size) in plans.items():
        if name in metafunc.fixturenames:
            ranges = [range(i, min(i + size, total)) for i in range(0, total, size)]
            if only is not None:
                ranges = [range(only, only + 1)]
            metafunc.parametrize(name, ranges, ids=lambda r: f"{r.start}-{r.stop - 1}")


def check_all(seeds, model, shape, tokenizer=None):
    """Check workloads by seed; the error says how to repeat the first that fails."""
    for seed in seeds:
        try:
            check(Workload.generate(seed, shape), model, tokenizer=tokenizer)
        except Exception as error:
            error.add_note(f"repeat it: pytest {__file__} --workload-seed {seed}")
            raise


@pytest.fixture(scope="module")
def hash_model():
    return HashModel(64, eos_token_ids=(0,), nan_every=101)


@pytest.fixture(scope="module", params=["quant", "plain"])
def real(request, tmp_path_factory):
    """A random V4.1 of four layers, and its tokenizer."""
    folder = tmp_path_factory.mktemp("four_layers") / "model"
    make_tiny(folder, seed=3, quant=request.param == "quant", shards=1, text_fields=FOUR_LAYERS)
    tokenizer = Tokenizer.from_dir(folder)
    return load_model(folder, cpu_ops(), LoadOptions(max_model_len=128), tokenizer), tokenizer


def test_hash_model_gets_what_it_gets_alone(hash_model, seeds) -> None:
    check_all(seeds, hash_model, Shape())


def test_text_is_what_it_is_alone(text_seeds) -> None:
    """Stop strings and bad words, with a vocabulary whose tokens say something."""
    tokenizer = Tokenizer.from_dir(DATA)
    model = HashModel(tokenizer.vocab_size, eos_token_ids=(1,), nan_every=199)
    check_all(text_seeds, model, Shape(texts=TEXTS), tokenizer)


def test_forms_are_what_they_are_alone(form_seeds) -> None:
    """Grammars of every kind, with whatever else a request may ask for."""
    tokenizer = Tokenizer.from_dir(DATA)
    model = HashModel(tokenizer.vocab_size, eos_token_ids=(1,), nan_every=199)
    check_all(form_seeds, model, Shape(max_tokens=16, texts=TEXTS, forms=FORMS), tokenizer)


def test_v41_gets_what_it_gets_alone(real, real_seeds) -> None:
    """Half of the seeds for each model: even ones quantised, odd ones plain."""
    model, tokenizer = real
    parity = model.info.vocab_size == 320
    seeds = [s for s in real_seeds if s % 2 == parity or len(real_seeds) == 1]
    check_all(seeds, model, Shape(vocab_size=300, max_prompt=60, texts=TEXTS), tokenizer)


def test_a_workload_is_a_function_of_its_seed() -> None:
    assert Workload.generate(7) == Workload.generate(7) != Workload.generate(8)


def test_rejection_repeats_with_an_equal_schedule(hash_model) -> None:
    """Its text may depend on how many drafts a step verifies, so costs are assumed; nothing else may show."""
    accepted = 0
    for seed in range(40):
        workload = Workload.generate(seed)
        features = {**workload.features, "speculation": "rejection", "draft_schedule": "adaptive"}
        workload = dataclasses.replace(workload, features=features, row_price=workload.row_price or 0.1)
        truth = oracle(workload, hash_model)
        first, second = (run(workload, hash_model, truth=truth) for _ in range(2))
        assert first == second
        assert not first.leaks
        accepted += first.num_accepted_drafts
    assert accepted > 50


def test_workloads_reach_what_they_are_for(hash_model) -> None:
    """Every way to end, preemption, stored prefixes and accepted drafts are frequent within 100 seeds."""
    workloads = [Workload.generate(seed) for seed in range(100)]
    facts = [check(workload, hash_model) for workload in workloads]
    requests = [r for f in facts for r in f.requests]
    reasons = {c.finish_reason for r in requests for c in r.choices} | {r.error for r in requests}
    assert sum(f.num_preemptions > 0 for f in facts) > 15
    assert sum(f.num_stored_tokens > 0 for f in facts) > 5
    assert sum(f.num_accepted_drafts for f in facts) > 100
    assert {"length", "stop", "abort", "error", "prompt_too_long", "numerical_error"} <= reasons
    starts = [[r.prompt[:4] for r in w.requests if len(r.prompt) > 4] for w in workloads]
    assert sum(len(s) > len(set(s)) for s in starts) > 30


@pytest.mark.parametrize(("chunk", "decode_from"), [(1, None), (2, None), (3, 17), (8, None), (40, 2), (None, None)])
@pytest.mark.parametrize("block_size", [2, 16])
def test_expected_logits_are_those_of_the_engine(chunk, decode_from, block_size) -> None:
    model = HashModel(64)
    ids = np.random.default_rng(1).integers(0, 64, 40).tolist()
    with LLM(model, backend="cpu", block_size=block_size, window_page=2, max_model_len=48) as llm:
        got = llm.logits(ids, chunk_size=chunk, decode_from=decode_from).numpy()
    assert np.array_equal(got, model.expected_logits(ids))


def test_expected_logits_of_a_prefix_are_a_prefix() -> None:
    model, ids = HashModel(64), list(range(30))
    whole = model.expected_logits(ids)
    assert all(np.array_equal(model.expected_logits(ids[:n]), whole[:n]) for n in (1, 2, 7, 29))
    assert len(np.unique(whole)) > 500
    ordered = np.sort(whole, axis=1)
    assert ordered.std() > 2


def test_exact_ties_for_the_best_token_happen() -> None:
    logits = HashModel(64).expected_logits(np.random.default_rng(2).integers(0, 64, 2000))
    ties = ((logits == logits.max(1, keepdims=True)).sum(1) > 1).mean()
    assert 0.01 < ties < 0.1


class Tampered(HashModel):
    """Before the step whose first row stands at a position, one thing that it reads is not what it was."""

    def __init__(self, what: str, at: int = 20) -> None:
        super().__init__(64)
        self.what = what
        self.at = at

    def forward(self, batch, caches, tap=None):
        position = int(batch.positions[0])
        if position == self.at:
            batch = self.tamper(batch, caches, position)
        return super().forward(batch, caches, tap)

    def tamper(self, batch, caches, position):
        if self.what in (PAIRS, TOKENS):
            cache = caches.records(self.what)
            entry = 3
            cache.data[int(batch.block_tables[0, entry // cache.records]), entry % cache.records * 8] += 1
        elif self.what in (EARLY, LATE):
            cache = caches.records(self.what)
            page, offset = divmod(position - (7 if self.what == EARLY else 1), batch.window_page)
            cache.data[int(batch.window_tables[0, page - int(batch.window_first_page[0])]), offset * 8] += 1
        elif self.what == OPEN:
            caches.state(OPEN).view(torch.int32)[batch.state_slots.long()] += 1
        elif self.what == "history":
            batch = dataclasses.replace(batch, history=batch.history.flip(1))
        elif self.what == "block_tables":
            batch = dataclasses.replace(batch, block_tables=batch.block_tables[:, [1, 0, *range(2, 6)]])
        elif self.what == "window_tables":
            batch = dataclasses.replace(batch, window_tables=batch.window_tables.flip(1))
        elif self.what == "positions":
            batch = dataclasses.replace(batch, positions=batch.positions - 1)
        elif self.what == "window_slots":
            batch = dataclasses.replace(batch, window_slots=batch.window_slots.roll(1))
        elif self.what == "ratio_slots":
            slots = {ratio: slot.roll(1) for ratio, slot in batch.ratio_slots.items()}
            batch = dataclasses.replace(batch, ratio_slots=slots)
        return batch


@pytest.mark.parametrize(
    "what",
    [
        *(PAIRS, TOKENS, EARLY, LATE, "history", "block_tables", "window_tables", "positions"),
        *("window_slots", "ratio_slots"),
    ],
)
def test_one_wrong_record_changes_every_logit_after_it(what) -> None:
    ids = np.random.default_rng(1).integers(0, 64, 24).tolist()
    model = Tampered(what)
    with LLM(model, backend="cpu", block_size=4, window_page=4, max_model_len=24) as llm:
        got = llm.logits(ids, chunk_size=20).numpy()
    want = model.expected_logits(ids)
    assert np.array_equal(got[:20], want[:20])
    first = 21 if what == "window_slots" else 20
    assert (got[first:] != want[first:]).mean() > 0.9


@pytest.mark.parametrize(("length", "differs"), [(20, False), (21, True)])
def test_a_wrong_open_group_changes_the_pair_that_is_closed_from_it(length, differs) -> None:
    """Two tokens are a pair; a prompt's last chunk at an odd place closes what the chunk before it left open."""
    ids = np.random.default_rng(1).integers(0, 64, 24).tolist()
    model = Tampered(OPEN, at=length)
    with LLM(model, backend="cpu", block_size=4, window_page=4, max_model_len=24) as llm:
        got = llm.logits(ids, chunk_size=length).numpy()
    want = model.expected_logits(ids)
    assert np.array_equal(got[:length], want[:length])
    assert (got[length:] != want[length:]).mean() > 0.9 or not differs
    assert np.array_equal(got, want) != differs


def test_the_check_names_seed_request_and_difference() -> None:
    workload = Workload.generate(3)
    with pytest.raises(
        WorkloadError, match=r"workload 3 .*\n(.*\n)*request \d+: answer \d: (token_ids|logprobs) differ at"
    ):
        check(workload, Fickle(64))


class Fickle(HashModel):
    """Rows of a step with two sequences differ from those alone."""

    def forward(self, batch, caches, tap=None):
        logits = super().forward(batch, caches, tap)
        return logits if len(batch.seq_lens) == 1 else logits.flip(1)


def test_facts_of_a_cancelled_request_are_compared_as_a_prefix() -> None:
    def facts(tokens, reason, error=None):
        logprobs = tuple(map(str, tokens))
        return RequestFacts((ChoiceFacts(tuple(tokens), "", reason, logprobs=logprobs),), error, seed=5)

    whole = facts([1, 2, 3], "length")
    assert facts([1, 2], "abort").difference(whole) is None
    assert facts([1, 2, 3], "length").difference(whole) is None
    assert facts([1, 2], "abort").difference(facts([1, 2, 3], "error", "numerical_error")) is None
    assert "answer 0: token_ids differ at 1" in facts([1, 3], "abort").difference(whole)
    assert "token_ids differ at 2: () of 2, alone (3,)" in facts([1, 2], "length").difference(whole)
    assert "finish_reason is 'stop'" in facts([1, 2, 3], "stop").difference(whole)
    assert facts([1, 2, 3, 4], "abort").difference(whole) is not None
    assert "0 answers and error x" in RequestFacts(error="x").difference(whole)


def test_scripted_drafts_know_the_future_as_often_as_asked() -> None:
    workload = dataclasses.replace(Workload.generate(3), draft_quality=1.0, features={"num_drafts": 4})
    workload = dataclasses.replace(workload, requests=(PlannedRequest((1, 2, 3), workload.requests[0].params),))
    truth = [RequestFacts((ChoiceFacts((7, 8, 9)),))]
    guess = scripted_draft(workload, truth, 64)._draft_fn
    assert guess([1, 2, 3, 7])[0][:2] == [8, 9]
    assert guess([1, 2, 3, 7]) == guess([1, 2, 3, 7])


def test_the_oracle_agrees_with_the_logits_of_the_tokens() -> None:
    model = HashModel(64)
    params = dataclasses.replace(Workload.generate(3).requests[0].params, temperature=0.0, max_tokens=9, seed=1)
    params = dataclasses.replace(params, ignore_eos=True, stop_token_ids=(), logprobs=None, prompt_logprobs=None)
    workload = Workload(0, (PlannedRequest((5, 6, 7), params),), {"max_model_len": 40, "seed": 0})
    tokens = [5, 6, 7]
    for _ in range(9):
        tokens.append(int(model.expected_logits(tokens)[-1].argmax()))
    assert oracle(workload, model)[0].choices[0].token_ids == tuple(tokens[3:])
