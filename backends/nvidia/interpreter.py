"""Triton's interpreter made exact, so that these kernels run on a host without a GPU and say something about bits.

The interpreter of Triton keeps bfloat16 as integers and multiplies them as such, truncates where a GPU rounds to
nearest even, and rounds 8-bit floats wrongly. Conversions and operations of those types are replaced here by torch's,
which are exact. It works on private names of Triton; `enable` fails loudly when they have moved.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Final

import numpy as np
import torch

from deepinfer.ops.errors import BackendUnavailableError

SWITCH: Final = "TRITON_INTERPRET"
_TORCH: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_LARGEST: Final = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_BITS: Final = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_PATCHED: Final = "_deepinfer_exact"


def enable() -> None:
    """Make Triton interpret every kernel that is defined from now on in this process.

    Raises:
        BackendUnavailableError: Triton is not installed, was imported for compilation before, or is a version whose
            interpreter this module does not know.
    """
    if "triton" in sys.modules and os.environ.get(SWITCH) != "1":
        raise BackendUnavailableError(
            f"triton is imported for compilation in this process already; start a new one with {SWITCH}=1"
        )
    os.environ[SWITCH] = "1"
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        raise BackendUnavailableError(f"the interpreter needs triton 3.8 or newer: {error}") from error
    if getattr(interpreter, _PATCHED, False):
        return
    try:
        _patch(interpreter)
    except AttributeError as error:
        raise BackendUnavailableError(
            f"the interpreter of triton {triton.__version__} is not one that can be made exact: {error}"
        ) from error
    setattr(interpreter, _PATCHED, True)
    np.seterr(all="ignore")  # NaN, Inf and wrapping integers are values here, as on a GPU


def _patch(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_convert, plain_binary = interpreter._convert_float, builder.binary_op
    plain_unary, plain_dot, plain_cast = builder.unary_op, builder.create_dot, builder.cast_impl
    decode = interpreter._prepare_dot_scaled_operand

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name in _TORCH and target.name in _TORCH:
            return convert_float(data, source.name, target.name)
        return plain_convert(data, source, target, rounding)

    def wide(x: Any) -> Any:
        data = convert_float(x.data, "bf16", "fp32").view(np.float32)
        return handle(data, tl.float32)

    def narrow(x: Any) -> Any:
        return handle(convert_float(np.asarray(x.data, dtype=np.float32), "fp32", "bf16"), tl.bfloat16)

    def is_bf16(x: Any) -> bool:
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if is_bf16(left) and is_bf16(right):
            result = plain_binary(self, wide(left), wide(right), op)
            return narrow(result) if result.data.dtype == np.float32 else handle(result.data, tl.int1)
        result = plain_binary(self, left, right, op)
        # a comparison gives truth values, though the interpreter calls them by the type of what was compared
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return narrow(plain_unary(self, wide(x), op)) if is_bf16(x) else plain_unary(self, x, op)

    def double(x: Any) -> Any:
        name = x.dtype.scalar.name
        data = convert_float(x.data, name, "fp32").view(np.float32) if name in ("bf16", *_LARGEST) else x.data
        return data.astype(np.float64)

    def create_dot(self: Any, left: Any, right: Any, acc: Any, *options: Any) -> Any:
        if acc.dtype.scalar != tl.float32:
            return plain_dot(self, left, right, acc, *options)
        # in float64, so that a row's bits do not depend on the order in which a library of the host adds
        product = np.matmul(double(left), double(right)).astype(np.float32)
        return handle(product + acc.data, tl.float32)

    def create_dot_scaled(
        self: Any,
        left: Any,
        left_scale: Any,
        left_format: Any,
        right: Any,
        right_scale: Any,
        right_format: Any,
        fast_math: bool,
        left_packed: bool,
        right_packed: bool,
        acc: Any,
    ) -> Any:
        exact = [
            decode(*operand, tl.bfloat16, is_right).astype(np.float64)
            for is_right, operand in enumerate(
                ((left, left_scale, left_format, left_packed), (right, right_scale, right_format, right_packed))
            )
        ]
        return handle(np.matmul(*exact).astype(np.float32) + acc.data, tl.float32)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        source, kind = x.dtype.scalar, target.scalar
        if tl.bfloat16 in (source, kind) and source != kind:
            if source == tl.bfloat16:  # to integers and wider floats by way of float32, which is exact
                return self.cast_impl(wide(x), target)
            return narrow(plain_cast(self, x, interpreter.tl.float32) if source.name != "fp64" else _single(x, handle))
        return plain_cast(self, x, target)

    sees_all = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(sees_all)  # once and for good: the interpreter does it anew for every call of a function
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter._convert_float = convert
    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_dot_scaled = create_dot_scaled


def _single(x: Any, handle: Any) -> Any:
    """float64 as the float32 that a GPU rounds through on its way to bfloat16."""
    import triton.language as tl

    return handle(x.data.astype(np.float32), tl.float32)


def convert_float(data: Any, source: str, target: str) -> Any:
    """Bits of `data` (a NumPy array of the interpreter's storage for `source`) as bits of `target`, rounded to nearest
    even; 8-bit floats saturate, as a GPU's conversion does.
    """
    data = np.ascontiguousarray(data)
    storage = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[data.dtype.itemsize]
    value = torch.from_numpy(data.view(storage).copy()).view(_TORCH[source])
    if target in _LARGEST:
        value = value.float()
        value = torch.where(value.isnan(), value, value.clamp(-_LARGEST[target], _LARGEST[target]))
    result = value.to(_TORCH[target])
    size = result.element_size()
    bits = result.view(_BITS[8 * size]).numpy()
    return bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]).reshape(data.shape)
