"""Schemas of public reports, text by text: what must be taken is, and what must not be stops where it goes wrong."""

import pytest
import xgrammar

from deepinfer.core.grammar.json_schema import JsonOptions, schema_to_ebnf


@pytest.fixture(scope="module")
def compiler():
    characters = [chr(code) for code in range(32, 127)]
    info = xgrammar.TokenizerInfo([*characters, "<end>"], stop_token_ids=[len(characters)])
    return xgrammar.GrammarCompiler(info)


@pytest.fixture
def taken(compiler):
    """How much of a text a schema's grammar takes, character by character, and whether it may end there."""

    def take(schema, text):
        grammar = compiler.compile_grammar(schema_to_ebnf(schema, JsonOptions(max_whitespace=0)))
        matcher = xgrammar.GrammarMatcher(grammar)
        for place, character in enumerate(text):
            if not matcher.accept_token(ord(character) - 32):
                return text[:place], False
        return text, bool(matcher.accept_token(95))

    return take


def test_a_declared_property_does_not_slip_through_as_an_additional_one_sg_1(taken) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    assert taken(schema, '{"a":"x"}') == ('{"a":', False), "refused at the opening quote of the value"
    assert taken(schema, '{"a":7}') == ('{"a":7}', True)
    assert taken(schema, '{"ab":"x"}') == ('{"ab":"x"}', True), "another name may hold anything"
    assert taken(schema, '{"a":7,"a":"x"}')[1] is False, "nor a second time"


@pytest.mark.parametrize("text", ["[]", '["a"]', '["a",1]', '["a",1,null]'])
def test_prefix_items_ask_for_no_items_sg_2(taken, text) -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    assert taken(schema, text) == (text, True)


def test_prefix_items_hold_their_places_sg_2(taken) -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    assert taken(schema, "[1]") == ("[", False)
    assert taken(schema, '["a","b"]') == ('["a",', False)


@pytest.mark.parametrize(
    ("schema", "text", "is_valid"),
    [
        ({"type": "number", "exclusiveMinimum": 0}, "0.1", True),
        ({"type": "number", "exclusiveMinimum": 0}, "0", False),
        ({"type": "number", "exclusiveMinimum": 0}, "0.0", False),
        ({"type": "number", "exclusiveMinimum": 0}, "-1", False),
        ({"type": "number", "minimum": 1, "maximum": 5}, "5.7", False),
        ({"type": "number", "minimum": 1, "maximum": 5}, "5", True),
        ({"type": "number", "minimum": 1, "maximum": 5}, "4.99", True),
        ({"type": "number", "minimum": 1, "maximum": 5}, "0.99", False),
        ({"type": "integer", "minimum": -5}, "-3", True),
        ({"type": "integer", "minimum": -5}, "-6", False),
        ({"type": "integer", "minimum": -5}, "40", True),
        ({"type": "number", "minimum": -5}, "-4.5", True),
        ({"type": "number", "minimum": -5}, "-5.5", False),
    ],
)
def test_ranges_of_numbers_are_exact_sg_3(taken, schema, text, is_valid) -> None:
    assert taken(schema, text)[1] is is_valid
