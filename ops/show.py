"""Values that callers gave, as messages show them: shortened, and whatever they are, without a fault of its own."""

from __future__ import annotations

from reprlib import Repr

_MOST = 160


class _Bounded(Repr):
    """`repr`, with bounds on depth, breadth and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = _MOST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8


_BOUNDED = _Bounded()


def shown(value: object) -> str:
    """`repr(value)`, shortened; never raises and never recurses deeply, however a value is nested or what it is."""
    try:
        text = _BOUNDED.repr(value)
    except Exception:  # a number of too many digits, or a class whose repr fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= 2 * _MOST else f"{text[:_MOST]}...{text[-_MOST:]}"
