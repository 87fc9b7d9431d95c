"""Batches of ops that are told which rows to touch, and of ops whose rows are counted or put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.batches import Arguments, RowBatch, Rows
from deepinfer.ops.spec import Case, OpSpec


class NamedRows(RowBatch):
    """Rows that are changed in place by entries naming them in `rows`; an entry of -1 belongs to none.

    Rows go to other places with their entries, so entries come in another order too.
    """

    target = "logits"
    per_row: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    def __init__(self, op: OpSpec[..., Any], case: Case) -> None:
        super().__init__(op, case)
        self.axes = dict.fromkeys((self.target, *self.per_row), 0)

    def take(self, args: Arguments, index: Tensor) -> Arguments:
        """The rows of `index`, each with its entries; a row that stands twice has them twice."""
        named = args["rows"].long()
        found = (index[:, None] == named[None]).nonzero()
        skipped = (named < 0).nonzero()[:, 0]
        rows = torch.cat((torch.full_like(skipped, -1), found[:, 0])).int()
        return self._with_entries(super().take(args, index), torch.cat((skipped, found[:, 1])), rows)

    def slice(self, args: Arguments, start: int, stop: int) -> Arguments:
        """Rows [start, stop) as views, with their entries in the order that they had."""
        named = args["rows"]
        kept = ((named < 0) | ((named >= start) & (named < stop))).nonzero()[:, 0]
        rows = torch.where(named[kept] < 0, -1, named[kept] - start).int()
        return self._with_entries(super().slice(args, start, stop), kept, rows)

    def _with_entries(self, args: Arguments, kept: Tensor, rows: Tensor) -> Arguments:
        return {**args, "rows": rows, **{name: args[name][kept] for name in self.entries}}


class Adjusted(NamedRows):
    """Numbers added to single logits."""

    entries = ("ids", "values")


class Penalised(NamedRows):
    """Penalties of a row, by the tokens that it has seen."""

    per_row = ("repetition", "frequency", "presence")
    entries = ("ids", "counts")


class Replaced(NamedRows):
    """Whole rows put in place."""

    target = "x"
    entries = ("values",)


class DraftBlocks(RowBatch):
    """Anchors, each with a block of rows; what numbers the rows of the batch is taken from the block's first."""

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """One row per anchor."""
        count, size = self.count(args), int(args["num_tokens"])
        ids, positions, before, seqs, own, block = result
        first = torch.arange(count, dtype=torch.int32) * size
        rows = {"ids": ids, "positions": positions, "before": before, "seqs": seqs}
        out: Rows = {name: tensor.reshape(count, size) for name, tensor in rows.items()}
        out["own"] = own.reshape(count, size) - first[:, None]
        out["block"] = block.reshape(count, size, size) - first[:, None, None]
        return out


class Stacked(RowBatch):
    """Rows of several parts below each other: any row may stand in any part."""

    def count(self, args: Arguments) -> int:
        """Rows of all parts."""
        return sum(int(part.shape[0]) for part in args["parts"])

    def take(self, args: Arguments, index: Tensor) -> Arguments:
        """The rows of `index` in parts of the sizes there are; what is left goes to the last one."""
        rows = torch.cat(args["parts"])[index]
        sizes = [int(part.shape[0]) for part in args["parts"][:-1]]
        return {**args, "parts": rows.split([*sizes, len(rows) - sum(sizes)])}

    def slice(self, args: Arguments, start: int, stop: int) -> Arguments:
        """Rows [start, stop) as views; a part that has none of them is empty."""
        parts, first = [], 0
        for part in args["parts"]:
            size = int(part.shape[0])
            low, high = (min(max(bound - first, 0), size) for bound in (start, stop))
            parts.append(part[low:high])
            first += size
        return {**args, "parts": tuple(parts)}


TARGETS: Mapping[str, Callable[[OpSpec[..., Any], Case], RowBatch]] = {
    "adjust_logits": Adjusted,
    "apply_penalties": Penalised,
    "put_rows": Replaced,
    "draft_rows": DraftBlocks,
    "concat_rows": Stacked,
}
