"""What the fake device's runtime hands out besides tensors: streams, events, and copies on their way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.backends.fake.errors import HostReadError
from deepinfer.backends.fake.streams import Work
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.runtime import Event

if TYPE_CHECKING:
    from deepinfer.backends.fake.runtime import FakeRuntime


@dataclass(frozen=True)
class FakeStream:
    """A stream of the fake device.

    Attributes:
        runtime: the device.
        number: 0 is the stream that work goes to by default.
    """

    runtime: FakeRuntime
    number: int

    def synchronize(self) -> None:
        """Run what was submitted to this stream, and wait for it."""
        with self.runtime.use_stream(self):
            event = self.runtime.event()
            event.record()
        event.synchronize()


@dataclass
class FakeEvent:
    """A mark in a stream of the fake device."""

    runtime: FakeRuntime
    _mark: Work | None = field(default=None, repr=False)
    _reached: float = field(default=0.0, repr=False)

    def record(self) -> None:
        """Mark the current end of the current stream; an older mark is forgotten."""
        self.runtime.refuse_in_graph("event.record")
        self._mark = self.runtime.submit(Work("event", self._note_time, always=True))

    def wait(self) -> None:
        """Make later work of the current stream wait for the mark."""
        self.runtime.refuse_in_graph("event.wait")
        if self._mark is not None:
            self.runtime.submit(Work("wait", after=self._mark, always=True))

    def synchronize(self) -> None:
        """Block the host until the mark is reached."""
        self.runtime.refuse_in_graph("event.synchronize")
        if self._mark is not None:
            self.runtime.wait_for(self._mark, "event.synchronize")

    def query(self) -> bool:
        """True when the mark has been reached; asking lets time pass."""
        self.runtime.refuse_in_graph("event.query")
        return self._mark is None or self.runtime.poll(self._mark)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds between the moments at which the device came to two marks.

        Raises:
            HostReadError: the host has not waited for both of them, or for anything behind them.
            OpArgumentError: the other one is of another device.
        """
        if not isinstance(since, FakeEvent) or since.runtime is not self.runtime:
            raise OpArgumentError("elapsed_ms takes an event of the same device")
        for event in (since, self):
            if event._mark is None or not self.runtime.knows(event._mark):
                raise HostReadError("the time between two events was read before the host waited for both")
        return (self._reached - since._reached) * 1e3

    def _note_time(self) -> None:
        self._reached = time.perf_counter()


@dataclass
class HostCopy:
    """A copy to the host on its way."""

    runtime: FakeRuntime
    work: Work
    _target: Tensor = field(repr=False)

    def wait(self) -> Tensor:
        """Wait for the copy."""
        self.runtime.wait_for(self.work, "a copy to the host")
        return self._target

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self.runtime.poll(self.work)

    @property
    def tensor(self) -> Tensor:
        """The values.

        Raises:
            HostReadError: the host has waited neither for the copy nor for anything behind it.
        """
        if not self.runtime.knows(self.work):
            raise HostReadError(
                "the target of a copy was read before the host waited for the copy, or an event after it"
            )
        return self._target
