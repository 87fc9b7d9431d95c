"""Dense products, products by groups of heads, products by experts: one family of kernels, one tile after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import CUBE_CORES, VECTOR_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed, short
from deepinfer.ops import linear as linear_ops
from deepinfer.ops import moe as moe_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor

_SOURCES: Final = ("kernels/products.asc",)
_PROGRAM: Final = program("products.asc")
_PRODUCT: Final = (
    "x, xs, w, ws, y!, psum, rows: i64, n: i64, k: i64, groups: i64, x_row: i64, x_group: i64, xs_row: i64, "
    "w_row: i64, w_group: i64, ws_row: i64, ws_group: i64, y_row: i64, y_group: i64, n_tile: i64, wide: i64"
)
_DIRECT: Final = {
    pair: _PROGRAM.kernel(f"product_{name}", _PRODUCT, "cube")
    for pair, name in {("mxfp8", "mxfp8"): "mx", ("bf16", "bf16"): "bf16", ("f32", "f32"): "f32"}.items()
}
_EXPANDED: Final = {
    (x, weight): _PROGRAM.kernel(f"product_{'mx' if x == 'mxfp8' else x}_{codes}", _PRODUCT, "mix")
    for x, weight, codes in (
        ("mxfp8", "mxfp4", "e2m1"),
        ("bf16", "mxfp8", "e4m3"),
        ("bf16", "mxfp4", "e2m1"),
        ("f32", "mxfp8", "e4m3"),
        ("f32", "mxfp4", "e2m1"),
    )
}
_PAD_SCALES: Final = _PROGRAM.kernel("pad_scales", "scales, out!, rows: i64, width: i64, stride: i64")
_FINISH: Final = _PROGRAM.kernel(
    "finish_rows",
    "y!, acc, out!, rows: i64, width: i64, y_row: i64, acc_row: i64, out_row: i64, factor: f32, wide: i64",
)
_WIDEN: Final = _PROGRAM.kernel("widen_bf16", "x, out!, rows: i64, width: i64, x_row: i64")

_KIND: Final = {torch.bfloat16: "bf16", torch.float32: "f32"}
_TILE_ROWS: Final = 128


@dataclass(frozen=True)
class _Matrix:
    """Rows of values or codes: [rows, K], or [groups, rows, K] for a weight.

    Attributes:
        kind: "mxfp8", "mxfp4", "bf16" or "f32".
        data: values, or bytes of codes; neighbours along K are neighbours in memory.
        scale: of codes.
    """

    kind: str
    data: Tensor
    scale: Tensor | None = None

    def pitch(self, axis: int) -> int:
        """Bytes from one entry of an axis to the next."""
        return int(self.data.stride(axis)) * self.data.element_size()

    def scale_pitch(self, axis: int) -> int:
        """The same for scales; 0 without."""
        return 0 if self.scale is None else int(self.scale.stride(axis))


def _close(x: Tensor) -> Tensor:
    """The tensor with neighbours along K side by side; a copy only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _matrix(x: Tensor | QTensor) -> _Matrix:
    if isinstance(x, QTensor):
        return _Matrix(x.fmt, _close(x.data), _close(x.scale))
    if x.dtype not in _KIND:
        raise OpArgumentError(f"the kernels multiply bfloat16 and float32, got {x.dtype}; float64 is the reference's")
    return _Matrix(_KIND[x.dtype], _close(x))


def _even(x: _Matrix) -> _Matrix:
    """Scales in pairs, as the Cube reads them; those of an odd number move to rows that are one longer."""
    scale = x.scale
    if scale is None or scale.shape[-1] % 2 == 0:
        return x
    width = scale.shape[-1]
    flat = scale.reshape(-1, width)
    padded = torch.empty(*scale.shape[:-1], width + 1, dtype=torch.uint8, device=scale.device)
    _PAD_SCALES(min(VECTOR_CORES, len(flat)), flat, padded, len(flat), width, flat.stride(0))
    return _Matrix(x.kind, x.data, padded)


def widen(x: Tensor) -> Tensor:
    """bfloat16 values as float32, in new memory."""
    width = x.shape[-1]
    flat = _close(x).reshape(-1, width)
    wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _WIDEN(min(VECTOR_CORES, len(flat)), flat, wide, len(flat), width, flat.stride(0))
    return wide


def _widened(x: _Matrix) -> _Matrix:
    """bfloat16 as float32: where one operand is float32 the Cube wants both to be."""
    return _Matrix("f32", widen(x.data)) if x.kind == "bf16" else x


def _operands(x: Tensor | QTensor, weight: Tensor | QTensor) -> tuple[Kernel, _Matrix, _Matrix]:
    left, right = _matrix(x), _matrix(weight)
    if {left.kind, right.kind} == {"bf16", "f32"}:
        left, right = _widened(left), _widened(right)
    pair = left.kind, right.kind
    if pair in _DIRECT:
        return _DIRECT[pair], _even(left), _even(right)
    if pair in _EXPANDED:
        return _EXPANDED[pair], _even(left), right
    raise OpArgumentError(
        f"no kernel multiplies {left.kind} by {right.kind}: activations are mxfp8, bf16 or f32, and weights mxfp8 or "
        "mxfp4, or, for plain activations, bf16 or f32"
    )


