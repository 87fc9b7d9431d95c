"""Waits of the host that must not happen: a guard that every blocking call of a runtime asks first.

While a step is planned and launched, the host waits for nothing: a device that stands still until the host has looked
at a result loses what asynchronous steps win. Such a wait is easy to write and hard to see, so it is an error where it
stands. What has to wait all the same (a user's function that reads logits, a table on the host that needs ids) says so
with `permit`, and is counted under the name that it gives.

A device whose driver can find such waits by itself, those in libraries as well, turns that on inside `watched`, in a
subclass. It costs time and may concern a whole process, so it is for tests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer.ops.errors import HostSyncError


class SyncGuard:
    """Says whether the host may wait now. Each thread has its own answer; by default it may.

    Attributes:
        permitted: how often each reason for waiting was given while waiting was forbidden.
    """

    def __init__(self) -> None:
        self.permitted: Counter[str] = Counter()
        self._here = threading.local()

    @property
    def is_forbidden(self) -> bool:
        """Whether this thread must not wait now."""
        return self._during is not None

    @contextmanager
    def forbid(self, during: str) -> Iterator[None]:
        """Make every wait of this thread an error inside; `during` says what goes on, for the message."""
        before, self._here.during = self._during, during
        self._changed()
        try:
            yield
        finally:
            self._here.during = before
            self._changed()

    @contextmanager
    def permit(self, reason: str) -> Iterator[None]:
        """Allow waits inside again, and count one under `reason` if they were forbidden."""
        before, self._here.during = self._during, None
        self._changed()
        if before is not None:
            self.permitted[reason] += 1
        try:
            yield
        finally:
            self._here.during = before
            self._changed()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have the driver look for waits as well, where it can: those that are forbidden are errors of its own kind."""
        yield

    def check(self, call: str) -> None:
        """Called by a runtime before it blocks the host.

        Raises:
            HostSyncError: waiting is forbidden now; the message names `call`.
        """
        during = self._during
        if during is not None:
            raise HostSyncError(call, during)

    def _changed(self) -> None:
        """Called when what this thread may do has changed."""

    @property
    def _during(self) -> str | None:
        during: str | None = getattr(self._here, "during", None)
        return during
