"""Positions to slots, and exact top-k: integer results, so equal bits are asked for and D2 comes free."""

import torch
from torch import Tensor

from acme_deepinfer import BACKEND
from deepinfer.ops import index as index_ops


@BACKEND.implements(index_ops.logical_to_slot)
def logical_to_slot(indices: Tensor, block_size: int, block_table: Tensor, row_to_seq: Tensor) -> None:
    """One lookup per index, 64 bits wide; -1 stays -1."""
    position = indices.long()
    column = (position // block_size).clamp(0, block_table.shape[1] - 1)
    slot = block_table[row_to_seq.long()[:, None], column].long() * block_size + position % block_size
    indices.copy_(torch.where(position < 0, -1, slot))  # in place, whatever the strides


@BACKEND.implements(index_ops.topk_select)
def topk_select(x: Tensor, k: int, lens: Tensor) -> Tensor:
    """Find the k-th value, take what is above it, then ties from the left; no sort."""
    column = torch.arange(x.shape[1], device=x.device)
    value = x.float().masked_fill(x.isnan() | (column >= lens[:, None]), -torch.inf)
    bound = value.topk(min(k, x.shape[1]), dim=1).values[:, -1:]  # values alone: torch may order ties as it likes
    above, tie = value > bound, (value == bound) & (bound > -torch.inf)
    room = k - above.sum(1, keepdim=True)
    chosen = above | (tie & (tie.cumsum(1) <= room))
    place = torch.where(chosen, chosen.cumsum(1) - 1, k)  # what is not chosen lands in column k, which is cut off
    out = torch.full((x.shape[0], k + 1), -1, dtype=torch.int32, device=x.device)
    return out.scatter_(1, place, column.int().expand_as(place))[:, :k].contiguous()
