"""Errors of the op layer, one class per remedy."""

from __future__ import annotations

from collections.abc import Sequence


class OpError(Exception):
    """Base of every error that the op layer raises on purpose."""


class OpArgumentError(OpError, ValueError):
    """The caller passed an argument that the contract forbids; fix the caller."""


class BackendUnavailableError(OpError):
    """A backend was named that is not installed, or that its probe refuses; install what is absent."""


class MissingOpsError(OpError):
    """Under `strict`, a backend lacks ops; the message names every one of them."""

    def __init__(self, backend: str, missing: Sequence[str]) -> None:
        self.backend = backend
        self.missing = tuple(missing)
        super().__init__(
            f"backend {backend!r} has no implementation of {len(self.missing)} op(s): {', '.join(self.missing)}. "
            "Implement them, or run without strict=True to use the reference for them."
        )


class DeviceError(OpError, RuntimeError):
    """A device refused or failed. Work is asynchronous, so a later call may be the one that raises it."""


class DeviceLostError(DeviceError):
    """The device is gone, with everything in its memory; make a new runtime, in a new process where a vendor asks."""


class LaunchError(DeviceError):
    """The device did not take one piece of work; nothing of it ran, and the device goes on."""


class OutOfDeviceMemoryError(DeviceError):
    """An allocation does not fit; nothing was allocated. Free something, or plan for less."""


class CaptureError(DeviceError):
    """A step did something that a graph cannot hold: an allocation, a host read, a synchronisation."""


class HostSyncError(DeviceError):
    """The host was about to wait for the device where it must not (`deepinfer.ops.sync_guard`); it says both."""

    def __init__(self, call: str, during: str) -> None:
        self.call = call
        super().__init__(
            f"{call} would make the host wait during {during}. Keep the value on the device, read it where the step is "
            "collected, or say why this must wait with runtime.sync_guard.permit(reason)."
        )


class CollectiveError(DeviceError):
    """A collective did not come to its end on this rank, and its communicator is of no use any more.

    Attributes:
        rank: whose fault it was, as the whole job counts ranks.
        op: the collective, or "join" while ranks meet.
        seconds: how long this rank had waited.
    """

    def __init__(self, rank: int, op: str, seconds: float, what: str) -> None:
        self.rank = rank
        self.op = op
        self.seconds = seconds
        super().__init__(f"{op}: rank {rank} {what} ({seconds:.1f} s after this rank began to wait)")


class RankLostError(CollectiveError):
    """A rank is gone: its process ended or its device was lost. Start the group again, without it or with another."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not take part in time, and may be alive: look what holds it up, or allow more time."""
