"""What may be asked, in every spelling, and that wrong values are refused by name and touch nobody."""

import json
import logging

import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.gates import OPEN, TriggerGate
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import source_of
from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, StructuredOutputError, Tag, ToolCalls
from deepinfer.core.grammar.vocabulary import renamed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, NEWLINE = 384, 1, 200

pytestmark = pytest.mark.usefixtures("one_thread")

TAG = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "it has regex, choice"),
        ({"json_schema": ""}, "json_schema must be a non-empty text"),
        ({"json_schema": False}, "it allows nothing"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "[" * 100_000}, "json_schema is not valid JSON"),
        ({"json_schema": [1]}, "must be a JSON schema"),
        ({"json_schema": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json_schema": {"enum": ["x" * (1 << 20)]}}, "are the most"),
        ({"json_object": False}, "json_object must be True"),
        ({"json_object": 1}, "json_object must be True"),
        ({"regex": ""}, "regex must be a non-empty text"),
        ({"regex": 5}, "regex must be a non-empty text"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": b"root"}, "grammar must be a non-empty text"),
        ({"choice": []}, "choice must be a non-empty list"),
        ({"choice": "abc"}, "choice must be a non-empty list"),
        ({"choice": ["a", ""]}, r"choice\[1\] must be a non-empty text"),
        ({"choice": ["a"] * 70_000}, "are the most"),
        ({"structural_tag": {"tags": []}}, "must be a StructuralTag"),
        ({"tool_calls": {}}, "must be a ToolCalls"),
        ({"regex": "a", "max_whitespace": -1}, "max_whitespace"),
        ({"regex": "a", "max_whitespace": True}, "max_whitespace"),
        ({"regex": "a", "timeout": 0}, "timeout"),
        ({"regex": "a", "timeout": float("inf")}, "timeout"),
        ({"regex": "a", "only_after_thinking": None}, "only_after_thinking"),
        ({"regex": "a", "trigger_token_ids": [-1]}, "trigger_token_ids"),
        ({"regex": "a", "trigger_token_ids": "ab"}, "trigger_token_ids"),
        ({"regex": "a", "bound_token_id": 5}, "bound_token_id forces trigger_token_ids"),
        ({"regex": "a", "trigger_token_ids": [1], "bound_token_id": 1.5}, "bound_token_id"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(options, said) -> None:
    with pytest.raises(StructuredOutputError, match=said) as caught:
        StructuredOutput(**options)
    assert caught.value.code == "invalid_structured_output" and isinstance(caught.value, RequestError | ValueError)


def test_schemas_may_come_as_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutput(json_schema=json.dumps(schema)) == StructuredOutput(json_schema=schema)
    assert StructuredOutput(json_schema=True).kind == "json_schema"


@pytest.mark.parametrize(
    "value",
    [
        {"structures": [TAG], "triggers": ["<f"]},
        {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]},
        json.dumps({"structures": [TAG], "triggers": ["<f"]}),
        {"format": {"type": "triggered_tags", "tags": [TAG], "triggers": ["<f"]}},
        {
            "format": {
                "type": "triggered_tags",
                "tags": [{**TAG, "content": {"type": "json_schema", "json_schema": TAG["schema"]}}],
                "triggers": ["<f"],
            }
        },
    ],
)
def test_structural_tags_in_every_spelling(value) -> None:
    assert StructuralTag.read(value) == StructuralTag([Tag("<f>", {"type": "integer"}, "</f>")], ["<f"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "must be an object"),
        ({"format": {"type": "sequence"}}, "'triggered_tags', got 'sequence'"),
        ({"structures": [], "triggers": ["<f"]}, "structural_tag.structures must be a non-empty list"),
        ({"structures": [5], "triggers": ["<f"]}, r"structures\[0\] must be an object"),
        ({"structures": [{"begin": "<f>", "end": "x"}], "triggers": ["<f"]}, "has no schema"),
        ({"structures": [{**TAG, "end": ""}], "triggers": ["<f"]}, r"tags\[0\].end must be a non-empty text"),
        ({"structures": [{**TAG, "schema": False}], "triggers": ["<f"]}, r"tags\[0\].schema .* allows nothing"),
        ({"structures": [TAG], "triggers": ["<g"]}, "must start with exactly one of the triggers"),
        ({"structures": [TAG], "triggers": ["<", "<f"]}, "must start with exactly one of the triggers"),
        ({"structures": [TAG], "triggers": [""]}, r"triggers\[0\] must be a non-empty text"),
    ],
)
def test_structural_tags_that_cannot_be(value, said) -> None:
    with pytest.raises(StructuredOutputError, match=said):
        StructuralTag.read(value)


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([], "auto", "tools must be a non-empty list"),
        ([{"type": "function"}], "auto", r"tools\[0\] must be an object with a function's name"),
        ([{"function": {"name": "a"}}, {"function": {"name": "a"}}], "auto", r"tools\[1\]: a tool called 'a'"),
        ([{"function": {"name": "a"}}], "b", "choice must be 'auto', 'required' or a tool's name"),
    ],
)
def test_tools_that_cannot_be(tools, choice, said) -> None:
    with pytest.raises(StructuredOutputError, match=said):
        ToolCalls(tools, choice)


