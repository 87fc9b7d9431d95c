"""Forms of answers in OpenAI's and vLLM's words, from a body to the answer."""

import json
import re
from contextlib import closing

import pytest

from deepinfer import LLM, EngineConfig, RequestError, StructuralTag, StructuredOutput, Tag, ToolCalls
from deepinfer.core.engine import Engine
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.answer_form import read_form
from deepinfer.entrypoints.batch import BatchRunner
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.entrypoints.result_file import ResultFile
from deepinfer.testing import HashModel
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS = 384, 1
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}},
}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
    "triggers": ["<f"],
}

pytestmark = pytest.mark.usefixtures("one_thread")


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": None, "tools": None, "tool_choice": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        ({"response_format": response_format(SCHEMA)}, StructuredOutput(json_schema=SCHEMA)),
        (
            {"response_format": TAGS},
            StructuredOutput(structural_tag=StructuralTag([Tag("<f>", {"type": "boolean"}, "</f>")], ["<f"])),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=SCHEMA)),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutput(choice=["a"])),
        ({"guided_grammar": "root ::= x"}, StructuredOutput(grammar="root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "regex": None}},
            StructuredOutput(json_object=True, max_whitespace=0),
        ),
        (
            {"structured_outputs": {"regex": "a", "only_after_thinking": False, "timeout": 2}},
            StructuredOutput(regex="a", only_after_thinking=False, timeout=2),
        ),
        ({"so_args": {"schema_type": "regex", "schema": "a"}}, StructuredOutput(regex="a", only_after_thinking=False)),
        ({"tools": [TOOL]}, None),
        ({"tools": [TOOL], "tool_choice": "auto"}, None),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [STRICT]}, StructuredOutput(tool_calls=ToolCalls([STRICT]))),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            StructuredOutput(tool_calls=ToolCalls([TOOL], parallel=False)),
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, StructuredOutput(tool_calls=ToolCalls([TOOL], "required"))),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            StructuredOutput(tool_calls=ToolCalls([TOOL], "look")),
        ),
        (
            {"tools": [TOOL], "tool_choice": "none", "response_format": {"type": "json_object"}},
            StructuredOutput(json_object=True),
        ),
    ],
)
def test_every_spelling_of_a_form(body, form) -> None:
    assert read_form(body, is_chat=True) == form


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": "json"}, "response_format.type must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.type must be"),
        ({"response_format": response_format(False)}, "it allows nothing"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex and response_format both say",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": [TOOL]},
            "response_format cannot be combined with tools",
        ),
        ({"response_format": {"type": "json_object"}, "tools": [STRICT]}, "response_format and tools both say"),
        ({"structured_outputs": 5}, "structured_outputs must be an object"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "unknown key 'whitespace_pattern'"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"guided_json": ""}, "json_schema must be a non-empty text"),
        ({"guided_json": False}, "it allows nothing"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": "look"}, "tool_choice must be 'auto'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice names no tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "choice must be"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
    ],
)
def test_forms_that_cannot_be_are_refused_by_name(body, said) -> None:
    with pytest.raises(RequestError, match=said):
        read_form(body, is_chat=True)


@pytest.fixture(scope="module")
def llm(tokenizer):
    """A model that knows nothing, with the chat format of the family, and one worker for all tests."""
    chat = chat_format("DeepseekV41ForCausalLM")
    grammars = GrammarService(tokenizer, VOCAB, (EOS,), tool_grammar=chat.tool_grammar, timeout=60)
    config = EngineConfig(model="models/tiny", block_size=32, window_page=16, num_kv_blocks=256, max_num_seqs=8)
    engine = Engine(HashModel(VOCAB, eos_token_ids=(EOS,)), config, cpu_ops(), tokenizer, grammars=grammars)
    with LLM.from_engine(engine, tokenizer=tokenizer, chat=chat) as llm:
        yield llm
    grammars.close()


ASK = [{"role": "user", "content": "hi"}]
PARAMS = SamplingParams(max_tokens=60, seed=5)


def test_a_chat_has_the_form_of_its_response_format(llm) -> None:
    (answer,) = llm.chat(ASK, PARAMS, thinking=False, response_format=response_format(SCHEMA))
    assert answer.error is None and json.loads(answer.content).keys() == {"a"}


def test_a_chat_calls_the_tool_that_it_must(llm) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    params = SamplingParams(max_tokens=300, seed=5, logit_bias={30: 5.0})
    (answer,) = llm.chat(ASK, params, thinking=False, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert answer.error is None
    (call,) = answer.tool_calls
    assert call.name == "look" and json.loads(call.arguments) in ({}, {"on": True}, {"on": False})


def test_a_form_is_asked_for_once(llm) -> None:
    params = SamplingParams(max_tokens=9, structured_output=StructuredOutput(regex="a"))
    (answer,) = llm.chat(ASK, params, response_format={"type": "json_object"})
    assert answer.error.code == "invalid_parameter" and "structured_output cannot be combined" in answer.error.message


def test_a_batch_holds_each_line_to_its_form(llm, tmp_path) -> None:
    def chat(**body):
        return "/v1/chat/completions", {"messages": ASK, "thinking": {"type": "disabled"}, "max_tokens": 60, **body}

    def text(**body):
        return "/v1/completions", {"prompt": "x", "max_tokens": 40, **body}

    bodies = {
        "chat-json": chat(response_format=response_format(SCHEMA)),
        "chat-object": chat(response_format={"type": "json_object"}, logit_bias={"95": 9}),
        "chat-choice": chat(structured_outputs={"choice": ["yes", "no"]}),
        "chat-tool": chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=300),
        "text-regex": text(guided_regex="[0-3]{4}"),
        "text-format": text(response_format=response_format(SCHEMA)),
        "text-so": text(so_args={"schema_type": "ebnf", "schema": 'root ::= "ab" | "ba"'}),
        "plain": text(),
        "empty-schema": text(guided_json=""),
        "no-schema": text(response_format={"type": "json_object"}, guided_json=SCHEMA),
        "unknown-type": text(so_args={"schema_type": "xml", "schema": "x"}),
        "bad-grammar": text(guided_grammar="root ::= nope"),
        "tools-in-text": text(tools=[TOOL]),
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, (url, body) in bodies.items()
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    with closing(ResultFile(target)) as results:
        BatchRunner(llm, source, results).run()
    answers = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}

    def said(name):
        choice = answers[name]["response"]["body"]["choices"][0]
        assert choice["finish_reason"] in ("stop", "tool_calls"), (name, choice)
        return choice["message"]["content"] if "message" in choice else choice["text"]

    assert json.loads(said("chat-json")).keys() == json.loads(said("text-format")).keys() == {"a"}
    assert isinstance(json.loads(said("chat-object")), dict)
    assert said("chat-choice") in ("yes", "no") and said("text-so") in ("ab", "ba")
    assert re.fullmatch("[0-3]{4}", said("text-regex"))
    call = answers["chat-tool"]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "look"
    assert len(answers["plain"]["response"]["body"]["choices"][0]["text"]) > 0
    codes = {name: answers[name]["error"]["code"] for name in answers if answers[name]["error"]}
    assert codes == {
        "empty-schema": "invalid_structured_output",
        "no-schema": "invalid_parameter",
        "unknown-type": "invalid_structured_output",
        "bad-grammar": "invalid_structured_output",
        "tools-in-text": "unknown_parameter",
    }
