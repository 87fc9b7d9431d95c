"""Random schemas: what satisfies them is let through, what is let through satisfies them."""

import json
import random
from decimal import Decimal

import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deepinfer.core.grammar.json_schema import JsonOptions, SchemaError, schema_to_ebnf
from deepinfer.core.grammar.schema_document import Document
from deepinfer.core.grammar.schema_values import satisfies

END = 256
NAMES = ["a", "b", "ab", "c"]
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

small = st.integers(-12, 12)
scalars = st.one_of(st.none(), st.booleans(), small, st.sampled_from(["", "a", "ab", 'x"y', "é", "b1"]))


def numbers():
    tenths = small.map(lambda n: Decimal(n) / 4)
    keyword = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
    bounds = st.dictionaries(keyword, st.one_of(small, tenths), max_size=2)
    multiples = st.dictionaries(
        st.just("multipleOf"), st.sampled_from([1, 2, 3, Decimal("0.5"), Decimal("0.1")]), max_size=1
    )
    types = st.sampled_from([{"type": "integer"}, {"type": "number"}])
    return st.tuples(types, bounds, multiples).map(lambda parts: parts[0] | parts[1] | parts[2])


def strings():
    counts = st.dictionaries(st.sampled_from(["minLength", "maxLength"]), st.integers(0, 4), max_size=2)
    patterns = st.dictionaries(
        st.just("pattern"), st.sampled_from(["^a", "b$", "^[ab]*$", "[0-9]", '^(x|é)?"?', "^.{1,3}$"]), max_size=1
    )
    return st.tuples(counts, patterns).map(lambda parts: {"type": "string"} | parts[0] | parts[1])


def containers(inner):
    counts = st.dictionaries(st.sampled_from(["minItems", "maxItems"]), st.integers(0, 3), max_size=2)
    items = st.fixed_dictionaries({}, optional={"items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2)})
    contains = st.fixed_dictionaries(
        {}, optional={"contains": inner, "minContains": st.integers(0, 2), "maxContains": st.integers(1, 2)}
    )
    arrays = st.tuples(items, counts, contains).map(lambda parts: {"type": "array"} | parts[0] | parts[1] | parts[2])
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
            "propertyNames": st.sampled_from([{"maxLength": 1}, {"pattern": "^[ab]"}, {"enum": ["a", "c"]}]),
            "minProperties": st.integers(0, 1),
            "maxProperties": st.integers(0, 3),
            "dependentRequired": st.dictionaries(st.sampled_from(NAMES), st.just(["b"]), max_size=1),
            "unevaluatedProperties": st.booleans(),
        },
    )
    combined = st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"oneOf": parts}),
        inner.map(lambda part: {"not": part}),
        st.tuples(inner, inner, inner).map(lambda p: {"if": p[0], "then": p[1], "else": p[2]}),
    )
    return st.one_of(arrays, objects, combined)


