"""Partial attention results of several splits of the keys, put together."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, short
from deepinfer.ops import attention as attention_ops
from deepinfer.ops.backend import Dims
from deepinfer.ops.errors import OpArgumentError

_SOURCES: Final = (*SOURCES, "merge.py", "kernels/generated/merge.asc")
_HEADS: Final = 128
_WIDTH: Final = 512
_SPLITS: Final = 32
"""Most heads, channels of a head, and splits (`tiles/merge.py`)."""


def _fits(dims: Dims) -> bool:
    return bool(dims["heads"] <= _HEADS and dims["dim"] <= _WIDTH)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@implements(attention_ops.attn_merge, sources=_SOURCES, when=_fits)
def attn_merge(
    o: Tensor, lse: Tensor, out_dtype: torch.dtype, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """A core per token, split after split.

    Raises:
        OpArgumentError: more splits than the kernel has room for.
    """
    splits, rows, heads, dim = o.shape
    if splits > _SPLITS:
        raise OpArgumentError(f"attn_merge of {splits} splits: the kernel has room for {_SPLITS}")
    merged = new_like(None if out is None else out[0], (rows, heads, dim), out_dtype, o.device)
    sums = new_like(None if out is None else out[1], (rows, heads), torch.float32, o.device)
    parts, part_sums = _dense(o), _dense(lse)
    family("merge")[f"merge_{short(out_dtype)}"](
        rows,
        o=parts,
        lse=part_sums,
        out=merged,
        out_lse=sums,
        rows=rows,
        splits=splits,
        heads=heads,
        channels=dim,
        split_pitch=parts.stride(0),
        row_pitch=parts.stride(1),
        head_pitch=parts.stride(2),
        lse_split_pitch=part_sums.stride(0),
        lse_row_pitch=part_sums.stride(1),
        out_pitch=heads * dim,
        width=dim,
        out_lse_pitch=heads,
    )
    return merged, sums
