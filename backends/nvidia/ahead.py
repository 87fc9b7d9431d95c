"""Compiling recorded launches where there is no GPU: what a kernel becomes on a generation, and whether it fits."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from deepinfer.backends.nvidia.launch import Launch

WARP: Final = 32
_TYPES: Final = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
_NUMBERS: Final = {"tl.int32": "i32", "tl.int64": "i64", "tl.uint32": "u32", "tl.float32": "fp32"}
CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_MATRIX: Final = re.compile(r"\b(UTC\w*MMA|HGMMA|QGMMA|HMMA|QMMA|IMMA|OMMA)\b")
_KINDS: Final = re.compile(r"tcgen05\.mma\.cta_group::\d\.(kind::\w+(?:\.block_scale)?)")
_SPILLS: Final = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A kernel as machine code.

    Attributes:
        name: of the kernel.
        capability: 90, 100 or 103.
        ptx: its PTX.
        code: its machine code.
        registers: of a thread.
        stack_bytes: of a thread: what it has outside registers for any reason.
        spilled_bytes: stores and loads of what does not fit in registers, per thread.
        shared_bytes: dynamic shared memory of a block.
    """

    name: str
    capability: int
    ptx: str
    code: bytes = field(repr=False)
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def target(self) -> str:
        """The architecture that its PTX is for."""
        return self.ptx.partition(".target ")[2].split()[0].rstrip(",")

    def instructions(self) -> str:
        """Its machine code as text."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code)
            file.flush()
            return _output([CUOBJDUMP, "--dump-sass", file.name])

    def matrix_instructions(self) -> frozenset[str]:
        """The kinds of matrix instruction that it has, as the machine names them, less their shapes: UTCHMMA, HGMMA."""
        return frozenset(_MATRIX.findall(self.instructions())) if "mma" in self.ptx else frozenset()

    def asynchronous_kinds(self) -> frozenset[str]:
        """What its `tcgen05.mma` multiply, as PTX names it: kind::f16, kind::mxf8f6f4.block_scale."""
        return frozenset(_KINDS.findall(self.ptx))


def form_of(launch: Launch) -> tuple[Any, ...]:
    """What of a launch chooses compiled code: two launches of equal form run the same."""
    return (launch.kernel, signature_of(launch), tuple(launch.constants.items()), launch.num_warps, launch.num_stages)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The first launch of every form."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        found.setdefault(form_of(launch), launch)
    return list(found.values())


def compile_ahead(launch: Launch, capability: int) -> Compiled:
    """Compile the kernel of a launch for a compute capability, without a device.

    Args:
        launch: as `launch.recording` gives it.
        capability: 90 for sm_90a, 100 for sm_100a, 103 for sm_103a.
    """
    function = launch.kernel.jit
    names = list(function.arg_names)
    signature = dict(signature_of(launch))
    constants = {name: None for name, kind in signature.items() if kind == "constexpr"} | launch.constants
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
    }
    source = ASTSource(
        fn=function,
        signature=signature | dict.fromkeys(launch.constants, "constexpr"),
        constexprs=constants,
        attrs=aligned,
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    registers, stack = resource_usage(made.asm["cubin"])
    spilled = _spilled_bytes(made.asm["ptx"], capability) if stack else 0
    return Compiled(
        function.__name__,
        capability,
        made.asm["ptx"],
        made.asm["cubin"],
        registers,
        stack,
        spilled,
        made.metadata.shared,
    )


def signature_of(launch: Launch) -> tuple[tuple[str, str], ...]:
    """Run-time parameters by name, with types as Triton spells them; "constexpr" for a pointer that is not there."""
    kinds = []
    annotations = launch.kernel.jit.fn.__annotations__
    for name, value in zip(launch.kernel.jit.arg_names, launch.args, strict=False):
        if isinstance(value, Tensor):
            kinds.append((name, f"*{_TYPES[value.dtype]}"))
        else:
            kinds.append((name, _NUMBERS.get(annotations[name], "constexpr")))
    return tuple(kinds)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes outside them: spilled values, and stacks of functions that it calls."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output([CUOBJDUMP, "--dump-resource-usage", file.name])
    found = _USAGE.search(text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {text!r}")
    return int(found[1]), max(int(found[2]), int(found[4]))


def _spilled_bytes(ptx: str, capability: int) -> int:
    """What the assembler says of spills; slower, so asked only where a thread has memory outside its registers."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise RuntimeError("PTX without a target")
    assembler = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        text = _output(
            [
                assembler,
                "-v",
                "--fmad=false",
                f"--gpu-name={target[1]}",
                str(file),
                "-o",
                str(Path(folder) / "kernel.cubin"),
            ]
        )
    return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(text))


def _output(command: list[Path | str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr
