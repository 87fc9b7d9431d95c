"""The interpreter's arithmetic: conversions are torch's, and kernels see bfloat16 and 8-bit floats as a GPU does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from deepinfer.backends.nvidia.interpreter import convert_float

KERNELS = """
from deepinfer.backends.nvidia import interpreter
interpreter.enable()
interpreter.enable()  # a second call changes nothing
import torch, triton
import triton.language as tl

@triton.jit
def arithmetic(total, product, code, wide, x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(total + i, a + b)
    tl.store(product + i, a * b)
    tl.store(code + i, (a.to(tl.float32) * 100).to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(wide + i, a.to(tl.float64))

@triton.jit
def product(out, x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))

@triton.jit
def scaled(out, x, xs, y, ys, rows: tl.constexpr, depth: tl.constexpr):
    i, k, g = tl.arange(0, rows), tl.arange(0, depth), tl.arange(0, depth // 32)
    half = tl.arange(0, depth // 2)
    left, left_scale = tl.load(x + i[:, None] * (depth // 2) + half), tl.load(xs + i[:, None] * (depth // 32) + g)
    right, right_scale = tl.load(y + i[:, None] * depth + k), tl.load(ys + i[:, None] * (depth // 32) + g)
    total = tl.zeros((rows, rows), tl.float32)
    total = tl.dot_scaled(left, left_scale, "e2m1", tl.trans(right), right_scale, "e4m3", total)
    tl.store(out + i[:, None] * rows + i[None, :], total)

@triton.jit
def scalar_mask(out, flag, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, i, mask=(i < 5) & (tl.load(flag) >= 0))

g = torch.Generator().manual_seed(0)
x, y = (torch.randn(64, generator=g).to(torch.bfloat16) for _ in range(2))
total, mul = torch.empty_like(x), torch.empty_like(x)
code, wide = torch.empty(64, dtype=torch.uint8), torch.empty(64, dtype=torch.float64)
arithmetic[(1,)](total, mul, code, wide, x, y, 64)
assert torch.equal(total, x + y)
assert torch.equal(mul, x * y)
want = (x.float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
assert torch.equal(code, want)
assert torch.equal(wide, x.double())
a, b = (torch.randn(16, 16, generator=g).to(torch.bfloat16) for _ in range(2))
out = torch.empty(16, 16)
product[(1,)](out, a, b, 16)
assert (out - a.float() @ b.float()).abs().max() < 1e-5
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import dequantize
def codes(width):
    data = torch.randint(0, 256, (16, width), dtype=torch.uint8, generator=g)
    return torch.where((data & 0x7F) == 0x7F, 0, data)
scales = torch.randint(100, 150, (2, 16, 4), dtype=torch.uint8, generator=g)
scales[0, 0, 0], scales[1, 1, 1] = 0, 255  # 2^-127 and NaN
x, y = QTensor(codes(64), scales[0], "mxfp4"), QTensor(codes(128), scales[1], "mxfp8")
scaled[(1,)](out, x.data, x.scale, y.data, y.scale, 16, 128)
want = (dequantize(x, torch.float64) @ dequantize(y, torch.float64).T).float()
assert want[:, 1].isnan().all() and want.isnan().sum() == 16
assert torch.equal(out.isnan(), want.isnan())
assert torch.equal(out.nan_to_num(0.0), want.nan_to_num(0.0))
marks = torch.zeros(8, dtype=torch.int32)
scalar_mask[(1,)](marks, torch.tensor([1], dtype=torch.int32), 8)
assert marks.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
scalar_mask[(1,)](marks.zero_(), torch.tensor([-1], dtype=torch.int32), 8)
assert marks.tolist() == [0] * 8
"""
TOO_LATE = """
import triton
from deepinfer.backends.nvidia import interpreter
from deepinfer.ops.errors import BackendUnavailableError
try:
    interpreter.enable()
except BackendUnavailableError as error:
    assert "start a new one with TRITON_INTERPRET=1" in str(error)
else:
    raise AssertionError("triton was imported for compilation, and nobody said so")
"""


def _run(program: str, tmp_path: Path) -> None:
    """Triton reads a kernel's source, so a program is a file; the interpreter takes a process of its own."""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernels_compute_as_torch_does(tmp_path: Path) -> None:
    _run(KERNELS, tmp_path)


def test_a_process_that_compiles_cannot_interpret(tmp_path: Path) -> None:
    _run(TOO_LATE, tmp_path)


def _edge_values() -> torch.Tensor:
    random = torch.randint(-(2**31), 2**31, (50_000,), generator=torch.Generator().manual_seed(1)).int()
    return torch.cat((random.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 500.0])))


def test_float32_to_bfloat16_is_nearest_even() -> None:
    x = _edge_values()
    got = torch.from_numpy(convert_float(x.numpy(), "fp32", "bf16").view(np.int16)).view(torch.bfloat16)
    want = x.to(torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@pytest.mark.parametrize(("name", "dtype"), [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)])
def test_eight_bit_floats_saturate_and_keep_nan(name: str, dtype: torch.dtype) -> None:
    x = _edge_values()
    got = torch.from_numpy(convert_float(x.numpy(), "fp32", name)).view(dtype).float()
    top = torch.finfo(dtype).max
    want = torch.where(x.isnan(), x, x.clamp(-top, top)).to(dtype).float()
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


def test_every_code_has_its_value() -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = torch.from_numpy(convert_float(codes, "fp8e4nv", "fp32").view(np.float32))
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))
