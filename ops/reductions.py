"""The arithmetic and the shapes of collectives: what every communicator checks, and the order in which it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

import torch
from torch import Tensor

from deepinfer.ops.collectives import Reduction
from deepinfer.ops.errors import OpArgumentError

_ROUNDED: Final = (torch.bfloat16, torch.float16)
SUMMABLE: Final = (torch.float64, torch.float32, *_ROUNDED, torch.int64, torch.int32)
COMPARABLE: Final = (*SUMMABLE, torch.uint8, torch.int8)


def reduce_in_rank_order(parts: Sequence[Tensor], op: Reduction) -> Tensor:
    """Reduce what each rank gave, first rank first; a new tensor of their dtype.

    Args:
        parts: one per rank, equal in shape and dtype, in rank order.
        op: "sum" adds bfloat16 and float16 in float32 and rounds once; "max" lets NaN through.
    """
    first = parts[0]
    if op == "max":
        total = first.clone()
        for part in parts[1:]:
            torch.maximum(total, part, out=total)
        return total
    wide = torch.float32 if first.dtype in _ROUNDED else first.dtype
    total = first.to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def check_reduction(tensor: Tensor, op: Reduction) -> None:
    """Refuse what cannot be reduced.

    Raises:
        OpArgumentError: no such reduction, or not of this dtype.
    """
    if op not in get_args(Reduction):
        raise OpArgumentError(f"reduction {op!r}; there are {', '.join(get_args(Reduction))}")
    allowed = SUMMABLE if op == "sum" else COMPARABLE
    if tensor.dtype not in allowed:
        raise OpArgumentError(f"{op} of {tensor.dtype}; it takes {', '.join(str(dtype) for dtype in allowed)}")


def gathered_shape(tensor: Tensor, world_size: int) -> tuple[int, ...]:
    """Shape of an `all_gather` of [n, ...].

    Raises:
        OpArgumentError: the tensor has no rows.
    """
    _check_rows("all_gather", tensor)
    return (world_size * tensor.shape[0], *tensor.shape[1:])


def scattered_shape(tensor: Tensor, world_size: int) -> tuple[int, ...]:
    """Shape of a `reduce_scatter` of [world_size * n, ...].

    Raises:
        OpArgumentError: the rows cannot be divided among the ranks.
    """
    _check_rows("reduce_scatter", tensor)
    if tensor.shape[0] % world_size:
        raise OpArgumentError(f"reduce_scatter of {tensor.shape[0]} rows among {world_size} ranks; they do not divide")
    return (tensor.shape[0] // world_size, *tensor.shape[1:])


def exchanged_shape(
    tensor: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], rank: int, world_size: int
) -> tuple[int, ...]:
    """Shape of an `all_to_all`.

    Raises:
        OpArgumentError: splits that do not fit the tensor, the ranks or each other.
    """
    _check_rows("all_to_all", tensor)
    for name, splits in (("send_splits", send_splits), ("recv_splits", recv_splits)):
        if len(splits) != world_size or min(splits) < 0:
            raise OpArgumentError(f"all_to_all: {name} is {list(splits)}; it takes {world_size} counts from 0 up")
    if sum(send_splits) != tensor.shape[0]:
        raise OpArgumentError(
            f"all_to_all: send_splits {list(send_splits)} add up to {sum(send_splits)}, the tensor has "
            f"{tensor.shape[0]} rows"
        )
    if send_splits[rank] != recv_splits[rank]:
        raise OpArgumentError(
            f"all_to_all: rank {rank} sends itself {send_splits[rank]} rows and expects {recv_splits[rank]}"
        )
    return (sum(recv_splits), *tensor.shape[1:])


def check_out(op: str, out: Tensor, shape: Sequence[int], tensor: Tensor) -> None:
    """Refuse an `out` that cannot hold the result.

    Raises:
        OpArgumentError: shape, dtype or strides do not fit.
    """
    if tuple(out.shape) != tuple(shape) or out.dtype != tensor.dtype or not out.is_contiguous():
        kind = "" if out.is_contiguous() else "strided "
        raise OpArgumentError(
            f"{op}: out is {kind}{out.dtype} {list(out.shape)}; the result is {tensor.dtype} {list(shape)}, contiguous"
        )


def sent_apart(tensor: Tensor, out: Tensor) -> Tensor:
    """What an exchange sends, packed: a copy where `out` shares its memory, since rows arrive before others leave."""
    packed = tensor.contiguous()
    shares = packed.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    return packed.clone() if shares else packed


def check_root(root: int, world_size: int) -> None:
    """Refuse a root that is no rank.

    Raises:
        OpArgumentError: it is out of range.
    """
    if not 0 <= root < world_size:
        raise OpArgumentError(f"broadcast from rank {root}; ranks run from 0 to {world_size - 1}")


def check_members(ranks: Sequence[int], rank: int, world_size: int) -> None:
    """Refuse a subgroup that is not ascending places of the group with this rank among them.

    Raises:
        OpArgumentError: it is not.
    """
    if list(ranks) != sorted(set(ranks)) or not ranks or ranks[0] < 0 or ranks[-1] >= world_size or rank not in ranks:
        raise OpArgumentError(
            f"subgroup {list(ranks)} called by rank {rank}; it takes ascending places from 0 to {world_size - 1}, "
            "the caller's among them"
        )


def _check_rows(op: str, tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise OpArgumentError(f"{op} of a scalar; it takes rows: reshape to [1]")
