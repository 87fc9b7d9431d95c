"""Kernels as Python sees them: declared once, launched on a device or, on host memory, in the twin.

A kernel takes pointers, integers and float32 numbers. Its signature is declared here in words, checked against the
compiled text, and used for both kinds of launch; tensors are passed with the exact bytes that they span, so that the
twin can tell an access beside them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from deepinfer.backends.ascend950 import twin_build
from deepinfer.backends.ascend950.twin_call import Measured, TwinFault, run_in_twin
from deepinfer.ops.errors import DeviceError

CUBE_CORES: Final = 32
"""AI cores of a server part: one cube core and two vector cores each."""

VECTOR_CORES: Final = 64

Core = Literal["vector", "cube", "mix"]
"""Which cores a kernel runs on: `__vector__`, `__cube__` or `__mix__(1, 2)`."""

_LETTERS: Final = {"i32": "i", "i64": "l", "f32": "f"}


@dataclass(frozen=True)
class Launch:
    """One launch as a recorder sees it.

    Attributes:
        kernel: what was launched.
        blocks: how many.
        args: in the order of the signature; None stands for a pointer that is not there.
        measured: what the twin counted; None where the launch was not made.
    """

    kernel: Kernel
    blocks: int
    args: tuple[Any, ...]
    measured: Measured | None


@dataclass
class _Recorder:
    launches: list[Launch]
    runs: bool


_RECORDER: ContextVar[_Recorder | None] = ContextVar("ascend_launch_recorder", default=None)


@contextmanager
def recording(*, run: bool = False) -> Iterator[list[Launch]]:
    """Collect launches, instead of making them or, with `run`, beside making them in the twin."""
    recorder = _Recorder([], run)
    token = _RECORDER.set(recorder)
    try:
        yield recorder.launches
    finally:
        _RECORDER.reset(token)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as in the kernel's text.
        letter: "p" pointer, "i" int32, "l" int64, "f" float32.
        written: the kernel writes what it points to.
    """

    name: str
    letter: str
    written: bool = False


def _parse(signature: str) -> tuple[Parameter, ...]:
    parameters = []
    for word in signature.replace("\n", " ").split(","):
        name, colon, kind = word.strip().partition(":")
        if colon:
            parameters.append(Parameter(name, _LETTERS[kind.strip()]))
        else:
            parameters.append(Parameter(name.rstrip("!"), "p", name.endswith("!")))
    return tuple(parameters)


@dataclass(eq=False)
class Program:
    """A file of kernel text with the kernels that Python declares of it.

    Attributes:
        path: the `.asc` file.
        zero_is_ub: its unified buffer begins at a null pointer, as in generated text.
        kernels: filled by `kernel`.
        lock: held while one of them runs in the twin, whose machine is one per library.
    """

    path: Path
    zero_is_ub: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _libraries: dict[str, ctypes.CDLL] = field(default_factory=dict, repr=False)

    def kernel(self, entry: str, signature: str, core: Core = "vector", *, together: bool = False) -> Kernel:
        """Declare a kernel of this file.

        Args:
            entry: its name, declared `extern "C"`.
            signature: its parameters: "x, out!, rows: i64, eps: f32" are two pointers, of which the kernel writes
                what `out` points to, and two numbers (i32, i64, f32).
            core: which cores it runs on.
            together: its blocks wait for one another, so all must run at once.
        """
        made = Kernel(self, entry, _parse(signature), core, together)
        self.kernels.append(made)
        return made

    def library(self) -> ctypes.CDLL:
        """This file compiled for the twin, with every kernel declared by now."""
        checks = twin_build.mode()
        if checks not in self._libraries:
            built = twin_build.library(self.path, [kernel.entry for kernel in self.kernels], checks)
            for kernel in self.kernels:
                kernel.check_signature(built)
            self._libraries[checks] = built
        return self._libraries[checks]


def program(name: str, *, zero_is_ub: bool = False) -> Program:
    """The kernel file of that name, in `kernels/`."""
    return Program(twin_build.KERNELS / name, zero_is_ub)


@dataclass(eq=False)
class Kernel:
    """A kernel of a program; calling it launches it.

    Attributes:
        program: the file that holds it.
        entry: its name there.
        parameters: in order.
        core: which cores it runs on.
        together: all its blocks run at once.
    """

    program: Program
    entry: str
    parameters: tuple[Parameter, ...]
    core: Core = "vector"
    together: bool = False

    def __call__(self, blocks: int, *args: Any) -> None:
        """Launch on the current stream of the arguments' device, or in the twin; no blocks launch nothing.

        Args:
            blocks: how many; at most the cores of the device, or some wait for others to end.
            args: tensors, None and numbers, in the order of the signature.

        Raises:
            TwinFault: the twin found a fault; what the kernel wrote until then stays.
            DeviceError: the text does not compile, tensors are on several devices, or a device refused.
            TypeError: arguments that are not those of the signature.
        """
        if blocks == 0:
            return
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.entry} takes {len(self.parameters)} arguments, got {len(args)}")
        recorder = _RECORDER.get()
        if recorder is not None and not recorder.runs:
            recorder.launches.append(Launch(self, blocks, args, None))
            return
        # one tensor of a device among those of the host is the device's to refuse: the twin would follow its address
        if any(arg.device.type != "cpu" for arg in args if isinstance(arg, Tensor)):
            from deepinfer.backends.ascend950.host.launcher import launch

            launch(self, blocks, args)
            return
        measured = run_in_twin(self, blocks, args, measure=recorder is not None)
        if recorder is not None:
            recorder.launches.append(Launch(self, blocks, args, measured))

    def check_signature(self, built: ctypes.CDLL) -> None:
        """Compare the declared parameters with those of the compiled text.

        Raises:
            DeviceError: they differ.
        """
        ask = getattr(built, f"twin_parameters_{self.entry}")
        ask.restype = ctypes.c_char_p
        found, declared = ask().decode(), "".join(parameter.letter for parameter in self.parameters)
        if found != declared:
            raise DeviceError(
                f"{self.program.path.name}: {self.entry} is declared with parameters {declared!r} and its text has "
                f"{found!r} (p pointer, i int32, l int64, f float32)"
            )


__all__ = [
    "CUBE_CORES",
    "VECTOR_CORES",
    "Kernel",
    "Launch",
    "Measured",
    "Parameter",
    "Program",
    "TwinFault",
    "program",
    "recording",
]
