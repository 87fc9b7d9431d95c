"""Reading one section of a `config.json` into a dataclass, with every broken field reported.

A dataclass field carries its rule (`count`, `real`, `ids`, `only`); `read_section` applies the rules and `run_checks`
the conditions between fields. Nothing is raised here: problems are collected, because a reader wants all of them.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from deepinfer.ops.show import shown

Problem = tuple[str, str]
"""A field's name, and what it is and what would be right."""

Check = Callable[..., Iterator[Problem]]
"""Takes fields as parameters of the same names; skipped while one of them is broken."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Rule:
    """What a field may hold.

    Attributes:
        want: the words that a message uses for it.
        parse: the value to keep, or None when it does not fit.
    """

    want: str
    parse: Callable[[Any], Any]


def count(low: int = 1, high: int = _INT32_MAX, default: Any = MISSING) -> Any:
    """An integer of at least `low` and at most `high`."""
    want = f"an integer of at least {low}" if high == _INT32_MAX else f"an integer from {low} to {high}"
    return _field(Rule(want, lambda v: v if _is_int(v) and low <= v <= high else None), default)


def real(default: Any = MISSING) -> Any:
    """A finite number above zero."""

    def parse(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) and number > 0 else None

    return _field(Rule("a finite number above 0", parse), default)


def ids(default: Any = MISSING) -> Any:
    """A list of integers of at least 0."""

    def parse(value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, list | tuple) or not all(_is_int(v) and 0 <= v <= _INT32_MAX for v in value):
            return None
        return tuple(value)

    return _field(Rule("a list of integers of at least 0", parse), default)


def only(*values: Any) -> Any:
    """One of these values; the first where the field is absent. The model's forward pass knows no other."""

    def parse(value: Any) -> Any:
        value = tuple(value) if isinstance(value, list) else value
        return value if any(value == v and type(value) is type(v) for v in values) else None

    return _field(Rule(" or ".join(json.dumps(v) for v in values), parse), values[0])


def unused() -> Any:
    """Read by training code only; any value will do."""
    return _field(Rule("anything", lambda v: v), None)


def read_section(cls: type, data: Any, prefix: str, problems: list[Problem]) -> dict[str, Any]:
    """Values of the fields that are right, by name.

    Args:
        cls: a dataclass whose fields were made by the functions above; others are left to the caller.
        data: the parsed JSON object.
        prefix: what goes before a field's name in problems, such as `text_config.`.
        problems: grows by one for every field that is absent or does not fit.
    """
    if not isinstance(data, Mapping):
        problems.append((prefix.rstrip("."), f"{show(data)} is not a JSON object"))
        return {}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        rule = field.metadata.get("rule")
        if rule is None:
            continue
        if field.name not in data:
            if field.default is MISSING:
                problems.append((prefix + field.name, f"is absent; it must be {rule.want}"))
            else:
                values[field.name] = field.default
            continue
        raw = data[field.name]
        parsed = None if raw is None else rule.parse(raw)
        if parsed is not None or (raw is None and field.default is None):
            values[field.name] = parsed
        else:
            problems.append((prefix + field.name, f"{show(raw)} is not allowed; it must be {rule.want}"))
    return values


def run_checks(checks: Iterable[Check], values: Mapping[str, Any], prefix: str, problems: list[Problem]) -> None:
    """Run conditions between fields in order; a field found broken silences later checks that read it."""
    sound = dict(values)
    for check in checks:
        names = inspect.signature(check).parameters
        if all(name in sound for name in names):
            for name, text in list(check(**{name: sound[name] for name in names})):
                problems.append((prefix + name, text))
                sound.pop(name, None)


def show(value: Any) -> str:
    """A value as its JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = shown(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _field(rule: Rule, default: Any) -> Any:
    return dataclasses.field(metadata={"rule": rule}, default=default)
