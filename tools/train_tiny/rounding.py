"""Rounding that gradients pass through, by the formats that engine and checkpoint store.

The values are those of `deepinfer.ops.quant`; the gradient is that of the identity.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepinfer.ops.formats import QuantFormat
from deepinfer.ops.quant import dequantize, pow2_ceil_bits, quantize, ue8m0_value

Storage = Literal["bf16", "f32", "fp8_blocks", "fp8_rows", "fp4"]
"""How the checkpoint stores a tensor."""

_BLOCK = 32


def through(x: Tensor, fmt: QuantFormat) -> Tensor:
    """`x` as records of `fmt` keep it, along the last axis; dtype and gradient of `x`."""
    with torch.no_grad():
        change = dequantize(quantize(x, fmt), torch.float32) - x
    return x + change.to(x.dtype)


def as_stored(weight: Tensor, storage: Storage) -> Tensor:
    """A float32 weight [..., N, K] as the checkpoint will give it back; its gradient is that of the weight."""
    if storage == "f32":
        return weight
    with torch.no_grad():
        change = stored_values(weight, storage) - weight
    return weight + change


def stored_values(weight: Tensor, storage: Storage) -> Tensor:
    """The values that storing and loading leaves, float32."""
    if storage == "bf16":
        return weight.bfloat16().float()
    if storage == "fp8_blocks":
        codes, exponents = quantize_blocks(weight)
        scale = ue8m0_value(exponents).repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        return codes.float() * scale[: weight.shape[0], : weight.shape[1]]
    if storage in ("fp8_rows", "fp4"):
        return dequantize(quantize(weight, "mxfp8" if storage == "fp8_rows" else "mxfp4"), torch.float32)
    return weight


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K] and ue8m0 bytes [ceil(N / 32), ceil(K / 32)] of values [N, K]."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.reshape(padded.shape[0] // _BLOCK, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
    exponents = pow2_ceil_bits(blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448).to(torch.uint8)
    codes = (blocks / ue8m0_value(exponents)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), exponents
