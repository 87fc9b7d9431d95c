"""Attention of the vision tower on the Cube: tiles of patches of one image each, keys from its first one on."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.ascend950.launch import CUBE_CORES, Kernel, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import SHORT, new_like, packed, short
from deepinfer.ops import vision as vision_ops
from deepinfer.ops.backend import Dims

_PROGRAM: Final = program("vision.asc")
_ATTEND: Final[dict[str, Kernel]] = {
    name: _PROGRAM.kernel(
        f"attend_patches_{name}",
        "out!, q, k, v, cu_seqlens, rows: i64, q_row: i64, q_head: i64, k_row: i64, k_head: i64, v_row: i64, "
        "v_head: i64, images: i32, heads: i32, dim: i32, scale: f32",
        core="mix",
    )
    for name in SHORT.values()
}
_QUERIES: Final = 128
"""Patches of a unit of work, `kQueries` of the kernel."""
_MAX_DIM: Final = 64
"""`kMaxDim` of the kernel."""


def _fits(dims: Dims) -> bool:
    return bool(dims["dim"] <= _MAX_DIM and dims["dim"] % 16 == 0)


def _by_head(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@implements(vision_ops.vision_attn, sources=("vision.py", "kernels/vision.asc"), when=_fits)
def vision_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float, *, out: Tensor | None = None
) -> Tensor:
    """A unit of work is 128 patches and a head; as many blocks as there can be units, up to the cores."""
    rows, heads, dim = q.shape
    images = cu_seqlens.shape[0] - 1
    out = new_like(out, (rows, heads, dim), q.dtype, q.device)
    views = tuple(_by_head(x) for x in (q, k, v))
    pitches = tuple(x.stride(axis) for x in views for axis in (0, 1))
    _ATTEND[short(q.dtype)](
        min((-(-rows // _QUERIES) + images) * heads, CUBE_CORES) if rows else 0,
        out,
        *views,
        packed(cu_seqlens),
        rows,
        *pitches,
        images,
        heads,
        dim,
        softmax_scale,
    )
    return out
