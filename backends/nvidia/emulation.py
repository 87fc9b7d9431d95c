"""The kernels on a host without a GPU: Triton's interpreter, made exact, over ordinary memory."""

from __future__ import annotations

from deepinfer.backends.nvidia import interpreter
from deepinfer.ops.host import HostRuntime


class InterpretedRuntime(HostRuntime):
    """Host memory; kernels run in Triton's interpreter, so values and bits mean something and times do not."""

    device_name = "Triton interpreter"


def emulate() -> InterpretedRuntime:
    """Switch this process to the interpreter and give its runtime.

    Raises:
        BackendUnavailableError: as `interpreter.enable`.
    """
    interpreter.enable()
    return InterpretedRuntime()