leaves = st.one_of(
    st.booleans(),
    numbers(),
    strings(),
    st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from(["null", "boolean", "integer", "string", "array", "object"]).map(lambda name: {"type": name}),
)
schemas = st.recursive(leaves, containers, max_leaves=6)
values = st.recursive(
    st.one_of(scalars, small.map(lambda n: Decimal(n) / 4), st.sampled_from([Decimal("0.1"), Decimal("-2.50")])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from([*NAMES, "ac", "z"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def instances(schema):
    """Values that a schema describes, or nearly; what combinations and counts ask for is left to chance."""
    if not isinstance(schema, dict):
        return values
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return st.one_of(*map(instances, schema[keyword]))
    if "if" in schema:
        return st.one_of(instances(schema["then"]), instances(schema["else"]))
    if schema.get("type") == "array":
        first = st.tuples(*map(instances, schema.get("prefixItems", ())))
        others = st.lists(st.one_of(instances(schema.get("items")), instances(schema.get("contains"))), max_size=3)
        return st.tuples(first, others).map(lambda parts: [*parts[0], *parts[1]])
    if schema.get("type") == "object":
        known = {name: instances(part) for name, part in schema.get("properties", {}).items()}
        needed = {name: known.pop(name, values) for name in [*known] if name in schema.get("required", ())}
        needed |= {name: values for name in schema.get("required", ()) if name not in needed}
        return st.fixed_dictionaries(needed, optional=known).map(lambda v: {n: v[n] for n in ordered(schema, v)})
    kinds = {
        "integer": small,
        "number": small.map(lambda n: Decimal(n) / 4),
        "null": st.none(),
        "boolean": st.booleans(),
    }
    return kinds.get(schema.get("type"), st.one_of(values, st.text('ab01x"', max_size=4)))


def ordered(schema, value):
    """The names of an object in the order in which a grammar takes them."""
    declared = [*schema.get("properties", ()), *schema.get("required", ())]
    return sorted(value, key=lambda name: declared.index(name) if name in declared else len(declared))


@pytest.fixture(scope="module")
def info():
    return xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[END])


def compiled(schema, info):
    """The grammar, None where the schema is refused."""
    try:
        ebnf = schema_to_ebnf(schema, JsonOptions(max_whitespace=1, max_digits=3))
    except SchemaError as error:
        assert str(error) and (error.pointer == "" or error.pointer.startswith("/"))
        return None
    return xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(ebnf)


def is_valid(schema, value):
    def is_integer(_, number):
        return isinstance(number, int | Decimal) and not isinstance(number, bool) and number == int(number)

    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return validator(schema).is_valid(value)


def dumps(value):
    return json.dumps(value, ensure_ascii=False, default=lambda number: float(number), separators=(", ", ": "))


def lets_through(grammar, text):
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()


@given(schema=schemas, seed=st.integers(0, 1 << 30))
@SETTINGS
def test_what_a_grammar_lets_through_satisfies_the_schema(info, schema, seed) -> None:
    grammar = compiled(schema, info)
    assume(grammar is not None)
    rng = random.Random(seed)
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    for _ in range(4):
        matcher, text = xgrammar.GrammarMatcher(grammar), bytearray()
        while len(text) < 400:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: END + 1]
            allowed = np.flatnonzero(bits)
            assert len(allowed), (schema, text)
            closing = [token for token in allowed if token in (*b'"]}', END)]
            readable = [token for token in allowed if token in (*b'ab019x"y{}[],:.-tfn ', END)]
            token = int(rng.choice(closing if closing and rng.random() < 0.4 else readable or list(allowed)))
            assert matcher.accept_token(token)
            if token == END:
                assert is_valid(schema, json.loads(text.decode(), parse_float=Decimal)), (schema, text)
                break
            text.append(token)


@given(schema=schemas, data=st.data())
@SETTINGS
def test_instances_that_satisfy_a_schema_are_let_through(info, schema, data) -> None:
    value = data.draw(instances(schema))
    assume(is_valid(schema, value))
    grammar = compiled(schema, info)
    if grammar is not None and not lets_through(grammar, dumps(value)):
        assert has_objects(value) and is_combined(schema), (schema, value)


def is_combined(schema):
    """Whether the order of properties is that of several subschemas, or names count as one."""
    combining = (
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "minProperties",
        "dependentRequired",
        "patternProperties",
        "enum",
    )
    return any(f'"{keyword}"' in dumps(schema) for keyword in combining)


@given(schema=schemas, value=values)
@SETTINGS
def test_what_is_refused_does_not_satisfy_the_schema_or_is_known_to_be_narrower(info, schema, value) -> None:
    """Properties in another order, and numbers or counts beyond the grammar's own bounds, are not generated here."""
    grammar = compiled(schema, info)
    assume(grammar is not None)
    through = lets_through(grammar, dumps(value))
    if through:
        assert is_valid(schema, value), (schema, value)
    elif is_valid(schema, value):
        assert has_objects(value) or '"unevaluatedProperties"' in dumps(schema), (schema, value)


def has_objects(value):
    """Whether the order of properties or the names of several may be what a grammar leaves out."""
    if isinstance(value, list):
        return any(map(has_objects, value))
    return isinstance(value, dict) and (len(value) > 1 or any(map(has_objects, value.values())))


@given(schema=schemas, value=values)
@SETTINGS
def test_our_own_verdict_on_values_is_that_of_the_validator(schema, value) -> None:
    try:
        document = Document(schema)
    except SchemaError:
        return
    plain = json.loads(dumps(value), parse_float=Decimal)
    assert satisfies(document, "", plain) == is_valid(schema, plain)
