"""Batches of ops whose rows belong together: sequences, images, experts, requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.conformance.batches import STATE, Arguments, Part, RowBatch, Rows, Variant, join_rows, select_rows
from deepinfer.conformance.values import transform
from deepinfer.ops.formats import QTensor
from deepinfer.ops.moe import DispatchHandle
from deepinfer.ops.spec import Case, OpSpec

Span = tuple[int, int, int]
"""A run of rows: sequence, first row, one past the last (rows of the original batch)."""


class SequenceBatch(RowBatch):
    """Packed sequences: `cu_seqlens_q`, `row_to_seq` and arguments per row and per sequence.

    Sequences are reordered, and cut in chunks that run one after the other; state goes on in the arguments.
    """

    per_row: tuple[str, ...] = ()
    per_sequence: tuple[str, ...] = ()
    cu = "cu_seqlens_q"

    def bounds(self, args: Arguments) -> list[int]:
        """Row bounds of the sequences."""
        return [int(bound) for bound in args[self.cu]]

    def spans(self, args: Arguments) -> list[Span]:
        """All rows of every sequence."""
        bounds = self.bounds(args)
        return [(s, bounds[s], bounds[s + 1]) for s in range(len(bounds) - 1)]

    def count(self, args: Arguments) -> int:
        """Rows of all sequences; padding rows behind them do not count."""
        return self.bounds(args)[-1]

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """Rows of sequences only; whatever the op writes elsewhere is state."""
        rows: Rows = {}
        count = self.count(args)
        for path, tensor in self.results(result):
            rows[path] = tensor[:count]
        for name in self.op.mutates:
            rows[STATE + name] = args[name]
        return rows

    def results(self, result: Any) -> Iterator[tuple[str, Tensor]]:
        """Result tensors with rows first."""
        yield "result", result

    def pick(self, args: Arguments, spans: list[Span]) -> Arguments:
        """A batch of these runs of rows, in this order."""
        index = _rows_of(spans)
        sequences = torch.tensor([s for s, _, _ in spans], dtype=torch.long)
        lengths = torch.tensor([0, *(stop - start for _, start, stop in spans)])
        new = dict(args)
        for name in self.per_row:
            new[name] = args[name][index] if args[name] is not None else None
        for name in self.per_sequence:
            new[name] = args[name][sequences] if args[name] is not None else None
        new[self.cu] = lengths.cumsum(0).int()
        if "row_to_seq" in args:
            new["row_to_seq"] = torch.repeat_interleave(torch.arange(len(spans)), lengths[1:]).int()
        return new

    def permuted(self, args: Arguments, gen: Generator) -> Variant:
        """Sequences in another order."""
        spans = self.spans(args)
        order = [spans[i] for i in torch.randperm(len(spans), generator=gen).tolist()]
        back = _rows_of(order).argsort()

        def restore(variant: Arguments, result: Any) -> Rows:
            return select_rows(self.canonical(variant, result), back)

        return Variant("sequences permuted", (Part(lambda: self.pick(args, order), restore),), lambda rows: rows[0])

    def padded(self, args: Arguments, gen: Generator) -> Iterator[Variant]:
        """Ops with sequences get their padding in cases of their own."""
        return iter(())

    def chunked(self, args: Arguments, size: int) -> Variant:
        """Every sequence in chunks of `size` rows; step i runs the i-th chunk of all sequences that have one."""
        spans = self.spans(args)
        longest = max((stop - start for _, start, stop in spans), default=0)
        steps = []
        for begin in range(0, longest, size):
            step = [(s, a + begin, min(a + begin + size, b)) for s, a, b in spans if a + begin < b]
            steps.append(step)
        where = torch.cat([_rows_of(step) for step in steps]) if steps else torch.zeros(0, dtype=torch.long)

        def join(rows: list[Rows]) -> Rows:
            return select_rows(join_rows(rows), where.argsort())

        parts = tuple(Part(partial(self.pick, args, step), self.canonical) for step in steps)
        return Variant(f"chunks of {size}", parts, join)


def _rows_of(spans: list[Span]) -> Tensor:
    runs = [torch.arange(start, stop) for _, start, stop in spans]
    return torch.cat([*runs, torch.zeros(0, dtype=torch.long)])


class Compressor(SequenceBatch):
    """The open group lives in `state`, addressed by position."""

    per_row = ("gate", "value", "positions")
    per_sequence = ("state_slots",)


class Ngrams(SequenceBatch):
    """Rows before a chunk become its history."""

    per_row = ("input_ids", "blocked")
    per_sequence = ("history", "history_blocked")

    def pick(self, args: Arguments, spans: list[Span]) -> Arguments:
        """As the base, with history continued from the rows before each run."""
        if args["blocked"] is not None and args["history_blocked"] is None:
            args = args | {"history_blocked": torch.zeros(args["history"].shape, dtype=torch.bool)}
        new = super().pick(args, spans)
        firsts = dict(enumerate(self.bounds(args)[:-1]))
        for run, (sequence, start, _) in enumerate(spans):
            for name, rows in (("history", "input_ids"), ("history_blocked", "blocked")):
                if args[name] is None:
                    continue
                before = args[rows][firsts[sequence] : start].flip(0)
                depth = args[name].shape[1]
                new[name][run] = torch.cat((before, args[name][sequence]))[:depth].to(new[name].dtype)
        return new


class Images(SequenceBatch):
    """Whole images; there are no chunks of an image."""

    per_row = ("q", "k", "v")
    cu = "cu_seqlens"

    def chunked(self, args: Arguments, size: int) -> Variant:
        """`size` images at a time."""
        spans = self.spans(args)
        groups = [spans[i : i + size] for i in range(0, len(spans), size)]
        parts = tuple(Part(partial(self.pick, args, group), self.canonical) for group in groups)
        return Variant(f"{size} images at a time", parts, join_rows)


class Requests(SequenceBatch):
    """Verification: what a row emits does not depend on rows behind it, so requests are also cut short."""

    per_row = ("logits", "draft_ids", "draft_logits")
    per_sequence = ("temperature", "top_k", "top_p", "min_p", "seeds", "output_index", "choice")
    cu = "cu_seqlens"

    def pick(self, args: Arguments, spans: list[Span]) -> Arguments:
        """Arguments that a call left out stay out."""
        present = {name: None for name in self.per_row + self.per_sequence}
        new = super().pick({**present, **args}, spans)
        return {name: value for name, value in new.items() if name in args}

    def results(self, result: Any) -> Iterator[tuple[str, Tensor]]:
        """Tokens per row; the counts follow from them."""
        yield "tokens", result[1]

    def chunked(self, args: Arguments, size: int) -> Variant:
        """Requests `size` at a time: a request is not cut, its rows are one decision."""
        spans = self.spans(args)
        groups = [spans[i : i + size] for i in range(0, len(spans), size)]
        parts = tuple(Part(partial(self.pick, args, group), self.canonical) for group in groups)
        return Variant(f"{size} requests at a time", parts, join_rows)


class Steps(SequenceBatch):
    """Step correction: sequences are reordered; everything it writes is per row or per sequence."""

    per_row = ("input_ids", "positions", "window_slots")
    per_sequence = ("seq_lens", "previous", "block_tables", "window_tables", "window_first_page")

    def pick(self, args: Arguments, spans: list[Span]) -> Arguments:
        """Slots per ratio have rows on their second axis."""
        new = super().pick(args, spans)
        new["ratio_slots"] = args["ratio_slots"][:, _rows_of(spans)]
        return new

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """Written arguments by row; lengths are checked by the values."""
        rows: Rows = {name: args[name][: self.count(args)] for name in self.per_row}
        rows["ratio_slots"] = args["ratio_slots"].T[: self.count(args)]
        rows["seq_lens"] = args["seq_lens"][args["row_to_seq"][: self.count(args)].long()]
        return rows

    def chunked(self, args: Arguments, size: int) -> Variant:
        """`size` sequences at a time; the rows of one sequence are one decision."""
        spans = self.spans(args)
        groups = [spans[i : i + size] for i in range(0, len(spans), size)]
        parts = tuple(Part(partial(self.pick, args, group), self.canonical) for group in groups)
        return Variant(f"{size} sequences at a time", parts, join_rows)


class RaggedScores(RowBatch):
    """Scores whose width is the widest row's: compared at the width of all keys."""

    def __init__(self, op: OpSpec[..., Any], case: Case) -> None:
        super().__init__(op, case)
        self.axes = {"q": 0, "weights": 0, "starts": 0, "ends": 0}

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """Columns filled up with -inf."""
        missing = int(args["k"].shape[0]) - result.shape[1]
        return {"result": torch.nn.functional.pad(result, (0, missing), value=-torch.inf)}


