import re

import pytest

from deepinfer.ops.show import shown


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Broken:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("value", [3, "text", None, [1, "a"], {"a": (1,)}, 0.1, 2**64])
def test_small_values_are_their_repr(value) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        nested(100_000),
        {"a": {"b": nested(5_000)}},
        "x" * 10**6,
        10**400,
        10**6000,
        list(range(10**5)),
        [["y" * 1000] * 50] * 50,
        Broken(),
        type("L", (list,), {})(nested(5_000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_shown_shortly(value) -> None:
    assert 0 < len(shown(value)) <= 400
    assert re.search(r"\.\.\.|<", shown(value))
