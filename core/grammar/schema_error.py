"""What is wrong with a schema, and where."""

from __future__ import annotations

from typing import NoReturn


class SchemaError(ValueError):
    """A schema is malformed, not supported, or satisfied by nothing. Remedy: the message says what would be right.

    Attributes:
        pointer: JSON pointer of the keyword at fault; "" is the whole schema.
    """

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(message)
        self.pointer = pointer

    def __reduce__(self) -> tuple[type[SchemaError], tuple[str, str]]:
        """Pickle by the two arguments: results cross process boundaries."""
        return type(self), (self.pointer, str(self))


def refuse(pointer: str, message: str) -> NoReturn:
    """Raise a `SchemaError`."""
    raise SchemaError(pointer, message)


def child(pointer: str, *parts: str | int) -> str:
    """The JSON pointer of something further in."""
    return pointer + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
