"""What was used last, up to a number of bytes.

People write the texts that grammars are kept under, so a number of entries would bound nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Values by key; the least recently used ones go first. Not thread safe.

    Args:
        max_bytes: most bytes in all; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0
        """Of what is kept now."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep a value in place of the key's last one; one that is larger than everything may be is not kept.

        Args:
            key: its name.
            value: what `get` returns.
            num_bytes: what key and value take, at least 1.
        """
        before = self._entries.pop(key, None)
        if before is not None:
            self.num_bytes -= before[1]
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1][1]
