"""properties, required, additionalProperties, patternProperties, propertyNames, counts, dependencies, unevaluated."""

INT, STR = {"type": "integer"}, {"type": "string"}
AB = {"a": INT, "b": STR}

CASES = [
    {
        "keyword": "properties",
        "schema": {"type": "object", "properties": {"a": INT}},
        "valid": ["{}", '{"a": 1}', '{"a": 1, "b": "x"}', '{"aa": "x"}', '{"": null}'],
        "invalid": ['{"a": ¦"x"}', '{"b": 1, "a¦": "x"}', '{"\\u00¦61": "x"}'],
        "narrower": ['{"a": 1, "a": 2}'],
    },
    {
        "keyword": "properties",
        "schema": {"type": "object", "properties": AB, "additionalProperties": False},
        "valid": ["{}", '{"a": 1}', '{"b": "x"}', '{"a": 1, "b": "x"}'],
        "invalid": ['{"¦c": 1}', '{"a": ¦null}', '{"a": 1, "b": ¦2}', '{"b": "x"¦, "c": 1}'],
        "narrower": ['{"b": "x", "a": 1}'],
    },
    {
        "keyword": "properties",
        "schema": {"properties": {"a": INT}},
        "valid": ["7", '{"a": 1}', "[]"],
        "invalid": ['{"a": ¦[]}', '{"a": ¦null}', '{"a"¦, 1}'],
    },
    {
        "keyword": "properties",
        "schema": {"type": "object", "properties": {'a"b': INT, "é": INT, "a/b~": INT}, "additionalProperties": False},
        "valid": ['{"a\\"b": 1}', '{"é": 2, "a/b~": 3}'],
        "invalid": ['{"a¦"b": 1}', '{"é": ¦"x"}'],
    },
    {
        "keyword": "properties",
        "schema": {"allOf": [{"properties": {"a": INT}}, {"properties": {"a": {"minimum": 3}}}], "type": "object"},
        "valid": ['{"a": 3}', "{}"],
        "invalid": ['{"a": 2¦}', '{"a": ¦"x"}'],
    },
    {
        "keyword": "properties",
        "schema": {
            "type": "object",
            "properties": {"n": {"type": "object", "properties": {"m": {"type": "boolean"}}, "required": ["m"]}},
            "required": ["n"],
        },
        "valid": ['{"n": {"m": true}}', '{"n": {"m": false, "k": 1}}'],
        "invalid": ['{"n": {¦}}', "{¦}", '{"n": {"m": ¦0}}'],
    },
    {
        "keyword": "properties",
        "schema": {"properties": [INT]},
        "refused": "/properties",
        "why": "object of schemas",
        "kind": "malformed",
    },
    {
        "keyword": "required",
        "schema": {"type": "object", "properties": AB, "required": ["b"]},
        "valid": ['{"b": "x"}', '{"a": 1, "b": "x"}', '{"b": "x", "c": 1}'],
        "invalid": ["{¦}", '{"a": 1¦}', '{"c": ¦1}'.replace('"c": ¦1', '"¦c": 1')],
        "narrower": ['{"c": 1, "b": "x"}'],
    },
    {
        "keyword": "required",
        "schema": {"type": "object", "required": ["x"], "additionalProperties": INT},
        "valid": ['{"x": 1}', '{"x": 1, "y": 2}'],
        "invalid": ["{¦}", '{"x": ¦"1"}', '{"x": 1, "y": ¦null}'],
    },
    {
        "keyword": "required",
        "schema": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "refused": "/properties/a",
        "why": "false",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "required",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 3}},
            "required": ["a"],
        },
        "refused": "/properties/a/minLength",
        "why": "more than maxLength",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "required",
        "schema": {"type": "object", "required": ["a"], "additionalProperties": False},
        "refused": "/additionalProperties",
        "why": "false",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "required",
        "schema": {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
        "refused": "/properties/a/required",
        "why": "beside properties",
        "kind": "malformed",
    },
    {
        "keyword": "additionalProperties",
        "schema": {"type": "object", "additionalProperties": INT},
        "valid": ["{}", '{"x": 1}', '{"x": 1, "y": 2}'],
        "invalid": ['{"x": ¦"a"}', '{"x": 1, "y": ¦null}', '{"x": 1¦.5}'],
    },
    {
        "keyword": "additionalProperties",
        "schema": {"type": "object", "properties": {"name": STR}, "additionalProperties": INT},
        "valid": ['{"name": "x", "n": 1}', '{"names": 1}', '{"nam": 1}'],
        "invalid": ['{"name": ¦1}', '{"names": ¦"x"}', '{"n": ¦"x"}'],
    },
    {
        "keyword": "additionalProperties",
        "schema": {"type": "object", "properties": {"a": INT}, "additionalProperties": True},
        "valid": ['{"a": 1}', '{"b": "x"}'],
        "invalid": ['{"a": ¦"x"}', '{"b": "x", "a¦": "x"}'],
    },
    {
        "keyword": "additionalProperties",
        "schema": {"type": "object", "additionalProperties": False},
        "valid": ["{}", "{ }"],
        "invalid": ['{¦"a": 1}', '{ ¦"": 1}'],
    },
    {
        "keyword": "patternProperties",
        "schema": {"type": "object", "patternProperties": {"^n_": INT}, "additionalProperties": STR},
        "valid": ['{"n_a": 1}', '{"x": "s"}', '{"n_": 1, "m": "s"}'],
        "invalid": ['{"n_a": ¦"s"}', '{"x": ¦1}', '{"n": ¦1}'],
    },
    {
        "keyword": "patternProperties",
        "schema": {
            "type": "object",
            "patternProperties": {"^x": INT, "y$": {"minimum": 5}},
            "additionalProperties": False,
        },
        "valid": ['{"x": 1}', '{"xy": 7}', '{"ay": 9, "x": 2}'],
        "invalid": ['{"xy": 3¦}', '{"a¦": 1}', '{"xy": ¦"s"}'],
    },
    {
        "keyword": "patternProperties",
        "schema": {"type": "object", "properties": {"ab": {"maximum": 9}}, "patternProperties": {"^a": INT}},
        "valid": ['{"ab": 9}', '{"ac": 10}', '{"b": "x"}'],
        "invalid": ['{"ab": 1¦0}', '{"ab": ¦"s"}', '{"ac": ¦"s"}'],
    },
    {
        "keyword": "patternProperties",
        "schema": {"patternProperties": {"(?=a)": INT}},
        "refused": "/patternProperties/(?=a)",
        "why": "look-around",
        "kind": "unsupported",
    },
    {
        "keyword": "propertyNames",
        "schema": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        "valid": ["{}", '{"abc": 1}'],
        "invalid": ['{"¦A": 1}', '{"a¦1": 1}', '{"¦": 1}'],
    },
    {
        "keyword": "propertyNames",
        "schema": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        "valid": ['{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'],
        "invalid": ['{"¦c": 1}', '{"a": ¦"x"}', '{"a¦b": 1}'],
    },
    {
        "keyword": "propertyNames",
        "schema": {"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"abc": INT, "ab": INT}},
        "valid": ['{"ab": 1}', '{"x": null}'],
        "invalid": ['{"ab¦c": 1}', '{"xyz": 1}'.replace("z", "¦z")],
    },
    {
        "keyword": "minProperties",
        "schema": {"type": "object", "minProperties": 1},
        "valid": ['{"a": 1}', '{"a": 1, "b": 2}'],
        "invalid": ["{¦}", "{ ¦}"],
    },
    {
        "keyword": "minProperties",
        "schema": {
            "type": "object",
            "properties": {"a": {}, "b": {}, "c": {}},
            "minProperties": 2,
            "additionalProperties": False,
        },
        "valid": ['{"a": 1, "c": 2}', '{"a": 1, "b": 1, "c": 1}'],
        "invalid": ['{"a": 1¦}', '{"¦c": 1}', "{¦}"],
    },
    {
        "keyword": "minProperties",
        "schema": {"type": "object", "properties": {"a": INT}, "minProperties": 2},
        "valid": ['{"a": 1, "x": 2}'],
        "invalid": ['{"a": 1¦}'],
        "narrower": ['{"x": 1, "y": 2}'],
    },
    {
        "keyword": "minProperties",
        "schema": {"type": "object", "minProperties": 3},
        "refused": "/minProperties",
        "why": "can be told apart",
        "kind": "unsupported",
    },
    {
        "keyword": "minProperties",
        "schema": {"type": "object", "minProperties": 2, "maxProperties": 1, "properties": AB},
        "refused": "/minProperties",
        "why": "more than maxProperties",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "maxProperties",
        "schema": {"type": "object", "maxProperties": 1},
        "valid": ["{}", '{"a": 1}'],
        "invalid": ['{"a": 1¦, "b": 2}', '{"a": {}¦, "": 2}'],
    },
    {
        "keyword": "maxProperties",
        "schema": {"type": "object", "properties": AB, "maxProperties": 2},
        "valid": ['{"a": 1, "b": "x"}', '{"a": 1, "z": 0}', "{}"],
        "invalid": ['{"a": 1, "b": "x"¦, "c": 1}', '{"b": ¦1}', '{"a": 1, "z": 0¦, "y": 1}'],
    },
    {
        "keyword": "maxProperties",
        "schema": {"type": "object", "maxProperties": 0},
        "valid": ["{}", "{ }"],
        "invalid": ['{¦"a": 1}', '{ ¦"a": 1}'],
    },
    {
        "keyword": "maxProperties",
        "schema": {"type": "object", "maxProperties": 1, "required": ["a", "b"]},
        "refused": "/maxProperties",
        "why": "together",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "dependentRequired",
        "schema": {
            "type": "object",
            "properties": AB,
            "dependentRequired": {"a": ["b"]},
            "additionalProperties": False,
        },
        "valid": ["{}", '{"b": "x"}', '{"a": 1, "b": "x"}'],
        "invalid": ['{"a": 1¦}', '{"a": ¦"x"}', '{"b": ¦1}'],
    },
    {
        "keyword": "dependentRequired",
        "schema": {"type": "object", "dependentRequired": {"a": ["b"], "b": ["c"]}, "additionalProperties": INT},
        "valid": ["{}", '{"c": 1}', '{"b": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'],
        "invalid": ['{"a": 1¦}', '{"b": 1¦}', '{"a": 1, "b": 2¦}'],
    },
    {
        "keyword": "dependentSchemas",
        "schema": {
            "type": "object",
            "properties": AB,
            "dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}, "required": ["b"]}},
            "additionalProperties": False,
        },
        "valid": ['{"b": "any"}', '{"a": 1, "b": "x"}', "{}"],
        "invalid": ['{"a": 1¦}', '{"a": 1, "b": "¦y"}', '{"b": ¦1}'],
    },
    {
        "keyword": "unevaluatedProperties",
        "schema": {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
        "valid": ["{}", '{"a": 1}'],
        "invalid": ['{"¦b": 1}', '{"a": 1¦, "b": 2}'],
    },
    {
        "keyword": "unevaluatedProperties",
        "schema": {
            "type": "object",
            "allOf": [{"properties": {"a": INT}}],
            "properties": {"b": STR},
            "unevaluatedProperties": False,
        },
        "valid": ['{"b": "x"}', '{"a": 1}', '{"b": "x", "a": 1}'],
        "invalid": ['{"¦c": 1}', '{"a": ¦"x"}'],
        "narrower": ['{"a": 1, "b": "x"}'],
    },
    {
        "keyword": "unevaluatedProperties",
        "schema": {
            "$defs": {"base": {"properties": {"id": INT}, "required": ["id"]}},
            "$ref": "#/$defs/base",
            "type": "object",
            "properties": {"n": STR},
            "unevaluatedProperties": STR,
        },
        "valid": ['{"id": 1}', '{"n": "x", "id": 1}', '{"id": 1, "z": "s"}'],
        "invalid": ['{"id": 1, "z": ¦2}', '{"n": "x"¦}', '{"id": ¦"1"}'],
    },
    {
        "keyword": "unevaluatedProperties",
        "schema": {
            "type": "object",
            "anyOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": INT}, "required": ["b"]}],
            "unevaluatedProperties": False,
        },
        "valid": ['{"a": 1}', '{"b": 2}'],
        "invalid": ['{"¦c": 1}', "{¦}", '{"a": ¦"x"}'],
        "narrower": ['{"a": 1, "b": 2}'],
    },
    {
        "keyword": "unevaluatedProperties",
        "schema": {
            "type": "object",
            "if": {"properties": {"k": {"const": 1}}, "required": ["k"]},
            "then": {"properties": {"v": STR}},
            "else": {"properties": {"w": STR}},
            "unevaluatedProperties": False,
        },
        "valid": ['{"k": 1, "v": "x"}', '{"w": "x"}', "{}"],
        "invalid": ['{"k": 1, "¦w": "x"}', '{"¦v": "x"}', '{"k": ¦2}'],
    },
]

NOTES = {
    "properties": "each once, in the order in which the schema declares them, before all others",
    "required": "order as with `properties`; required names that are not declared come behind those that are",
    "additionalProperties": (
        "other names are never a declared one; they may repeat, which readers of JSON resolve to one of them"
    ),
    "patternProperties": "at most 6 patterns for one object; patterns as with `pattern`",
    "propertyNames": "",
    "minProperties": (
        "undeclared names count as one, since a grammar cannot keep them different; more than can be told "
        "apart is refused"
    ),
    "maxProperties": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "unevaluatedProperties": "order as with `properties`; of `anyOf`, one branch at a time evaluates",
}
