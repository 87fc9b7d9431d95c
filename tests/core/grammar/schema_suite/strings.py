"""minLength, maxLength, pattern, format."""

CASES = [
    {
        "keyword": "minLength",
        "schema": {"type": "string", "minLength": 2},
        "valid": ['"ab"', '"你好"', '"a\\n"', '"abcdef"'],
        "invalid": ['"a¦"', '"¦"', '"你¦"', '"\\n¦"'],
    },
    {
        "keyword": "minLength",
        "schema": {"type": "string", "minLength": 1},
        "valid": ['"a"', '"\\ud83d\\ude00"'],
        "invalid": ['"¦"', "¦1"],
    },
    {
        "keyword": "minLength",
        "schema": {"minLength": 2, "maxLength": 3},
        "valid": ['"ab"', '"abc"', "7"],
        "invalid": ['"a¦"', '"abc¦d"', '"¦"'],
    },
    {
        "keyword": "minLength",
        "schema": {"type": "string", "minLength": 12},
        "valid": ['"abcdefghijkl"', '"abcdefghijkl\\n"'],
        "invalid": ['"abcdefghijk¦"', '"¦"'],
        "narrower": ['"\\"bcdefghijkl"'],
    },
    {
        "keyword": "minLength",
        "schema": {"type": "string", "minLength": 5, "maxLength": 3},
        "refused": "/minLength",
        "why": "more than maxLength 3",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "minLength",
        "schema": {"minLength": -1},
        "refused": "/minLength",
        "why": "at least 0",
        "kind": "malformed",
    },
    {
        "keyword": "maxLength",
        "schema": {"type": "string", "maxLength": 3},
        "valid": ['""', '"abc"', '"你好é"', '"\\n\\"\\\\"', '"\\ud83d\\ude00ab"'],
        "invalid": ['"abc¦d"', '"你好é¦x"', '"\\n\\n\\n¦\\n"', '"ab\\ud83d\\ude00¦a"', '"abcd'.replace("d", "¦d")],
    },
    {"keyword": "maxLength", "schema": {"type": "string", "maxLength": 0}, "valid": ['""'], "invalid": ['"¦a"']},
    {
        "keyword": "maxLength",
        "schema": {"type": "string", "maxLength": 20},
        "valid": ['"exactly twenty chars"', '""'],
        "invalid": ['"exactly twenty chars¦!"', "¦1"],
        "narrower": ['"line\\n"', '"a \\"b\\""'],
    },
    {
        "keyword": "maxLength",
        "schema": {"type": "string", "maxLength": 40, "minLength": 10},
        "valid": ['"ten charac"', '"ten characters and more"'],
        "invalid": ['"nine char¦"', '"1234567890123456789012345678901234567890¦1"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^[a-z]+$"},
        "valid": ['"a"', '"abc"'],
        "invalid": ['"¦"', '"a¦B"'],
        "narrower": ['"\\u0061"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "b"},
        "valid": ['"b"', '"abc"', '"\\nb"'],
        "invalid": ['"a¦"', '"¦"', '"B¦"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^ab"},
        "valid": ['"ab"', '"abc"'],
        "invalid": ['"¦b"', '"a¦"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "ab$"},
        "valid": ['"ab"', '"aab"'],
        "invalid": ['"aba¦"', '"b¦"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^(foo|ba[rz])$"},
        "valid": ['"foo"', '"bar"', '"baz"'],
        "invalid": ['"fo¦"', '"ba¦x"', '"foo¦o"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^x|y$"},
        "valid": ['"x"', '"xz"', '"zy"'],
        "invalid": ['"z¦"', '"yz¦"', '"¦"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
        "valid": ['"123-4567"', '"000-0000"'],
        "invalid": ['"12¦-4567"', '"123-4567¦8"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^.{2,3}$"},
        "valid": ['"ab"', '"é你x"', '"\\"\\\\"'],
        "invalid": ['"a¦"', '"abc¦d"', '"a¦\\n"'.replace("¦\\n", "\\¦n")],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^[^\\s,]+(, [^\\s,]+)*$"},
        "valid": ['"a"', '"a, b"', '"ab, cd, e"'],
        "invalid": ['"a,¦b"', '"¦ a"', '"a, ¦"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^\\w+\\.(?:py|rs)$"},
        "valid": ['"a.py"', '"main_1.rs"'],
        "invalid": ['"a.¦c"', '"¦.py"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^a\\u00e9\\x41\\t$"},
        "valid": ['"aéA\\t"'],
        "invalid": ['"aé¦B"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^[A-F0-9]+$", "minLength": 2, "maxLength": 4},
        "valid": ['"AB"', '"0F1"', '"FFFF"'],
        "invalid": ['"A¦"', '"FFFF¦F"', '"A¦G"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
        "valid": ['"az"', '"abcz"'],
        "invalid": ['"a¦"', '"¦bz"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^[^x]{0,100}$"},
        "valid": ['""', '"any word"'],
        "invalid": ['"ab¦x"', '"¦x"'],
        "narrower": ['"two\\nlines"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "not": {"pattern": "^a"}},
        "valid": ['""', '"ba"'],
        "invalid": ['"¦a"', '"¦ab"'],
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "(?=a)b"},
        "refused": "/pattern",
        "why": "look-around",
        "kind": "unsupported",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "(a)\\1"},
        "refused": "/pattern",
        "why": "backreferences",
        "kind": "unsupported",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "\\bfoo"},
        "refused": "/pattern",
        "why": "word boundaries",
        "kind": "unsupported",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "\\p{L}"},
        "refused": "/pattern",
        "why": "Unicode properties",
        "kind": "unsupported",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "a^b"},
        "refused": "/pattern",
        "why": "at the ends of alternatives",
        "kind": "unsupported",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "(a"},
        "refused": "/pattern",
        "why": "without its )",
        "kind": "malformed",
    },
    {
        "keyword": "pattern",
        "schema": {"type": "string", "pattern": "^a+$", "maxLength": 0},
        "refused": "/maxLength",
        "why": "no value satisfies",
        "kind": "unsatisfiable",
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "date"},
        "valid": ['"2024-01-31"', '"1999-12-01"', '"2023-02-28"'],
        "invalid": ['"2024-¦13-01"'.replace("¦13", "1¦3"), '"2024-04-3¦1"', '"24-¦01-01"'.replace("24-¦", "24¦-")],
        "narrower": ['"2024-02-29"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "time"},
        "valid": ['"12:00:00Z"', '"23:59:59.5+01:00"'],
        "invalid": ['"2¦4:00:00Z"', '"12:00¦Z"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "date-time"},
        "valid": ['"2024-01-31T12:00:00Z"', '"2024-06-30T23:59:59.123-05:30"'],
        "invalid": ['"2024-01-31¦ 12:00:00Z"', '"2024-01-31T12:00:00¦"'],
        "narrower": ['"2024-01-31t12:00:00z"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "email"},
        "valid": ['"a@b.co"', '"first.last+tag@example.org"'],
        "invalid": ['"a¦"', '"¦@b.co"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "ipv4"},
        "valid": ['"127.0.0.1"', '"255.255.255.255"'],
        "invalid": ['"25¦6.1.1.1"', '"1.1.1¦"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "ipv6"},
        "valid": ['"::1"', '"2001:db8::ff00:42:8329"', '"1:2:3:4:5:6:7:8"', '"::"'],
        "invalid": ['":¦1"', '"1:2:3:4:5:6:7¦"', '"12345¦::"'.replace("12345¦", "1234¦5"), '"1::2:¦:3"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "uuid"},
        "valid": ['"123e4567-e89b-12d3-a456-426614174000"'],
        "invalid": ['"123e4567-e89b-12d3-a456-42661417400¦"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "hostname"},
        "valid": ['"example.com"', '"a-b.c"'],
        "invalid": ['"¦-a"', '"a.¦"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "uri"},
        "valid": ['"https://example.com/a/b?x=1"', '"http://a.b"'],
        "invalid": ['"¦example"', '"http:¦a"'],
        "narrower": ['"ftp://a.b"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "duration"},
        "valid": ['"P3D"', '"PT1H30M"', '"P1Y2M3DT4S"', '"P2W"'],
        "invalid": ['"P¦"', '"P¦T"'.replace("P¦T", "PT¦"), '"P1¦H"', '"¦3D"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "json-pointer"},
        "valid": ['""', '"/a/b~0"'],
        "invalid": ['"¦a"', '"/~¦2"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "ipv4", "pattern": "^10\\."},
        "valid": ['"10.1.2.3"'],
        "invalid": ['"1¦1.1.2.3"'],
    },
    {
        "keyword": "format",
        "schema": {"type": "string", "format": "iri"},
        "refused": "/format",
        "why": "the formats are",
        "kind": "unsupported",
    },
]

NOTES = {
    "minLength": "above 8, the first `minLength` characters are such as need no escape",
    "maxLength": (
        "above 8, characters that JSON must escape (quotes, backslashes, control characters) are not generated"
    ),
    "pattern": (
        "ECMA-262, unanchored; patterned text is written without needless escapes; one pattern of more than "
        "64 states keeps its counted classes to characters without escapes; look-around, backreferences, word"
        " boundaries, Unicode properties and anchors inside of alternatives are refused"
    ),
    "format": (
        "asserted, never wider than the standard: no 29 February, no leap second, capital T and Z, http(s) alone for "
        "`uri`, ASCII; other formats are refused"
    ),
}
