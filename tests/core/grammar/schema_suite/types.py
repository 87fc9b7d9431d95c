"""type, enum, const, boolean schemas, and what JSON text itself may look like."""

ANY = ["null", "true", "-12.5e3", '"x"', "[]", "{}", '[1, {"a": [null]}]']

CASES = [
    {
        "keyword": "boolean schema",
        "schema": True,
        "valid": ANY,
        "invalid": ["¦x", "[1,¦]", '{"a":¦}', "nul¦x", "[1¦}", '{"a"¦}', "tru¦"],
    },
    {
        "keyword": "boolean schema",
        "schema": {},
        "valid": ANY,
        "invalid": [
            "¦x",
            "[1,¦]",
            '{"a":¦}',
            "{¦1:2}",
            "[1¦}",
            '["a":¦1]'.replace('"a":¦', '"a"¦:'),
            "01".replace("0", "0¦"),
        ],
    },
    {
        "keyword": "boolean schema",
        "schema": False,
        "refused": "",
        "why": "false is satisfied by nothing",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "boolean schema",
        "schema": {"properties": {"a": False}},
        "valid": ["{}", '{"b": 1}', "7"],
        "invalid": ['{"a¦": 1}', '{"b": 1, "a¦": 1}', "[1¦}"],
    },
    {"keyword": "type", "schema": {"type": "null"}, "valid": ["null"], "invalid": ["¦0", "¦false", '¦""']},
    {"keyword": "type", "schema": {"type": "boolean"}, "valid": ["true", "false"], "invalid": ["¦null", "¦1", "t¦he"]},
    {
        "keyword": "type",
        "schema": {"type": "integer"},
        "valid": ["0", "-7", "123456", "99999999999999999999"],
        "invalid": ["1¦.5", '¦"1"', "0¦1", "-¦"],
        "narrower": ["1.0", "1e3", "100000000000000000000"],
    },
    {
        "keyword": "type",
        "schema": {"type": "number"},
        "valid": ["0", "-7", "2.50", "1e5", "1E-05", "-0.0"],
        "invalid": ["¦.5", "1.¦", "1e¦", "¦+1", "0¦1", "-¦x"],
        "narrower": ["1e100", "0.000000000000000000001"],
    },
    {
        "keyword": "type",
        "schema": {"type": "string"},
        "valid": ['""', '"a b"', '"é 你"', '"\\n\\"\\\\\\/"', '"\\u00e9"', '"\\ud83d\\ude00"'],
        "invalid": ["¦a", '"a¦', '"¦\n"', '"\\¦x"', '"\\u00¦g0"', "¦'a'"],
    },
    {
        "keyword": "type",
        "schema": {"type": "array"},
        "valid": ["[]", "[1]", '[1, "a", [null]]'],
        "invalid": ["¦{}", "[1¦", "[1 ¦2]"],
    },
    {
        "keyword": "type",
        "schema": {"type": "object"},
        "valid": ["{}", '{"a": 1}', '{"a": {"b": []}, "": null}'],
        "invalid": ["¦[]", '{"a"¦}', '{"a": 1,¦}'],
    },
    {"keyword": "type", "schema": {"type": ["string", "null"]}, "valid": ['"a"', "null"], "invalid": ["¦1", "¦[]"]},
    {"keyword": "type", "schema": {"type": ["integer", "number"]}, "valid": ["1", "1.5"], "invalid": ['¦"1"', "¦true"]},
    {
        "keyword": "type",
        "schema": {"type": ["array", "boolean", "integer"]},
        "valid": ["[]", "true", "-3"],
        "invalid": ["¦{}", "3¦.5", "¦null"],
    },
    {
        "keyword": "type",
        "schema": {"type": "float"},
        "refused": "/type",
        "why": "the types are null, boolean",
        "kind": "malformed",
    },
    {"keyword": "type", "schema": {"type": []}, "refused": "/type", "why": "at least one", "kind": "malformed"},
    {
        "keyword": "type",
        "schema": {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "refused": "/allOf/1/type",
        "why": "contradicts",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "enum",
        "schema": {"enum": ["red", "green", 3, None]},
        "valid": ['"red"', '"green"', "3", "null"],
        "invalid": ['"r¦ose"', '"blue"'.replace("b", "¦b"), "3¦0", "¦true"],
        "narrower": ["3.0", '"r\\u0065d"'],
    },
    {
        "keyword": "enum",
        "schema": {"enum": [1, 1.5, -2, "1"]},
        "valid": ["1", "1.5", "-2", '"1"'],
        "invalid": ["1¦2", "1.5¦5", "¦2", "¦null"],
    },
    {
        "keyword": "enum",
        "schema": {"enum": [[1, 2], {"a": "b"}, []]},
        "valid": ["[1, 2]", '{"a": "b"}', "[]"],
        "invalid": ["[1¦]", '{"a": "¦c"}', "[¦2]"],
    },
    {
        "keyword": "enum",
        "schema": {"enum": [{"a": 1, "b": 2}]},
        "valid": ['{"a": 1, "b": 2}'],
        "invalid": ['{"a": 1¦}'],
        "narrower": ['{"b": 2, "a": 1}'],
    },
    {"keyword": "enum", "schema": {"type": "string", "enum": ["a", 1]}, "valid": ['"a"'], "invalid": ["¦1"]},
    {"keyword": "enum", "schema": {"enum": [1, 5, 9], "minimum": 4}, "valid": ["5", "9"], "invalid": ["¦1", "¦4"]},
    {"keyword": "enum", "schema": {"enum": ["a", "bbb"], "minLength": 2}, "valid": ['"bbb"'], "invalid": ['"¦a"']},
    {
        "keyword": "enum",
        "schema": {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
        "valid": ["2", "3"],
        "invalid": ["¦1", "¦4"],
    },
    {
        "keyword": "enum",
        "schema": {"enum": ["tab\t", 'quote"', "back\\slash", "é", "😀"]},
        "valid": ['"tab\\t"', '"quote\\""', '"back\\\\slash"', '"é"', '"😀"'],
        "invalid": ['"tab¦\t"', '"quote¦"', '"back\\¦s"', '"¦e"', '"¦x"'],
    },
    {
        "keyword": "enum",
        "schema": {"enum": [True, False, 0]},
        "valid": ["true", "false", "0"],
        "invalid": ["¦1", "¦null", '¦""'],
    },
    {
        "keyword": "enum",
        "schema": {"enum": []},
        "refused": "/enum",
        "why": "name at least one",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "enum",
        "schema": {"type": "object", "enum": ["a", 1]},
        "refused": "/enum",
        "why": "no value of enum",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "enum",
        "schema": {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
        "refused": "/allOf/0/enum",
        "why": "satisfies the rest",
        "kind": "unsatisfiable",
    },
    {"keyword": "const", "schema": {"const": "yes"}, "valid": ['"yes"'], "invalid": ['"¦no"']},
    {"keyword": "const", "schema": {"const": 0}, "valid": ["0"], "invalid": ["¦false", "0¦1"], "narrower": ["0.0"]},
    {
        "keyword": "const",
        "schema": {"const": {"a": [True, None]}},
        "valid": ['{"a": [true, null]}', '{"a":[true,null]}'],
        "invalid": ['{"a": [true¦]}', "{¦}"],
    },
    {
        "keyword": "const",
        "schema": {"const": 1, "type": "string"},
        "refused": "/const",
        "why": "no value of const",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "const",
        "schema": {"const": 2, "maximum": 1},
        "refused": "/const",
        "why": "satisfies the rest",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "JSON text",
        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        "valid": ["[1,2]", "[ 1 , 2 ]", "[\n  1,\n  2\n]", "[\t1\r\n]"],
        "invalid": ["[1,,2]".replace(",,", ",¦,"), "[¦,1]", "[1,2¦", "[1, ¦]"],
        "narrower": ["[" + " " * 17 + "1]", " [1]", "[1] "],
    },
    {
        "keyword": "JSON text",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "compact": True,
        "valid": ['{"a":1}'],
        "invalid": ["{¦x}"],
        "narrower": ['{ "a":1}', '{"a": 1}', '{"a":1 }', '{"a":1\n}'],
    },
]

NOTES = {
    "boolean schema": "",
    "type": (
        "integers are written with digits alone, up to 20 (`JsonOptions.max_digits`); other numbers with up "
        "to 20 before and behind the point and an exponent of up to two digits"
    ),
    "enum": (
        "each value is written one way: strings without needless escapes, numbers as in the schema, "
        "properties in the schema's order"
    ),
    "const": "as `enum`",
    "JSON text": (
        "white space between two parts is bounded (`JsonOptions.max_whitespace`, 0 is compact), and none "
        "stands around the value; names and strings that a schema constrains are written without needless "
        "escapes"
    ),
}
