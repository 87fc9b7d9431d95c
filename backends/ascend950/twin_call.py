"""One launch in the twin: the structures of `twin/launch.h`, the call, and what comes back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from deepinfer.backends.ascend950 import twin_build
from deepinfer.ops.errors import DeviceError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.launch import Kernel

_NUMBERS: Final[dict[str, Any]] = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}
_PIPES: Final = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
_SPACES: Final = ("UB", "L1", "L0A", "L0B", "L0C", "BT", "FB", "L0A_MX", "L0B_MX")


class TwinFault(DeviceError):
    """The twin found what a device would have done wrong or not at all.

    Attributes:
        kind: such as "race", "bounds", "alignment", "flag", "poison", "deadlock", "blocks".
        kernel: name of the kernel.
        block: number of the block, -1 where it is of none.
        core: "AIC", "AIV0" or "AIV1"; empty where it is of none.
        pipe: of the instruction.
        intrinsic: the call that failed.
        address: offset in a local memory, or address in global memory.
    """

    def __init__(self, kernel: str, fault: _Fault) -> None:
        self.kind = fault.kind.decode()
        self.kernel = kernel
        self.block = int(fault.block)
        self.core = fault.core.decode()
        self.pipe = fault.pipe.decode()
        self.intrinsic = fault.intrinsic.decode()
        self.address = int(fault.address)
        place = f"{kernel}, block {self.block}" + (f", {self.core}" if self.core else "")
        super().__init__(f"{self.kind}: {fault.message.decode()} [{self.intrinsic} on pipe {self.pipe}; {place}]")


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int32),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 512),
        ("intrinsic", ctypes.c_char * 64),
        ("core", ctypes.c_char * 8),
        ("pipe", ctypes.c_char * 8),
        ("block", ctypes.c_int32),
        ("raised", ctypes.c_int32),
        ("address", ctypes.c_uint64),
    )


class _Counters(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint64 * len(_PIPES)),
        ("instructions", ctypes.c_uint64 * len(_PIPES)),
        ("cube_cycles", ctypes.c_uint64),
        ("highest", ctypes.c_uint64 * len(_SPACES)),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("cube", ctypes.c_int32),
        ("vectors", ctypes.c_int32),
        ("together", ctypes.c_int32),
        ("backwards", ctypes.c_int32),
        ("zero_is_ub", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("fault", _Fault),
        ("counters", _Counters),
    )


@dataclass(frozen=True)
class Measured:
    """What the twin counted in one launch.

    Attributes:
        bytes: moved, by pipe.
        instructions: issued, by pipe.
        cube_cycles: of matrix products, on paper.
        highest: bytes of each local memory up to the highest one touched.
    """

    bytes: dict[str, int]
    instructions: dict[str, int]
    cube_cycles: int
    highest: dict[str, int]


def run_in_twin(kernel: Kernel, blocks: int, args: Sequence[Any], *, measure: bool = False) -> Measured | None:
    """Run a kernel on host memory, in the twin.

    Args:
        kernel: what.
        blocks: how many, at least one.
        args: in the order of its signature.
        measure: give what the twin counted.

    Raises:
        TwinFault: the twin found a fault; what the kernel wrote until then stays.
    """
    values: list[Any] = []
    regions: list[_Region] = []
    for parameter, arg in zip(kernel.parameters, args, strict=True):
        if parameter.letter == "p":
            values.append(ctypes.c_void_p(0 if arg is None else arg.data_ptr()))
            if arg is not None:
                name, writable = parameter.name.encode(), int(parameter.written)
                regions.append(_Region(arg.data_ptr(), _span_bytes(arg), name, writable))
        else:
            values.append(_NUMBERS[parameter.letter](arg))
    written = {(region.base, region.bytes) for region in regions if region.writable}
    for region in regions:  # memory that goes by two names is written under either
        region.writable = int((region.base, region.bytes) in written)
    request = _Request(
        regions=(_Region * len(regions))(*regions),
        num_regions=len(regions),
        blocks=blocks,
        cube=int(kernel.core != "vector"),
        vectors={"vector": 1, "cube": 0, "mix": 2}[kernel.core],
        together=int(kernel.together),
        backwards=int(twin_build.runs_backwards()),
        zero_is_ub=int(kernel.program.zero_is_ub),
    )
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with kernel.program.lock:
        run = getattr(kernel.program.library(), f"twin_run_{kernel.entry}")
        failed = run(ctypes.byref(request), places)
    if failed:
        raise TwinFault(kernel.entry, request.fault)
    return _measured(request.counters) if measure else None


def _span_bytes(x: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one in memory."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int((last + 1) * x.element_size())


def _measured(counters: _Counters) -> Measured:
    return Measured(
        bytes=dict(zip(_PIPES, counters.bytes, strict=True)),
        instructions=dict(zip(_PIPES, counters.instructions, strict=True)),
        cube_cycles=int(counters.cube_cycles),
        highest=dict(zip(_SPACES, counters.highest, strict=True)),
    )
