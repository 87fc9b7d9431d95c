"""Wrappers of Hopper's warpgroup MMA, written for one width each: the instruction names every accumulator register."""

from __future__ import annotations


def wgmma(name: str, width: int, *, transposed: bool = False) -> str:
    """CUDA C++ of `name(d, a, b, accumulate)`: 64 rows by `width` columns, 16 deep, bfloat16 to float32.

    Both operands are descriptors of shared memory.

    Args:
        name: of the function.
        width: columns, a multiple of 8 up to 256.
        transposed: the second operand's columns run along K.

    Source: PTX ISA, wgmma.mma_async.
    """
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a, b, again = f"%{count}", f"%{count + 1}", f"%{count + 2}"
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b, u32 accumulate) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {again}, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{registers}}}, "\n'
        f'      "{a}, {b}, p, 1, 1, 0, {int(transposed)};\\n}}"\n'
        f'      : {results} : "l"(a), "l"(b), "r"(accumulate));\n}}\n'
    )
