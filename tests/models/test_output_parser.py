"""Completions to messages, whole and in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from deepinfer.models.deepseek_v41_flash.output_parser import (
    VISIBLE_TOKENS,
    OutputParser,
    ParsedMessage,
    ToolCall,
    parse_completion,
)

OPEN, CLOSE = "<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>"


def parameter(name: str, value: str, attribute: str = ' string="true"') -> str:
    return f'<｜DSML｜ parameter name="{name}"{attribute}>{value}</｜DSML｜ parameter>'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">\n' + "\n".join(parameters) + "\n</｜DSML｜ invoke>"


def block(*invokes: str) -> str:
    return OPEN + "\n".join(invokes) + CLOSE


def only_call(completion: str, **options: Any) -> ToolCall:
    message = parse_completion(completion, False, **options)
    assert message.content == ""
    (found,) = message.tool_calls
    return found


CALL = block(invoke("f", parameter("a", "x")))
F_X = (ToolCall("f", '{"a": "x"}'),)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("why</think>answer", True, ParsedMessage("why", "answer")),
        ("</think>answer", True, ParsedMessage("", "answer")),
        ("why\n</think>\nanswer\n\n", True, ParsedMessage("why\n", "\nanswer\n\n")),
        ("answer", False, ParsedMessage(None, "answer")),
        ("", False, ParsedMessage(None, "")),
        ("why</think>ok\n\n" + CALL, True, ParsedMessage("why", "ok", F_X)),
        ("why</think>\n\n" + CALL, True, ParsedMessage("why", "", F_X)),
        ("ok\n\n" + CALL, False, ParsedMessage(None, "ok", F_X)),
        # lenient: separators, a block in the reasoning, stray ends of reasoning, text after the block
        ("ok\n" + CALL, False, ParsedMessage(None, "ok", F_X)),
        ("ok" + CALL, False, ParsedMessage(None, "ok", F_X)),
        ("ok\n\n\n" + CALL, False, ParsedMessage(None, "ok\n", F_X)),
        ("why\n\n" + CALL, True, ParsedMessage("why", "", F_X)),
        ("why\n\n" + CALL + "</think>late", True, ParsedMessage("why", "", F_X)),
        ("why</think>a</think>b", True, ParsedMessage("why", "ab")),
        ("</think>b", False, ParsedMessage(None, "b")),
        ("ok\n\n" + CALL + "late\n\n" + CALL, False, ParsedMessage(None, "ok", F_X)),
        (
            CALL.replace("<｜DSML｜ ", "<｜DSML｜").replace("</｜DSML｜ ", "</｜DSML｜"),
            False,
            ParsedMessage(None, "", F_X),
        ),
        # text that only looks like the start of markup
        ("why <", True, ParsedMessage("why <", "", reasoning_truncated=True)),
        ("a </thin", False, ParsedMessage(None, "a </thin")),
        ("1 < 2\n\n", False, ParsedMessage(None, "1 < 2\n\n")),
        ("<｜DSML｜ tool_calls>", False, ParsedMessage(None, "<｜DSML｜ tool_calls>")),
        # the budget ran out
        ("why", True, ParsedMessage("why", "", reasoning_truncated=True)),
        ("", True, ParsedMessage("", "", reasoning_truncated=True)),
        ("ok\n\n<｜DSML｜ ca", False, ParsedMessage(None, "ok", calls_truncated=True)),
        ("why\n\n<｜DSML｜", True, ParsedMessage("why", "", calls_truncated=True)),
        ("ok\n\n" + OPEN, False, ParsedMessage(None, "ok", calls_truncated=True)),
        (CALL.removesuffix(CLOSE), False, ParsedMessage(None, "", F_X, calls_truncated=True)),
        (CALL[:-40], False, ParsedMessage(None, "", calls_truncated=True)),
        (
            block(invoke("f", parameter("a", "x")), invoke("g"))[:-45],
            False,
            ParsedMessage(None, "", F_X, calls_truncated=True),
        ),
    ],
)
def test_parses(text: str, thinking: bool, expected: ParsedMessage) -> None:
    assert parse_completion(text, thinking) == expected
    parser = OutputParser(thinking)
    for letter in text:
        parser.feed(letter)
    parser.finish()
    assert parser.message() == expected


def test_thinking_that_used_the_whole_budget_says_so() -> None:
    """LC-11."""
    message = parse_completion("let me see, first", True)
    assert message.content == ""
    assert message.reasoning_truncated
    assert not parse_completion("done</think>", True).reasoning_truncated


def test_calls_keep_order_types_and_exact_values() -> None:
    raw = 'a<b> "q" \\ </think> <｜User｜>\n二'
    text = block(
        invoke(
            "first",
            parameter("text", raw),
            parameter("number", " 1.50 ", ' string="false"'),
            parameter("items", '[1, "二"]', ' string="false"'),
            parameter("digits", "12"),
            parameter("huge", "1e999", ' string="false"'),
        ),
        invoke("second", ""),
        invoke("third"),
    )
    first, second, third = parse_completion(text, False).tool_calls
    assert first.name == "first"
    assert first.arguments == (
        f'{{"text": {json.dumps(raw, ensure_ascii=False)}, "number": 1.50, "items": [1, "二"], '
        '"digits": "12", "huge": 1e999}'
    )
    assert second == ToolCall("second", "{}")
    assert third == ToolCall("third", "{}")


@pytest.mark.parametrize(
    ("value", "attribute", "expected"),
    [
        ("3", "", "3"),
        ('{"k": 1}', "", '{"k": 1}'),
        ("three", "", '"three"'),
        ("{x", ' string="false"', '"{x"'),
        ("NaN", ' string="false"', '"NaN"'),
        ("", ' string="false"', '""'),
        ("[" * 100_000, ' string="false"', '"' + "[" * 100_000 + '"'),
        ("3", ' string="true"', '"3"'),
        ("true", ' string="other"', "true"),
    ],
)
def test_parameter_values(value: str, attribute: str, expected: str) -> None:
    assert only_call(block(invoke("f", parameter("a", value, attribute)))).arguments == f'{{"a": {expected}}}'


def test_repeated_parameter_counts_once() -> None:
    text = block(invoke("f", parameter("a", "x"), parameter("b", "y"), parameter("a", "z")))
    assert json.loads(only_call(text).arguments) == {"a": "z", "b": "y"}


def test_garbage_between_tags_is_dropped() -> None:
    text = OPEN + "hm " * 1000 + invoke("f", "so:", parameter("a", "x"), "or <｜DSML｜ parameter>") + "!" + CLOSE
    assert parse_completion(text, False).tool_calls == F_X


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("attribute", ["", ' string="true"', ' string="false"'])
def test_lone_wrapper_is_opened(name: str, attribute: str) -> None:
    text = block(invoke("f", parameter(name, ' {"a": 1, "b": "x"}', attribute)))
    assert only_call(text).arguments == '{"a": 1, "b": "x"}'
    declared = [{"function": {"name": "f", "parameters": {"properties": {name: {"type": "object"}}}}}]
    assert list(json.loads(only_call(text, tools=declared).arguments)) == [name]
    others = [{"function": {"name": "f", "parameters": {"properties": {"a": {}}}}}, {"function": {"name": "g"}}]
    assert json.loads(only_call(text, tools=others).arguments) == {"a": 1, "b": "x"}


def test_wrapper_stays_unless_it_holds_an_object_alone() -> None:
    assert only_call(block(invoke("f", parameter("input", "hello")))).arguments == '{"input": "hello"}'
    assert only_call(block(invoke("f", parameter("input", "[1]")))).arguments == '{"input": "[1]"}'
    both = block(invoke("f", parameter("input", "{}"), parameter("a", "x")))
    assert json.loads(only_call(both).arguments) == {"input": "{}", "a": "x"}


def test_calls_are_ordinary_text_when_not_looked_for() -> None:
    text = "ok\n\n" + CALL
    assert parse_completion(text, False, parse_calls=False) == ParsedMessage(None, text)
    half = "ok\n\n<｜DSML｜ ca"
    assert parse_completion(half, False, parse_calls=False) == ParsedMessage(None, half)


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = OutputParser(True)
    assert parser.feed("why").reasoning_content == "why"
    assert not parser.feed("</thi")
    assert parser.feed("nk>an").content == "an"
    assert parser.feed("swer\n").content == "swer"
    assert not parser.feed("\n")
    assert not parser.feed(OPEN + '<｜DSML｜ invoke name="f">\n' + parameter("a", "x"))
    assert parser.feed("\n</｜DSML｜ invoke>").tool_calls == F_X
    assert not parser.feed(CLOSE + "late")
    assert not parser.finish()
    assert parser.message() == ParsedMessage("why", "answer", F_X)
    with pytest.raises(RuntimeError, match="after finish"):
        parser.feed("x")


def test_held_back_text_comes_with_finish() -> None:
    parser = OutputParser(False)
    assert parser.feed("a\n\n<").content == "a"
    assert parser.finish().content == "\n\n<"
    assert not parser.finish()


TAGS = [
    "<｜DSML｜ calls>",
    "<｜DSML｜calls>",
    "</｜DSML｜ calls>",
    "</think>",
    "<think>",
    "｜DSML｜",
    "<",
    "</",
    " ",
    "\n",
]
INNER_TAGS = [
    '<｜DSML｜ invoke name="',
    'f">',
    "</｜DSML｜ invoke>",
    '<｜DSML｜ parameter name="',
    '" string="true">',
    '">',
]
OTHERS = [
    "</｜DSML｜ parameter>",
    "a",
    "\n\n",
    "arguments",
    '{"k": 1}',
    "x" * 600,
    CALL,
    invoke("g", parameter("b", "1", "")),
]
fragments = st.sampled_from([*TAGS, *INNER_TAGS, *OTHERS])


@settings(deadline=None)
@given(st.lists(fragments, max_size=14).map("".join), st.booleans(), st.booleans(), st.data())
def test_streaming_equals_one_shot(text: str, thinking: bool, parse_calls: bool, data: st.DataObject) -> None:
    whole = parse_completion(text, thinking, parse_calls=parse_calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = OutputParser(thinking, parse_calls=parse_calls)
    deltas = [parser.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas.append(parser.finish())
    assert parser.message() == whole
    assert "".join(delta.reasoning_content for delta in deltas) == (whole.reasoning_content or "")
    assert "".join(delta.content for delta in deltas) == whole.content
    assert sum((delta.tool_calls for delta in deltas), ()) == whole.tool_calls


names = st.text(st.characters(exclude_characters='｜\n"', exclude_categories=["Cs"]), min_size=1, max_size=6)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


@settings(deadline=None)
@given(texts, texts, calls)
def test_undoes_the_encoder(reasoning: str, content: str, wanted: list[tuple[str, dict[str, Any]]]) -> None:
    message = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"id": str(i), "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(wanted)
        ],
    }
    prompt = encode_chat({"messages": [{"role": "user", "content": "A"}, message]}, add_generation_prompt=False).text
    completion = prompt.split("<｜Assistant｜><think>", 1)[1].removesuffix("<｜end▁of▁sentence｜>")
    tools = [{"function": {"name": name, "parameters": {"properties": arguments}}} for name, arguments in wanted]
    parsed = parse_completion(completion, True, tools=tools)
    assert (parsed.reasoning_content, parsed.content) == (reasoning, content)
    assert [(found.name, json.loads(found.arguments)) for found in parsed.tool_calls] == wanted


def test_visible_tokens_are_what_the_parser_looks_for() -> None:
    assert VISIBLE_TOKENS == ("</think>", "｜DSML｜")
