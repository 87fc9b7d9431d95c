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


class RankDeadError(DeviceError):
    """Another rank of the group died, so work that waits for it never ends; `rank` says which."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)
