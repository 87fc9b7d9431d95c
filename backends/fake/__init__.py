"""The fake backend: a device that exists only in software and behaves like a hard one.

Its memory cannot be read from the host, its work happens late and in any order that events allow, freed memory is
poisoned, and it can be told to fail. Ops run the kernels of the CPU backend on the hidden memory, so results have the
CPU's bits: what differs is a bug of whoever drives the device. It is chosen by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.ops.backend import Availability, Backend

if TYPE_CHECKING:
    from deepinfer.ops.runtime import Runtime


def _probe() -> Availability:
    return Availability(True)


def _runtime() -> Runtime:
    from deepinfer.backends.fake.runtime import FakeRuntime

    return FakeRuntime()


BACKEND = Backend(
    "fake",
    device_type="privateuseone",  # the name that torch keeps for devices it does not know
    probe=_probe,
    op_modules=("deepinfer.backends.fake.ops",),
    runtime=_runtime,
    priority=-1,
    software=True,
)
