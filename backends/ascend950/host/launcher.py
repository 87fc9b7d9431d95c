"""Loading device binaries and launching their kernels on the current stream.

`launch` is where a kernel of `backends/ascend950/launch.py` goes when its tensors are on a device.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from deepinfer.backends.ascend950.host.acl import Acl
from deepinfer.backends.ascend950.host.elf import kernel_names
from deepinfer.backends.ascend950.host.jit import Toolchain, find_toolchain
from deepinfer.backends.ascend950.host.prototypes import CONSTANTS, LaunchAttr, LaunchConfig
from deepinfer.backends.ascend950.host.torch_device import NpuTorch
from deepinfer.ops.errors import DeviceError, LaunchError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.launch import Kernel

_PARAMETERS: Final[dict[str, Any]] = {
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "p": ctypes.c_void_p,
}
"""What a parameter is in memory, by the letter that a kernel's signature has for it."""
_TOTAL_ALIGNMENT: Final = 8
_LEAST_ALIGNMENT: Final = 4
_ALL_CORES_AT_ONCE: Final = 1
"""Scheduling mode in which a launch waits until every core that it asks for is free."""
_KERNEL_SECONDS: Final = 120
"""A kernel that runs longer hangs, and ends with an error instead of holding the device; ranks wait less than that."""


def launch(kernel: Kernel, blocks: int, args: Sequence[Any]) -> None:
    """Launch a kernel on the current stream of the device that its tensors are on.

    Args:
        kernel: what, as Python declares it.
        blocks: cores to run on.
        args: tensors of one device, None and numbers, in the order of the signature.

    Raises:
        DeviceError: its text does not compile or load, or the tensors are on several devices.
        LaunchError: the driver refused this launch.
    """
    places = {arg.device for arg in args if isinstance(arg, Tensor)}
    if len(places) != 1:
        raise DeviceError(
            f"{kernel.entry}: its tensors are on {', '.join(sorted(map(str, places)))}, not on one device"
        )
    (device,) = places
    submit(launcher_of(device.index), kernel, blocks, args)


def submit(launcher: Launcher, kernel: Kernel, blocks: int, args: Sequence[Any]) -> None:
    """As `launch`, with a launcher of the caller's choice."""
    launcher.launch(kernel.program.path, kernel.entry, blocks, arguments(kernel, args), all_at_once=kernel.together)


def arguments(kernel: Kernel, args: Sequence[Any]) -> list[Any]:
    """Tensors, None and numbers as ctypes values of a kernel's parameters."""
    values = []
    for parameter, arg in zip(kernel.parameters, args, strict=True):
        if parameter.letter == "p":
            arg = 0 if arg is None else arg.data_ptr()
        values.append(_PARAMETERS[parameter.letter](arg))
    return values


@functools.cache
def driver_of(index: int) -> tuple[NpuTorch, Acl]:
    """A device's sides of torch and of the driver, opened once in a process.

    Raises:
        BackendUnavailableError: the driver's library is not there.
        DeviceError: the device does not answer.
    """
    tensors = NpuTorch(index)  # first: torch_npu initialises the driver with its own settings
    acl = Acl()
    acl.start(index)
    return tensors, acl


@functools.cache
def launcher_of(index: int) -> Launcher:
    """The launcher of a device; kernels that are loaded stay loaded for the process.

    Raises:
        DeviceError: as `driver_of`.
    """
    tensors, acl = driver_of(index)
    return Launcher(acl, find_toolchain, lambda: tensors.current_queue().handle)


def pack(arguments: Sequence[Any]) -> bytes:
    """Arguments as a kernel's parameters lie in memory.

    Args:
        arguments: ctypes values in the order of the parameters. Each begins at a multiple of its own size and of 4; the
            whole is a multiple of 8 long.
    """
    packed = bytearray()
    for argument in arguments:
        alignment = max(_LEAST_ALIGNMENT, ctypes.alignment(argument))
        packed.extend(bytes(-len(packed) % alignment))
        packed.extend(bytes(argument))
    packed.extend(bytes(-len(packed) % _TOTAL_ALIGNMENT))
    return bytes(packed)


class Launcher:
    """Kernels of one device, compiled and loaded when they are first launched.

    Args:
        acl: the driver.
        toolchain: makes the compiler on first use; kernels that are in the cache still need its version.
        stream: handle of the stream to launch on, asked at every launch.
    """

    def __init__(self, acl: Acl, toolchain: Callable[[], Toolchain], stream: Callable[[], int]) -> None:
        self._acl = acl
        self._find_toolchain = toolchain
        self._toolchain: Toolchain | None = None
        self._stream = stream
        self._functions: dict[tuple[Path, str], int] = {}
        self._loading = threading.Lock()

    def launch(
        self,
        source: Path,
        entry: str,
        blocks: int,
        arguments: Sequence[Any],
        *,
        all_at_once: bool = False,
        dynamic_ub_bytes: int = 0,
    ) -> None:
        """Queue a kernel; the arguments are copied before this returns.

        Args:
            source: the .asc file.
            entry: the kernel's name in it.
            blocks: cores to run on.
            arguments: ctypes values, one per parameter.
            all_at_once: blocks wait for each other, so none may start before all can.
            dynamic_ub_bytes: unified buffer of each vector core that the text leaves to the launch.

        Raises:
            DeviceError: the file does not compile or load.
            LaunchError: the driver refused this launch.
        """
        function = self._function(source, entry)
        attributes = [_attribute("TIMEOUT", "timeout", _KERNEL_SECONDS)]
        if all_at_once:
            attributes.append(_attribute("SCHEM_MODE", "schemMode", _ALL_CORES_AT_ONCE))
        if dynamic_ub_bytes:
            attributes.append(_attribute("DYN_UBUF_SIZE", "dynUBufSize", dynamic_ub_bytes))
        config = LaunchConfig((LaunchAttr * len(attributes))(*attributes), len(attributes))
        packed = pack(arguments)
        self._acl.call(
            "aclrtLaunchKernelWithHostArgs",
            function,
            blocks,
            self._stream(),
            ctypes.byref(config),
            packed,
            len(packed),
            None,
            0,
            error=LaunchError,
            what=f"{entry} on {blocks} blocks",
        )

    def load(self, source: Path) -> tuple[str, ...]:
        """Compile and load a kernel file before its first launch; gives the names of its kernels.

        Raises:
            DeviceError: it does not compile or load.
        """
        with self._loading:
            if self._toolchain is None:
                self._toolchain = self._find_toolchain()
            binary = self._toolchain.build(source)
            names = kernel_names(binary)
            # binaries stay loaded: graphs name their functions for as long as the process runs
            handle = self._acl.found("aclrtBinaryLoadFromFile", str(binary).encode(), None, what=source.name)
            for name in names:
                self._functions[source, name] = self._acl.found(
                    "aclrtBinaryGetFunction", handle, name.encode(), what=f"{source.name}, kernel {name}"
                )
        return names

    def _function(self, source: Path, entry: str) -> int:
        found = self._functions.get((source, entry))
        if found is None:
            names = self.load(source)
            if entry not in names:
                raise DeviceError(f"{source.name} has no kernel {entry!r}; it has {', '.join(names)}")
            found = self._functions[source, entry]
        return found


def _attribute(name: str, field: str, value: int) -> LaunchAttr:
    made = LaunchAttr(id=CONSTANTS[f"ACL_RT_LAUNCH_KERNEL_ATTR_{name}"])
    setattr(made.value, field, value)
    return made
