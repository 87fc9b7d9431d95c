"""What only a fake device can find out: breaches of discipline that a hard one answers with garbage.

Errors that any device may raise (`DeviceLostError`, `LaunchError`, ...) are in `deepinfer.ops.errors`.
"""

from __future__ import annotations

from deepinfer.ops.errors import OpError


class DisciplineError(OpError):
    """Base: the program did what a hard device does not forbid and does not survive."""


class HostAccessError(DisciplineError):
    """Host code touched device memory, or mixed it with host tensors; the message names the call."""

    def __init__(self, call: str, why: str = "") -> None:
        self.call = call
        super().__init__(
            f"{call} on a tensor of the fake device: {why or 'its memory cannot be read by the host'}. Copy with "
            "runtime.to_host, compute with an op, or take a view (integers and slices)."
        )


class UseAfterFreeError(DisciplineError):
    """Work ran on memory whose last tensor had died, or whose address had been handed out again."""


class UnwrittenReadError(DisciplineError):
    """Work read memory that nothing had written: an op was skipped, or no event orders reader and writer."""


class UnorderedAccessError(DisciplineError):
    """Work touches memory that work of another stream writes, or writes what it reads, and no event orders the two."""


class HostBufferReuseError(DisciplineError):
    """A pinned host buffer was overwritten before the copy that reads it was done."""


class BrokenPromiseError(DisciplineError):
    """A plan that calls itself capturable allocated, waited for the device, or returned other memory than `out`."""


class HostReadError(DisciplineError):
    """The host looked at the target of a copy without waiting for it."""
