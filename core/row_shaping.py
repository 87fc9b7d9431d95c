"""Applies row shapes to a step's logits, through ops, touching only the rows that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.grammar.masks import GrammarMasks
from deepinfer.core.shaping import NO_IDS, Float32Array, RowFn, RowShape
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.transfer import send
from deepinfer.ops import heads, sampling, shaping
from deepinfer.ops.registry import OpTable

ShapedRows = Sequence[tuple[int, RowShape]]
"""Rows of a logits tensor, each once, with what changes them."""


@dataclass
class StepShapes:
    """What changes the rows of a step.

    Attributes:
        rows: those with shapes of their own.
        form_rows: [n] int32, rows that nothing but a form shapes: that of `form_rows[i]` is mask i of the step's
            grammar masks.
    """

    rows: list[tuple[int, RowShape]] = field(default_factory=list)
    form_rows: Int32Array = field(default_factory=lambda: NO_IDS)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return bool(self.rows) or self.form_rows.size > 0


class RowShaping:
    """The ops that shape logits, bound once.

    Args:
        ops: the engine's op table.
        vocab_size: ids run from 0 to `vocab_size` - 1.
    """

    def __init__(self, ops: OpTable, vocab_size: int) -> None:
        self._runtime = ops.context.runtime
        self._vocab_size = vocab_size
        self._apply_bitmask = ops.bind(sampling.apply_bitmask)
        self._adjust = ops.bind(shaping.adjust_logits)
        self._penalise = ops.bind(shaping.apply_penalties)
        self._put_rows = ops.bind(shaping.put_rows)
        self._gather_rows = ops.bind(heads.gather_rows)
        self.grammar = GrammarMasks(self._runtime, vocab_size)
        """Masks of constrained rows; filled before `apply` is called with shapes that name them."""
        self.num_host_waits = 0
        """Times a step waited for logits on the host, for a user's own functions."""

    def apply(self, logits: Tensor, rows: ShapedRows, form_rows: Int32Array = NO_IDS) -> dict[int, Exception]:
        """Mask, bias and penalise, in the order of `ops.sampling`; forced ids are left to `force`.

        Args:
            logits: [N, V] float32, changed in place.
            rows: which of them, and how.
            form_rows: as in `StepShapes`.

        Returns:
            What a user's own function raised, by row; it did not change that row.
        """
        with torch.inference_mode():
            self._mask_by_grammar(
                logits, [(row, shape.mask_row) for row, shape in rows if shape.mask_row >= 0], form_rows
            )
            if not rows:
                return {}
            self._mask(logits, [(r, shape.mask) for r, shape in rows if shape.mask is not None and shape.mask_row < 0])
            self._bias(logits, rows)
            self._penalties(logits, rows)
            return self._call(logits, [(row, shape.functions) for row, shape in rows if shape.functions])

    def force(self, logits: Tensor, rows: ShapedRows) -> None:
        """Allow nothing but the forced id, in the rows that have one."""
        forced = [(row, shape.forced) for row, shape in rows if shape.forced >= 0]
        if not forced:
            return
        tokens = list(dict.fromkeys(token for _, token in forced))
        words = np.zeros((len(tokens), -(-self._vocab_size // 32)), np.uint32)
        for mask, token in zip(words, tokens, strict=True):
            mask[token // 32] = 1 << token % 32
        masks = dict(zip(tokens, words.view(np.int32), strict=True))
        with torch.inference_mode():
            self._mask(logits, [(row, masks[token]) for row, token in forced])

    def _mask_by_grammar(self, logits: Tensor, places: Sequence[tuple[int, int]], form_rows: Int32Array) -> None:
        if not places and not form_rows.size:
            return
        mask_rows = np.full(logits.shape[0], -1, np.int32)
        mask_rows[form_rows] = np.arange(len(form_rows), dtype=np.int32)
        if places:
            rows, masks = zip(*places, strict=True)
            mask_rows[list(rows)] = masks
        self._apply_bitmask(logits, self.grammar.send(), self._send(mask_rows))

    def _mask(self, logits: Tensor, masks: Sequence[tuple[int, Int32Array]]) -> None:
        if not masks:
            return
        distinct: dict[int, int] = {}
        words: list[Int32Array] = []
        mask_rows = np.full(logits.shape[0], -1, np.int32)
        for row, mask in masks:
            if id(mask) not in distinct:
                distinct[id(mask)] = len(words)
                words.append(mask)
            mask_rows[row] = distinct[id(mask)]
        self._apply_bitmask(logits, self._send(np.stack(words)), self._send(mask_rows))

    def _bias(self, logits: Tensor, rows: ShapedRows) -> None:
        places, ids, values = [], [], []
        for row, shape in rows:
            bias_ids, bias = shape.bias_ids, shape.bias
            if not (shape.forbidden.size or bias_ids.size):
                continue
            if shape.forbidden.size and bias_ids.size:
                kept = ~np.isin(bias_ids, shape.forbidden)
                bias_ids, bias = bias_ids[kept], bias[kept]
            forbid = np.full(len(shape.forbidden), -np.inf, np.float32)
            for some_ids, some in ((bias_ids, bias), (shape.forbidden, forbid)):
                if some_ids.size:
                    places.append(np.full(len(some_ids), row, np.int32))
                    ids.append(some_ids)
                    values.append(some)
        if ids:
            self._adjust(logits, *(self._send(np.concatenate(part)) for part in (places, ids, values)))

    def _penalties(self, logits: Tensor, rows: ShapedRows) -> None:
        some = [(row, shape.penalties) for row, shape in rows if shape.penalties is not None]
        if not any(penalties.ids.size for _, penalties in some):
            return
        factors = np.ones(logits.shape[0], np.float32), *np.zeros((2, logits.shape[0]), np.float32)
        for row, p in some:
            factors[0][row], factors[1][row], factors[2][row] = p.repetition, p.frequency, p.presence
        places = [np.full(len(p.ids), row, np.int32) for row, p in some]
        ids, counts = [p.ids for _, p in some], [p.counts for _, p in some]
        entries = (self._send(np.concatenate(part)) for part in (places, ids, counts))
        self._penalise(logits, *entries, *map(self._send, factors))

    def _call(self, logits: Tensor, rows: Sequence[tuple[int, tuple[RowFn, ...]]]) -> dict[int, Exception]:
        """Let users' functions change rows on the host."""
        if not rows:
            return {}
        there = self._send(np.array([row for row, _ in rows], np.int32))
        self.num_host_waits += 1
        with self._runtime.sync_guard.permit("a user's function changes logits"):
            values: Float32Array = self._runtime.to_host(self._gather_rows(logits, there)).numpy().copy()
        faults: dict[int, Exception] = {}
        for place, (row, functions) in enumerate(rows):
            try:
                changed = values[place].copy()
                for function in functions:
                    changed = function(changed)
                values[place] = changed
            except Exception as error:  # a user's code may raise anything
                faults[row] = error
        self._put_rows(logits, there, self._send(values))
        return faults

    def _send(self, array: NDArray[Any]) -> Tensor:
        return send(self._runtime, array)
