"""What the layers of one forward pass share: the batch, the caches, and the newest selection of positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from deepinfer.models.interface import Caches, StepBatch, Tap
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.index import build_swa_index, clip_window, visible_lens
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
        is_cut: the rows are those of `StepBatch.decoder_rows`; records that every token has are stored already.
    """

    batch: StepBatch
    caches: Caches
    window_index: Tensor
    visible: dict[int, Tensor]
    selection: Tensor | None = None
    pool: Tensor | None = None
    is_cut: bool = False


class StepBuilder:
    """Makes the context of a step: index lists that all layers share are built once."""

    def __init__(self, ops: OpTable, window: int, ratios: tuple[int, ...]) -> None:
        self._window = window
        self._ratios = ratios
        self._swa = ops.bind(build_swa_index, window=window)
        self._visible = ops.bind(visible_lens)
        self._clip = ops.bind(clip_window)
        self._gather = ops.bind(gather_rows)

    def __call__(self, batch: StepBatch, caches: Caches, tap: Tap | None) -> StepContext:
        """Build the context of `batch`."""
        return StepContext(
            positions=batch.positions,
            tap=tap,
            batch=batch,
            caches=caches,
            window_index=self._window_index(batch),
            visible={ratio: self._visible(batch.positions, ratio) for ratio in self._ratios},
        )

    def decoder(self, step: StepContext) -> StepContext:
        """The step as decoder layers see it: its last rows and a window that starts where they do, if it is so bound.

        Of a step that is cut only what belongs to rows is meant; `cu_seqlens_q` and `ratio_slots` stay those of before.
        """
        batch = step.batch
        starts, rows = batch.decoder_starts, batch.decoder_rows
        if starts is None:
            return step
        if rows is not None:
            batch = replace(
                batch,
                input_ids=self._gather(batch.input_ids, rows),
                positions=self._gather(batch.positions, rows),
                row_to_seq=self._gather(batch.row_to_seq, rows),
                window_slots=self._gather(batch.window_slots, rows),
            )
        bound = self(batch, step.caches, step.tap)
        self._clip(bound.window_index, batch.positions, batch.row_to_seq, starts)
        return replace(bound, is_cut=rows is not None)

    def _window_index(self, batch: StepBatch) -> Tensor:
        return self._swa(
            batch.positions,
            batch.row_to_seq,
            batch.window_tables,
            batch.window_first_page,
            batch.window_page,
            self._window,
        )


def row_slices(num_rows: int, columns: int, limit: int = 1 << 25) -> list[slice]:
    """Slices covering `num_rows` rows such that a [rows, columns] scratch stays under `limit` elements."""
    height = max(1, limit // max(columns, 1))
    return [slice(start, min(start + height, num_rows)) for start in range(0, num_rows, height)]
