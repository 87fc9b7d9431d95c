"""Streams of a device that is late on purpose, and the thread that does the work.

Work of one stream runs in order. Between streams the order is whatever a seed picks among the orders that events allow.
Nothing runs when it is submitted, except that now and then a few pieces run early; the rest waits until the host waits,
and then no more runs than the host waits for. The host stands still while the thread works, so a seed alone decides the
order, and a failing order can be run again.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from deepinfer.backends.fake.faults import FaultPlan
from deepinfer.backends.fake.memory import DeviceMemory, Ref
from deepinfer.backends.fake.ordering import check_order, note_accesses
from deepinfer.ops.errors import DeviceLostError, RankLostError

_MAX_PENDING: Final = 4096
"""A queue as long as this makes the host wait, as a hard one does."""
_LOG: Final = 4096
_EARLY: Final = 0.01
"""Chance that a submission makes a few pieces run at once."""
_BURST: Final = 0.85
"""Chance that the device goes on with its favourite stream, so that others fall far behind."""


@dataclass(slots=True, eq=False)
class Work:
    """A piece of queued work.

    Attributes:
        name: for messages, faults and the log.
        run: does it, in the device thread; None for a mark.
        reads: memory that must be alive and written.
        writes: memory that must be alive, and is written afterwards.
        after: runs only when this is done (an event of another stream).
        always: runs even when work before it failed (marks and frees).
        collective: it waits for other ranks, so it never runs early, while the host may still have to reach them.
        dropped: called in its place where a failure before it made it meaningless.
        stream: set when it is queued.
        place: how many pieces its stream had before it.
        clock: what was known to be done before it, by stream.
        done: it has run, or was dropped after a failure.
    """

    name: str
    run: Callable[[], None] | None = None
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    after: Work | None = None
    always: bool = False
    collective: bool = False
    dropped: Callable[[], None] | None = None
    stream: int = 0
    place: int = 0
    clock: dict[int, int] = field(default_factory=dict)
    done: bool = False

    def again(self) -> Work:
        """The same work, to be queued once more."""
        return replace(self, stream=0, place=0, clock={}, done=False)


@dataclass(slots=True, eq=False)
class Queue:
    """A stream: work that happens in order.

    Attributes:
        number: 0 for the stream that work goes to by default.
        queue: what has not run.
        submitted: pieces so far.
        clock: per other stream, how many of its pieces are known to come before the next one here.
    """

    number: int
    queue: deque[Work] = field(default_factory=deque)
    submitted: int = 0
    clock: dict[int, int] = field(default_factory=dict)


class Device:
    """All streams, one thread, and what went wrong.

    Args:
        seed: decides the order of work.
        faults: what is to fail.
        memory: where freed blocks go.
        detect: check memory before each piece of work; off lets garbage through, as a hard device does.
        patience: seconds after which a wait for a dead rank gives up.
    """

    def __init__(self, seed: int, faults: FaultPlan, memory: DeviceMemory, *, detect: bool, patience: float) -> None:
        self.streams: list[Queue] = [Queue(0)]
        self.log: deque[tuple[int, str]] = deque(maxlen=_LOG)
        self.lost: str | None = None
        self._random = random.Random(seed)
        self._faults = faults
        self._memory = memory
        self._detect = detect
        self._patience = patience
        self._failure: Exception | None = None
        self._dead: tuple[int, str] | None = None  # the rank, and the work that waits for it
        self._pending = 0
        self._favourite = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fake-device")

    def new_stream(self) -> int:
        """Number of a new stream."""
        self.streams.append(Queue(len(self.streams)))
        return len(self.streams) - 1

    def submit(self, work: Work, stream: int, known: Mapping[int, int]) -> Work:
        """Queue work; now and then some of what is queued runs early.

        Args:
            work: not submitted before.
            stream: its number.
            known: per stream, how many pieces of work the host has waited for.

        Raises:
            UnorderedAccessError: it races with work of another stream; it was not queued.
        """
        target = self.streams[stream]
        if work.after is not None:
            _merge(target.clock, work.after.clock)
        if self._detect and (work.reads or work.writes):
            check_order(work.name, stream, target.submitted, target.clock, known, work.reads, work.writes)
            note_accesses(work.name, stream, target.submitted, work.reads, work.writes)
        work.stream, work.place = stream, target.submitted
        target.submitted += 1
        work.clock = {**target.clock, stream: target.submitted}
        target.queue.append(work)
        self._pending += 1
        if self._pending > _MAX_PENDING:
            self._work(self._pending // 2, None)
        elif not work.always and self._random.random() < _EARLY:
            self._work(self._random.randrange(1, 12), None, early=True)
        return work

    def wait(self, work: Work | None) -> None:
        """Run until `work` is done, or everything (None); other streams get only as far as the seed takes them.

        Raises:
            RankLostError: no progress is possible.
        """
        if self._pending and (work is None or not work.done):
            self._work(None, work)
        if self._dead is not None and (self._pending if work is None else not work.done):
            time.sleep(self._patience)
            raise RankLostError(*self._dead, self._patience, "does not answer")

    def nudge(self) -> None:
        """Run a little: a host that polls must see an end."""
        if self._pending:
            self._work(self._random.randrange(1, 4), None)

    def raise_failure(self) -> None:
        """Raise what went wrong since the last call.

        Raises:
            DeviceLostError: for ever, once the device is lost.
        """
        if self.lost is not None:
            raise DeviceLostError(self.lost)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def lose(self, why: str) -> None:
        """Lose the device for good; called in its own thread."""
        self.lost = why

    def _work(self, count: int | None, until: Work | None, *, early: bool = False) -> None:
        self._thread.submit(self._run, count, until, early).result()

    def _run(self, count: int | None, until: Work | None, early: bool) -> None:
        # A host that waits for one stream is the best moment to neglect the others.
        neglect = until is not None and self._random.random() < 0.5
        self._favourite = until.stream if neglect and until is not None else self._random.choice(self.streams).number
        with torch.inference_mode():
            while (count is None or count > 0) and (until is None or not until.done) and self._dead is None:
                ready = [s for s in self.streams if s.queue and _is_ready(s.queue[0], early)]
                if not ready:
                    return
                stream = self._pick(ready)
                work = stream.queue[0]
                try:
                    self._do(work)
                except Exception as error:  # it belongs to whoever looks next
                    error.add_note(f"raised by {work.name} in the thread of the fake device")
                    self._failure = self._failure or error
                if self._dead is not None:
                    return  # the work hangs: its partner is gone
                stream.queue.popleft()
                self._pending -= 1
                work.done = True
                if not work.always:
                    self.log.append((stream.number, work.name))
                count = None if count is None else count - 1

    def _pick(self, ready: list[Queue]) -> Queue:
        favourite = [s for s in ready if s.number == self._favourite]
        if favourite and (len(ready) == 1 or self._random.random() < _BURST):
            return favourite[0]
        return self._random.choice(ready)

    def _do(self, work: Work) -> None:
        if work.run is None:
            return
        if work.always:
            work.run()
            return
        if self.lost is not None or self._failure is not None:
            if work.dropped is not None:
                work.dropped()
            return  # what follows a failure has no meaning; the first one is reported
        fault = self._faults.at_run(work.name)
        if fault is not None and fault.kind == "lost_device":
            self.lost = f"the fake device was lost while it ran {work.name}: a fault that its plan asked for"
            return
        if fault is not None and fault.kind == "dead_rank":
            self._dead = (fault.rank, work.name)
            return
        if fault is not None:
            time.sleep(fault.seconds)
        if self._detect:
            for ref in work.reads:
                ref.check(work.name, reads=True)
            for ref in work.writes:
                ref.check(work.name, reads=False)
        work.run()
        for ref in work.writes:
            ref.block.written = True
            ref.block.pristine = False


def _is_ready(work: Work, early: bool) -> bool:
    return (work.after is None or work.after.done) and not (early and work.collective)


def _merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