class Dispatch(RowBatch):
    """Expanded rows, looked up through the handle, per token and choice."""

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """What each choice of each token was sent."""
        rows, weights, _, handle = result
        slots = handle.slot_to_row
        index = slots.clamp(min=0).long()
        chosen = slots >= 0

        def sent(tensor: Tensor) -> Tensor:
            picked = tensor[index] if len(tensor) else tensor.new_zeros(*index.shape, *tensor.shape[1:])
            return torch.where(chosen.reshape(*chosen.shape, *[1] * (picked.dim() - 2)), picked, 0)

        out: Rows = {"weights": sent(weights), "chosen": chosen}
        if isinstance(rows, QTensor):
            return {**out, "data": sent(rows.data), "scale": sent(rows.scale)}
        return {**out, "rows": sent(rows)}


class Combine(RowBatch):
    """Tokens: choices are reordered, the experts' rows stay where they are."""

    def count(self, args: Arguments) -> int:
        """Tokens."""
        return int(args["handle"].slot_to_row.shape[0])

    def _with_padding(self, args: Arguments, kept: Tensor, total: int) -> Arguments:
        wide = super()._with_padding(args, kept, total)
        padding = torch.ones(total, dtype=torch.bool)
        padding[kept] = False
        slots = wide["handle"].slot_to_row.clone()
        slots[padding] = int((~torch.isin(torch.arange(len(args["y"])), slots)).nonzero()[0])  # a NaN row
        wide["handle"] = DispatchHandle(slots)
        return wide