def test_so_args_are_those_of_deepinfer() -> None:
    given = {"schema_type": "json", "schema": '{"type": "object"}', "trigger_token_ids": [5, 6], "bound_token_id": 7}
    made = SamplingParams(so_args=given).structured_output
    assert made == StructuredOutput(
        json_schema={"type": "object"}, trigger_token_ids=(5, 6), bound_token_id=7, only_after_thinking=False
    )
    for kind, name in (("regex", "regex"), ("ebnf", "grammar")):
        so_args = {"schema_type": kind, "schema": "x", "trigger_token_ids": None}
        assert getattr(SamplingParams(so_args=so_args).structured_output, name) == "x"


@pytest.mark.parametrize(
    ("so_args", "said"),
    [
        (False, "so_args must be a mapping, got False"),
        ({"schema_type": "json", "schema": ""}, "so_args.schema must be a non-empty text"),
        ({"schema_type": "json", "schema": False}, "so_args.schema must be a non-empty text, got False"),
        ({"schema_type": "yaml", "schema": "x"}, "so_args.schema_type must be one of 'json', 'regex', 'ebnf'"),
        ({"schema_type": ["json"], "schema": "x"}, "so_args.schema_type must be one of"),
        ({"schema_type": "json"}, "so_args.schema must be"),
        ({"schema_type": "regex", "schema": "x", "serialized": True}, "unknown key 'serialized'"),
        ({"schema_type": "regex", "schema": "x", "bound_token_id": 3}, "bound_token_id forces"),
    ],
)
def test_so_args_that_cannot_be_sx_4(so_args, said) -> None:
    with pytest.raises(StructuredOutputError, match=said):
        SamplingParams(so_args=so_args)


def test_parameters_take_one_form() -> None:
    spec = StructuredOutput(regex="a")
    with pytest.raises(ValueError, match="not both"):
        SamplingParams(structured_output=spec, so_args={"schema_type": "regex", "schema": "b"})
    with pytest.raises(ValueError, match="structured_output must be a StructuredOutput"):
        SamplingParams(structured_output={"regex": "a"})


@pytest.fixture
def make(tokenizer, grammars):
    engines = []

    def made(model, **settings):
        settings = {"block_size": 4, "window_page": 2, "num_kv_blocks": 64, "max_num_seqs": 8, **settings}
        engines.append(Engine(model, EngineConfig(**settings), cpu_ops(), tokenizer, grammars=grammars))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def finish(engine):
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"structured_output": StructuredOutput(grammar='root ::= Token("<nope>")')}, "no control token '<nope>'"),
        ({"structured_output": StructuredOutput(regex="a", trigger_token_ids=[VOCAB])}, f"has id {VOCAB}"),
        ({"structured_output": StructuredOutput(tool_calls=ToolCalls([{"name": "a"}]))}, "no format for calls"),
        ({"structured_output": StructuredOutput(regex="a"), "ignore_eos": True}, "cannot be combined with ignore_eos"),
        (
            {"structured_output": StructuredOutput(structural_tag=StructuralTag([Tag("<think>x", {}, "e")], ["<thi"]))},
            "ends inside of a control token",
        ),
    ],
)
def test_refused_at_submit_and_the_others_finish_sx_4(make, params, said) -> None:
    engine = make(HashModel(VOCAB, eos_token_ids=(EOS,)))
    engine.add_request("healthy", [5], SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match=said):
        engine.add_request("bad", [5], SamplingParams(**params))
    assert finish(engine)["healthy"].error is None


def test_a_model_without_an_end_needs_a_stop_id(tokenizer) -> None:
    config = EngineConfig(block_size=4, window_page=2, num_kv_blocks=64, max_num_seqs=8)
    service = GrammarService(tokenizer, VOCAB, ())
    engine = Engine(HashModel(VOCAB), config, cpu_ops(), tokenizer, grammars=service)
    spec = StructuredOutput(choice=["a"])
    with pytest.raises(StructuredOutputError, match="needs a control token that ends the answer"):
        engine.add_request("x", [5], SamplingParams(structured_output=spec, stop_token_ids=[70]))
    engine.add_request("x", [5], SamplingParams(structured_output=spec, stop_token_ids=[382]))
    output = finish(engine)["x"]
    assert output.outputs[0].token_ids == [67, 382] and output.outputs[0].stop_reason == 382
    engine.close()
    service.close()


