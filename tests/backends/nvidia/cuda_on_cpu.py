"""CUDA C++ kernels on the CPU, thread by thread: their source, with `cuda_on_cpu.h` for its machine instructions."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from torch import Tensor

from deepinfer.backends.nvidia.nvrtc import CudaProgram

HERE = Path(__file__).parent
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ (?:[^\n]*\}$|.*?\n\}$)\n", re.MULTILINE | re.DOTALL
)
_PRODUCT = re.compile(r"(.*?\{\n).*m64n(\d+)k\d+\.f32\.(\w+)\..*p, 1, 1(?:, [01])*?(?:, ([01]))?;", re.DOTALL)
_BARRIER = re.compile(r'asm volatile\("bar\.(sync|arrive) (%0|\d+), (%0|\d+);" ::(?:"\w"\((.*?)\) )?.*?"memory"\);')
_REGISTERS = re.compile(r'asm volatile\("setmaxnreg.*?\);\n')
_LAUNCHER = """
struct Given {
  FIELDS
};
extern "C" void launch(const void* from, int width, int height, int cluster, int threads, int shared_bytes) {
  Given given;
  std::memcpy(static_cast<void*>(&given), from, sizeof given);
  simt::grid = {static_cast<u32>(width), static_cast<u32>(height), 1};
  for (int y = 0; y < height; y++) {
    for (int x = 0; x < width; x += cluster) {
      const Place3 first{static_cast<u32>(x), static_cast<u32>(y), 0};
      simt::run(cluster, threads, shared_bytes, first, [&] { KERNEL(ARGUMENTS); });
    }
  }
}
extern "C" int params_bytes() { return sizeof(Given); }
extern "C" const char* findings() { return order::findings(); }
"""


def on_cpu(program: CudaProgram, folder: Path) -> ctypes.CDLL:
    """Compile a program for the CPU.

    Args:
        program: the kernel, whose parameters are each a type of its source or a number.
        folder: where to.

    Returns:
        A library. Its `launch` takes parameters as `side_by_side` gives them, width and height of the grid, blocks of a
        cluster, threads of a block and bytes of shared memory; its `params_bytes` says how large the parameters are.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    *before, last = (f'#line 1 "{path.name}"\n{_without_instructions(path.read_text())}\n' for path in program.files)
    text = "".join((*before, *map(_product, program.generated), last))
    # types that the shim has as well, and shared memory
    text = re.sub(r"^using u\d+ = .*\n", "", text, flags=re.MULTILINE)
    memory = r"\1* const \2 = reinterpret_cast<\1*>(simt::memory());"
    text = re.sub(r"(?:extern )?__shared__ (\w+) (\w+)\[\d*\];", memory, text)
    given = re.search(rf"__global__ [^;{{]*\b{program.entry}\(([^)]*)\)", text)
    assert given is not None
    types = [of.replace("const __grid_constant__ ", "").rsplit(" ", 1)[0] for of in given[1].split(",")]
    fields = "\n  ".join(f"{of.strip()} given{i};" for i, of in enumerate(types))
    launcher = _LAUNCHER.replace("FIELDS", fields).replace("KERNEL", program.entry)
    launcher = launcher.replace("ARGUMENTS", ", ".join(f"given.given{i}" for i in range(len(types))))
    text = text.replace('extern "C" __global__ void', "static void")
    macros = "".join(f"#define {name} {value}\n" for name, value in program.macros.items())
    source = folder / f"{program.entry}-{'-'.join(map(str, program.macros.values()))}.cpp"
    source.write_text(f'{macros}#include "cuda_on_cpu.h"\n{text}{launcher}')
    library = source.with_suffix(".so")
    objects = source.with_suffix(".o")
    # the compiler puts a call before each access, which `cuda_order.cpp` answers instead of the compiler's own library
    seen = "-fsanitize=thread", "-fno-threadsafe-statics", "-g"
    _compile(compiler, "-O1", *seen, "-c", source, "-o", objects)
    _compile(compiler, "-shared", objects, _clocks(compiler), "-o", library)
    return ctypes.CDLL(str(library))


