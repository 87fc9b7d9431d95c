"""What a line of the benchmark of ops is made of: an op, operands, and peers; and the sizes of the model.

Operands are random and made on the device. Those of a product that a cache could hold come in as many sets as leave it
no chance. Lists and rows of a decode step fit the device's cache, where the op before leaves them in a real step too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.registry import OpTable
from deepinfer.ops.spec import OpSpec

HIDDEN: Final = 5120
HEADS: Final = 64
DIM: Final = 512
EXPERTS: Final = 384
CHOSEN: Final = 6
INTERMEDIATE: Final = 2304
STREAMS: Final = 4
GROUPS, RANK = 8, 1024
INDEX_HEADS, INDEX_DIM = 32, 128
POOL_BLOCKS, POOL_BLOCK = 2048, 8
TOPK: Final = 512
Q_RANK: Final = 1280
ROTATED: Final = 64
WINDOW: Final = 128
WINDOW_PAGE, BLOCK = 32, 128
DRAFTS: Final = 5
EPS: Final = 1e-20
CODE_BYTES: Final = 33 / 32
_ROTATED_BYTES: Final = 400 << 20
Calls = list[dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """Something to time beside an op.

    Attributes:
        name: in the table.
        run: called with the arguments of `calls`.
        calls: makes argument lists to rotate over.
    """

    name: str
    run: Callable[..., Any]
    calls: Callable[[], Calls]


@dataclass(frozen=True)
class Work:
    """An op on operands.

    Attributes:
        op: its contract.
        shape: in the table.
        calls: argument lists to rotate over.
        flops: a call's; 0 where there are none to speak of.
        num_bytes: that a call must move.
        peers: what is timed beside it.
    """

    op: OpSpec[..., Any]
    shape: str
    calls: Calls
    flops: float
    num_bytes: float
    peers: list[Peer] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """What may be smaller where a host computes. Widths of rows stay the model's.

    Attributes:
        few: rows of a decode step.
        many: rows of a prefill chunk.
        requests: that decode together and verify drafts.
        vocabulary: token ids.
        experts: routed ones.
        table_rows: of an Engram table. The model's has 384 million of them, a hundred gigabytes.
        image: patches of an image, the largest that the model takes.
        small_image: the smallest one.
    """

    few: int = 128
    many: int = 8192
    requests: int = 64
    vocabulary: int = 129280
    experts: int = EXPERTS
    table_rows: int = 4 << 20
    image: int = 8910
    small_image: int = 1521


class Maker:
    """Random operands on the device, and the ops that peers need.

    Args:
        ops: of the device.
        sizes: of what is made.
    """

    def __init__(self, ops: OpTable, sizes: Sizes | None = None) -> None:
        self.ops = ops
        self.sizes = sizes or Sizes()
        self.device = ops.context.device
        self.gen = torch.Generator(self.device).manual_seed(0)

    def plain(self, *shape: int) -> Tensor:
        """Standard normal bfloat16."""
        return torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_(generator=self.gen)

    def single(self, *shape: int) -> Tensor:
        """Uniform float32 in [0, 1)."""
        return torch.rand(shape, generator=self.gen, device=self.device)

    def codes(self, *shape: int, fmt: str) -> QTensor:
        """Any code but NaN, scales near 1."""
        width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
        data = torch.randint(0, 256, (*shape[:-1], width), generator=self.gen, device=self.device, dtype=torch.uint8)
        if fmt == "mxfp8":
            data.masked_fill_((data & 0x7F) == 0x7F, 0)
        scale_shape = (*shape[:-1], shape[-1] // 32)
        scale = torch.randint(110, 118, scale_shape, generator=self.gen, device=self.device, dtype=torch.uint8)
        return QTensor(data, scale, fmt)  # type: ignore[arg-type]

    def cache(self, kind: str, pages: int, records: int, dim: int) -> PagedCache:
        """Records of random bytes that are no NaN."""
        fmt = CacheFormat(kind, dim)  # type: ignore[arg-type]
        data = torch.randint(
            0, 100, (pages, records * fmt.record_bytes), generator=self.gen, device=self.device, dtype=torch.uint8
        )
        return PagedCache(data, fmt, records)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.gen, device=self.device, dtype=torch.int32)

    def numbers(self, low: int, high: int) -> Tensor:
        """int32 low, low + 1, ..., high - 1."""
        return torch.arange(low, high, device=self.device, dtype=torch.int32)

    def shuffled(self, count: int) -> Tensor:
        """int32 0, 1, ..., count - 1 in any order."""
        return torch.randperm(count, generator=self.gen, device=self.device, dtype=torch.int32)

    def same(self, value: float, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """One value everywhere."""
        return torch.full(shape, value, device=self.device, dtype=dtype)


def rotated(make: Callable[[], dict[str, Any]], num_bytes: float) -> Calls:
    """As many operand sets as leave a cache no chance, 16 at most."""
    return [make() for _ in range(max(1, min(16, math.ceil(_ROTATED_BYTES / max(num_bytes, 1)))))]


def phases(make: Maker) -> tuple[tuple[int, int, str], tuple[int, int, str]]:
    """A decode step and a prefill chunk: rows, the sequences that they divide among them evenly, and what that is."""
    few, many = make.sizes.few, make.sizes.many
    return (few, few, f"{few} rows, a sequence each"), (many, 1, f"{many} rows of one sequence")


Families = Mapping[Callable[[Maker], Iterator[Work]], tuple[str, ...]]
"""Generators of work with the ops that each yields, known before its operands are made."""
