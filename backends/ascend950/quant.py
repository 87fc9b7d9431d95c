"""Values of quantised tensors."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, rows_of, short
from deepinfer.ops import quant as quant_ops
from deepinfer.ops.formats import QTensor

_SOURCES: Final = (*SOURCES, "quant.py", "kernels/generated/codes.asc")
_STRETCH: Final = 2048
"""Values of a task (`tiles/codes.py`)."""


@implements(quant_ops.dequantize, sources=_SOURCES)
def dequantize(x: QTensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Codes times scales, in registers of float32."""
    out = new_like(out, tuple(x.shape), dtype, x.device)
    codes, scale = rows_of(x.data), rows_of(x.scale)
    rows, width = codes.shape[0], x.shape[-1]
    family("codes")[f"dequantize_{x.fmt}_{short(dtype)}"](
        rows * tasks_of(width, _STRETCH),
        codes=codes,
        scale=scale,
        out=out,
        rows=rows,
        width=width,
        code_pitch=codes.stride(0),
        scale_pitch=scale.stride(0),
    )
    return out
