"""The masks of all constrained rows of a step, built in native code, in one buffer that is sent once.

Row i of a verification stands behind drafts 0..i-1, so matchers go on along the drafts, all of them together one draft
at a time, and come back in the end. A draft that its row forbids is never emitted: the walk of that answer ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.grammar.gates import OPEN
from deepinfer.core.grammar.matching import Matcher, MatcherBatch
from deepinfer.core.shaping import PLAIN, RowShape
from deepinfer.core.step_buffers import Int32Array
from deepinfer.ops.runtime import Event, Runtime

if TYPE_CHECKING:
    from deepinfer.core.grammar.shaper import GrammarShaper

_MIN_ROWS = 16


class GrammarMasks:
    """Buffers of one engine; two take turns, so that one is written while a step may still read the other.

    Args:
        runtime: whose pinned memory the buffers are.
        vocab_size: ids run from 0 to `vocab_size` - 1.
    """

    def __init__(self, runtime: Runtime, vocab_size: int) -> None:
        self._runtime = runtime
        self._num_words = -(-vocab_size // 32)
        self._buffers = [_Buffer(runtime, self._num_words) for _ in range(2)]
        self._turn = 0
        self._batch: MatcherBatch | None = None
        self.num_steps = 0
        """Steps with rows that were masked."""
        self.num_rows = 0
        """Rows that were masked."""
        self.num_illegal_drafts = 0
        """Drafts that a grammar forbade."""

    def fill(
        self, answers: Sequence[tuple[GrammarShaper, Sequence[int]]], single: Sequence[GrammarShaper] = ()
    ) -> bool:
        """Write the masks of a step.

        Args:
            answers: shapers of answers that draw, each with the drafts it verifies. They are handed their shapes.
            single: more of them, whose form holds already and who verify no draft: they have one row each, masks 0,
                1, ... in this order, and are handed nothing.

        Returns:
            Whether that went well. If not, each answer has to be asked for its own shapes.
        """
        self._turn ^= 1
        most = len(single) + sum(len(drafts) + 1 for _, drafts in answers)
        buffer = self._buffers[self._turn]
        memory = buffer.rows(most)
        try:
            self._fill_single(single, memory)
            shapes, used, illegal = self._shape(answers, memory, len(single))
        except Exception:  # the library's; one answer's fault is not to be the others', so each is asked alone
            buffer.used = 0
            return False
        for (shaper, _), rows in zip(answers, shapes, strict=True):
            shaper.prepare(rows)
        buffer.used = used
        self.num_steps += used > 0
        self.num_rows += used
        self.num_illegal_drafts += illegal
        return True

    def shapes_of(self, shaper: GrammarShaper, drafts: Sequence[int]) -> list[RowShape]:
        """The shapes of one answer's rows, outside of any step."""
        own = np.empty((len(drafts) + 1, self._num_words), np.int32)
        shapes = self._shape([(shaper, drafts)], own)[0][0]
        return [RowShape(mask=shape.mask, forbidden=shape.forbidden, forced=shape.forced) for shape in shapes]

    def send(self) -> Tensor:
        """The masks of the step that was filled last, on the device: [rows, words] int32."""
        return self._buffers[self._turn].send()

    def _fill_single(self, shapers: Sequence[GrammarShaper], masks: Int32Array) -> None:
        """Write one mask each, from the first row of `masks` on."""
        if not shapers:
            return
        self._batch_of_matchers().fill([shaper.matcher for shaper in shapers], masks[: len(shapers)])
        too_early: dict[Bits, list[int]] = {}  # few: most answers end by the same ids
        for row, shaper in enumerate(shapers):
            if shaper.num_outputs < shaper.min_tokens:
                too_early.setdefault(shaper.ends, []).append(row)
        for ends, rows in too_early.items():
            forbid_unless_all(masks, rows, ends)

    def _batch_of_matchers(self) -> MatcherBatch:
        if self._batch is None:
            self._batch = MatcherBatch()
        return self._batch

    def _shape(
        self, answers: Sequence[tuple[GrammarShaper, Sequence[int]]], masks: Int32Array, used: int = 0
    ) -> tuple[list[list[RowShape]], int, int]:
        """Shapes by answer, rows of `masks` that hold something, `used` do already, and drafts that are not allowed."""
        batch = self._batch_of_matchers()
        shapes: list[list[RowShape]] = [[] for _ in answers]
        walks: list[_Walk] = []
        for place, (shaper, drafts) in enumerate(answers):
            walk = _Walk(shaper, drafts, shapes[place])
            if walk.has_row_left:
                walks.append(walk)
        try:
            used = _walk(batch, walks, masks, used)
        finally:
            back = [walk for walk in walks if walk.num_accepted]
            batch.roll_back([walk.matcher for walk in back], [walk.num_accepted for walk in back])
        for rows_of, (_, drafts) in zip(shapes, answers, strict=True):
            rows_of.extend([PLAIN] * (len(drafts) + 1 - len(rows_of)))
        return shapes, used, sum(walk.is_illegal for walk in walks)