def test_a_drafter_that_always_offers_what_is_forbidden_sx_1(make, tokenizer, caplog, capfd) -> None:
    """Quietly rejected and counted; the answer is the one without drafts."""
    newlines = tokenizer.encode("\n\n")[0]

    def liked(ids):
        rng = np.random.default_rng(len(ids))
        return rng.normal(size=VOCAB) + 20.0 * (np.arange(VOCAB) == newlines)

    prompt, answers = [5, 6], []
    params = SamplingParams(
        temperature=0, max_tokens=20, structured_output=StructuredOutput(json_object=True, max_whitespace=0)
    )
    for speculation in ("off", "coupled"):
        model = PuppetModel(VOCAB, liked, eos_token_ids=(EOS,))
        if speculation == "coupled":
            model = ScriptedDraft(lambda ids: ([newlines] * 4, [0.9] * 4), 4).bind(model)
        engine = make(model, speculation=speculation, draft_schedule="fixed", async_scheduling=False)
        with caplog.at_level(logging.DEBUG):
            engine.add_request("x", prompt, params)
            answers.append(finish(engine)["x"].outputs[0].token_ids)
        assert (engine.stats().num_illegal_drafts > 5) == (speculation == "coupled")
    assert answers[0] == answers[1] and newlines not in answers[0]
    assert not caplog.records and "Warning" not in capfd.readouterr().err


def test_a_puppet_that_likes_white_space_gets_as_much_as_allowed_sg_6(make, tokenizer) -> None:
    newline = tokenizer.encode("\n")[0]

    def liked(ids):
        return np.random.default_rng(len(ids)).normal(size=VOCAB) + 50.0 * (np.arange(VOCAB) == newline)

    closed = {"required": ["a"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, **closed}
    for count in (0, 1, 3):
        engine = make(PuppetModel(VOCAB, liked, eos_token_ids=(EOS,)))
        spec = StructuredOutput(json_schema=schema, max_whitespace=count)
        engine.add_request("x", [5], SamplingParams(temperature=0, max_tokens=60, structured_output=spec))
        (answer,) = finish(engine)["x"].outputs
        assert answer.finish_reason == "stop" and json.loads(answer.text).keys() == {"a"}
        gap = "\n" * count
        assert answer.text.startswith("{" + gap + '"a"') and ("\n" in answer.text) == (count > 0)


def test_a_trigger_is_found_wherever_it_begins() -> None:
    gate = TriggerGate([1, 1, 2], None)

    def state(tokens):
        at = gate.start
        for token in tokens:
            at = gate.after(at, token)
        return at

    assert state([1, 1, 2]) == state([1, 1, 1, 2]) == state([1, 2, 1, 1, 2]) == OPEN
    assert state([1, 1, 1]) == 2 and state([1, 1, 3]) == 0 and state([2]) == 0


def test_a_bound_id_forces_the_trigger() -> None:
    gate = TriggerGate([5, 6], 9)
    at = gate.after(gate.after(gate.start, 5), 9)
    forced = []
    while at != OPEN:
        forced.append(gate.shape(at).forced)
        at = gate.after(at, forced[-1])
    assert forced == [5, 6]


def test_rules_are_renamed_and_nothing_else() -> None:
    grammar = (
        'root ::= item* "root" [item] # root\nitem ::= "a\\"item" | ("b" item){1,2} | Regex("item", json_string=false)'
    )
    assert renamed(grammar, "x_") == (
        'x_root ::= x_item* "root" [item] # root\n'
        'x_item ::= "a\\"item" | ("b" x_item){1,2} | Regex("item", json_string=false)'
    )


def test_names_of_control_tokens_are_resolved_outside_of_strings(vocabulary) -> None:
    text = 'root ::= "Token(\\"<think>\\")" Token("<think>") Token( "｜DSML｜" ) Token(5) [Token("<think>")]'
    assert vocabulary.resolve(text) == (
        'root ::= "Token(\\"<think>\\")" Token(376) Token(378) Token(5) [Token("<think>")]'
    )
    assert vocabulary.literal('a<think>"é') == '"a" Token(376) "\\"\\U000000e9"'


def test_equal_wishes_are_one_grammar(vocabulary) -> None:
    one, other = (StructuredOutput(choice=["a", "b"], timeout=t, only_after_thinking=t == 1) for t in (1, 2))
    assert source_of(one, vocabulary) == source_of(other, vocabulary)
    assert source_of(StructuredOutput(choice=["b", "a"]), vocabulary) != source_of(one, vocabulary)
