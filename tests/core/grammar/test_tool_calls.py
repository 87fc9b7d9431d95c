"""Calls of tools in the model family's format: what the grammar lets through is what the parser reads, and no more."""

import json

import pytest
import xgrammar

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.source import source_of
from deepinfer.core.grammar.spec import StructuredOutput, StructuredOutputError, ToolCalls
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.models.deepseek_v41_flash.output_parser import VISIBLE_TOKENS, parse_completion
from deepinfer.models.deepseek_v41_flash.tool_grammar import tool_grammar
from deepinfer.testing import HashModel
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, THINK, END_THINK = 384, 1, 376, 377

pytestmark = pytest.mark.usefixtures("one_thread")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer"},
                "zip": {"type": "string", "pattern": "^[0-9]{3}$"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "place": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "days"],
            "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        },
    },
}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
BARE = {"type": "function", "function": {"name": "bare"}}
TOOLS = [WEATHER, PING, BARE]


def spec(choice="required", parallel=True, tools=TOOLS, **options):
    return StructuredOutput(tool_calls=ToolCalls(tools, choice, parallel), max_whitespace=0, **options)


@pytest.fixture
def follow(vocabulary, tokenizer):
    """Where a grammar stands behind a text that holds control tokens: False, "open" or "complete"."""
    tokens = vocabulary.token_bytes()
    info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def run(spec, text):
        grammar = compiler.compile_grammar(source_of(spec, vocabulary, tool_grammar).text)
        matcher = xgrammar.GrammarMatcher(grammar)
        for token in tokenizer.encode(text, parse_special=True):
            if not matcher.accept_token(token):
                return False
        return "complete" if matcher.is_completed() else "open"

    return run


def call(name, *arguments):
    inside = "\n".join(
        f'<｜DSML｜ parameter name="{key}" string="{"true" if is_text else "false"}">{value}</｜DSML｜ parameter>'
        for key, is_text, value in arguments
    )
    return f'<｜DSML｜ invoke name="{name}">\n{inside}\n</｜DSML｜ invoke>\n'


def block(*calls, before="\n\n"):
    return f"{before}<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"


GOOD = [
    block(call("weather", ("city", True, 'a </b> <｜ \n"x" < / </'), ("days", False, "-3"))),
    block(call("weather", ("city", True, ""), ("unit", True, "F"), ("days", False, "0"), ("zip", False, '"123"'))),
    block(call("weather", ("city", True, "x"), ("days", False, "1"), ("note", True, "null"), ("place", False, "[]"))),
    block(call("weather", ("city", True, "x"), ("days", False, "1"), ("note", False, "null"))),
    block(call("ping"), call("bare"), call("ping")),
]
BAD = [
    block(call("weather", ("days", False, "1"))),  # city is required
    block(call("weather", ("city", True, "x"))),  # so is days
    block(call("weather", ("city", False, '"x"'), ("days", False, "1"))),  # a string stands as it is
    block(call("weather", ("city", True, "x"), ("days", True, "1"))),
    block(call("weather", ("city", True, "x"), ("days", False, "1.5"))),
    block(call("weather", ("city", True, "x"), ("unit", True, "K"), ("days", False, "1"))),
    block(call("weather", ("city", True, "x"), ("days", False, "1"), ("zip", False, '"12"'))),
    block(call("weather", ("city", True, "x"), ("days", False, "1"), ("place", False, "[true,true,true]"))),
    block(call("weather", ("city", True, "x"), ("days", False, "1"), ("other", True, "x"))),
    block(call("weather", ("city", True, "a</｜"), ("days", False, "1"))),  # would look like the end
    block(call("ping", ("x", True, "y"))),
    block(call("pong")),
    block(),
    block(call("ping"), before=""),
    block(call("ping")) + "more",
]


@pytest.mark.parametrize("text", GOOD)
def test_calls_that_satisfy_the_schemas_are_let_through_and_parse(follow, text) -> None:
    assert follow(spec(), text) == "complete"
    message = parse_completion(text, False, tools=TOOLS)
    assert len(message.tool_calls) == text.count("invoke name")
    for made in message.tool_calls:
        assert isinstance(json.loads(made.arguments), dict)


@pytest.mark.parametrize("text", BAD)
def test_calls_that_do_not_are_stopped(follow, text) -> None:
    assert follow(spec(), text) != "complete"