def _walk(batch: MatcherBatch, walks: Sequence[_Walk], masks: Int32Array, used: int) -> int:
    """Shape all rows, one per answer and round; returns how many rows of `masks` hold something."""
    while walks:
        rows = range(used, used + len(walks))
        batch.fill([walk.matcher for walk in walks], masks[rows.start : rows.stop])
        used += len(walks)
        going = []
        for walk, row in zip(walks, rows, strict=True):
            walk.take(masks[row], row)
            if walk.has_row_left and walk.may_go_on(masks[row]):
                going.append(walk)
        batch.accept([walk.matcher for walk in going], [walk.draft for walk in going])
        for walk in going:
            walk.num_accepted += 1
        walks = going
    return used


class _Walk:
    """One answer on its way along its drafts."""

    __slots__ = ("_drafts", "_rows", "_shaper", "is_illegal", "matcher", "num_accepted")

    matcher: Matcher

    def __init__(self, shaper: GrammarShaper, drafts: Sequence[int], rows: list[RowShape]) -> None:
        self._shaper, self._drafts, self._rows = shaper, drafts, rows
        self.num_accepted = 0
        self.is_illegal = False
        state, gate = shaper.state, shaper.gate
        while state != OPEN and gate is not None and len(rows) <= len(drafts):
            rows.append(self._before_min_tokens(gate.shape(state)))
            if len(rows) <= len(drafts):
                state = gate.after(state, drafts[len(rows) - 1])
        if self.has_row_left:
            self.matcher = shaper.matcher

    @property
    def has_row_left(self) -> bool:
        """Whether there is a row without a shape; the form holds for it."""
        return len(self._rows) <= len(self._drafts)

    @property
    def draft(self) -> int:
        """The draft that the row shaped last verifies."""
        return self._drafts[len(self._rows) - 1]

    def take(self, mask: Int32Array, row: int) -> None:
        """Shape the next row with a mask that was just filled."""
        shaper = self._shaper
        if shaper.num_outputs + len(self._rows) < shaper.min_tokens:
            forbid_unless_all(mask[None], [0], shaper.ends)
        self._rows.append(RowShape(mask=mask, mask_row=row))

    def may_go_on(self, mask: Int32Array) -> bool:
        """Whether the draft of the row shaped last is allowed, and more may follow it."""
        draft = self.draft
        self.is_illegal = not 0 <= draft < 32 * len(mask) or not mask[draft >> 5] >> (draft & 31) & 1
        return not self.is_illegal and not self._shaper.is_stop(draft)

    def _before_min_tokens(self, shape: RowShape) -> RowShape:
        shaper = self._shaper
        if shape.forced >= 0 or shaper.num_outputs + len(self._rows) >= shaper.min_tokens:
            return shape
        return RowShape(forbidden=np.union1d(shape.forbidden, shaper.ends.ids).astype(np.int32))


class _Buffer:
    """Host memory for masks, which grows."""

    def __init__(self, runtime: Runtime, num_words: int) -> None:
        self._runtime = runtime
        self._num_words = num_words
        self._memory = runtime.pinned((_MIN_ROWS, num_words), torch.int32)
        self._sent: Event | None = None
        self._there: Tensor | None = None
        self.used = 0

    def rows(self, count: int) -> Int32Array:
        """Memory for so many rows, once nothing reads it any more."""
        if self._sent is not None and not self._sent.query():
            with self._runtime.sync_guard.permit("a step's masks are still being copied"):
                self._sent.synchronize()
        self._sent, self._there = None, None
        if count > len(self._memory):
            self._memory = self._runtime.pinned((1 << (count - 1).bit_length(), self._num_words), torch.int32)
        array: Int32Array = self._memory.numpy()
        return array

    def send(self) -> Tensor:
        """The rows that were used, on the device."""
        if self._there is None:
            self._there = self._runtime.to_device(self._memory[: self.used])
            self._sent = self._runtime.event()
            self._sent.record()
        return self._there


class Bits(NamedTuple):
    """Some ids, and where their bits stand in a mask.

    Attributes:
        ids: sorted, each once.
        words: the words that hold any of them, each once.
        bits: those bits of each, as a signed word.
    """

    ids: tuple[int, ...]
    words: tuple[int, ...]
    bits: tuple[int, ...]


def bits_of(ids: Iterable[int]) -> Bits:
    """The bits of ids; the same object for the same ids."""
    return _bits_of(tuple(sorted(set(ids))))


@lru_cache(maxsize=64)
def _bits_of(ids: tuple[int, ...]) -> Bits:
    words: dict[int, int] = {}
    for token in ids:
        words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
    return Bits(ids, tuple(words), tuple(word - (1 << 32) if word >> 31 else word for word in words.values()))


def forbid_unless_all(masks: Int32Array, rows: Sequence[int], ids: Bits) -> None:
    """Clear the bits of ids in some rows of masks, but in those that would allow nothing then.

    Args:
        masks: [B, ceil(vocab / 32)] int32, changed in place.
        rows: which of them.
        ids: what to forbid.
    """
    if not ids.ids:
        return
    places = np.ix_(rows, ids.words)
    before = masks[places]
    bits = np.array(ids.bits, np.int32)
    if not (before & bits).any():  # as almost always: a form that is not complete allows no end
        return
    masks[places] = before & ~bits
    for place, row in enumerate(rows):
        if not masks[row].any():
            masks[row, ids.words] = before[place]
