"""What the engine asks of a device beyond ops: memory, copies, events, graphs.

Streams are implicit (each thread of work has one) and collectives are not in contract version 1.

The engine is written against this protocol. A backend without a feature says so in `capabilities` and the engine takes
the slower road; it never guesses from a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Capabilities:
    """What a device can do; everything defaults to no.

    Attributes:
        asynchronous: work submitted to a stream may run after the call returns.
        graphs: capture and replay of a step.
        pinned_memory: host buffers that copies read without blocking the host.
        unified_memory: host code may read device tensors without a copy.
        num_devices: how many devices this process sees.
    """

    asynchronous: bool = False
    graphs: bool = False
    pinned_memory: bool = False
    unified_memory: bool = False
    num_devices: int = 1


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of device memory: free now, and in all."""

    free_bytes: int
    total_bytes: int


@runtime_checkable
class Event(Protocol):
    """A mark in a stream."""

    def record(self) -> None:
        """Mark the current end of the current stream."""
        ...

    def wait(self) -> None:
        """Make the current stream wait for the mark; the host goes on."""
        ...

    def synchronize(self) -> None:
        """Block the host until the mark is reached."""
        ...

    def query(self) -> bool:
        """True when the mark has been reached."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """One device as the engine sees it."""

    device: torch.device
    capabilities: Capabilities

    def memory_info(self) -> MemoryInfo:
        """Free and total device memory in bytes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that copies read without blocking the host; ordinary memory where there is no other.

        `to_device` of it, or of a view, may read it after the call returns: whoever writes it again first waits on an
        event recorded behind the copy. Any other host tensor may be written as soon as `to_device` returns, unless
        memory is unified.
        """
        ...

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device on the current stream.

        With `capabilities.unified_memory` the result may be the host tensor itself. Whoever lets an op write the
        result, or writes the host tensor again while the result is in use, passes a copy.
        """
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the host, after the work that makes it."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def synchronize(self) -> None:
        """Block the host until all submitted work is done."""
        ...

    def capture(self, step: Callable[[], Any]) -> Callable[[], None]:
        """Capture a step as a graph and return its replay.

        Raises:
            NotImplementedError: `capabilities.graphs` is False.
        """
        ...
