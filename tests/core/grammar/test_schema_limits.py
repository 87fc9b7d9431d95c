"""Schemas that are large, deep or knotted: done in bounded work, or refused with the place."""

import math
import pickle

import pytest
import xgrammar

from deepinfer.core.grammar.json_schema import JsonOptions, SchemaError, schema_to_ebnf

LIMITS = JsonOptions()


def refused(schema):
    with pytest.raises(SchemaError) as caught:
        schema_to_ebnf(schema, LIMITS)
    return caught.value


def compiles(schema, options=LIMITS):
    return xgrammar.Grammar.from_ebnf(schema_to_ebnf(schema, options))


@pytest.mark.parametrize("combination", ["oneOf", "anyOf", "allOf"])
def test_a_deep_chain_of_combinations_is_small(combination) -> None:
    """SX-5: twelve levels, the next one twice in each."""
    schema = {"$defs": {"n12": {"type": "integer"}}, "$ref": "#/$defs/n0"}
    for level in range(12):
        inner = {"$ref": f"#/$defs/n{level + 1}"}
        schema["$defs"][f"n{level}"] = {
            combination: [
                {"type": "object", "properties": {name: inner}, "required": [name], "additionalProperties": False}
                for name in (("a", "b") if combination != "allOf" else ("a", "a"))
            ]
        }
    assert len(schema_to_ebnf(schema, LIMITS).splitlines()) < 500


def test_a_chain_that_doubles_for_the_same_value_is_refused() -> None:
    schema = {"$defs": {"n40": {"type": "integer"}}, "$ref": "#/$defs/n0"}
    for level in range(40):
        schema["$defs"][f"n{level}"] = {"oneOf": [{"$ref": f"#/$defs/n{level + 1}"}] * 2}
    error = refused(schema)
    assert error.pointer.startswith("/$defs/n") and "expand to more than" in str(error)


def test_choices_that_multiply_are_refused() -> None:
    parts = [{"anyOf": [{"required": [f"{name}{i}"]} for name in "abcd"]} for i in range(8)]
    error = refused({"type": "object", "allOf": parts})
    assert error.pointer.startswith("/allOf/") and "more than 2000 cases" in str(error)


def test_an_enum_is_long_or_refused() -> None:
    assert '"4999"' in schema_to_ebnf({"enum": list(range(5_000))}, LIMITS)
    error = refused({"properties": {"a": {"enum": list(range(100_000))}}})
    assert error.pointer == "/properties/a/enum" and "100000 values" in str(error)


def test_a_document_that_is_too_deep_or_too_large_is_refused() -> None:
    deep = {}
    for _ in range(400):
        deep = {"items": deep}
    assert "levels" in str(refused(deep))
    wide = {"anyOf": [{"const": i} for i in range(20_001)]}
    assert "more than 20000 subschemas" in str(refused(wide))


def test_a_long_chain_of_references_is_refused_and_a_usual_one_is_not() -> None:
    def chain(length):
        defs = {f"n{i}": {"type": "array", "items": {"$ref": f"#/$defs/n{i + 1}"}} for i in range(length)}
        return {"$ref": "#/$defs/n0", "$defs": defs | {f"n{length}": {"type": "null"}}}

    compiles(chain(30))
    assert "too deeply" in str(refused(chain(3_000)))


def test_huge_counts_are_refused_where_they_need_states_of_their_own() -> None:
    both = {"type": "string", "pattern": "^a*$", "maxLength": 30_000}
    assert refused(both).pointer == "/pattern" or refused(both).pointer == "/maxLength"
    several = {"type": "array", "contains": {"const": 1}, "maxContains": 5_000, "maxItems": 50_000}
    assert "rules" in str(refused(several))
    names = {"type": "object", "properties": {f"p{i}": {} for i in range(200)}, "maxProperties": 100}
    assert "rules" in str(refused(names))


def test_large_counts_that_need_none_are_small() -> None:
    for schema in (
        {"type": "string", "maxLength": 1_000_000},
        {"type": "array", "items": {"type": "null"}, "minItems": 1_000, "maxItems": 50_000},
        {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(500)}},
    ):
        compiles(schema)


@pytest.mark.parametrize(
    "schema", [None, 1, "", [], math.nan, {"const": math.inf}, {"const": {1}}, {1: 2}, {"enum": [b""]}]
)
def test_what_is_no_schema_is_refused(schema) -> None:
    refused(schema)


@pytest.mark.parametrize(
    "schema", [{"const": "\ud800"}, {"properties": {"\udc00": {}}}, {"type": "string", "pattern": "\\ud800"}]
)
def test_half_surrogates_are_refused(schema) -> None:
    refused(schema)


def test_options_are_checked() -> None:
    for bad in ({"max_whitespace": -1}, {"max_whitespace": 10**9}, {"max_digits": 0}, {"max_digits": 10**9}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            JsonOptions(**bad)


def test_digits_and_whitespace_follow_the_options() -> None:
    grammar = compiles({"type": "array", "items": {"type": "number"}}, JsonOptions(max_whitespace=1, max_digits=1))
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)

    def taken(text):
        matcher = xgrammar.GrammarMatcher(compiled)
        return next((at for at, byte in enumerate(text.encode()) if not matcher.accept_token(byte)), len(text))

    assert taken("[ 1 , -2.5 ]") == 12
    assert taken("[  1]") == 2
    assert taken("[12]") == 2
    assert taken("[1.25]") == 4


def test_bytes_that_are_no_text_are_never_let_through() -> None:
    """Half a surrogate pair, an overlong form, a code point beyond the last: bytes that tokens could spell."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[256])
    for schema in ({"type": "string"}, {"type": "string", "pattern": "^[^a]*$"}, {"type": "string", "maxLength": 90}):
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(schema_to_ebnf(schema, LIMITS))
        for text in (b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80"):
            matcher = xgrammar.GrammarMatcher(compiled)
            assert matcher.accept_token(ord('"'))
            assert not all(matcher.accept_token(byte) for byte in text), (schema, text)


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(refused({"type": "float"})))
    assert error.pointer == "/type" and "the types are" in str(error)
