"""Memory pools as accounts: who holds how much, and no more than a limit, over any allocator of tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from deepinfer.ops.errors import OpArgumentError, OutOfDeviceMemoryError
from deepinfer.ops.runtime import PoolStats

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class PoolAccount:
    """The books of one pool; a runtime with an allocator of its own uses these alone.

    Args:
        name: of the pool.
        limit_bytes: the most it may hold; None for no limit.
    """

    def __init__(self, name: str, limit_bytes: int | None = None) -> None:
        self.name = name
        self._limit = limit_bytes
        self._floor = 0
        self._allocated = 0
        self._peak = 0
        self._allocations = 0
        self._releases = 0
        self._lock = threading.RLock()  # tensors die in any thread, also in one that is in here

    @property
    def reserved_bytes(self) -> int:
        """Taken from the device."""
        return max(self._floor, self._allocated)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit.

        Raises:
            OpArgumentError: the pool holds more.
        """
        with self._lock:
            if limit_bytes < self.reserved_bytes:
                raise OpArgumentError(
                    f"memory pool {self.name!r} holds {self.reserved_bytes} bytes; its limit cannot be {limit_bytes}"
                )
            self._limit = limit_bytes

    def growth(self, num_bytes: int) -> int:
        """Bytes that the device must give for an allocation of that size, beyond what is reserved.

        Raises:
            OutOfDeviceMemoryError: the limit does not allow it.
        """
        with self._lock:
            self._check(self._allocated + num_bytes, f"{num_bytes} bytes more")
            return max(self._allocated + num_bytes - self.reserved_bytes, 0)

    def take(self, num_bytes: int) -> None:
        """Book an allocation.

        Raises:
            OutOfDeviceMemoryError: the limit does not allow it.
        """
        with self._lock:
            self._check(self._allocated + num_bytes, f"{num_bytes} bytes more")
            self._allocated += num_bytes
            self._allocations += 1
            self._peak = max(self._peak, self._allocated)

    def give_back(self, num_bytes: int) -> int:
        """Book the end of an allocation; returns the bytes that the device has back."""
        with self._lock:
            before = self.reserved_bytes
            self._allocated -= num_bytes
            self._releases += 1
            return before - self.reserved_bytes

    def cancel(self, num_bytes: int) -> None:
        """Book that an allocation did not come about."""
        with self._lock:
            self._allocated -= num_bytes
            self._allocations -= 1

    def reserve(self, num_bytes: int) -> int:
        """Hold at least so many bytes in all; returns how many more the device must give.

        Raises:
            OutOfDeviceMemoryError: the limit does not allow it.
        """
        with self._lock:
            self._check(num_bytes, f"{num_bytes} bytes in all")
            before = self.reserved_bytes
            self._floor = max(self._floor, num_bytes)
            return self.reserved_bytes - before

    def release(self) -> int:
        """Hold no more than is in use; returns how many bytes the device has back."""
        with self._lock:
            before = self.reserved_bytes
            self._floor = 0
            return before - self.reserved_bytes

    def stats(self) -> PoolStats:
        """The books."""
        with self._lock:
            return PoolStats(
                self._limit, self.reserved_bytes, self._allocated, self._peak, self._allocations, self._releases
            )

    def _check(self, total: int, what: str) -> None:
        if self._limit is not None and total > self._limit:
            raise OutOfDeviceMemoryError(
                f"memory pool {self.name!r} has a limit of {self._limit} bytes and {self._allocated} of them in use: "
                f"{what} do not fit"
            )


class AccountedPool:
    """Implements `MemoryPool` over the allocator of a runtime, which knows nothing of it.

    What `reserve` keeps is kept in the books alone: `Runtime.memory_info` counts it as taken, so whoever plans by that
    leaves it free, but no allocator holds it.

    Args:
        name: of the pool.
        empty: `Runtime.empty`.
        zeros: `Runtime.zeros`.
        free_bytes: what the device has free, pools' reserves not counted.
    """

    def __init__(self, name: str, empty: Allocate, zeros: Allocate, free_bytes: Callable[[], int]) -> None:
        self.name = name
        self.account = PoolAccount(name)
        self._empty = empty
        self._zeros = zeros
        self._free_bytes = free_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `MemoryPool.empty`."""
        return self._booked(self._empty, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `MemoryPool.zeros`."""
        return self._booked(self._zeros, shape, dtype)

    def reserve(self, num_bytes: int) -> None:
        """As `MemoryPool.reserve`."""
        free = self._free_bytes()
        held = self.account.reserved_bytes
        if num_bytes - held > free:
            raise OutOfDeviceMemoryError(
                f"memory pool {self.name!r}: {num_bytes} bytes in all do not fit, {held} are held and {free} free"
            )
        self.account.reserve(num_bytes)

    def release(self) -> int:
        """As `MemoryPool.release`."""
        return self.account.release()

    def stats(self) -> PoolStats:
        """As `MemoryPool.stats`."""
        return self.account.stats()

    def _booked(self, allocate: Allocate, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        self.account.take(num_bytes)
        try:
            made = allocate(shape, dtype)
        except BaseException:
            self.account.cancel(num_bytes)
            raise
        # Views share the storage and outlive the tensor that they were taken of.
        weakref.finalize(made.untyped_storage(), self.account.give_back, num_bytes)
        return made
