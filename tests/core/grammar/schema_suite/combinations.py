"""allOf, anyOf, oneOf, not, if/then/else, references, annotations, unknown keywords, limits."""

INT, STR = {"type": "integer"}, {"type": "string"}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": INT, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": INT},
    "required": ["kind", "lives"],
    "additionalProperties": False,
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": STR},
    "required": ["kind"],
    "additionalProperties": False,
}
KIND = {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}


def nested(depth):
    schema = INT
    for _ in range(depth):
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False},
                {"type": "null"},
            ]
        }
    return schema


CASES = [
    {
        "keyword": "allOf",
        "schema": {"allOf": [{"minimum": 2}, {"maximum": 4}, INT]},
        "valid": ["2", "4"],
        "invalid": ["¦1", "5¦".replace("5¦", "¦5"), "2¦.5"],
    },
    {
        "keyword": "allOf",
        "schema": {"allOf": [{"required": ["a"]}, {"properties": {"a": INT}}], "type": "object"},
        "valid": ['{"a": 1}', '{"a": 1, "b": 2}'],
        "invalid": ["{¦}", '{"a": ¦"x"}'],
    },
    {
        "keyword": "allOf",
        "schema": {"allOf": [{"anyOf": [INT, STR]}, {"anyOf": [STR, {"type": "null"}]}]},
        "valid": ['"a"', '""'],
        "invalid": ["¦1", "¦null"],
    },
    {
        "keyword": "allOf",
        "schema": {"allOf": [{"minimum": 3}, {"maximum": 2}], "type": "integer"},
        "refused": "/allOf/0/minimum",
        "why": "above maximum",
        "kind": "unsatisfiable",
    },
    {"keyword": "allOf", "schema": {"allOf": []}, "refused": "/allOf", "why": "at least one", "kind": "malformed"},
    {
        "keyword": "anyOf",
        "schema": {"anyOf": [INT, {"type": "string", "maxLength": 2}]},
        "valid": ["1", '"ab"'],
        "invalid": ['"ab¦c"', "¦null", "1¦.5"],
    },
    {
        "keyword": "anyOf",
        "schema": {"type": "object", "properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
        if (AB := {"a": INT, "b": INT})
        else {},
        "valid": ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        "invalid": ["{¦}", '{"a": ¦null}', '{"¦c": 1}'],
    },
    {
        "keyword": "anyOf",
        "schema": {"anyOf": [CAT, DOG]},
        "valid": ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}', '{"kind": "dog", "name": "x"}'],
        "invalid": ['{"kind": "cat"¦}', '{"kind": "dog", "¦lives": 9}', '{"kind": "¦x"}'],
    },
    {
        "keyword": "anyOf",
        "schema": {"anyOf": [{"minimum": 5, "maximum": 3, "type": "integer"}, STR]},
        "valid": ['"x"', '""'],
        "invalid": ["¦4", "¦5"],
    },
    {
        "keyword": "anyOf",
        "schema": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, False]},
        "refused": "/anyOf/1",
        "why": "false",
        "kind": "unsatisfiable",
    },
    {"keyword": "oneOf", "schema": {"oneOf": [INT, STR]}, "valid": ["1", '"a"'], "invalid": ["¦null", "1¦.5"]},
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
        "valid": ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}'],
        "invalid": ['{"kind": "cat"¦}', '{"kind": "c¦ow"}'],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"},
        "valid": ["2", "3", "9", "-4"],
        "invalid": ["6¦", "5¦", "12¦", "¦0"],
    },
    {
        "keyword": "oneOf",
        "schema": {
            "type": "object",
            "properties": AB,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            "additionalProperties": False,
        },
        "valid": ['{"a": 1}', '{"b": 1}'],
        "invalid": ["{¦}", '{"a": 1¦, "b": 2}'],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "valid": ["1.5", "-0.25"],
        "invalid": ["1¦", "1.0¦", "2.00¦"],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        "valid": ["1", "3"],
        "invalid": ["¦2", "¦4"],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
        "valid": ['"a"', '"abcd"', '""'],
        "invalid": ['"ab¦"', '"abc¦"'],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}]},
        "valid": ['"2024-01-01"', '"1.1.1.1"'],
        "invalid": ['"2024-¦"', '"¦x"'],
    },
    {
        "keyword": "oneOf",
        "schema": {"oneOf": [{"type": "string", "format": "hostname"}, {"type": "string", "format": "ipv4"}]},
        "refused": "/oneOf/1/format",
        "why": "cannot be denied",
        "kind": "unsupported",
    },
    {"keyword": "oneOf", "schema": {"oneOf": [INT, INT]}, "refused": "/oneOf/1", "why": "", "kind": "unsatisfiable"},
    {
        "keyword": "oneOf",
        "schema": nested(12),
        "valid": ["null", '{"a": null}', '{"a": {"a": {"a": null}}}'],
        "invalid": ["{¦}", '{"a": ¦1}', '{"a": {"a": ¦[]}}'],
    },
    {
        "keyword": "not",
        "schema": {"not": {"type": ["string", "object"]}},
        "valid": ["1", "null", "[]", "1.5"],
        "invalid": ['¦"a"', "¦{}"],
    },
    {
        "keyword": "not",
        "schema": {"type": "integer", "not": {"minimum": 5}},
        "valid": ["4", "-7"],
        "invalid": ["¦5", "4¦4"],
    },
    {
        "keyword": "not",
        "schema": {"type": "string", "not": {"enum": ["no", "never"]}},
        "valid": ['"yes"', '"n"', '"nope"', '"nev"'],
        "invalid": ['"no¦"', '"never¦"'],
    },
    {
        "keyword": "not",
        "schema": {"type": "object", "not": {"required": ["a"]}},
        "valid": ["{}", '{"b": 1}', '{"aa": 1}'],
        "invalid": ['{"a¦": 1}', '{"b": 1, "a¦": 2}'],
    },
    {"keyword": "not", "schema": {"not": {"not": INT}}, "valid": ["1", "-3"], "invalid": ["1¦.5", '¦"a"']},
    {
        "keyword": "not",
        "schema": {"type": "array", "not": {"items": INT}},
        "valid": ['["a"]', "[1, null]"],
        "invalid": ["[¦]", "[1¦]", "[1, 2¦]"],
    },
    {
        "keyword": "not",
        "schema": {"type": "number", "not": {"multipleOf": 0.5}},
        "valid": ["0.1", "1.25", "3.4"],
        "invalid": ["1¦", "0.5¦", "2.50¦"],
    },
    {
        "keyword": "not",
        "schema": {"not": {"anyOf": [INT, {"const": "x"}]}},
        "valid": ["1.5", '"y"', "null", "{}"],
        "invalid": ["1¦", '"x¦"', "7¦"],
    },
    {"keyword": "not", "schema": {"not": {}}, "refused": "/not", "why": "nothing else", "kind": "unsatisfiable"},
    {
        "keyword": "not",
        "schema": {"type": "object", "not": {"additionalProperties": INT}},
        "refused": "/not/additionalProperties",
        "why": "cannot be denied",
        "kind": "unsupported",
    },
    {
        "keyword": "if/then/else",
        "schema": {"type": "object", "properties": {"kind": STR, "v": INT}, "if": KIND, "then": {"required": ["v"]}},
        "valid": ["{}", '{"kind": "x", "v": 1}', '{"kind": "y"}', '{"v": 2}'],
        "invalid": ['{"kind": "x"¦}', '{"kind": ¦1}', '{"kind": "y", "v": ¦null}'],
    },
    {
        "keyword": "if/then/else",
        "schema": {"if": INT, "then": {"minimum": 0}, "else": {"type": "null"}},
        "valid": ["0", "null", "12"],
        "invalid": ["-¦1", '¦"a"', "1¦.5"],
    },
    {
        "keyword": "if/then/else",
        "schema": {"type": "integer", "if": {"multipleOf": 2}, "then": {"maximum": 10}, "else": {"minimum": 100}},
        "valid": ["2", "10", "101"],
        "invalid": ["12¦", "3¦", "99¦"],
    },
    {
        "keyword": "if/then/else",
        "schema": {"then": {"type": "null"}, "type": "integer"},
        "valid": ["1", "2"],
        "invalid": ["¦null", '¦"a"'],
    },
    {
        "keyword": "if/then/else",
        "schema": {"type": "string", "if": {"format": "date"}, "then": {"minLength": 1}},
        "refused": "/if/format",
        "why": "cannot be denied",
        "kind": "unsupported",
    },
    {
        "keyword": "$ref",
        "schema": TREE,
        "valid": ['{"v": 1}', '{"v": 1, "kids": []}', '{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}, {"v": 4}]}'],
        "invalid": ['{"v": 1, "kids": [¦1]}', '{"v": 1, "kids": [{¦}]}', '{"¦kids": []}'],
    },
    {
        "keyword": "$ref",
        "schema": {
            "properties": {"a": {"$ref": "#/properties/b"}, "b": INT},
            "type": "object",
            "additionalProperties": False,
        },
        "valid": ['{"a": 1}', '{"a": 1, "b": 2}'],
        "invalid": ['{"a": ¦"x"}', '{"b": ¦null}'],
    },
    {
        "keyword": "$ref",
        "schema": {"$defs": {"s": STR}, "$ref": "#/$defs/s", "maxLength": 2},
        "valid": ['"ab"', '""'],
        "invalid": ['"ab¦c"', "¦1"],
    },
    {
        "keyword": "$ref",
        "schema": {
            "$defs": {"a/b": INT, "c~d": STR, "e f": {"type": "null"}},
            "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}, {"$ref": "#/$defs/e%20f"}],
        },
        "valid": ["1", '"a"', "null"],
        "invalid": ["¦[]", "¦true", "1¦.5"],
    },
    {
        "keyword": "$ref",
        "schema": {"anyOf": [INT, {"type": "array", "items": {"$ref": "#"}}]},
        "valid": ["1", "[[1], []]"],
        "invalid": ["[¦null]", '[[¦"a"]]'],
    },
    {
        "keyword": "$ref",
        "schema": {"$ref": "#/$defs/x"},
        "refused": "/$ref",
        "why": "refers to nothing",
        "kind": "malformed",
    },
    {
        "keyword": "$ref",
        "schema": {"$ref": "https://example.com/other"},
        "refused": "/$ref",
        "why": "outside of the schema",
        "kind": "unsupported",
    },
    {"keyword": "$ref", "schema": {"$ref": "#"}, "refused": "", "why": "never ends", "kind": "malformed"},
    {
        "keyword": "$ref",
        "schema": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        "refused": "/properties/a",
        "why": "without end",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "$anchor",
        "schema": {"$defs": {"x": {"$anchor": "num", "type": "integer"}}, "$ref": "#num"},
        "valid": ["1", "-2"],
        "invalid": ['¦"a"', "1¦.5"],
    },
    {
        "keyword": "$anchor",
        "schema": {"$ref": "#num"},
        "refused": "/$ref",
        "why": "no subschema has the anchor",
        "kind": "malformed",
    },
    {
        "keyword": "$id",
        "schema": {
            "$id": "https://example.com/root",
            "$defs": {"x": {"$id": "item", "type": "integer"}},
            "$ref": "item",
        },
        "valid": ["1", "0"],
        "invalid": ['¦"a"', "¦null"],
    },
    {
        "keyword": "$dynamicRef",
        "schema": {
            "$dynamicAnchor": "n",
            "type": "object",
            "properties": {"k": {"$dynamicRef": "#n"}},
            "additionalProperties": False,
        },
        "valid": ['{"k": {"k": {}}}', "{}"],
        "invalid": ['{"k": ¦1}', '{"k": {"¦x": 1}}'],
    },
    {
        "keyword": "$dynamicRef",
        "schema": {
            "$defs": {"a": {"$dynamicAnchor": "n", "type": "integer"}, "b": {"$dynamicAnchor": "n", "type": "null"}},
            "$dynamicRef": "#n",
        },
        "refused": "/$dynamicRef",
        "why": "several targets",
        "kind": "unsupported",
    },
    {
        "keyword": "annotations",
        "schema": {
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": ["x"],
            "$comment": "c",
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "contentMediaType": "text/plain",
            "x-order": 3,
            "type": "integer",
        },
        "valid": ["1", "2"],
        "invalid": ['¦"x"', "¦null"],
    },
    {
        "keyword": "unknown keywords",
        "schema": {"type": "string", "maxlength": 3},
        "refused": "/maxlength",
        "why": "did you mean maxLength",
        "kind": "malformed",
    },
    {
        "keyword": "unknown keywords",
        "schema": {"type": "string", "nullable": True},
        "refused": "/nullable",
        "why": 'add "null" to type',
        "kind": "malformed",
    },
    {
        "keyword": "unknown keywords",
        "schema": {"properties": {"a": {"divisibleBy": 2}}},
        "refused": "/properties/a/divisibleBy",
        "why": "multipleOf",
        "kind": "malformed",
    },
    {
        "keyword": "unknown keywords",
        "schema": {"type": "integer", "x-unit": "m"},
        "valid": ["1", "2"],
        "invalid": ['¦"x"', "¦null"],
    },
    {"keyword": "unknown keywords", "schema": "", "refused": "", "why": "object or a boolean", "kind": "malformed"},
]

NOTES = {
    "allOf": "",
    "anyOf": "",
    "oneOf": (
        "exact: where branches can hold together the others are denied; refused where a branch that would "
        "have to be cannot be (see `not`)"
    ),
    "not": (
        "types, values, bounds, counts, patterns, `required`, `properties`, `items` without `prefixItems`, "
        "`contains` and combinations of these; other keywords cannot be denied and are refused"
    ),
    "if/then/else": "exact where `if` can be denied (see `not`), refused else",
    "$ref": "within the schema, recursive as well",
    "$anchor": "",
    "$id": "",
    "$dynamicRef": "as `$ref`, where one subschema alone has the anchor; refused else",
    "annotations": (
        "ignored, as the draft says: `title`, `description`, `default`, `examples`, `$comment`, `deprecated`,"
        " `readOnly`, `writeOnly`, `content*`, and OpenAPI's `discriminator`, `example`, `externalDocs`, "
        "`xml`"
    ),
    "unknown keywords": (
        "refused, with the keyword that was probably meant, unless their name begins with `x-`; the draft "
        "would ignore them"
    ),
}
