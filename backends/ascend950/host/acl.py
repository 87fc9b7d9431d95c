"""AscendCL through ctypes: the library is loaded once, calls are checked, errors say what the driver said.

The declarations are in `prototypes.py`. Device memory, streams and tensors belong to torch_npu (`torch_device.py`);
this file only calls what it is told to call.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any, Final

from deepinfer.backends.ascend950.host.prototypes import CONSTANTS, PROTOTYPES, ctype
from deepinfer.ops.errors import BackendUnavailableError, DeviceError, OutOfDeviceMemoryError

LIBRARY: Final = "libascendcl.so"
_OUT_OF_MEMORY: Final = (CONSTANTS["ACL_ERROR_RT_MEMORY_ALLOCATION"], CONSTANTS["ACL_ERROR_BAD_ALLOC"])


class Acl:
    """The functions of `PROTOTYPES`, from one library.

    Args:
        library: file or name of the library; the linker searches for a name.

    Raises:
        BackendUnavailableError: it cannot be loaded, or lacks a function.
    """

    def __init__(self, library: str | Path = LIBRARY) -> None:
        try:
            self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise BackendUnavailableError(
                f"{library} cannot be loaded ({error}); install CANN 9.2 or newer and run its set_env.sh"
            ) from error
        missing = [name for name in PROTOTYPES if not hasattr(self.library, name)]
        if missing:
            raise BackendUnavailableError(
                f"{library} has no {', '.join(missing)}; it is of an older CANN: install CANN 9.2 or newer"
            )
        for name, (result, *arguments) in PROTOTYPES.items():
            function = getattr(self.library, name)
            function.restype = ctype(result)
            function.argtypes = [ctype(argument) for argument in arguments]
        self._context: int | None = None
        self._here = threading.local()

    def call(self, name: str, *arguments: Any, error: type[DeviceError] = DeviceError, what: str = "") -> None:
        """Call a function that returns an error code.

        Args:
            name: one of `PROTOTYPES`.
            arguments: Python numbers, bytes, and ctypes values; `ctypes.byref` for what it fills in.
            error: what to raise.
            what: on what behalf, for the message.

        Raises:
            OutOfDeviceMemoryError: the driver has no memory for it.
            DeviceError: or its subclass in `error`: any other code.
        """
        self._attach()
        code = getattr(self.library, name)(*arguments)
        if code == CONSTANTS["ACL_SUCCESS"]:
            return
        kind = OutOfDeviceMemoryError if code in _OUT_OF_MEMORY else error
        raise kind(f"{f'{what}: ' if what else ''}{name} failed with {code}{self._recent_message()}")

    def made(self, name: str, *arguments: Any) -> Any:
        """Call a function whose first argument is a handle that it fills in, and give the handle.

        Raises:
            DeviceError: as `call`.
        """
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value

    def found(self, name: str, *arguments: Any, error: type[DeviceError] = DeviceError, what: str = "") -> Any:
        """Call a function whose last argument is a handle that it fills in, and give the handle.

        Raises:
            DeviceError: as `call`.
        """
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(handle), error=error, what=what)
        return handle.value

    def start(self, index: int) -> None:
        """Initialise AscendCL where torch_npu has not; make a device current, for other threads at their first call.

        Raises:
            DeviceError: there is no such device, or the driver does not answer.
        """
        code = self.library.aclInit(None)
        if code not in (CONSTANTS["ACL_SUCCESS"], CONSTANTS["ACL_ERROR_REPEAT_INITIALIZE"]):
            raise DeviceError(f"aclInit failed with {code}{self._recent_message()}; is the driver loaded?")
        self.call("aclrtSetDevice", index)
        self._context = self.made("aclrtGetCurrentContext")
        self._here.attached = True

    def num_devices(self) -> int:
        """How many devices this process sees."""
        count = ctypes.c_uint32()
        self.call("aclrtGetDeviceCount", ctypes.byref(count))
        return count.value

    def soc_name(self) -> str:
        """Name of the chip, such as "Ascend950DT_9572"; empty when the driver does not say."""
        name: bytes | None = self.library.aclrtGetSocName()
        return (name or b"").decode(errors="replace")

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("aclrtGetMemInfo", CONSTANTS["ACL_HBM_MEM"], ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def _attach(self) -> None:
        """A context is current per thread, and an engine may run in another thread than the one that made it."""
        if self._context is not None and not getattr(self._here, "attached", False):
            self._here.attached = True
            self.call("aclrtSetCurrentContext", self._context)

    def _recent_message(self) -> str:
        message: bytes | None = self.library.aclGetRecentErrMsg()
        return f": {message.decode(errors='replace').strip()}" if message else ""
