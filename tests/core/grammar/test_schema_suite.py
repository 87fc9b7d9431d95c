"""The schema suite: its labels against an independent validator, its verdicts by matcher and by engine, its page."""

import importlib.util
import json
import sys
from collections import Counter
from datetime import datetime, time
from decimal import Decimal

import jsonschema
import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.grammar.json_schema import schema_to_ebnf
from deepinfer.core.grammar.spec import StructuredOutput, StructuredOutputError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import PuppetModel
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS = 384, 1
UNCHECKED = {"hostname", "uri", "duration", "json-pointer"}
"""Formats for which the validator needs packages that may not be there."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def fidelity(pytestconfig):
    path = pytestconfig.rootpath / "tools" / "schema_fidelity.py"
    spec = importlib.util.spec_from_file_location("schema_fidelity", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(fidelity):
    return fidelity.load()[0]


def plain(fidelity, text):
    return text.replace(fidelity.MARK, "")


def is_integer(_, value):
    return not isinstance(value, bool) and isinstance(value, int | Decimal) and value == int(value)


@pytest.fixture(scope="module")
def formats():
    """The validator's own checks, and what it would need more packages for or is lax about, by the standard library."""
    checker = jsonschema.FormatChecker(formats=())
    checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    checker.checks("date-time", ValueError)(
        lambda text: text[10:11] in ("T", "t") and datetime.fromisoformat(text.upper()).tzinfo is not None
    )
    checker.checks("time", ValueError)(lambda text: len(text) > 8 and time.fromisoformat(text).tzinfo is not None)
    checker.checks("email")(lambda text: text.count("@") == 1 and all(text.split("@")))
    return checker


def satisfies(schema, text, formats):
    """What jsonschema says, with decimal numbers and with formats asserted."""
    value = json.loads(text, parse_float=Decimal)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return validator(exact, format_checker=formats).is_valid(value)


def test_the_suite_is_large_and_covers_every_keyword(fidelity, cases) -> None:
    pairs = sum(min(len(case.valid), len(case.invalid)) for case in cases)
    assert pairs >= 400
    assert {case.keyword for case in cases} == set(fidelity.load()[1])
    asked = Counter(json.dumps([c.schema, c.compact], sort_keys=True) for c in cases)
    assert max(asked.values()) == 1


def test_an_independent_validator_agrees_with_every_label(fidelity, cases, formats) -> None:
    for case in cases:
        if case.refused is not None:
            continue
        for text in case.valid + case.narrower:
            assert satisfies(case.schema, text, formats), (case.schema, text)
        for marked in case.invalid:
            try:
                is_valid = satisfies(case.schema, plain(fidelity, marked), formats)
            except ValueError:  # no JSON
                continue
            unchecked = (
                isinstance(case.schema, dict) and case.schema.get("format") in UNCHECKED - formats.checkers.keys()
            )
            assert not is_valid or unchecked, (case.schema, marked)


def test_every_verdict_token_by_token_and_the_page_that_tells_of_it(fidelity) -> None:
    page = fidelity.page(fidelity.Runner())  # raises with every fault
    assert fidelity.TARGET.read_text(encoding="utf-8") == page, "run tools/schema_fidelity.py"


def test_the_engine_writes_what_is_valid_and_cannot_write_what_is_not(fidelity, cases, tokenizer, grammars) -> None:
    wanted = []
    for case in cases:
        if case.refused is None:
            form = StructuredOutput(json_schema=case.schema, max_whitespace=case.options.max_whitespace)
            wanted += [(form, text, True) for text in case.valid]
            wanted += [(form, plain(fidelity, text), False) for text in case.invalid]
    scripts = [[*tokenizer.encode(text), EOS] for _, text, _ in wanted]

    def logits(ids):
        script, done = scripts[ids[0] * 256 + ids[1]], len(ids) - 2
        out = np.zeros(VOCAB, np.float32)
        out[script[done] if done < len(script) else EOS] = 50.0
        return out

    config = EngineConfig(
        block_size=8, window_page=2, max_model_len=96, num_kv_blocks=2000, max_num_batched_tokens=512, max_num_seqs=256
    )
    engine = Engine(PuppetModel(VOCAB, logits, eos_token_ids=(EOS,)), config, cpu_ops(), tokenizer, grammars=grammars)
    for number, (form, _, _) in enumerate(wanted):
        params = SamplingParams(temperature=0.0, max_tokens=len(scripts[number]), structured_output=form)
        engine.add_request(str(number), [number // 256, number % 256], params)
    num_done = 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                number, num_done = int(output.request_id), num_done + 1
                form, text, is_valid = wanted[number]
                assert output.error is None, (form.json_schema, output.error)
                answer = output.outputs[0]
                assert (answer.token_ids == scripts[number]) == is_valid, (form.json_schema, text, answer.text)
    engine.close()
    assert num_done == len(wanted)


def test_a_refused_schema_never_reaches_the_queue(fidelity, cases, tokenizer, grammars) -> None:
    for case in cases:
        if case.refused is not None and isinstance(case.schema, dict):
            with pytest.raises(StructuredOutputError) as caught:
                grammars.source(StructuredOutput(json_schema=case.schema))
            assert f"json_schema{case.refused}: " in caught.value.message


def test_a_puppet_that_likes_digits_ends_under_the_empty_schema(tokenizer, grammars) -> None:
    """SG-5: any JSON value, and yet no number without end."""
    digits = [token for token in range(VOCAB) if tokenizer.id_to_bytes(token).isdigit()]
    logits = np.zeros(VOCAB, np.float32)
    logits[digits] = 20.0
    config = EngineConfig(block_size=8, window_page=2, max_model_len=96)
    model = PuppetModel(VOCAB, lambda ids: logits, eos_token_ids=(EOS,))
    engine = Engine(model, config, cpu_ops(), tokenizer, grammars=grammars)
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_output=StructuredOutput(json_schema={}))
    engine.add_request("digits", [5], params)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    engine.close()
    answer = outputs[-1].outputs[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.text), int | float)


def test_grammars_are_the_same_every_time(cases) -> None:
    for case in cases:
        if case.refused is None:
            assert schema_to_ebnf(case.schema, case.options) == schema_to_ebnf(case.schema, case.options)
