"""What is kept is what was used last, within its bytes."""

import random

from deepinfer.core.grammar.kept import Kept


def test_what_was_used_last_stays() -> None:
    kept: Kept[str, int] = Kept(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 4)
    assert kept.get("a") == 1
    kept.put("c", 3, 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    kept.put("a", 5, 10)
    assert (kept.get("a"), kept.get("c"), len(kept), kept.num_bytes) == (5, None, 1, 10)


def test_what_is_too_large_is_not_kept_and_neither_is_what_it_replaces() -> None:
    kept: Kept[str, int] = Kept(10)
    kept.put("a", 1, 4)
    kept.put("b", 1, 4)
    kept.put("a", 2, 11)
    assert (kept.get("a"), kept.get("b"), kept.num_bytes) == (None, 1, 4)
    none: Kept[str, int] = Kept(0)
    none.put("a", 1, 1)
    assert none.get("a") is None and len(none) == 0


def test_the_bytes_are_those_of_the_entries() -> None:
    rng = random.Random(1)
    kept: Kept[int, int] = Kept(100)
    sizes = {}
    for _ in range(2000):
        key, size = rng.randrange(20), rng.randrange(1, 60)
        sizes[key] = size
        kept.put(key, size, size)
        left = [value for key in range(20) if (value := kept.get(key)) is not None]
        assert sum(left) == kept.num_bytes <= 100 and len(left) == len(kept)
        assert kept.get(key) == sizes[key]
