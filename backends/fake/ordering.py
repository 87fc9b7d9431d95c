"""Finds work on two streams that touches the same bytes without an event between: a race, whatever the outcome is.

A hard device runs such a program well for years. Here it is an error where the second piece of work is submitted, in
every order of work, because it follows from what was submitted: each piece knows what comes before it (`Work.clock`),
each block knows who touches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deepinfer.backends.fake.errors import UnorderedAccessError
from deepinfer.backends.fake.memory import Access, Ref

_KEPT: Final = 128
"""Accesses that a block remembers; older ones are long past."""


def check_order(
    name: str,
    stream: int,
    place: int,
    clock: Mapping[int, int],
    known: Mapping[int, int],
    reads: tuple[Ref, ...],
    writes: tuple[Ref, ...],
) -> None:
    """Refuse work that races with queued work of another stream.

    Args:
        name: of the work.
        stream: where it goes.
        place: in that stream.
        clock: per stream, how many pieces of its work come before this one.
        known: per stream, how many pieces the host has waited for.
        reads: what it reads.
        writes: what it writes.

    Raises:
        UnorderedAccessError: no event orders it behind work that touches the same bytes.
    """
    for ref, does_write in [*((ref, False) for ref in reads), *((ref, True) for ref in writes)]:
        first, end = ref.extent
        for other in ref.block.accesses:
            if other.stream == stream or not (does_write or other.writes) or other.first >= end or first >= other.end:
                continue
            if max(clock.get(other.stream, 0), known.get(other.stream, 0)) <= other.place:
                verb, did = ("writes" if does_write else "reads"), ("writes" if other.writes else "reads")
                raise UnorderedAccessError(
                    f"{name} on stream {stream} {verb} memory at {ref.block.address + first:#x} that {other.work} on "
                    f"stream {other.stream} {did}, and nothing orders them: record an event behind {other.work} and "
                    f"wait for it on stream {stream}"
                )


def note_accesses(name: str, stream: int, place: int, reads: tuple[Ref, ...], writes: tuple[Ref, ...]) -> None:
    """Remember what queued work touches."""
    for ref, does_write in [*((ref, False) for ref in reads), *((ref, True) for ref in writes)]:
        first, end = ref.extent
        accesses = ref.block.accesses
        accesses[:] = [a for a in accesses if not _covers(stream, first, end, does_write, a)][-_KEPT:]
        accesses.append(Access(stream, place, first, end, does_write, name))


def _covers(stream: int, first: int, end: int, does_write: bool, old: Access) -> bool:
    """Whether whoever is ordered behind the new access is ordered behind the old one, and has no other use for it."""
    return old.stream == stream and old.writes <= does_write and first <= old.first and old.end <= end
