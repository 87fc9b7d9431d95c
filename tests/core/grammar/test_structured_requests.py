"""Every kind of structured output, against an oracle that tries each token, in every mode of the engine."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.grammar import matching
from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, Tag
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import HashModel, ScriptedDraft
from deepinfer.testing.slow_grammar import SlowGrammar
from deepinfer.testing.slow_oracle import slow_answer
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, THINK, END_THINK, DSML, QUERY = 384, 1, 376, 377, 378, 382

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "drafts": {"async_scheduling": False, "speculation": "coupled", "draft_schedule": "fixed"},
    "async drafts": {"async_scheduling": True, "speculation": "coupled", "draft_schedule": "fixed"},
    "rejection": {"async_scheduling": True, "speculation": "rejection", "draft_schedule": "fixed"},
    "async drafts, tiny pool": {
        "async_scheduling": True,
        "speculation": "coupled",
        "draft_schedule": "fixed",
        "num_kv_blocks": 20,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
    },
    "sync, tiny pool": {
        "async_scheduling": False,
        "num_kv_blocks": 20,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 12,
    },
    "one row": {"async_scheduling": True, "max_num_batched_tokens": 1, "max_num_seqs": 1},
}

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = StructuralTag(
    [Tag("<f=a>", {"type": "integer"}, "</f>"), Tag("<f=b>", {"enum": ["x", "y"]}, "</f>")], ["<f="], at_least_one=True
)
CONTROL_TAG = StructuralTag(
    [Tag("<｜DSML｜a>", {"type": "boolean"}, "<｜DSML｜>")], ["<｜DSML｜"], stop_after_first=True
)


def form(**options):
    return {"structured_output": StructuredOutput(max_whitespace=1, **options)}


FEATURES = {
    "plain": {},
    "plain, greedy": {"temperature": 0.0},
    "regex": form(regex=r"[a-f]{2,9}-[0-9]{1,4}(x|yz)?"),
    "regex, greedy": {**form(regex=r"(ab|cd)+[0-9]*"), "temperature": 0.0},
    "choice": form(choice=["yes", "yes, but", "no", 'perhaps\n"so" \\ é']),
    "schema": form(json_schema=PERSON),
    "schema with logprobs": {**form(json_schema=PERSON), "logprobs": 3, "logprob_token_ids": [70, 5]},
    "schema, processed": {
        **form(json_schema=PERSON),
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
        "top_k": 6,
        "temperature": 0.8,
    },
    "object": {**form(json_object=True), "logit_bias": {95: 5.0}},
    "any": form(json_schema=True),
    "grammar": form(grammar='root ::= item ("," item)*\nitem ::= [a-z] [0-9]? | "(" root ")"'),
    "left recursion, SG-4": {**form(grammar='root ::= root "a" | "b"'), "logit_bias": {EOS: 2.0}},
    "control token in a grammar": form(grammar='root ::= "a"+ Token("｜DSML｜") [^a-z] Token(382)'),
    "structural tag": form(structural_tag=TAGS),
    "structural tag of a control token": {**form(structural_tag=CONTROL_TAG), "logit_bias": {DSML: 9.0, 30: 6.0}},
    "behind thinking": {**form(regex="[a-c]+"), "thinking": True, "logit_bias": {END_THINK: 5.0, EOS: 9.0}},
    "behind a thinking budget": {**form(choice=["abc", "abd"]), "thinking": True, "thinking_budget": 3},
    "not behind thinking": {**form(regex="[a-c]{3}", only_after_thinking=False), "thinking": True},
    "trigger": {
        **form(regex="[0-9]{3,5}", trigger_token_ids=[70, 70, 71]),
        "logit_bias": {70: 11.0, 71: 10.0},
    },
    "trigger and bound": {
        **form(regex="[0-9]{3,5}", trigger_token_ids=[QUERY, 80], bound_token_id=75),
        "logit_bias": {75: 6.0},
    },
    "so_args": {
        "so_args": {
            "schema_type": "json",
            "schema": json.dumps(PERSON),
            "trigger_token_ids": [QUERY],
            "bound_token_id": 66,
        },
        "logit_bias": {66: 6.0},
    },
    "three choices": {**form(regex="[a-z]{3,9}"), "n": 3, "logprobs": 0},
    "choices of a schema": {**form(json_schema=PERSON), "n": 2},
    "min_tokens": {**form(regex="[ab]*"), "min_tokens": 8, "logit_bias": {EOS: 9.0}},
    "min_tokens beyond the grammar": {**form(choice=["ab", "abc"]), "min_tokens": 14},
    "min_tokens while thinking": {
        **form(regex="a*"),
        "thinking": True,
        "min_tokens": 6,
        "logit_bias": {END_THINK: 9.0},
    },
    "stop string": {**form(regex="[a-e]+"), "stop": ["a", "cc"], "include_stop_str_in_output": True},
    "stop id that is text": {**form(regex="[a-e ]+"), "stop_token_ids": [67, 69]},
    "stop id that is control": {**form(regex="[a-e]+"), "stop_token_ids": [QUERY], "logit_bias": {QUERY: 6.0}},
    "stop id of the grammar's own": {
        **form(grammar='root ::= [a-c]+ Token("<｜query｜>") "x"'),
        "stop_token_ids": [381],
        "logit_bias": {QUERY: 4.0},
    },
    "penalties": {
        **form(regex="[a-e]{5,}"),
        "temperature": 0.0,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.4,
    },
    "bad words": {**form(regex="[a-e]+"), "bad_words": ["a", "bc"]},
    "allowed ids": {**form(regex="[a-z]+x"), "allowed_token_ids": [67, 68, 90, EOS]},
    "bias": {**form(json_object=True), "logit_bias": {4: 9.0, 5: -9.0}},
    "filters": {**form(json_schema=PERSON), "temperature": 1.4, "top_k": 5, "top_p": 0.7, "min_p": 0.02},
    "golden within the grammar": {**form(regex="[a-e]+"), "golden_token_ids": [68, -1, 67], "logprobs": 1},
    "prompt logprobs": {**form(regex="[a-z]{3,9}"), "prompt_logprobs": 1, "n": 2},
    "no text": {**form(regex="[a-z]{3,9}"), "detokenize": False},
}


@pytest.fixture(scope="module")
def model():
    return HashModel(VOCAB, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def truth(model, tokenizer):
    rng = random.Random(1)
    found = {}
    for name, given in FEATURES.items():
        options = {"max_tokens": rng.choice([16, 30]), "seed": rng.randrange(1 << 64), **given}
        prompt = [rng.choice([5, 6, *range(67, 93)]) for _ in range(rng.choice([1, 2, 9, 17]))]
        prompt += [THINK] * options.pop("thinking", False)
        params = SamplingParams(**options)
        slow = None
        if params.structured_output is not None:
            slow = SlowGrammar(params.structured_output, tokenizer, VOCAB, (EOS,), prompt, params.stop_token_ids)
        answers = [
            slow_answer(
                lambda ids: model.expected_logits(ids)[-1],
                prompt,
                params,
                seed=params.seed,
                choice=choice,
                eos=(EOS,),
                tokenizer=tokenizer,
                form=slow,
            )
            for choice in range(params.n)
        ]
        found[name] = prompt, params, answers
    return found


def draft_for(truth, count=4, quality=0.75):
    """Drafts that are mostly what the answer goes on with, and often what no grammar allows."""
    sequences = [[*prompt, *a.token_ids] for prompt, _, answers in truth.values() for a in answers]

    def guess(ids):
        rng = random.Random(str(ids))
        known = [s for s in sequences if s[: len(ids)] == ids and len(s) > len(ids)]
        ahead = (rng.choice(known)[len(ids) : len(ids) + count] if known else []) + [EOS] * count
        tokens = [t if rng.random() < quality else rng.choice([0, EOS, 70, DSML, VOCAB - 1]) for t in ahead[:count]]
        return tokens, [0.5] * count

    return ScriptedDraft(guess, count)


def run(model, tokenizer, grammars, truth, mode, *, names=None):
    settings = {"num_kv_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 64, **mode}
    if settings.get("speculation"):
        model = draft_for(truth).bind(model)
    config = EngineConfig(block_size=4, window_page=2, max_model_len=80, **settings)
    engine = Engine(model, config, cpu_ops(), tokenizer, grammars=grammars)
    before = engine.blocks.num_free_blocks, engine.blocks.num_free_pages, engine.blocks.num_free_slots
    for name in names or truth:
        prompt, params, _ = truth[name]
        engine.add_request(name, prompt, params)
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
    assert before == (engine.blocks.num_free_blocks, engine.blocks.num_free_pages, engine.blocks.num_free_slots)
    engine.blocks.pool.check()
    stats = dataclasses.replace(engine.stats())
    engine.close()
    return done, stats


def facts(output):
    return [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs, c.cumulative_logprob)
        for c in output.outputs
    ], output.prompt_logprobs


@pytest.fixture(scope="module")
def plain_run(model, tokenizer, grammars, truth):
    return run(model, tokenizer, grammars, truth, MODES["sync"])[0]


def test_answers_are_those_of_the_slow_oracle(truth, plain_run) -> None:
    for name, (_, _, answers) in truth.items():
        output = plain_run[name]
        assert output.error is None, (name, output.error)
        for got, want in zip(output.outputs, answers, strict=True):
            assert got.token_ids == want.token_ids, (name, got.text, want.text)
            said = got.text, got.finish_reason, got.stop_reason
            assert said == (want.text, want.finish_reason, want.stop_reason), name
            for entry, other in zip(got.logprobs or (), want.logprobs, strict=True):
                assert entry.keys() == other.keys(), name
                assert all(np.isclose(entry[t].logprob, other[t], atol=1e-4) for t in other), name


def test_finished_answers_have_their_form(truth, plain_run) -> None:
    """Judged by other means than grammars."""

    def texts(name):
        ended = [c for c in plain_run[name].outputs if c.finish_reason == "stop"]
        assert ended, (name, plain_run[name].outputs[0].text)
        return [c.text for c in ended]

    assert all(re.fullmatch(r"[a-f]{2,9}-[0-9]{1,4}(x|yz)?", text) for text in texts("regex"))
    assert all(text in FEATURES["choice"]["structured_output"].choice for text in texts("choice"))
    for text in texts("schema, processed"):
        value = json.loads(text)
        assert {"name", "age"} <= value.keys() <= {"name", "age", "on"}
        assert isinstance(value["name"], str) and isinstance(value["age"], int)
    assert all(isinstance(json.loads(text), dict) for text in texts("object"))
    assert all(re.fullmatch("ba*", text) for text in texts("left recursion, SG-4"))
    assert all(re.fullmatch(r"[a-z]{3,9}", text) for text in texts("three choices"))
    answer = truth["behind thinking"][2][0].token_ids
    assert END_THINK in answer and EOS not in answer[: answer.index(END_THINK)]
    for name in ("trigger", "trigger and bound", "so_args"):
        behind = truth[name][1].structured_output.trigger_token_ids[-1]
        assert behind in truth[name][2][0].token_ids, name


@pytest.mark.parametrize("mode", [name for name in MODES if name != "sync"])
def test_modes_change_nothing(mode, model, tokenizer, grammars, truth, plain_run) -> None:
    done, stats = run(model, tokenizer, grammars, truth, MODES[mode])
    for name in truth:
        if mode != "rejection" or name != "plain":  # rejection has draws of its own; constrained rows verify no drafts
            assert facts(done[name]) == facts(plain_run[name]), name
    assert (stats.num_illegal_drafts > 0) == ("drafts" in mode)
    assert (stats.num_preemptions > 0) == ("tiny pool" in mode)
    assert stats.num_masked_rows >= stats.num_grammar_steps > 0


def test_neighbours_get_what_they_get_alone_sx_3(model, tokenizer, grammars, truth, plain_run) -> None:
    """A plain request in a batch with a constrained one, and each of them alone."""
    for names in (["plain", "object"], ["plain"], ["object"]):
        done, _ = run(model, tokenizer, grammars, truth, MODES["async drafts"], names=names)
        for name in names:
            assert facts(done[name]) == facts(plain_run[name]), (name, names)


def test_a_grammar_that_grows_with_each_token_ends_its_request_alone(model, tokenizer, grammars, monkeypatch) -> None:
    """Each token of an ambiguous grammar takes longer than the one before, and everybody waits for it."""
    monkeypatch.setattr(matching, "SLOW_SECONDS", 1e-4)
    monkeypatch.setattr(matching, "MAX_SLOW_SECONDS", 2e-3)
    truth = {
        "ambiguous": (
            [5, 6],
            SamplingParams(max_tokens=70, min_tokens=70, seed=3, **form(grammar='root ::= root root | "a" | ""')),
            [],
        ),
        "plain": ([5, 7], SamplingParams(max_tokens=40, seed=4, ignore_eos=True), []),
    }
    done, _ = run(model, tokenizer, grammars, truth, {})
    assert done["ambiguous"].error.code == "grammar_too_slow"
    assert done["plain"].error is None and len(done["plain"].outputs[0].token_ids) == 40


@pytest.mark.parametrize("mode", ["sync", "async", "async drafts"])
@pytest.mark.parametrize(
    ("options", "said", "kept"),
    [
        ({"golden_token_ids": [68, 67, 300]}, "output token 2 was forced to be id 300", [68, 67]),
        ({"golden_token_ids": [EOS]}, f"output token 0 was forced to be id {EOS}", []),
        (
            {**form(regex="[a-c]{5}", only_after_thinking=False), "thinking": True, "thinking_budget": 0},
            f"output token 0 was forced to be id {END_THINK}",
            [],
        ),
    ],
)
def test_what_is_forced_against_the_form_ends_that_request(
    mode, options, said, kept, model, tokenizer, grammars
) -> None:
    options = {"max_tokens": 8, "seed": 3, **form(regex="[a-c]{5}"), **options}
    prompt = [5, 6, *[THINK] * options.pop("thinking", False)]
    truth = {
        "forced": (prompt, SamplingParams(**options), []),
        "plain": ([5, 7], SamplingParams(max_tokens=8, seed=4, ignore_eos=True), []),
    }
    done, _ = run(model, tokenizer, grammars, truth, MODES[mode])
    assert done["forced"].error.code == "grammar_violated"
    assert said in done["forced"].error.message and "does not allow there" in done["forced"].error.message
    assert done["forced"].outputs[0].token_ids == kept
    assert done["plain"].error is None and len(done["plain"].outputs[0].token_ids) == 8
