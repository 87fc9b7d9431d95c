"""What the layers of one forward pass share: the batch, the caches, and the newest selection of positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.models.interface import Caches, StepBatch, Tap
from deepinfer.ops.index import build_swa_index, visible_lens
from deepinfer.ops.registry import OpTable


@dataclass(kw_only=True)
class RowContext:
    """What every pass over rows has, be it the backbone's or the draft's.

    Attributes:
        positions: [T] int32, index of each row in its sequence.
        tap: observer of intermediates, for tests.
    """

    positions: Tensor
    tap: Tap | None = None

    def observe(self, name: str, value: Tensor) -> None:
        """Show an intermediate to the tap, if there is one."""
        if self.tap is not None:
            self.tap(name, value)


@dataclass(kw_only=True)
class StepContext(RowContext):
    """State of one forward pass of the backbone.

    Attributes:
        batch: the rows.
        caches: records and states by name.
        window_index: [T, window] int32 slots that each row's window reads; equal for all layers.
        visible: per ratio, [T] int32 compressed entries each row may see.
        selection: [T, index_topk] int32 slots chosen by the newest index source; None before the first.
        pool: [T, blocks] int32 candidate blocks of the pool source; None before it.
    """

    batch: StepBatch
    caches: Caches
    window_index: Tensor
    visible: dict[int, Tensor]
    selection: Tensor | None = None
    pool: Tensor | None = None


class StepBuilder:
    """Makes the context of a step: index lists that all layers share are built once."""

    def __init__(self, ops: OpTable, window: int, ratios: tuple[int, ...]) -> None:
        self._window = window
        self._ratios = ratios
        self._swa = ops.bind(build_swa_index, window=window)
        self._visible = ops.bind(visible_lens)

    def __call__(self, batch: StepBatch, caches: Caches, tap: Tap | None) -> StepContext:
        """Build the context of `batch`."""
        index = self._swa(
            batch.positions,
            batch.row_to_seq,
            batch.window_tables,
            batch.window_first_page,
            batch.window_page,
            self._window,
        )
        visible = {ratio: self._visible(batch.positions, ratio) for ratio in self._ratios}
        return StepContext(
            positions=batch.positions, tap=tap, batch=batch, caches=caches, window_index=index, visible=visible
        )


def row_slices(num_rows: int, columns: int, limit: int = 1 << 25) -> list[slice]:
    """Slices covering `num_rows` rows such that a [rows, columns] scratch stays under `limit` elements."""
    height = max(1, limit // max(columns, 1))
    return [slice(start, min(start + height, num_rows)) for start in range(0, num_rows, height)]
