"""What torch owns of a device: tensors and their memory, copies between host and device, the current stream.

torch_npu's allocators remember which stream uses which memory, so whatever moves or holds a tensor goes through them.
The runtime is written against `TorchDevice`; a test gives it host memory behind a driver of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Queue:
    """A stream.

    Attributes:
        handle: as AscendCL names it.
        owner: torch's object for it, which keeps it alive; streams with one handle are equal.
    """

    handle: int
    owner: Any = field(default=None, compare=False, repr=False)


class TorchDevice(Protocol):
    """Tensors on one device.

    Attributes:
        device: where they live.
    """

    device: torch.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, of the current stream.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised page-locked host memory."""
        ...

    def is_pinned(self, host: Tensor) -> bool:
        """Whether a host tensor lies in page-locked memory."""
        ...

    def copy(self, target: Tensor, source: Tensor, *, later: bool) -> None:
        """Copy on the current stream; with `later` the host may go on before pinned memory was read or written."""
        ...

    def fill_zero(self, tensor: Tensor) -> None:
        """Write zeros on the current stream."""
        ...

    def unused_bytes(self) -> int:
        """Bytes of device memory that the allocator holds and no tensor uses."""
        ...

    def new_queue(self) -> Queue:
        """A new stream."""
        ...

    def current_queue(self) -> Queue:
        """The stream of this thread."""
        ...

    def use_queue(self, queue: Queue) -> AbstractContextManager[None]:
        """Make a stream this thread's current one."""
        ...

    def kept_allocations(self) -> AbstractContextManager[object]:
        """Memory allocated inside stays reserved for as long as the object that it gives lives."""
        ...


class NpuTorch:
    """`TorchDevice` by torch_npu.

    Args:
        index: which device.
    """

    def __init__(self, index: int) -> None:
        self._npu = import_torch_npu().npu
        self.device = torch.device("npu", index)
        self._npu.set_device(self.device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `TorchDevice.empty`."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `TorchDevice.pinned`."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def is_pinned(self, host: Tensor) -> bool:
        """As `TorchDevice.is_pinned`."""
        return host.is_pinned()

    def copy(self, target: Tensor, source: Tensor, *, later: bool) -> None:
        """As `TorchDevice.copy`."""
        target.copy_(source, non_blocking=later)

    def fill_zero(self, tensor: Tensor) -> None:
        """As `TorchDevice.fill_zero`."""
        tensor.zero_()

    def unused_bytes(self) -> int:
        """As `TorchDevice.unused_bytes`."""
        return int(self._npu.memory_reserved(self.device) - self._npu.memory_allocated(self.device))

    def new_queue(self) -> Queue:
        """As `TorchDevice.new_queue`."""
        return self._queue(self._npu.Stream(self.device))

    def current_queue(self) -> Queue:
        """As `TorchDevice.current_queue`."""
        return self._queue(self._npu.current_stream(self.device))

    @contextmanager
    def use_queue(self, queue: Queue) -> Iterator[None]:
        """As `TorchDevice.use_queue`."""
        with self._npu.stream(queue.owner):
            yield

    @contextmanager
    def kept_allocations(self) -> Iterator[object]:
        """As `TorchDevice.kept_allocations`."""
        pool = self._npu.MemPool()
        with self._npu.use_mem_pool(pool, self.device):
            yield pool

    def _queue(self, stream: Any) -> Queue:
        return Queue(int(stream.npu_stream), stream)


def import_torch_npu() -> Any:
    """torch_npu, set to launch its operators at once.

    It can hand operators to a thread of its own that launches them later; kernels launched here would then overtake
    operators that were called before them.

    Raises:
        ImportError: it is not installed, or a library that it needs is not there.
    """
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # read when the first operator runs
    import torch_npu

    return torch_npu
