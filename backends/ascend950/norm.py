"""RMSNorm, alone and with the quantiser that follows it, and that quantiser."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import FORMAT, SHORT, WEIGHT_KIND, new_codes, new_like, packed, rows_of, short
from deepinfer.ops import norm as norm_ops
from deepinfer.ops import quant as quant_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.formats import QTensor, QuantFormat

_PROGRAM: Final = program("norm.asc")
_ROWS: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"norm_rows_{name}",
        "x, weight, y!, codes!, scales!, rows: i64, pitch: i64, width: i32, weight_kind: i32, format: i32, eps: f32",
    )
    for name in SHORT.values()
}
_MAX_WIDTH: Final = 8192
"""What two rows in and out leave room for in the unified buffer; `kMaxWidth` of the kernel."""


def _narrow(dims: Dims) -> bool:
    return bool(dims.get("n", dims.get("k", 0)) <= _MAX_WIDTH)  # `n` of the norms, `k` of the quantiser


def _run(x: Tensor, weight: Tensor | None, eps: float, y: Tensor | None, codes: QTensor | None) -> None:
    flat = rows_of(x)
    rows, width = flat.shape
    _ROWS[short(x.dtype)](
        min(rows, VECTOR_CORES),
        flat,
        None if weight is None else packed(weight),
        y,
        None if codes is None else codes.data,
        None if codes is None else codes.scale,
        rows,
        flat.stride(0),
        width,
        0 if weight is None else WEIGHT_KIND[weight.dtype],
        FORMAT["plain" if codes is None else codes.fmt],
        eps,
    )


@implements(norm_ops.rms_norm, sources=("kernels/norm.asc",), when=_narrow)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """A row read once for its sum and once for its values, both from the unified buffer."""
    out = new_like(out, tuple(x.shape), x.dtype, x.device)
    _run(x, weight, eps, out, None)
    return out


@implements(norm_ops.rms_norm_quant, sources=("kernels/norm.asc",), when=_narrow)
def rms_norm_quant(
    x: Tensor, weight: Tensor | None, eps: float, fmt: QuantFormat, *, out: tuple[QTensor, Tensor] | None = None
) -> tuple[QTensor, Tensor]:
    """The norm, rounded, and its codes while the values are still in registers."""
    codes = new_codes(None if out is None else out[0], tuple(x.shape), fmt, x.device)
    y = new_like(None if out is None else out[1], tuple(x.shape), x.dtype, x.device)
    _run(x, weight, eps, y, codes)
    return codes, y


@implements(quant_ops.quantize, sources=("kernels/norm.asc",), when=_narrow)
def quantize(x: Tensor, fmt: QuantFormat, *, out: QTensor | None = None) -> QTensor:
    """Codes of rows as they are."""
    codes = new_codes(out, tuple(x.shape), fmt, x.device)
    _run(x, None, 0.0, None, codes)
    return codes
