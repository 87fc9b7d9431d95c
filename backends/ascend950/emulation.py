"""The kernels on a host without a device: their own text, compiled by a C++ compiler against a model of the machine."""

from __future__ import annotations

from deepinfer.backends.ascend950 import twin_build
from deepinfer.ops.errors import BackendUnavailableError
from deepinfer.ops.host import HostRuntime


class TwinRuntime(HostRuntime):
    """Host memory; kernels run in the twin, so values and bits mean something and times do not."""

    device_name = "Ascend 950 twin"


def emulate() -> TwinRuntime:
    """The runtime whose tensors kernels run on in the twin.

    Raises:
        BackendUnavailableError: there is no C++20 compiler that works, or a variable of the twin has a value that it
            does not know.
        DeviceError: `CXX` is no command line, or there is no place for compiled kernels.
    """
    missing = twin_build.missing_compiler()
    if missing:
        raise BackendUnavailableError(missing)
    try:
        twin_build.mode()
        twin_build.runs_backwards()
    except ValueError as error:
        raise BackendUnavailableError(str(error)) from error
    twin_build.made_cache_folder()
    return TwinRuntime()
