"""The host as a device: the base of runtimes whose tensors live in ordinary memory and whose work is done on return.

It names no vendor and computes nothing. A backend for a device that torch addresses by another name overrides `device`,
`to_device` and `to_host`, and says in `capabilities` what else it can do. `deepinfer.ops.sockets` joins ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.defaults import RuntimeDefaults
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.runtime import Capabilities, Event, HostCopy, MemoryInfo
from deepinfer.ops.sockets import has_store, join
from deepinfer.ops.sync_guard import SyncGuard

_MEMINFO = Path("/proc/meminfo")


class HostEvent:
    """A mark in a stream that has no delay: work is done when the call that submits it returns.

    Args:
        guard: of the runtime that made it.
    """

    def __init__(self, guard: SyncGuard) -> None:
        self._guard = guard
        self._reached: float | None = None

    def record(self) -> None:
        """Note the time; everything before this call is done."""
        self._reached = time.perf_counter()

    def wait(self) -> None:
        """Do nothing; the mark has been reached."""

    def synchronize(self) -> None:
        """Do nothing but ask the guard; the mark has been reached."""
        self._guard.check("event.synchronize")

    def query(self) -> bool:
        """Always True."""
        return True

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of the host's clock between two marks.

        Raises:
            OpArgumentError: one of them was not recorded, or is of another device.
        """
        if not isinstance(since, HostEvent) or since._reached is None or self._reached is None:
            raise OpArgumentError("elapsed_ms takes two events of this device, both recorded")
        return (self._reached - since._reached) * 1e3


@dataclass(frozen=True)
class DoneCopy:
    """A copy to the host where host memory is device memory.

    Attributes:
        tensor: the values.
        guard: of the runtime that made it.
    """

    tensor: torch.Tensor
    guard: SyncGuard

    def wait(self) -> torch.Tensor:
        """The values, at once."""
        self.guard.check("waiting for a copy to the host")
        return self.tensor


class HostRuntime(RuntimeDefaults):
    """The `Runtime` protocol over host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(unified_memory=True, torch_compute=True, collectives=has_store())
        self.sync_guard = SyncGuard()

    def memory_info(self) -> MemoryInfo:
        """Memory that the system could hand out now, and in all, in bytes."""
        fields = {}
        if _MEMINFO.exists():
            for line in _MEMINFO.read_text().splitlines():
                name, _, rest = line.partition(":")
                fields[name] = rest.split()[0]
        if "MemAvailable" in fields and "MemTotal" in fields:
            free = int(fields["MemAvailable"]) * 1024 - self.reserved_and_unused
            return MemoryInfo(max(free, 0), int(fields["MemTotal"]) * 1024)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(max(total - self.reserved_and_unused, 0), total)  # no better answer without /proc

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory."""
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory."""
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory; every copy is done on return, so all of it will do."""
        return torch.zeros(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """The tensor itself: host memory is device memory."""
        return host

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: device memory is host memory."""
        self.sync_guard.check("to_host")
        return tensor

    def to_host_later(self, tensor: torch.Tensor) -> HostCopy:
        """The tensor itself, as a copy that is done."""
        return DoneCopy(tensor, self.sync_guard)

    def write(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy into the target."""
        target.copy_(host)

    def event(self) -> Event:
        """A new event."""
        return HostEvent(self.sync_guard)

    def synchronize(self) -> None:
        """Do nothing but ask the guard; no work is outstanding."""
        self.sync_guard.check("synchronize")

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Graphs do not exist here.

        Raises:
            NotImplementedError: always; `capabilities.graphs` is False.
        """
        raise NotImplementedError("host memory has no graphs; call the step itself")

    def communicator(self, rendezvous: Rendezvous | None = None) -> Communicator:
        """Ranks are processes, or threads, on any hosts (`deepinfer.ops.sockets`); calls are done on return."""
        if rendezvous is None or not self.capabilities.collectives:
            return super().communicator(rendezvous)
        return join(rendezvous)
