"""What the rank programs of level 5 share: a rank's place, values to pass around, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.conformance.results import Check
from deepinfer.ops.backend import Backend
from deepinfer.ops.collectives import Communicator
from deepinfer.ops.runtime import Runtime


@dataclass(frozen=True)
class Place:
    """A rank of a group, with its device.

    Attributes:
        backend: under test.
        runtime: this rank's device.
        group: all ranks of the case.
    """

    backend: Backend
    runtime: Runtime
    group: Communicator

    @property
    def ranks(self) -> range:
        """Places in the group."""
        return range(self.group.world_size)

    def there(self, host: Tensor) -> Tensor:
        """A device tensor of its own with these values."""
        return self.runtime.to_device(host.clone())

    def here(self, tensor: Tensor) -> Tensor:
        """Its values on the host."""
        return self.runtime.to_host(tensor)


Program = Callable[[Place], Iterator[Check]]


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values whose sum shows the order of additions; small integers for integers."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 40, tuple(shape), generator=generator).to(dtype)
    scale = torch.randint(-10, 6, tuple(shape), generator=generator).double().exp2()
    return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale).to(dtype)


def equal(name: str, got: Tensor, want: Tensor) -> Check:
    """Whether shape, dtype and values are the same; NaN is NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return Check(name, False, f"{tag(got.dtype)} {list(got.shape)}, not {tag(want.dtype)} {list(want.shape)}")
    same = (got == want) | (got.isnan() & want.isnan()) if got.dtype.is_floating_point else got == want
    wrong = int((~same).sum())
    return Check(name, not wrong, f"{wrong} of {want.numel()} elements differ")


def tag(dtype: torch.dtype) -> str:
    """As torch says it, without its own name."""
    return str(dtype).removeprefix("torch.")
