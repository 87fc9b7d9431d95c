"""Changes to single logits in place: biases, penalties, masks."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from deepinfer.backends.ascend950.generated import SOURCES, family, tasks_of
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import packed
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops

_SOURCES: Final = (*SOURCES, "shaping.py", "kernels/generated/shaping.asc")
_FLAT: Final = 512
"""Entries that a core works on at a time (`tiles/common.py`)."""


@implements(shaping_ops.adjust_logits, sources=_SOURCES)
def adjust_logits(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor, *, out: None = None) -> None:
    """A thread per entry."""
    entries = rows.shape[0]
    family("shaping")["add_to_logits"](
        tasks_of(entries, _FLAT),
        logits=logits,
        entry_rows=packed(rows),
        ids=packed(ids),
        values=packed(values),
        entries=entries,
        pitch=logits.stride(0),
        stride=logits.stride(1),
    )


@implements(shaping_ops.apply_penalties, sources=_SOURCES)
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    *,
    out: None = None,
) -> None:
    """A thread per entry; a product and a difference are two roundings, so text is compiled without contraction."""
    entries = rows.shape[0]
    family("shaping")["penalise"](
        tasks_of(entries, _FLAT),
        logits=logits,
        entry_rows=packed(rows),
        ids=packed(ids),
        counts=packed(counts),
        repetition=packed(repetition),
        frequency=packed(frequency),
        presence=packed(presence),
        entries=entries,
        pitch=logits.stride(0),
        stride=logits.stride(1),
    )


@implements(sampling_ops.apply_bitmask, sources=_SOURCES)
def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor, *, out: None = None) -> None:
    """All cores over the ids of a row, row after row; only forbidden ids are written."""
    count, num_ids = logits.shape
    words = mask if mask.stride(1) == 1 else mask.contiguous()
    family("shaping")["forbid"](
        tasks_of(num_ids, _FLAT) if count else 0,
        logits=logits,
        mask=words,
        mask_rows=packed(rows),
        rows=count,
        num_ids=num_ids,
        mask_pitch=words.stride(0),
        pitch=logits.stride(0),
        stride=logits.stride(1),
    )
