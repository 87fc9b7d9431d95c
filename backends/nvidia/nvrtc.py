"""CUDA C++ compiled at run time by NVRTC, without nvcc and without an extension of torch.

A program is its files, its macros and an architecture; the machine code is kept on disk under their hash and the
compiler's version. Compiling needs no GPU, so tests can read registers and spills where there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.ops.cache_dir import cache_dir, keep_file
from deepinfer.ops.errors import DeviceError

_LOG = logging.getLogger(__name__)
_STATIC_SHARED: Final = 48 << 10
"""Bytes of shared memory that a launch may ask for without saying so beforehand."""


def cache_folder() -> Path:
    """Where machine code is kept: `DEEPINFER_CACHE_DIR`, else the user's cache folder."""
    return cache_dir() / "cuda"


@lru_cache(maxsize=64)
def architecture_of(device: int) -> str:
    """What a device's machine code is called, with everything that its generation alone has: sm_90a, sm_100a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


@dataclass(frozen=True)
class CudaProgram:
    """One kernel in CUDA C++.

    Attributes:
        files: sources in order of inclusion; the last holds the kernel.
        entry: its name, declared `extern "C"`.
        macros: compile-time numbers.
        generated: text that stands before the last file.
    """

    files: tuple[Path, ...]
    entry: str
    macros: Mapping[str, int | str] = field(default_factory=dict)
    generated: tuple[str, ...] = ()

    def text(self) -> str:
        """What the compiler reads."""
        parts = [f"#define {name} {value}\n" for name, value in self.macros.items()]
        *before, last = (f'#line 1 "{path.name}"\n{path.read_text()}\n' for path in self.files)
        return "".join((*parts, *before, *self.generated, last))

    def compile(self, architecture: str) -> bytes:
        """Machine code for an architecture such as "sm_90a", from the disk where it was made before.

        Raises:
            DeviceError: it does not compile; the compiler's own words are in the message.
        """
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions

        text = self.text()
        _, major, minor = nvrtc.nvrtcVersion()
        key = hashlib.sha256(f"{major}.{minor} {architecture} {text}".encode()).hexdigest()
        kept = cache_folder() / f"{self.entry}-{architecture}-{key[:32]}.cubin"
        with suppress(OSError):  # not there, or not to be read: then it is made
            return kept.read_bytes()
        options = ProgramOptions(arch=architecture, std="c++17", device_as_default_execution_space=True)
        try:
            code = bytes(Program(text, "c++", options).compile("cubin").code)
        except Exception as error:  # the library's own error types differ between versions
            raise DeviceError(f"{self.files[-1].name} does not compile for {architecture}: {error}") from error
        try:
            keep_file(kept, code)
        except OSError as error:
            _warn_of(kept.parent, error.strerror or str(error))
        return code


@lru_cache(maxsize=8)  # once a folder: a model has dozens of programs
def _warn_of(folder: Path, why: str) -> None:
    _LOG.warning("compiled kernels are not kept in %s, and are compiled again by the next process: %s", folder, why)


class CudaFunction:
    """A program loaded into the current device, ready to launch on torch's current stream.

    Args:
        program: what to compile and load.
        architecture: of the device.
        shared_bytes: dynamic shared memory of every launch.
    """

    def __init__(self, program: CudaProgram, architecture: str, shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._shared_bytes = shared_bytes
        torch.cuda.current_stream()  # the primary context exists from here on
        (library,) = self._checked(
            driver.cuLibraryLoadData(program.compile(architecture), [], [], 0, [], [], 0), "load"
        )
        (kernel,) = self._checked(driver.cuLibraryGetKernel(library, program.entry.encode()), program.entry)
        (self._function,) = self._checked(driver.cuKernelGetFunction(kernel), program.entry)
        self._library = library
        if shared_bytes > _STATIC_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), "shared memory")

    def launch(self, grid: Sequence[int], block: int, args: Sequence[Any]) -> None:
        """Launch; arguments are ctypes values or structures, in the order of the kernel's parameters.

        Raises:
            DeviceError: the driver refused.
        """
        places = np.array([ctypes.addressof(arg) for arg in args], np.uint64)
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch.cuda.current_stream().cuda_stream
        self._checked(
            self._driver.cuLaunchKernel(
                self._function, x, y, z, block, 1, 1, self._shared_bytes, stream, places.ctypes.data, 0
            ),
            "launch",
        )

    def clusters_at_once(self, blocks: int, threads: int) -> int:
        """Clusters of so many blocks of so many threads that the whole device holds at a time."""
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        size = self._driver.CUlaunchAttribute()
        size.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = self._driver.CUlaunchAttributeValue()
        shape.clusterDim.x, shape.clusterDim.y, shape.clusterDim.z = blocks, 1, 1
        size.value = shape
        config.attrs, config.numAttrs = [size], 1
        (count,) = self._checked(self._driver.cuOccupancyMaxActiveClusters(self._function, config), "clusters")
        return int(count)

    def _checked(self, result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        if int(result[0]):
            raise DeviceError(f"CUDA driver, {what}: {result[0]}")
        return result[1:]


def tensor_map(x: Tensor, rows: int, columns: int) -> ctypes.Array[ctypes.c_char]:
    """A TMA map of a bfloat16 matrix with boxes of `rows` by `columns`, 128-byte swizzle, zeros outside.

    Args:
        x: [R, C] bfloat16, rows at multiples of 16 bytes.
        rows: rows of a box.
        columns: columns of a box; 64 fill the swizzle's 128 bytes.
    """
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    error, made = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        x.data_ptr(),
        [driver.cuuint64_t(x.shape[1]), driver.cuuint64_t(x.shape[0])],
        [driver.cuuint64_t(x.stride(0) * x.element_size())],
        [driver.cuuint32_t(columns), driver.cuuint32_t(rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise DeviceError(f"CUDA driver, tensor map of {tuple(x.shape)} {x.dtype}: {error}")
    raw = (ctypes.c_char * 128)()
    ctypes.memmove(raw, int(made.getPtr()), 128)
    return raw