def _tile_columns(num_out: int) -> int:
    """Rows of the weight in a tile: fewer where there would be too few tiles for the cores. Never affects a sum."""
    if num_out >= CUBE_CORES * 256:
        return 256
    return 128 if num_out >= CUBE_CORES * 128 else 64


def _launch(x: Tensor | QTensor, weight: Tensor | QTensor, y: Tensor, psum: Tensor | None = None) -> None:
    """Write products to `y`, in its dtype (bfloat16 or float32).

    Args:
        x: [rows, K], or [rows, groups, K] without `psum`.
        weight: [N, K], or [groups, N, K].
        y: [rows, N], or [rows, groups, N] like `x`.
        psum: [groups] int32, where the rows of each group end.
    """
    kernel, left, right = _operands(x, weight)
    grouped, split = right.data.dim() == 3, left.data.dim() == 3
    groups, num_out = (right.data.shape[0], right.data.shape[1]) if grouped else (1, right.data.shape[0])
    num_rows, depth = left.data.shape[0], x.shape[-1]
    columns = _tile_columns(num_out)
    row_tiles = num_rows // _TILE_ROWS + groups if psum is not None else -(-num_rows // _TILE_ROWS) * groups
    blocks = min(CUBE_CORES, row_tiles * -(-num_out // columns)) if num_rows and num_out else 0
    kernel(
        blocks,
        left.data,
        left.scale,
        right.data,
        right.scale,
        y,
        None if psum is None else packed(psum),
        num_rows,
        num_out,
        depth,
        groups,
        left.pitch(0),
        left.pitch(1) if split else 0,
        left.scale_pitch(0),
        right.pitch(-2),
        right.pitch(0) if grouped else 0,
        right.scale_pitch(-2),
        right.scale_pitch(0) if grouped else 0,
        y.stride(0),
        y.stride(1) if split else 0,
        columns,
        int(y.dtype == torch.float32),
    )


def _finish(sums: Tensor, acc: Tensor | None, factor: float, out: Tensor) -> None:
    """`out = sums * factor + acc`; sums float32 [rows, N], acc float32 or bfloat16; `out` may be `sums`."""
    rows, width = sums.shape
    added = acc
    if acc is not None:
        added = widen(acc) if short(acc.dtype) == "bf16" else _close(acc)
    _FINISH(
        min(VECTOR_CORES, rows),
        sums,
        added,
        out,
        rows,
        width,
        sums.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        factor,
        int(out.dtype == torch.float32),
    )


def _product(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None,
    factor: float,
    out: Tensor | None,
) -> Tensor:
    shape = x.shape[0], weight.shape[0]
    device = x.device
    y = new_like(out, shape, out_dtype, device)
    if acc is None and factor == 1.0:
        _launch(x, weight, y)
        return y
    sums = y if out_dtype == torch.float32 else torch.empty(shape, dtype=torch.float32, device=device)
    _launch(x, weight, sums)
    _finish(sums, acc, factor, y)
    return y


def _whole_pairs(dims: Dims) -> bool:
    return int(dims["k"]) % 64 == 0


def _odd(dims: Dims) -> bool:
    return not _whole_pairs(dims)


@implements(linear_ops.linear_mx, sources=_SOURCES, when=_whole_pairs)
def linear_mx(
    x: Tensor | QTensor,
    weight: QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """MXFP8 by MXFP8 with block scales in the Cube; other pairs after an exact change of the weight's codes."""
    return _product(x, weight, out_dtype, acc, 1.0, out)


@implements(linear_ops.linear_mx, sources=_SOURCES, when=_odd, capturable=False)
def linear_mx_odd(
    x: Tensor | QTensor,
    weight: QTensor,
    out_dtype: torch.dtype,
    acc: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same for an odd number of scales in a row, which are filled up in memory of the call's own."""
    return _product(x, weight, out_dtype, acc, 1.0, out)


@implements(linear_ops.linear_bf16, sources=_SOURCES)
def linear_bf16(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, out_scale: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """bfloat16 by bfloat16 or float32 by float32; a mixed pair as float32."""
    return _product(x, weight, out_dtype, None, out_scale, out)


@implements(linear_ops.linear_grouped_o, sources=_SOURCES)
def linear_grouped_o(x: Tensor, weight: Tensor | QTensor, *, out: Tensor | None = None) -> Tensor:
    """Each group of heads with its matrix; tiles of all groups in one launch."""
    y = new_like(out, (*x.shape[:2], weight.shape[1]), x.dtype, x.device)
    _launch(x, weight, y)
    return y


@implements(moe_ops.moe_grouped_gemm, sources=_SOURCES, when=_whole_pairs)
def moe_grouped_gemm(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    psum: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Tiles of experts that have rows; where they begin and end is read on the device alone."""
    y = new_like(out, (x.shape[0], weight.shape[-2]), out_dtype, x.device)
    _launch(x, weight, y, psum)
    return y


@implements(moe_ops.moe_grouped_gemm, sources=_SOURCES, when=_odd, capturable=False)
def moe_grouped_gemm_odd(
    x: Tensor | QTensor,
    weight: Tensor | QTensor,
    psum: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same for an odd number of scales in a row, which are filled up in memory of the call's own."""
    return moe_grouped_gemm(x, weight, psum, out_dtype, out=out)