def test_auto_leaves_text_alone_and_holds_a_calls_block_to_the_schemas(follow) -> None:
    auto = spec("auto")
    assert follow(auto, "any text < </ at all\n") == "complete"
    assert follow(auto, "text" + block(call("ping"))) == "complete"
    assert follow(auto, "text" + block(call("pong"))) is False
    assert follow(auto, "text" + block(call("ping")) + "text") is False


def test_one_tool_and_one_call_where_asked(follow) -> None:
    assert follow(spec("ping"), block(call("ping"), call("ping"))) == "complete"
    assert follow(spec("ping"), block(call("bare"))) is False
    assert follow(spec(parallel=False), block(call("ping"), call("bare"))) is False
    assert follow(spec(parallel=False), block(call("bare"))) == "complete"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "array"}, "must be the schema of an object"),
        ({"anyOf": [{}]}, "has 'anyOf', which calls do not support at the top"),
        ({"properties": {}, "required": ["x"]}, "required names 'x', which properties lacks"),
        ({"properties": {'a"b': {}}}, "cannot be written in a call"),
        ({"properties": {"a\ud800": {}}}, "cannot be written in a call"),
        ({"properties": {1: {}}}, "the name 1 cannot be written in a call"),
        ({"properties": []}, "properties must be an object"),
        ({"properties": {}, "required": 5}, "required must be a list of names"),
        ({"properties": {}, "required": [[1]]}, r"required names [1], which properties lacks"),
        ({5: 1, "anyOf": []}, "has '"),
        (False, "must be the schema of an object, got False"),
        ([], "must be the schema of an object, got []"),
    ],
)
def test_tools_that_cannot_be_written_are_refused_with_their_place(vocabulary, parameters, said) -> None:
    tool = {"function": {"name": "f", "parameters": parameters}}
    with pytest.raises(StructuredOutputError, match=r"tool_calls: tools\[0\].function.parameters") as caught:
        source_of(spec(tools=[tool]), vocabulary, tool_grammar)
    assert said in str(caught.value)
    with pytest.raises(StructuredOutputError, match="no format for calls"):
        source_of(spec(), vocabulary)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": 5}, "anyOf"),
        ({"type": "string", "enum": 5}, "enum"),
        ({"type": "string", "enum": "ab"}, "enum"),
        ({"const": "a", "enum": 5}, "enum"),
        ({"type": "string", "enum": ["a", "\ud800"]}, "half a surrogate pair"),
        ([], "schema"),
    ],
)
def test_arguments_with_a_malformed_schema_are_refused(vocabulary, schema, said) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    with pytest.raises(StructuredOutputError, match=said):
        source_of(spec(tools=[tool]), vocabulary, tool_grammar)


def test_the_engine_makes_calls_behind_the_reasoning(tokenizer, vocabulary) -> None:
    """A model that knows nothing calls the tool all the same, with arguments of the right types."""
    service = GrammarService(tokenizer, VOCAB, (EOS,), tool_grammar=tool_grammar)
    model = HashModel(VOCAB, eos_token_ids=(EOS,))
    config = EngineConfig(block_size=16, window_page=4, num_kv_blocks=64, max_num_seqs=8, async_scheduling=True)
    engine = Engine(model, config, cpu_ops(), tokenizer, grammars=service)
    bias = {END_THINK: 9.0, 30: 6.0, tokenizer.encode("\n")[0]: 9.0}
    for seed in range(6):
        params = SamplingParams(
            max_tokens=400,
            seed=seed,
            structured_output=spec(parallel=False),
            skip_special_tokens=False,
            logit_bias=bias,
            repetition_penalty=1.1,
        )
        engine.add_request(str(seed), [70 + seed, THINK], params)
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.close()
    service.close()
    parsed = []
    visible = {tokenizer.token_to_id(token) for token in VISIBLE_TOKENS}
    for output in done.values():
        assert output.error is None
        if output.outputs[0].finish_reason == "stop":
            text = tokenizer.decode(output.outputs[0].token_ids, keep_ids=visible)
            parsed.append(parse_completion(text, True, tools=TOOLS))
    assert len(parsed) >= 3
    for message in parsed:
        (made,) = message.tool_calls
        arguments = json.loads(made.arguments)
        if made.name == "weather":
            assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int)
            assert arguments.get("unit", "C") in ("C", "F")
        else:
            assert arguments == {}
