"""items, prefixItems, counts, contains, uniqueItems, unevaluatedItems."""

INT, STR = {"type": "integer"}, {"type": "string"}

CASES = [
    {
        "keyword": "items",
        "schema": {"type": "array", "items": INT},
        "valid": ["[]", "[1]", "[1, 2, 3]"],
        "invalid": ['[¦"a"]', "[1, ¦null]", "[1¦.5]"],
    },
    {
        "keyword": "items",
        "schema": {"type": "array", "items": {"type": "array", "items": INT}},
        "valid": ["[[]]", "[[1], [2, 3]]"],
        "invalid": ["[¦1]", "[[1], [¦true]]"],
    },
    {
        "keyword": "items",
        "schema": {"items": INT},
        "valid": ["[1]", '"a"', "{}"],
        "invalid": ['[¦"a"]', "[1, ¦[]]", "[¦{}]"],
    },
    {"keyword": "items", "schema": {"type": "array", "items": False}, "valid": ["[]"], "invalid": ["[¦1]"]},
    {"keyword": "items", "schema": {"items": [INT]}, "refused": "/items", "why": "prefixItems", "kind": "malformed"},
    {
        "keyword": "prefixItems",
        "schema": {"type": "array", "prefixItems": [STR, INT]},
        "valid": ["[]", '["a"]', '["a", 1]', '["a", 1, null]'],
        "invalid": ["[¦1]", '["a", ¦"b"]', "[¦null]", '["a", ¦[]]'],
    },
    {
        "keyword": "prefixItems",
        "schema": {"type": "array", "prefixItems": [STR, INT], "items": False},
        "valid": ["[]", '["a"]', '["a", 1]'],
        "invalid": ['["a", 1¦, 2]', "[¦1]", '["a", ¦null]'],
    },
    {
        "keyword": "prefixItems",
        "schema": {"type": "array", "prefixItems": [STR], "items": {"type": "boolean"}, "minItems": 2},
        "valid": ['["a", true]', '["a", true, false]'],
        "invalid": ['["a"¦]', '["a", ¦1]', "[¦]"],
    },
    {
        "keyword": "prefixItems",
        "schema": {"allOf": [{"prefixItems": [STR]}, {"prefixItems": [{"maxLength": 2}, INT]}], "type": "array"},
        "valid": ['["ab", 1]', "[]"],
        "invalid": ['["ab¦c"]', '["a", ¦"b"]', "[¦1]"],
    },
    {
        "keyword": "prefixItems",
        "schema": {"prefixItems": []},
        "refused": "/prefixItems",
        "why": "at least one",
        "kind": "malformed",
    },
    {
        "keyword": "minItems",
        "schema": {"type": "array", "items": INT, "minItems": 2},
        "valid": ["[1, 2]", "[1, 2, 3]"],
        "invalid": ["[¦]", "[1¦]"],
    },
    {"keyword": "minItems", "schema": {"minItems": 1}, "valid": ["[1]", "7"], "invalid": ["[¦]", "[ ¦]"]},
    {
        "keyword": "minItems",
        "schema": {"type": "array", "minItems": 3, "maxItems": 2},
        "refused": "/minItems",
        "why": "more than maxItems",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "minItems",
        "schema": {"type": "array", "minItems": 3, "prefixItems": [INT], "items": False},
        "refused": "/items",
        "why": "false",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "maxItems",
        "schema": {"type": "array", "items": INT, "maxItems": 2},
        "valid": ["[]", "[1]", "[1, 2]"],
        "invalid": ["[1, 2¦, 3]", "[¦null]"],
    },
    {
        "keyword": "maxItems",
        "schema": {"type": "array", "maxItems": 0},
        "valid": ["[]", "[ ]"],
        "invalid": ["[¦1]", "[ ¦[]]"],
    },
    {
        "keyword": "maxItems",
        "schema": {"type": "array", "items": STR, "minItems": 1, "maxItems": 3},
        "valid": ['["a"]', '["a", "b", "c"]'],
        "invalid": ["[¦]", '["a", "b", "c"¦, "d"]'],
    },
    {
        "keyword": "contains",
        "schema": {"type": "array", "contains": INT},
        "valid": ["[1]", '["a", 1]', '[1, "a", null]'],
        "invalid": ["[¦]", '["a"¦]', "[1.5¦]"],
    },
    {
        "keyword": "contains",
        "schema": {"type": "array", "items": {"type": ["integer", "string"]}, "contains": STR, "maxItems": 2},
        "valid": ['["a"]', '[1, "a"]', '["a", 1]'],
        "invalid": ["[1¦]", "[1, ¦2]", '["a", 1¦, "b"]'],
    },
    {
        "keyword": "contains",
        "schema": {"type": "array", "items": STR, "contains": INT},
        "refused": "/items/type",
        "why": "contradicts",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "minContains",
        "schema": {"type": "array", "contains": INT, "minContains": 2},
        "valid": ["[1, 2]", '[1, "a", 2]', "[1, 2, 3]"],
        "invalid": ["[1¦]", '[1, "a"¦]', "[¦]"],
    },
    {
        "keyword": "minContains",
        "schema": {"type": "array", "contains": INT, "minContains": 0},
        "valid": ["[]", '["a"]'],
        "invalid": ["[¦,]", "[1¦"],
    },
    {
        "keyword": "maxContains",
        "schema": {"type": "array", "contains": {"const": 1}, "maxContains": 2},
        "valid": ["[1]", "[1, 1]", "[1, 2, 1]", '["a", 1]'],
        "invalid": ["[1, 1, 1¦]", "[2¦]", "[¦]"],
    },
    {
        "keyword": "maxContains",
        "schema": {
            "type": "array",
            "contains": STR,
            "minContains": 1,
            "maxContains": 1,
            "items": {"type": ["string", "null"]},
        },
        "valid": ['["a"]', '[null, "a", null]'],
        "invalid": ['["a", ¦"b"]', "[null¦]"],
    },
    {
        "keyword": "maxContains",
        "schema": {"type": "array", "contains": {"format": "date"}, "maxContains": 1},
        "refused": "/contains/format",
        "why": "cannot be denied",
        "kind": "unsupported",
    },
    {
        "keyword": "uniqueItems",
        "schema": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
        "valid": ["[]", "[1, 2]", "[3, 1, 2]"],
        "invalid": ["[1, ¦1]", "[1, 2, ¦1]", "[2, 3, ¦2]"],
    },
    {
        "keyword": "uniqueItems",
        "schema": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
        "valid": ["[true]", "[false, true]"],
        "invalid": ["[true, ¦true]", "[¦]", "[true, false¦, true]"],
    },
    {
        "keyword": "uniqueItems",
        "schema": {"type": "array", "uniqueItems": False},
        "valid": ["[1, 1]", "[]"],
        "invalid": ["[1, ¦]", "¦1"],
    },
    {
        "keyword": "uniqueItems",
        "schema": {"type": "array", "items": STR, "uniqueItems": True},
        "refused": "/uniqueItems",
        "why": "at most 8 known values",
        "kind": "unsupported",
    },
    {
        "keyword": "uniqueItems",
        "schema": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3},
        "refused": "/minItems",
        "why": "no value satisfies",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "unevaluatedItems",
        "schema": {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        "valid": ["[]", "[1]"],
        "invalid": ["[1¦, 2]", '[¦"a"]'],
    },
    {
        "keyword": "unevaluatedItems",
        "schema": {"type": "array", "allOf": [{"prefixItems": [INT, STR]}], "unevaluatedItems": {"type": "null"}},
        "valid": ['[1, "a"]', '[1, "a", null]'],
        "invalid": ['[1, "a", ¦2]', "[1, ¦null]"],
    },
    {
        "keyword": "unevaluatedItems",
        "schema": {"type": "array", "contains": INT, "unevaluatedItems": {"type": "null"}},
        "valid": ["[1]", "[null, 1]", "[1, 2, null]"],
        "invalid": ["[¦]", "[null¦]", '[1, ¦"a"]'],
    },
    {
        "keyword": "unevaluatedItems",
        "schema": {
            "type": "array",
            "anyOf": [{"prefixItems": [INT]}, {"prefixItems": [True, STR]}],
            "unevaluatedItems": False,
        },
        "valid": ["[1]", '[1, "a"]', "[]"],
        "invalid": ['[1, "a"¦, 2]', "[null, ¦null]"],
        "narrower": [],
    },
]

NOTES = {
    "items": "",
    "prefixItems": "",
    "minItems": "",
    "maxItems": "",
    "contains": "",
    "minContains": "",
    "maxContains": (
        "needs items that `contains` does not match; where those cannot be said, as for `format`, it is refused"
    ),
    "uniqueItems": (
        "needs items of at most 8 known values (`enum`, `const`, boolean, null); refused else, and together "
        "with `contains`"
    ),
    "unevaluatedItems": "of `anyOf`, one branch at a time evaluates items",
}
