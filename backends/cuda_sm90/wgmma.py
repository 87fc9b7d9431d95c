"""Wrappers of Hopper's warpgroup MMA, written for one width each: the instruction names every accumulator register."""

from __future__ import annotations

from typing import Final

WIDTH: Final = "template <int N>\nstruct Width {};\n"
"""CUDA C++ of a number as a type, which tells functions of several widths apart."""


def wgmma(
    name: str,
    width: int,
    *,
    transposed: bool = False,
    registers: bool = False,
    eight_bits: bool = False,
    widest: int | None = None,
) -> str:
    """CUDA C++ of `name(d, a, b, accumulate)`: 64 rows by `width` columns, 32 bytes deep, to float32.

    The second operand is a descriptor of shared memory, and so is the first unless it is in registers.

    Args:
        name: of the function.
        width: columns, a multiple of 8 up to 256.
        transposed: the second operand's columns run along K.
        registers: the first operand is four registers of a thread, `const u32* a`.
        eight_bits: e4m3 operands, which cannot be transposed, instead of bfloat16.
        widest: columns that `d` has room for, where functions of several widths share it; they take `Width<width>()`
            first, and `WIDTH` stands before them.

    Source: PTX ISA, wgmma.mma_async.
    """
    count = width // 2
    places = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    size = 4 if registers else 1
    first = [f"%{count + i}" for i in range(size)]
    a = "{" + ", ".join(first) + "}" if registers else first[0]
    given = ", ".join(f'"r"(a[{i}])' for i in range(size)) if registers else '"l"(a)'
    b, again = f"%{count + size}", f"%{count + size + 1}"
    orders = "" if eight_bits else f", {int(transposed)}" if registers else f", 0, {int(transposed)}"
    form = f"m64n{width}k32.f32.e4m3.e4m3" if eight_bits else f"m64n{width}k16.f32.bf16.bf16"
    kind = "const u32*" if registers else "u64"
    sums = f"float (&d)[{count}]" if widest is None else f"Width<{width}>, float (&d)[{widest // 2}]"
    return (
        f"__device__ __forceinline__ void {name}({sums}, {kind} a, u64 b, u32 accumulate) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {again}, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.{form} {{{places}}}, "\n'
        f'      "{a}, {b}, p, 1, 1{orders};\\n}}"\n'
        f'      : {results} : {given}, "l"(b), "r"(accumulate));\n}}\n'
    )
