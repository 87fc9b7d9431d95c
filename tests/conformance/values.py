"""Arguments and results as trees of tensors: walking, copying, snapshotting, moving, comparing bits.

Layout is part of a case (a strided view, a cache spread over 3 GiB), so copies keep strides, and nothing here touches
memory that a view does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.formats import PagedCache, QTensor

HUGE_BYTES = 1 << 26
"""Tensors above this size are compared at a sample of rows, so that lazily committed memory stays uncommitted."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path; None and scalars are skipped."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from walk(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)


def transform(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor replaced; a cache's bytes may change their place but not their number."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: transform(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [transform(item, function) for item in value]
        return type(value)(items) if not hasattr(value, "_fields") else type(value)(*items)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {part.name: transform(getattr(value, part.name), function) for part in fields(value)}
        return replace(value, **changed)
    return value


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last that a view names."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def place(tensor: Tensor, buffer: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    """A copy with the same strides in a new buffer of `buffer(elements, dtype)`."""
    if tensor.is_contiguous() or any(stride == 0 for stride in tensor.stride()) or tensor.numel() == 0:
        target = buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
    else:
        target = buffer(extent(tensor), tensor.dtype).as_strided(tensor.shape, tensor.stride())
    target.copy_(tensor)
    return target


def copied(value: Any) -> Any:
    """A deep copy that keeps strides; the gaps of views hold zeros that are never touched."""
    return transform(value, lambda tensor: place(tensor, _host_buffer))


def _host_buffer(elements: int, dtype: torch.dtype) -> Tensor:
    import numpy as np

    size = torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(max(elements * size, 1), dtype=np.uint8))[: elements * size].view(dtype)


def snapshot(value: Any) -> dict[str, Tensor]:
    """Bits of every tensor, packed; huge tensors are sampled."""
    return {path: _bits(_sample(tensor)).clone() for path, tensor in walk(value)}


def _sample(tensor: Tensor) -> Tensor:
    if tensor.numel() * tensor.element_size() <= HUGE_BYTES:
        return tensor
    rows = torch.linspace(0, tensor.shape[0] - 1, 64, dtype=torch.float64).long().unique()
    return tensor[rows]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bits; one NaN is as good as another."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    return bool(((_bits(left) == _bits(right)) | (left.isnan() & right.isnan())).all())


def first_difference(left: Tensor, right: Tensor) -> str:
    """Where two tensors differ first, for messages."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)}"
    differ = left != right
    if left.dtype.is_floating_point:
        differ &= ~(left.isnan() & right.isnan())
        differ |= (left == right) & (left.signbit() != right.signbit())
    where = differ.nonzero()
    if not len(where):
        return "no difference"
    index = tuple(where[0].tolist())
    return f"{len(where)} of {left.numel()} elements, first at {list(index)}: {left[index]} against {right[index]}"


def cache_parts(cache: PagedCache) -> tuple[Tensor, Tensor | None]:
    """Codes [slots, n] and scales [slots, m] of a cache as stored; scales are None for float32 records."""
    fmt, pages = cache.format, cache.data.shape[0]
    codes_bytes, scale_bytes = fmt.code_bytes, fmt.scale_bytes
    if fmt.layout == "sectioned":
        split = cache.records * codes_bytes
        codes = cache.data[:, :split].reshape(pages * cache.records, codes_bytes)
        scales = cache.data[:, split:].reshape(pages * cache.records, scale_bytes)
    else:
        records = cache.data.reshape(pages * cache.records, fmt.record_bytes)
        codes, scales = records[:, :codes_bytes], records[:, codes_bytes:]
    if fmt.quant is None:
        return codes.contiguous().view(torch.float32), None
    return codes.contiguous(), scales.contiguous()


def settle_codes(value: QTensor) -> QTensor:
    """The same tensor with the codes of NaN groups cleared: the contract leaves them open."""
    nan = (value.scale & 0x7F) == 0x7F if value.fmt == "nvfp4" else value.scale == 255
    if not bool(nan.any()):
        return value
    per_group = {"mxfp8": 32, "mxfp4": 16, "nvfp4": 8}[value.fmt]
    spread = nan.repeat_interleave(per_group, dim=-1)[..., : value.data.shape[-1]]
    return QTensor(torch.where(spread, 0, value.data), value.scale, value.fmt, value.layout)


def plain_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors whose bits the contract fixes: as `walk`, with codes of NaN groups cleared and caches cut in parts."""
    if isinstance(value, QTensor):
        settled = settle_codes(value)
        yield f"{path}.data", settled.data
        yield f"{path}.scale", settled.scale
    elif isinstance(value, PagedCache):
        codes, scales = cache_parts(value)
        if scales is None or value.format.quant is None:
            yield f"{path}.records", codes
        else:
            yield from plain_leaves(QTensor(codes, scales, value.format.quant), path)
    elif isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from plain_leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from plain_leaves(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from plain_leaves(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)
