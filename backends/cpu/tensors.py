"""From tensors to what the kernels take: addresses, element kinds and thread counts.

A kernel cannot check a layout, so these helpers do: each returns a tensor that is contiguous and of a kind that the
kernels read. The caller keeps it alive until the kernel returns, by holding it in a local variable.
"""

from __future__ import annotations

import os
from typing import Final

import torch
from torch import Tensor

from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import PagedCache, QTensor, QuantFormat

_NUM_CPUS: Final = os.cpu_count() or 1


class _Kinds(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise OpArgumentError(f"the CPU kernels take float32 and bfloat16, got {dtype}; float64 is the reference's")


KIND: Final = _Kinds({torch.float32: 0, torch.bfloat16: 1})
"""Element kinds as `native/common.hpp` numbers them."""

QUANT_KIND: Final[dict[str, int]] = {"mxfp8": 2, "mxfp4": 3, "nvfp4": 4}
"""Quantised kinds, numbered on from `KIND`."""

_CACHE_KIND: Final[dict[str, int]] = {"f32": 0, "fp8": 2, "index": 3, "fp4": 4}

CacheArgs = tuple[int, int, int, int, int, int, bool]
NO_CACHE: Final[CacheArgs] = (0, 0, 0, 1, 0, 0, False)

_empty = torch.empty


def num_threads() -> int:
    """Threads a kernel may use now; results do not depend on it."""
    return min(torch.get_num_threads(), _NUM_CPUS)


def dense(x: Tensor) -> Tensor:
    """The tensor with its elements in a row."""
    return x if x.is_contiguous() else x.contiguous()


def ids(x: Tensor) -> Tensor:
    """A contiguous int32 tensor of indices."""
    if x.dtype is not torch.int32:
        x = x.to(torch.int32)
    return x if x.is_contiguous() else x.contiguous()


def floats(x: Tensor) -> Tensor:
    """A contiguous float32 tensor."""
    if x.dtype is not torch.float32:
        x = x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()


def operand(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None, int]:
    """Contiguous codes or values, contiguous scales or None, and the kind.

    Raises:
        OpArgumentError: a dtype that the kernels do not read, or codes in a layout of another backend.
    """
    if isinstance(x, QTensor):
        if x.layout != "canonical":
            raise OpArgumentError(f"the CPU kernels read canonical quantised tensors, got layout {x.layout!r}")
        return dense(x.data), dense(x.scale), QUANT_KIND[x.fmt]
    return dense(x), None, KIND[x.dtype]


def address(x: Tensor | None) -> int:
    """First byte of a tensor; 0 when there is none."""
    return 0 if x is None else x.data_ptr()


def empty_codes(shape: tuple[int, ...], fmt: QuantFormat) -> QTensor:
    """An uninitialised quantised tensor of a logical shape."""
    width = shape[-1]
    group, packed = (16 if fmt == "nvfp4" else 32), (1 if fmt == "mxfp8" else 2)
    data = _empty((*shape[:-1], width // packed), dtype=torch.uint8)
    return QTensor(data, _empty((*shape[:-1], -(-width // group)), dtype=torch.uint8), fmt)


def cache_args(cache: PagedCache) -> CacheArgs:
    """A paged cache as `native/cache.hpp` takes it."""
    data, fmt = cache.data, cache.format
    kind = _CACHE_KIND[fmt.kind]
    return data.data_ptr(), data.stride(0), data.shape[0], cache.records, kind, fmt.head_dim, kind == 3
