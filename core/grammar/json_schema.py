"""JSON schema to grammar: an answer is held to the schema as draft 2020-12 means it, or the schema is refused at once.

The grammar never allows a value that the schema does not. Where it allows fewer, or where a keyword is refused,
`docs/schema_fidelity.md` says so, keyword by keyword. `deepinfer.core.grammar.schema_document` reads the schema,
`schema_cases` reduces it to alternatives of plain facts, and `schema_to_ebnf` writes rules for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core.grammar.schema_document import Document
from deepinfer.core.grammar.schema_error import SchemaError
from deepinfer.core.grammar.schema_to_ebnf import Builder

__all__ = ["JsonOptions", "SchemaError", "schema_to_ebnf"]


@dataclass(frozen=True)
class JsonOptions:
    """How JSON may be written. The defaults bound every run that a model could get caught in.

    Attributes:
        max_whitespace: most whitespace characters between two parts; 0 is compact JSON.
        max_digits: most digits of a number before its point and behind it, where the schema itself asks for no more.
    """

    max_whitespace: int = 16
    max_digits: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.max_whitespace <= 1_000:
            raise ValueError(f"max_whitespace is 0 to 1000, not {self.max_whitespace}")
        if not 1 <= self.max_digits <= 200:
            raise ValueError(f"max_digits is 1 to 200, not {self.max_digits}")


def schema_to_ebnf(schema: object, options: JsonOptions) -> str:
    """The grammar of all JSON texts that satisfy a schema, in the library's dialect of EBNF; it starts at `root`.

    Args:
        schema: a draft 2020-12 schema as `json.loads` makes it: a dict, or True or False.
        options: how JSON may be written.

    Returns:
        Rules, one a line, whose names are letters, digits and underscores.

    Raises:
        SchemaError: the schema is malformed, uses what no grammar can express, grows beyond the limits, or nothing
            satisfies it. Nothing is left behind.
    """
    try:
        return Builder(Document(schema), options.max_whitespace, options.max_digits).grammar()
    except RecursionError:
        raise SchemaError(
            "", "its subschemas stand or refer too deeply inside of each other; write fewer levels"
        ) from None
