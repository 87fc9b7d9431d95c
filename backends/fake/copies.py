"""Copies between host and device: they happen late, and a pinned buffer that is overwritten too early is found out."""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.fake.errors import HostBufferReuseError
from deepinfer.backends.fake.memory import POISON, Ref
from deepinfer.backends.fake.streams import Work


class PinnedBuffers:
    """Host memory that copies read late, known by its addresses."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by first address

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed buffer; it is forgotten when its last tensor dies."""
        num_bytes = prod(shape) * dtype.itemsize
        owner = np.zeros(max(num_bytes, 1), dtype=np.uint8)
        address = owner.ctypes.data
        self._ends[address] = address + owner.nbytes
        weakref.finalize(owner, self._ends.pop, address)
        return torch.from_numpy(owner)[:num_bytes].view(dtype).view(shape)

    def __contains__(self, host: Tensor) -> bool:
        address = host.data_ptr()
        return any(start <= address < end for start, end in list(self._ends.items()))  # buffers die in any thread


def copy_in(target: Ref, host: Tensor, *, late: bool = False, detect: bool = True) -> Work:
    """A copy to the device.

    Args:
        target: of the same shape and dtype.
        host: pageable memory is read now.
        late: it is pinned, and read when the copy runs.
        detect: of pinned memory, keep what it holds now, and hold that against what the copy finds.

    Returns:
        The work; it raises `HostBufferReuseError` where a pinned source has changed before it runs.
    """
    staged = host.detach().contiguous() if late and not detect else host.detach().clone()

    def copy() -> None:
        if late and detect and not _same_bytes(staged, host):
            raise HostBufferReuseError(
                f"a pinned host buffer of {list(host.shape)} {host.dtype} was overwritten before its copy to the "
                "device was done; wait on an event recorded behind the copy"
            )
        target.view().copy_(staged)

    return Work("to_device", copy, writes=(target,))


def copy_out(source: Ref) -> tuple[Work, Tensor]:
    """A copy to the host: the work, and where the values will be, full of poison until then."""
    target = torch.full((prod(source.shape) * source.dtype.itemsize,), POISON, dtype=torch.uint8)
    target = target.view(source.dtype).view(source.shape)

    def copy() -> None:
        target.copy_(source.view())

    return Work("to_host", copy, reads=(source,)), target


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    return left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
