"""Rounding that gradients pass through, by the formats that engine and checkpoint store.

The values are those of `deepinfer.ops.quant`; the gradient is that of the identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from deepinfer.ops.formats import GROUP, QuantFormat
from deepinfer.ops.quant import pow2_ceil_bits, ue8m0_value

Storage = Literal["bf16", "f32", "fp8_blocks", "fp8_rows", "fp4"]
"""How the checkpoint stores a tensor."""

_BLOCK = 32


def through(x: Tensor, fmt: QuantFormat) -> Tensor:
    """`x` as records of `fmt` keep it, along the last axis; dtype and gradient of `x`."""
    groups = x.unflatten(-1, (-1, GROUP[fmt]))
    return through_groups(groups.flatten(0, -2), fmt).view(x.shape)


def through_groups(groups: Tensor, fmt: QuantFormat) -> Tensor:
    """`through` of [N, group] rows that share a scale each: one form for all widths, for those who compile it."""
    with torch.no_grad():
        change = _rounded_groups(groups.float(), fmt) - groups
    return groups + change.to(groups.dtype)


def rounded(x: Tensor, fmt: QuantFormat) -> Tensor:
    """The values of `dequantize(quantize(x, fmt))` in float32, found without making codes.

    Args:
        x: [..., K], K a multiple of the format's group, finite.
        fmt: of the codes.
    """
    return _rounded_groups(x.float().unflatten(-1, (-1, GROUP[fmt])), fmt).flatten(-2)


def _rounded_groups(groups: Tensor, fmt: QuantFormat) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True)
    if fmt == "nvfp4":
        scale = (amax.clamp(min=6 * 2.0**-9) / 6).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    elif fmt == "mxfp4":
        scale = _power_above(amax.clamp(min=6 * 2.0**-126) / 6)
    else:
        scale = _power_above(amax.clamp(min=1e-4) / 448)
    ratio = groups / scale
    if fmt == "mxfp8":
        codes = ratio.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    else:
        codes = _nearest_e2m1(ratio.clamp(-6.0, 6.0))
    return codes * scale


def _power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below a positive normal `x`."""
    return ue8m0_value(pow2_ceil_bits(x).to(torch.uint8))


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of `x`, ties to the even code: even multiples of the step."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


@torch.no_grad()
def changes_by_storing(weights: Mapping[str, Tensor], storage: Mapping[str, Storage]) -> dict[str, Tensor]:
    """What storing changes of float32 weights [..., N, K], by name; weights stored in float32 are left out.

    Equal shapes are rounded together: hundreds of small tensors would be a launch for every operation of each.

    Args:
        weights: by name.
        storage: of each.
    """
    groups: dict[tuple[Storage, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, weight in weights.items():
        if storage[name] != "f32":
            groups[storage[name], tuple(weight.shape)].append(name)
    changes: dict[str, Tensor] = {}
    for (kind, _), names in groups.items():
        stacked = torch.stack([weights[name] for name in names])
        changes.update(zip(names, stored_values(stacked, kind) - stacked, strict=True))
    return changes


def stored_values(weight: Tensor, storage: Storage) -> Tensor:
    """The values that storing and loading leaves, float32."""
    if storage == "bf16":
        return weight.bfloat16().float()
    if storage == "fp8_blocks":
        codes, exponents = quantize_blocks(weight)
        scale = ue8m0_value(exponents).repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
        return codes.float() * scale[..., : weight.shape[-2], : weight.shape[-1]]
    if storage in ("fp8_rows", "fp4"):
        return rounded(weight, "mxfp8" if storage == "fp8_rows" else "mxfp4")
    return weight


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., N, K] and ue8m0 bytes [..., ceil(N / 32), ceil(K / 32)] of values [..., N, K]."""
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
    exponents = pow2_ceil_bits(blocks.abs().amax((-3, -1)).clamp(min=1e-4) / 448).to(torch.uint8)
    codes = (blocks / ue8m0_value(exponents)[..., None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[..., :rows, :columns].contiguous(), exponents
