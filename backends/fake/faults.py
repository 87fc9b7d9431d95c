"""Faults that a fake device is told to have, counted so that a test can name the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from deepinfer.ops.errors import LaunchError

FaultKind = Literal["slow_copy", "failed_launch", "lost_device", "dead_rank", "death", "slow_rank", "failed_collective"]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: "slow_copy" sleeps in the device thread; "failed_launch" refuses one op at once and goes on; "lost_device"
            fails everything from then on; "dead_rank" stops all progress, as a collective does whose partner is gone.
            Of collectives alone: "death" ends this rank as it comes to one, "slow_rank" sleeps before it takes part,
            "failed_collective" leaves the group in the middle.
        at: which piece of work it strikes, from 1, among those whose name matches.
        name: pattern over the names of work: ops and collectives by their own, copies are "to_device" and "to_host".
        seconds: how long a slow copy takes, or a slow rank stays away.
        rank: who died, for "dead_rank".
    """

    kind: FaultKind
    at: int = 1
    name: str = "*"
    seconds: float = 0.05
    rank: int = 1


@dataclass
class FaultPlan:
    """The faults of one runtime, with their counts.

    Attributes:
        faults: what to do, and when.
        struck: faults that have happened, in order.
    """

    faults: Sequence[Fault] = ()
    struck: list[Fault] = field(default_factory=list)
    _counts: dict[Fault, int] = field(default_factory=dict)

    def add(self, fault: Fault) -> None:
        """One fault more, counted from now."""
        self._counts.pop(fault, None)
        self.faults = (*(other for other in self.faults if other != fault), fault)

    def at_submit(self, name: str) -> None:
        """Called for each op before it is queued.

        Raises:
            LaunchError: this one fails.
        """
        if self._strikes(name, "failed_launch") is not None:
            raise LaunchError(f"the fake device did not take {name}: a fault that its plan asked for")

    def at_run(self, name: str) -> Fault | None:
        """The fault that this piece of work meets as it runs."""
        if not self.faults:
            return None
        copies = ("slow_copy",) if name in ("to_device", "to_host") else ()
        return self._strikes(name, "lost_device", "dead_rank", *copies)

    def at_collective(self, name: str) -> Fault | None:
        """The fault that this rank has as its device comes to a collective."""
        return self._strikes(name, "death", "slow_rank", "failed_collective") if self.faults else None

    def _strikes(self, name: str, *kinds: FaultKind) -> Fault | None:
        hit = None
        for fault in self.faults:
            if fault.kind in kinds and fnmatchcase(name, fault.name):
                self._counts[fault] = self._counts.get(fault, 0) + 1
                if self._counts[fault] == fault.at:
                    self.struck.append(fault)
                    hit = hit or fault
        return hit
