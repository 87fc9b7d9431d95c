"""Storage formats: quantised tensors and paged cache records, as layouts without arithmetic.

The arithmetic of encoding and decoding lives in `deepinfer.ops.quant`. A cache format is a function of its kind and
dimension; every pool carries its format, because equal byte counts do not mean equal layouts.

Source: DeepSeek-V4.1-Flash checkpoint, quantisation of weights and caches (model specification, section 8).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

QuantFormat = Literal["mxfp8", "mxfp4", "nvfp4"]
"""mxfp8: e4m3, ue8m0 scale per 32; mxfp4: e2m1, ue8m0 scale per 32; nvfp4: e2m1, e4m3 scale per 16."""

CacheKind = Literal["fp8", "fp4", "index", "f32"]

GROUP: dict[str, int] = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class QTensor:
    """A quantised tensor in canonical layout: groups run along the last axis, scales are row-major.

    Attributes:
        data: [..., K] uint8 of e4m3 codes, or [..., K/2] uint8 of e2m1 pairs with the even index in the low nibble.
        scale: [..., ceil(K/group)] uint8 of ue8m0 or e4m3 codes.
        fmt: which codes these are.
        layout: "canonical", or a backend's private name.
    """

    data: Tensor
    scale: Tensor
    fmt: QuantFormat
    layout: str = "canonical"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in values."""
        packed = 1 if self.fmt == "mxfp8" else 2
        return (*self.data.shape[:-1], self.data.shape[-1] * packed)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.data.device

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.numel() + self.scale.numel()

    def __getitem__(self, index: int | slice) -> QTensor:
        return QTensor(self.data[index], self.scale[index], self.fmt, self.layout)


@dataclass(frozen=True)
class CacheFormat:
    """The record of one cached vector.

    Attributes:
        kind: "fp8" e4m3 with ue8m0 per 32; "fp4" e2m1 with e4m3 per 16; "index" e2m1 with ue8m0 per 32; "f32" plain.
        head_dim: values in a record.
    """

    kind: CacheKind
    head_dim: int

    def __post_init__(self) -> None:
        need = {"fp8": 32, "fp4": 16, "index": 32, "f32": 1}.get(self.kind)
        if need is None:
            raise ValueError(f"cache kind {self.kind!r} is not one of fp8, fp4, index, f32")
        if self.head_dim <= 0 or self.head_dim % need:
            raise ValueError(f"a {self.kind} cache needs a head_dim that is a multiple of {need}, got {self.head_dim}")

    @property
    def layout(self) -> str:
        """Either "interleaved", codes then scales of one record, or "sectioned", codes of a page then its scales."""
        return "sectioned" if self.kind == "index" else "interleaved"

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a record."""
        return {"fp8": self.head_dim, "fp4": self.head_dim // 2, "index": self.head_dim // 2, "f32": 4 * self.head_dim}[
            self.kind
        ]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in a record."""
        return {"fp8": self.head_dim // 32, "fp4": self.head_dim // 16, "index": self.head_dim // 32, "f32": 0}[
            self.kind
        ]

    @property
    def record_bytes(self) -> int:
        """Bytes of a record: 528, 288 and 68 for fp8 and fp4 at 512 and index at 128."""
        return self.code_bytes + self.scale_bytes

    @property
    def quant(self) -> QuantFormat | None:
        """The quantiser of its values; None for f32."""
        quants: dict[str, QuantFormat | None] = {"fp8": "mxfp8", "fp4": "nvfp4", "index": "mxfp4", "f32": None}
        return quants[self.kind]

    @property
    def tag(self) -> str:
        """Names kind, dimension and layout, for export headers and messages."""
        return f"{self.kind}-{self.head_dim}-{self.layout}"


@dataclass(frozen=True)
class PagedCache:
    """Records of one kind and one layer in a pool of pages. A slot is `page * records + offset`.

    Attributes:
        data: [num_pages, >= records * record_bytes] uint8; rows may be strided (a view into a wider block).
        format: what a record looks like.
        records: records per page.
    """

    data: Tensor
    format: CacheFormat
    records: int

    def __post_init__(self) -> None:
        need = self.records * self.format.record_bytes
        if self.data.dim() != 2 or self.data.dtype != torch.uint8 or self.data.shape[1] != need:
            raise ValueError(
                f"a page of {self.records} {self.format.tag} records is uint8 [pages, {need}], "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )
        if self.data.stride(1) != 1:
            raise ValueError("bytes inside a page must be contiguous")

    @property
    def num_slots(self) -> int:
        """Slots in all pages, page 0 included."""
        return int(self.data.shape[0]) * self.records

    def record_views(self, start: int, stop: int) -> Iterator[Tensor]:
        """Views of the bytes of slots [start, stop), and of no others; whole pages in one."""
        fmt = self.format
        while start < stop:
            page, offset = divmod(start, self.records)
            pages = (stop - start) // self.records if offset == 0 else 0
            if pages:
                yield self.data[page : page + pages]
                start += pages * self.records
                continue
            end = min(offset + stop - start, self.records)
            row = self.data[page]
            if fmt.layout == "sectioned":
                yield row[offset * fmt.code_bytes : end * fmt.code_bytes]
                scales = row[self.records * fmt.code_bytes :]
                yield scales[offset * fmt.scale_bytes : end * fmt.scale_bytes]
            else:
                yield row[offset * fmt.record_bytes : end * fmt.record_bytes]
            start += end - offset
