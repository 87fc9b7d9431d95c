"""What a runtime need not write itself: one stream, pools that keep accounts, a group of one rank.

A base class for backends whose device has no more, or not yet. Each answer is honest about it: `capabilities.streams`
and `capabilities.collectives` stay False until a backend overrides what they speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.exchange import HostCommunicator
from deepinfer.ops.pools import AccountedPool
from deepinfer.ops.runtime import Capabilities, HostCopy, Landing, MemoryInfo, MemoryPool, PoolStats, Stream


@dataclass(frozen=True)
class OnlyStream:
    """The one stream of a device that has no other."""

    runtime: RuntimeDefaults

    def synchronize(self) -> None:
        """Wait for the device: all its work is in this stream."""
        self.runtime.synchronize()


class CopiesToHost(Protocol):
    """What `NewMemory` needs of a runtime."""

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """As `Runtime.to_host_later`."""
        ...


@dataclass(frozen=True)
class NewMemory:
    """A landing that keeps nothing: each copy brings memory of its own."""

    runtime: CopiesToHost

    def begin(self, tensor: Tensor) -> HostCopy:
        """As `Landing.begin`."""
        return self.runtime.to_host_later(tensor)


class RuntimeDefaults:
    """Streams, pools and ranks of a runtime that has memory and `synchronize`; override what the device does better.

    Its `stream` is the device's only one, so events and `use_stream` order what is in order already. Its pools count
    tensors whose storage torch knows, and enforce their limits. Its communicator has one rank.
    """

    capabilities: Capabilities

    def memory_info(self) -> MemoryInfo:
        """Written by the backend; subtract `reserved_and_unused`."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Written by the backend."""
        raise NotImplementedError

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Written by the backend."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Written by the backend."""
        raise NotImplementedError

    def write(self, target: Tensor, host: Tensor) -> None:
        """Written by the backend."""
        raise NotImplementedError

    def write_later(self, target: Tensor, host: Tensor) -> None:
        """Copy now: right where `write` is, and slower than a copy that the host need not wait for."""
        self.write(target, host)

    def to_host_later(self, tensor: Tensor) -> HostCopy:
        """Written by the backend."""
        raise NotImplementedError

    def landing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Landing:
        """None of its own."""
        return NewMemory(self)

    @cached_property
    def _pools(self) -> dict[str, AccountedPool]:
        return {}

    @property
    def reserved_and_unused(self) -> int:
        """Bytes that pools keep ready, which `memory_info` is to count as taken."""
        return sum(stats.reserved_bytes - stats.allocated_bytes for stats in self.pools().values())

    def pool(self, name: str, limit_bytes: int | None = None) -> MemoryPool:
        """As `Runtime.pool`."""
        if name not in self._pools:
            self._pools[name] = AccountedPool(name, self.empty, self.zeros, lambda: self.memory_info().free_bytes)
        found = self._pools[name]
        if limit_bytes is not None:
            found.account.set_limit(limit_bytes)
        return found

    def pools(self) -> Mapping[str, PoolStats]:
        """As `Runtime.pools`."""
        return {name: pool.stats() for name, pool in self._pools.items()}

    def stream(self) -> Stream:
        """The only stream."""
        return OnlyStream(self)

    def current_stream(self) -> Stream:
        """The only stream."""
        return OnlyStream(self)

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Change nothing: there is one stream.

        Raises:
            OpArgumentError: it is a stream of another device.
        """
        if stream != OnlyStream(self):
            raise OpArgumentError(f"{stream} is not a stream of this device")
        yield

    def communicator(self, rendezvous: Rendezvous | None = None) -> Communicator:
        """A group of one.

        Raises:
            NotImplementedError: the rendezvous has more ranks.
        """
        if rendezvous is not None and rendezvous.world_size > 1:
            raise NotImplementedError(
                f"{type(self).__name__} joins no ranks (capabilities.collectives is False); the rendezvous has "
                f"{rendezvous.world_size}"
            )
        return HostCommunicator()
