"""Launching Triton kernels: what is compiled anew, what is kept, and what ahead-of-time checks see.

Numbers never choose a compiled form: every scalar parameter of a kernel is annotated (`tl.int32`, `tl.int64`,
`tl.float32`), and what the code should know at compile time is a `tl.constexpr`, last in the signature. So the form
depends on dtypes, 16-byte alignment of pointers and constants alone, and a handle kept under those is always right.
A kept handle skips Triton's argument binding, the larger part of the cost of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import triton
from torch import Tensor

_NUMBERS: Final = ("tl.int32", "tl.int64", "tl.uint32", "tl.float32")
_ALIGNED: Final = 16


@dataclass(frozen=True)
class Launch:
    """One launch as a recorder sees it.

    Attributes:
        kernel: what was launched.
        grid: programs along each axis.
        args: run-time arguments in order; None stands for a pointer that is not there.
        constants: compile-time arguments by name.
        num_warps: warps of a program.
        num_stages: depth of software pipelining.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


_RECORDER: ContextVar[list[Launch] | None] = ContextVar("launch_recorder", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of making them, to compile their kernels where there is no device."""
    launches: list[Launch] = []
    token = _RECORDER.set(launches)
    try:
        yield launches
    finally:
        _RECORDER.reset(token)


@dataclass(eq=False)
class Kernel:
    """A Triton kernel with its compiled forms.

    Attributes:
        jit: the function as Triton holds it (compiled or interpreted).
    """

    jit: Any
    _handles: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def __call__(
        self, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        """Launch on the current stream; a grid without programs launches nothing.

        Args:
            grid: programs along one to three axes.
            args: run-time arguments in the order of the signature.
            num_warps: warps of a program.
            num_stages: depth of software pipelining of loops.
            constants: compile-time arguments by name, in the order of the signature.
        """
        if 0 in grid:
            return
        recorder = _RECORDER.get()
        if recorder is not None:
            recorder.append(Launch(self, grid, args, constants, num_warps, num_stages))
            return
        key = (_form(args), num_warps, num_stages, *constants.values())
        handle = self._handles.get(key)
        if handle is not None:
            stream = triton.runtime.driver.active.get_current_stream(key[0][-1])
            width, height, depth = (*grid, 1, 1)[:3]
            # what the handle's own launcher does, less the hooks of profilers
            handle.run(
                width,
                height,
                depth,
                stream,
                handle.function,
                handle.packed_metadata,
                None,
                None,
                None,
                *args,
                *constants.values(),
            )
            return
        # no fused multiply-add unless a kernel writes one: contracts count roundings
        made = self.jit[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)
        if made is not None:  # the interpreter makes nothing
            self._handles[key] = made


def _form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of the run-time arguments chooses a compiled form; the device is part of it."""
    form: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            form.append((arg.dtype, arg.data_ptr() % _ALIGNED == 0))
            device = arg.device.index
        else:
            form.append(arg is None)
    form.append(device)
    return tuple(form)


def kernel(function: Callable[..., None]) -> Kernel:
    """Make a kernel of a function in Triton's language whose scalar parameters are annotated."""
    numbers = [name for name, kind in function.__annotations__.items() if kind in _NUMBERS]
    return Kernel(triton.jit(function, do_not_specialize=numbers))


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in Triton's language that kernels call."""
    made: Callable[..., Any] = triton.jit(function)
    return made
