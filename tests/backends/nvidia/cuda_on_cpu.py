"""CUDA C++ kernels on the CPU, thread by thread: their source, with `cuda_on_cpu.h` for its machine instructions."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

from deepinfer.backends.nvidia.nvrtc import CudaProgram

HERE = Path(__file__).parent
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ (?:[^\n]*\}$|.*?\n\}$)\n", re.MULTILINE | re.DOTALL
)
_LAUNCHER = """
extern "C" void launch(const void* given, int width, int height, int cluster, int threads, int shared_bytes) {
  Params params;
  std::memcpy(static_cast<void*>(&params), given, sizeof params);
  for (int y = 0; y < height; y++) {
    for (int x = 0; x < width; x += cluster) {
      const Place3 first{static_cast<u32>(x), static_cast<u32>(y), 0};
      simt::run(cluster, threads, shared_bytes, first, [&] { KERNEL(params); });
    }
  }
}
extern "C" int params_bytes() { return sizeof(Params); }
"""


def on_cpu(program: CudaProgram, folder: Path) -> ctypes.CDLL:
    """Compile a program for the CPU.

    Args:
        program: its kernel takes one `Params`.
        folder: where to.

    Returns:
        A library. Its `launch` takes parameters, width and height of the grid, blocks of a cluster, threads of a block
        and bytes of shared memory; its `params_bytes` says how large the parameters are.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = "".join(_without_instructions(path.read_text()) for path in program.files)
    # types that the shim has as well, and dynamic shared memory
    text = re.sub(r"^using u\d+ = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"extern __shared__ (\w+) raw\[\];", r"\1* const raw = reinterpret_cast<\1*>(simt::memory());", text)
    text = text.replace('extern "C" __global__ void', "static void")
    macros = "".join(f"#define {name} {value}\n" for name, value in program.macros.items())
    source = folder / f"{program.entry}-{'-'.join(map(str, program.macros.values()))}.cpp"
    source.write_text(f'{macros}#include "cuda_on_cpu.h"\n{text}{_LAUNCHER.replace("KERNEL", program.entry)}')
    library = source.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}"]
    done = subprocess.run([compiler, *options, source, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))


def map_words(matrix: Tensor, rows: int) -> list[int]:
    """What stands in the place of a tensor map of a bfloat16 matrix, with boxes of so many rows by 64 columns."""
    words = [matrix.data_ptr(), matrix.stride(0) * 2, *matrix.shape, rows]
    return words + [0] * (16 - len(words))


def _without_instructions(text: str) -> str:
    """The source less every function that is written in machine instructions."""
    return _FUNCTION.sub(lambda found: "" if re.search(r"\basm\b|__cvta", found[0]) else found[0], text)
