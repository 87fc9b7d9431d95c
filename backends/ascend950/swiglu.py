"""The gated activation of an expert, plain or quantised."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.norm import quantize
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_codes, new_like, packed, rows_of, short
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import QTensor, QuantFormat

_SOURCES: Final = (*SOURCES, "swiglu.py", "norm.py", "kernels/norm.asc", "kernels/generated/swiglu.asc")
_STRETCH: Final = 2048
"""Values of a task (`tiles/codes.py`)."""


def _launch(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
    gates, ups = rows_of(gate), rows_of(up)
    rows, width = gates.shape
    result = "mxfp8" if scale is not None else short(out.dtype)
    family("swiglu")[f"swiglu_{short(gate.dtype)}_{result}"](
        rows * tasks_of(width, _STRETCH),
        gate=gates,
        up=ups,
        weights=None if weight is None else packed(weight),
        out=out,
        scale=scale,
        rows=rows,
        width=width,
        weighted=int(weight is not None),
        limit=limit,
        gate_pitch=gates.stride(0),
        up_pitch=ups.stride(0),
        out_pitch=width,
        scale_pitch=tasks_of(width, 32),
    )


def _is_one_launch(dims: Dims) -> bool:
    return dims["fmt"] in ("plain", "mxfp8")


@implements(moe_ops.swiglu_quant, sources=_SOURCES, when=_is_one_launch)
def swiglu_quant(
    gate: Tensor,
    up: Tensor,
    limit: float,
    row_weight: Tensor | None,
    fmt: QuantFormat | None,
    *,
    out: Tensor | QTensor | None = None,
) -> Tensor | QTensor:
    """One launch to plain values or mxfp8."""
    if fmt is None:
        plain = new_like(out if isinstance(out, Tensor) else None, tuple(gate.shape), gate.dtype, gate.device)
        _launch(gate, up, limit, row_weight, plain, None)
        return plain
    codes = new_codes(out if isinstance(out, QTensor) else None, tuple(gate.shape), fmt, gate.device)
    _launch(gate, up, limit, row_weight, codes.data, codes.scale)
    return codes


@implements(moe_ops.swiglu_quant, sources=_SOURCES, when=lambda dims: not _is_one_launch(dims), capturable=False)
def swiglu_then_quant(
    gate: Tensor,
    up: Tensor,
    limit: float,
    row_weight: Tensor | None,
    fmt: QuantFormat,
    *,
    out: QTensor | None = None,
) -> QTensor:
    """Four-bit formats: a float32 result between two launches."""
    wide = torch.empty(tuple(gate.shape), dtype=torch.float32, device=gate.device)
    _launch(gate, up, limit, row_weight, wide, None)
    return quantize(wide, fmt, out=out)
