"""Named pools of the fake device: what they reserve is taken from its memory, and nobody else gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.backends.fake.memory import DeviceMemory
from deepinfer.ops.pools import PoolAccount
from deepinfer.ops.runtime import PoolStats

if TYPE_CHECKING:
    from threading import RLock

    from deepinfer.backends.fake.runtime import FakeRuntime


@dataclass
class FakePool:
    """Implements `deepinfer.ops.runtime.MemoryPool`.

    Attributes:
        name: of the pool.
        runtime: the device.
        memory: of the device.
        lock: held while the books of pool and device change.
        account: the books; sizes are those of blocks, rounded up.
    """

    name: str
    runtime: FakeRuntime
    memory: DeviceMemory
    lock: RLock
    account: PoolAccount = field(init=False)

    def __post_init__(self) -> None:
        self.account = PoolAccount(self.name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory full of poison."""
        return self.runtime.allocate(shape, dtype, self.account)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory that a queued fill sets to zero."""
        return self.runtime.filled(self.empty(shape, dtype))

    def reserve(self, num_bytes: int) -> None:
        """As `MemoryPool.reserve`."""
        with self.lock:
            self.memory.reserve(num_bytes, self.account)

    def release(self) -> int:
        """As `MemoryPool.release`."""
        with self.lock:
            return self.memory.release(self.account)

    def stats(self) -> PoolStats:
        """As `MemoryPool.stats`; memory that waits in a queue to be freed counts as in use."""
        return self.account.stats()
