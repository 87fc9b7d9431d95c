"""The CPU as a device: host memory, one stream, events that are always reached (`deepinfer.ops.host`)."""

from __future__ import annotations

from deepinfer.ops.host import HostEvent, HostRuntime

CpuEvent = HostEvent


class CpuRuntime(HostRuntime):
    """The `Runtime` protocol over host memory; nothing to add for this backend."""
