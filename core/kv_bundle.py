"""KV records of a token prefix outside any engine: a typed value that can be kept in a file and sent elsewhere.

A bundle holds bytes and what is needed to refuse them: they mean something only to an engine of the same model, record
layout and numerics. What stands in front of the last block boundary is all there is: at a boundary every group of a
compressor is closed, so its open groups are empty, and n-gram history follows from the token ids.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.core.errors import KVTransferError
from deepinfer.core.step_buffers import Int32Array
from deepinfer.ops.show import shown

FORMAT: Final = "deepinfer.kv"
VERSION: Final = 1
_TENSORS: Final = ("token_ids", "keys", "blocks", "pages", "page_places")


@dataclass(frozen=True)
class KVLayout:
    """What records mean; equal where one engine can read what another wrote.

    Attributes:
        model: names the model and its weights (`ModelInfo.fingerprint`).
        numerics: how activations and records are rounded, and which rows of a prompt run in all layers.
        block_size: tokens in a block.
        window_page: tokens in a window page.
        window: positions a query sees in its window.
        block_records: name, format and ratio of each record kind in a block, in order.
        window_records: the same for a window page.
        block_bytes: bytes of a block.
        page_bytes: bytes of a window page.
    """

    model: str
    numerics: str
    block_size: int
    window_page: int
    window: int
    block_records: tuple[str, ...]
    window_records: tuple[str, ...]
    block_bytes: int
    page_bytes: int

    @property
    def pages_per_block(self) -> int:
        """Window pages of a block's tokens."""
        return self.block_size // self.window_page

    def differences(self, other: KVLayout) -> list[str]:
        """What is not as in another layout, for a message: `name is this, not that`."""
        found = []
        for name in (field.name for field in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if isinstance(mine, tuple):
                here, there = set(mine) - set(theirs), set(theirs) - set(mine)
                mine, theirs = sorted(here)[:3] or "in another order", sorted(there)[:3]
            found.append(f"{name} is {mine}, not {theirs}")
        return found


@dataclass(frozen=True)
class KVBundle:
    """Records of a token prefix.

    Attributes:
        layout: what the bytes mean.
        salt: of the requests that may start from it.
        token_ids: [n * block_size] int32.
        keys: [n] uint64, the hash chain over the blocks' tokens.
        blocks: [n, block_bytes] uint8, on the host.
        pages: [m, page_bytes] uint8, on the host: window pages.
        page_places: [m] int32 ascending, `position // window_page` of each.
    """

    layout: KVLayout
    salt: int
    token_ids: Int32Array
    keys: NDArray[np.uint64]
    blocks: Tensor
    pages: Tensor
    page_places: Int32Array

    def __post_init__(self) -> None:
        """Check that the parts fit together.

        Raises:
            KVTransferError: names the part that does not.
        """
        if not 0 <= self.salt < 1 << 64:
            raise KVTransferError(f"bundle: salt is {shown(self.salt)}; it has 64 bits")
        layout, num_blocks = self.layout, len(self.blocks)
        shapes = {
            "token_ids": (self.token_ids.shape, (num_blocks * layout.block_size,)),
            "keys": (self.keys.shape, (num_blocks,)),
            "blocks": (tuple(self.blocks.shape), (num_blocks, layout.block_bytes)),
            "pages": (tuple(self.pages.shape), (len(self.page_places), layout.page_bytes)),
        }
        for name, (found, expected) in shapes.items():
            if found != expected:
                raise KVTransferError(f"bundle: {name} has shape {list(found)}; expected {list(expected)}")
        places = self.page_places
        if (np.diff(places) <= 0).any() or (places < 0).any() or (places >= num_blocks * layout.pages_per_block).any():
            raise KVTransferError("bundle: page_places must ascend within the pages of its blocks")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self.blocks.nbytes + self.pages.nbytes

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, which appears whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path)
        tensors = {
            "token_ids": torch.from_numpy(self.token_ids),
            "keys": torch.from_numpy(self.keys.view(np.int64)),
            "blocks": self.blocks.contiguous(),
            "pages": self.pages.contiguous(),
            "page_places": torch.from_numpy(self.page_places),
        }
        about = {
            "format": FORMAT,
            "version": str(VERSION),
            "salt": str(self.salt),
            "checksum": _checksum(tensors),
            "layout": json.dumps(asdict(self.layout)),
        }
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            save_file(tensors, unfinished, about)
            unfinished.replace(path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> KVBundle:
        """Read a file that `save` wrote.

        Raises:
            OSError: it cannot be read.
            KVTransferError: it is something else, damaged, or of another version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                _check_header(path, about)
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
        except SafetensorError as error:
            raise KVTransferError(f"{path} is no KV bundle, or damaged: {error}") from error
        dtypes = (torch.int32, torch.int64, torch.uint8, torch.uint8, torch.int32)
        for (name, tensor), dtype in zip(tensors.items(), dtypes, strict=True):
            if tensor.dtype is not dtype:
                raise KVTransferError(f"{path}: {name} is {tensor.dtype}; expected {dtype}")
        try:
            bundle = cls(
                _layout(json.loads(about["layout"])),
                int(about["salt"]),
                tensors["token_ids"].numpy(),
                tensors["keys"].numpy().view(np.uint64),
                tensors["blocks"],
                tensors["pages"],
                tensors["page_places"].numpy(),
            )
            checksum = about["checksum"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise KVTransferError(f"{path}: its header is damaged: {type(error).__name__}: {error}") from error
        if _checksum(tensors) != checksum:
            raise KVTransferError(f"{path}: its records are damaged: they do not have the checksum {checksum}")
        return bundle


def _check_header(path: str | Path, about: Mapping[str, str]) -> None:
    if about.get("format") != FORMAT:
        raise KVTransferError(f"{path} is no KV bundle: its format is {about.get('format')!r}, not {FORMAT!r}")
    if about.get("version") != str(VERSION):
        raise KVTransferError(
            f"{path} is a KV bundle of version {about.get('version')}; this release reads {VERSION}; export it again"
        )


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    total = 0
    for name in _TENSORS:
        total = zlib.crc32(tensors[name].numpy().data, total)
    return f"{total:08x}"


def _layout(values: dict[str, Any]) -> KVLayout:
    for name, least in (("block_size", 1), ("window_page", 1), ("window", 0), ("block_bytes", 0), ("page_bytes", 0)):
        number = values[name]
        if not isinstance(number, int) or number < least:
            raise ValueError(f"layout.{name} is {shown(number)}; expected an integer, at least {least}")
    for name in ("block_records", "window_records"):
        records = tuple(values[name])
        if not all(isinstance(record, str) for record in records):
            raise ValueError(f"layout.{name} is {shown(records)}; expected strings")
        values[name] = records
    return KVLayout(**values)
