"""Weight files: safetensors shards opened, checked and read through memory maps, for any model.

Headers are parsed here and compared with file sizes, so an absent, cut off or damaged shard is found before any weight
is read, and all faults are named at once. Which tensors a model wants, and what they become, is the model's business.

Source: the safetensors format (an 8-byte little-endian header length, a JSON header, then data).
"""

import hashlib
import json
import mmap
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.models.errors import CheckpointError
from deepinfer.ops.show import shown

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_NUM_SAMPLES = 16  # of a shard, spread evenly
_SAMPLE_BYTES = 4096

_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_MAX_LISTED = 100
_LONGEST_NAME = 255
_PREFIX = "model."
_FETCH_AGAIN = "Nothing was loaded. Fetch the named files again, for example with `hf download`."
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model expects.

    Attributes:
        shape: as stored.
        dtypes: safetensors names of the storage types that are understood.
        part: which part of the model it belongs to; parts may be skipped by choice.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    part: str = "backbone"

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint holds.

    Attributes:
        file: the shard's name.
        dtype: safetensors name of the storage type.
        shape: as stored.
        start: first byte, counted from the beginning of the file.
        num_bytes: bytes of data.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} in {self.file}"


class Checkpoint:
    """The tensors of a checkpoint folder; built by `open`.

    Not thread-safe while maps are being opened; tensors it gave out are.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor], index: Mapping[str, str] | None) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self._index = index
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Parse all headers of a folder with `model.safetensors.index.json`, or one `model.safetensors`.

        A leading `model.` of tensor names is dropped. No weight is read.

        Raises:
            CheckpointError: files are absent, cut off or damaged, or a tensor stands twice; all of them are named.
        """
        root = Path(path)
        index = _read_index(root)
        files = sorted(set(index.values())) if index is not None else [SINGLE_FILE]
        tensors: dict[str, StoredTensor] = {}
        problems: list[str] = []
        for file in files:
            named = sum(shard == file for shard in index.values()) if index is not None else 0
            try:
                stored = _read_header(root, file, named)
            except _BadFile as error:
                problems.append(str(error))
                continue
            for raw, tensor in stored.items():
                name = raw.removeprefix(_PREFIX)
                if name in tensors:
                    problems.append(f"{name} stands twice: {tensors[name]} and {tensor}; remove the stale file")
                tensors[name] = tensor
        if problems:
            summary = f"{_plural(len(problems), 'fault')} in the weight files"
            raise CheckpointError(str(root), summary, problems, _FETCH_AGAIN)
        placed = None if index is None else {name.removeprefix(_PREFIX): file for name, file in index.items()}
        return cls(root, tensors, placed)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def fingerprint(self) -> str:
        """Names these weights, in 32 hex digits: a hash of what tensors there are and of samples of their bytes.

        Folders that hold the same weights in other shards have another one.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file} {tensor.start}\n".encode())
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            path = self.path / file
            size = path.stat().st_size
            with open(path, "rb") as shard:
                for place in range(_NUM_SAMPLES):
                    shard.seek(max(0, size - _SAMPLE_BYTES) * place // (_NUM_SAMPLES - 1))
                    digest.update(shard.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Tensor:
        """A tensor on the CPU that shares memory with the file; later writes to it never reach the file.

        Raises:
            CheckpointError: the checkpoint has no tensor of that name.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(str(self.path), f"has no tensor {name}", [], "Validate before reading.")
        dtype = _DTYPES[stored.dtype]
        count = stored.num_bytes // dtype.itemsize
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        if stored.start % dtype.itemsize:  # other writers need not align; a copy is
            with open(self.path / stored.file, "rb") as file:
                file.seek(stored.start)
                return torch.frombuffer(bytearray(file.read(stored.num_bytes)), dtype=dtype).reshape(stored.shape)
        mapped = self._map(stored.file)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=stored.start).reshape(stored.shape)

    def release(self) -> None:
        """Forget open maps. Tensors given out keep theirs; the memory of all others is the system's again."""
        self._maps.clear()

    def validate(
        self,
        expected: Mapping[str, TensorSpec],
        parts: Collection[str],
        skipped: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Compare names, shapes and dtypes with what a model expects; nothing is read.

        Args:
            expected: all tensors of the model, by name.
            parts: parts that will be loaded. Tensors of other parts may be there or not.
            skipped: whether a tensor that nobody expects belongs to a part that is skipped by choice.

        Raises:
            CheckpointError: something differs; everything that differs is listed.
        """
        missing, shapes, dtypes = [], [], []
        for name, spec in expected.items():
            if spec.part not in parts:
                continue
            stored = self.tensors.get(name)
            if stored is None:
                missing.append(f"{name}: expected {spec}{self._place(name)}")
            elif stored.shape != spec.shape:
                shapes.append(f"{name}: expected {spec}, found {stored}")
            elif stored.dtype not in spec.dtypes:
                dtypes.append(f"{name}: expected {spec}, found {stored}")
        extra = [n for n in self.tensors if n not in expected and not skipped(n)]
        unexpected = [f"{name}: found {self.tensors[name]}" for name in sorted(extra)]
        groups = (missing, unexpected, shapes, dtypes)
        labels = ("missing", "unexpected", "of the wrong shape", "of the wrong dtype")
        found = {label: lines for label, lines in zip(labels, groups, strict=True) if lines}
        if not found:
            return
        summary = ", ".join(f"{len(lines)} {label}" for label, lines in found.items())
        problems: list[str] = []
        for label, lines in found.items():
            problems.append(f"{_plural(len(lines), 'tensor')} {label}:")
            problems += [f"  {line}" for line in lines[:_MAX_LISTED]]
            if len(lines) > _MAX_LISTED:
                problems.append(f"  ... and {len(lines) - _MAX_LISTED} more")
        raise CheckpointError(
            str(self.path),
            f"tensors differ from what config.json asks for: {summary}",
            problems,
            "Nothing was loaded. Use the config.json that belongs to these weights, or fetch or convert them again.",
        )

    def _place(self, name: str) -> str:
        file = self._index.get(name) if self._index is not None else None
        return f" in {file}, where the index places it" if file is not None else ""

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            with open(self.path / file, "rb") as handle:
                mapped = _map_privately(handle.fileno())
            self._maps[file] = mapped
        return mapped


class _BadFile(Exception):
    """One shard cannot be used; says which and why."""


def _map_privately(descriptor: int) -> mmap.mmap:
    """Map a file so that torch may treat it as writable: pages are shared until written, and never written back.

    A read-only map would make torch warn, and a stray write kill the process. No swap is reserved, since a shard may be
    larger than memory.
    """
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _read_index(root: Path) -> dict[str, str] | None:
    """Tensor name to shard, or None for a folder with a single file."""
    file = root / INDEX_FILE
    if not root.is_dir():
        raise CheckpointError(str(root), "no such folder", [], "Give the folder of config.json and the weights.")
    if not file.exists():
        if (root / SINGLE_FILE).exists():
            return None
        others = sorted(p.name for p in root.glob("*.safetensors"))
        found = f"it holds {', '.join(others[:5])} but no index" if others else "it holds no weights"
        raise CheckpointError(str(root), f"neither {INDEX_FILE} nor {SINGLE_FILE} is there; {found}", [], _FETCH_AGAIN)
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not a JSON object with entries")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = "it has no weight_map" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(str(file), f"not an index of shards: {why}", [], _FETCH_AGAIN) from error
    outside = [
        f"{_shortened(n)}: {shown(f)}"
        for n, f in weight_map.items()
        if not isinstance(f, str) or Path(f).name != f or not f
    ]
    if outside:
        raise CheckpointError(
            str(file), "shards must be files of this folder", outside[:_MAX_LISTED], "Fetch the index file again."
        )
    return weight_map


def _read_header(root: Path, file: str, named: int) -> dict[str, StoredTensor]:
    """Tensors of one shard, by the names that stand in it."""
    path = root / file
    if not _is_file(path):
        raise _BadFile(f"{_shortened(file)}: no such file; {INDEX_FILE} places {_plural(named, 'tensor')} in it")
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise _BadFile(
                    f"{file}: cut off or damaged: {size} bytes, not even the header of {length} bytes that its first "
                    "8 bytes announce"
                )
            if length > _MAX_HEADER_BYTES:
                raise _BadFile(f"{file}: damaged header: it claims {length} bytes, more than the format allows")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise _BadFile(f"{file}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _BadFile(f"{file}: damaged header, not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _BadFile(f"{file}: damaged header: not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_extents(file, tensors, 8 + length, size)
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have, such as a very long one
        return False


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:40]}...{name[-40:]} ({len(name)} characters)"


def _stored(file: str, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(v) is int and v >= 0 for v in (*shape, begin, end)) or end < begin:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise _BadFile(f"{file}: damaged header: {name} has no valid dtype, shape and data_offsets") from error
    if dtype not in _DTYPES:
        raise _BadFile(f"{file}: {name} has dtype {dtype!r}, which is none of {', '.join(_DTYPES)}")
    want = _DTYPES[dtype].itemsize
    for extent in shape:
        want *= extent
    if want != end - begin:
        raise _BadFile(
            f"{file}: damaged header: {name} is {dtype} {list(shape)}, {want} bytes, but takes {end - begin} bytes"
        )
    return StoredTensor(file, dtype, shape, data_start + begin, want)


def _check_extents(file: str, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Tensors must follow each other without gap or overlap, to the end of the file."""
    at, before = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != at:
            kind = "overlaps" if tensor.start < at else "leaves a gap after"
            raise _BadFile(f"{file}: damaged header: {name} {kind} {before}")
        at, before = tensor.start + tensor.num_bytes, name
    if size < at:
        raise _BadFile(f"{file}: cut off: {size} bytes of {at} that its header describes; {at - size} are missing")
    if size > at:
        raise _BadFile(f"{file}: damaged: {size} bytes, but its header describes only {at}")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def total_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of these tensors."""
    return sum(tensor.num_bytes for tensor in tensors)
