"""The host as a device: the base of runtimes whose tensors live in ordinary memory and whose work is done on return.

It names no vendor and computes nothing. A backend for a device that torch addresses by another name overrides `device`,
`to_device` and `to_host`, and says in `capabilities` what else it can do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepinfer.ops.runtime import Capabilities, Event, MemoryInfo

_MEMINFO = Path("/proc/meminfo")


class HostEvent:
    """A mark in a stream that has no delay: work is done when the call that submits it returns."""

    def record(self) -> None:
        """Do nothing; everything before this call is done."""

    def wait(self) -> None:
        """Do nothing; the mark has been reached."""

    def synchronize(self) -> None:
        """Do nothing; the mark has been reached."""

    def query(self) -> bool:
        """Always True."""
        return True


class HostRuntime:
    """The `Runtime` protocol over host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(unified_memory=True)

    def memory_info(self) -> MemoryInfo:
        """Memory that the system could hand out now, and in all, in bytes."""
        fields = {}
        if _MEMINFO.exists():
            for line in _MEMINFO.read_text().splitlines():
                name, _, rest = line.partition(":")
                fields[name] = rest.split()[0]
        if "MemAvailable" in fields and "MemTotal" in fields:
            return MemoryInfo(int(fields["MemAvailable"]) * 1024, int(fields["MemTotal"]) * 1024)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(total, total)  # no better answer without /proc

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
        return tensor

    def event(self) -> Event:
        """A new event."""
        return HostEvent()

    def synchronize(self) -> None:
        """Do nothing; no work is outstanding."""

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Graphs do not exist here.

        Raises:
            NotImplementedError: always; `capabilities.graphs` is False.
        """
        raise NotImplementedError("host memory has no graphs; call the step itself")