class GroupedRows(RowBatch):
    """Expert rows: reordered within an expert, spread over calls that hold a part of every expert's rows."""

    def __init__(self, op: OpSpec[..., Any], case: Case) -> None:
        super().__init__(op, case)
        self.axes = {"x": 0}

    def count(self, args: Arguments) -> int:
        """Defined rows."""
        return int(args["psum"][-1]) if len(args["psum"]) else 0

    def canonical(self, args: Arguments, result: Any) -> Rows:
        """Rows up to the last end."""
        return {"result": result[: self.count(args)]}

    def _experts(self, args: Arguments) -> list[list[int]]:
        ends = [0, *args["psum"].tolist()]
        return [list(range(ends[e], ends[e + 1])) for e in range(len(ends) - 1)]

    def _pick(self, args: Arguments, groups: list[list[int]]) -> Arguments:
        index = torch.tensor([row for group in groups for row in group], dtype=torch.long)
        psum = torch.tensor([len(group) for group in groups]).cumsum(0).int()
        return {**args, "x": transform(args["x"], lambda t: t.index_select(0, index)), "psum": psum}

    def permuted(self, args: Arguments, gen: Generator) -> Variant:
        """Rows of each expert in another order."""
        groups = [[g[i] for i in torch.randperm(len(g), generator=gen).tolist()] for g in self._experts(args)]
        back = torch.tensor([row for group in groups for row in group], dtype=torch.long).argsort()
        return self._single("rows permuted", lambda: self._pick(args, groups), back)

    def padded(self, args: Arguments, gen: Generator) -> Iterator[Variant]:
        """More undefined rows behind the last end."""
        count, rows = self.count(args), int(args["x"].shape[0])
        if rows == 0:
            return
        order = torch.cat((torch.arange(count), torch.full((9,), rows - 1)))

        def make() -> Arguments:
            return {**args, "x": transform(args["x"], lambda t: t.index_select(0, order))}

        yield self._single("padded behind", make, torch.arange(count))

    def chunked(self, args: Arguments, size: int) -> Variant:
        """At most `size` rows of every expert per call."""
        experts = self._experts(args)
        longest = max((len(group) for group in experts), default=0)
        steps = [[group[a : a + size] for group in experts] for a in range(0, longest, size)]
        where = torch.tensor([row for step in steps for group in step for row in group], dtype=torch.long)
        parts = tuple(Part(partial(self._pick, args, step), self.canonical) for step in steps)
        return Variant(f"{size} rows per expert", parts, lambda rows: select_rows(join_rows(rows), where.argsort()))


BATCHES: Mapping[str, Callable[[OpSpec[..., Any], Case], RowBatch]] = {
    "kv_compress": Compressor,
    "engram_ngrams": Ngrams,
    "vision_attn": Images,
    "verify": Requests,
    "advance_step": Steps,
    "index_logits_ragged": RaggedScores,
    "ep_dispatch": Dispatch,
    "ep_combine": Combine,
    "moe_grouped_gemm": GroupedRows,
}