@cache
def _clocks(compiler: str) -> Path:
    """`cuda_order.cpp`, compiled once."""
    made = Path(mkdtemp()) / "order.o"
    atexit.register(shutil.rmtree, made.parent)
    _compile(compiler, "-O2", "-c", HERE / "cuda_order.cpp", "-o", made)
    return made


def _compile(compiler: str, *arguments: str | Path) -> None:
    # Names that are unique in a process would be those of a program that was loaded before; fortified code takes a jump
    # to another stack for a fault.
    options = ["-std=c++17", "-w", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE", f"-I{HERE}"]
    done = subprocess.run([compiler, *options, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def disorder(library: ctypes.CDLL) -> list[str]:
    """Pairs of accesses of shared memory without an order in what a program ran since this was asked, with their lines.

    A line is followed by those that the function it is in was called from; a product has none.
    """
    library.findings.restype = ctypes.c_char_p
    found = [line.split("\t") for line in library.findings().decode().splitlines()]
    places = sorted({place for _, *both, _ in found for place in both if place != "0"})
    command = ["addr2line", "-i", "-e", library._name, *places]
    said = subprocess.run([*command[:2], "-a", *command[2:]], capture_output=True, text=True, check=True).stdout
    lines: dict[str, list[str]] = {}
    for line in said.splitlines():
        if line.startswith("0x"):
            own = lines[f"{int(line, 16):x}"] = []
        elif Path(line.split(":")[0]).suffix in (".cu", ".cuh"):  # not the shim's
            own.append(Path(line).name.split(" ")[0])
    at = {place: "<".join(lines[place]) or "a product" for place in places} | {"0": "-"}
    return [f"{what}: {at[first]}, then {at[second]} ({more})" for what, first, second, more in found]


def map_words(matrix: Tensor, rows: int) -> list[int]:
    """What stands in the place of a tensor map of a bfloat16 matrix, with boxes of so many rows by 64 columns."""
    words = [matrix.data_ptr(), matrix.stride(0) * 2, *matrix.shape, rows]
    return words + [0] * (16 - len(words))


@dataclass(frozen=True)
class FunctionOnCpu:
    """A program as what launches kernels sees it, instead of a `CudaFunction`.

    Attributes:
        library: from `on_cpu`.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks that run together.
    """

    library: ctypes.CDLL
    shared_bytes: int
    cluster: int = 1

    def launch(self, grid: tuple[int, ...], threads: int, given: Sequence[Any]) -> None:
        """Run it to its end."""
        width, height, _ = (*grid, 1, 1)[:3]
        data = side_by_side(self.library, *given)
        self.library.launch(data, width, height, self.cluster, threads, self.shared_bytes)


def side_by_side(library: ctypes.CDLL, *given: ctypes.Structure | ctypes._SimpleCData[Any] | list[int]) -> bytes:
    """What `launch` takes for a kernel of several parameters, of which lists are `map_words`."""
    data = b""
    for one in given:
        part = bytes((ctypes.c_uint64 * len(one))(*one) if isinstance(one, list) else one)
        data += bytes(-len(data) % min(len(part), 8)) + part
    missing = library.params_bytes() - len(data)
    assert 0 <= missing < 64  # the alignment of a map
    return data + bytes(missing)


def _product(text: str) -> str:
    """A generated product as a call of the shim's own; other text as it is."""
    found = _PRODUCT.match(text)
    if found is None:
        return text
    head, width, operands, transposed = found.groups()
    return f"{head}  product<{width}, {transposed or 0}, {int(operands == 'e4m3')}>(d, a, b, accumulate);\n}}\n"


def _without_instructions(text: str) -> str:
    """The source less every function that is written in machine instructions; of barriers of threads, calls."""

    def barrier(found: re.Match[str]) -> str:
        which, count = (found[4] if number == "%0" else number for number in found.group(2, 3))
        return f"named_{'meet' if found[1] == 'sync' else 'arrive'}({which}, {count});"

    text = _BARRIER.sub(barrier, text)
    lines = "\n"  # as many as before
    text = _FUNCTION.sub(
        lambda found: lines * found[0].count("\n") if re.search(r"\basm\b|__cvta", found[0]) else found[0], text
    )
    return _REGISTERS.sub("\n", text)
