"""What a request changes about its logits, row by row: data that the host makes before a step and ops apply in it.

Requests whose logits depend on what they have produced (penalties, bad words, a grammar, ...) have a `RowShaper`. Its
answers hold for known tokens, so such a request waits for its step to be collected before the next one is planned, and
its drafts are brought to the host: row i of a verification is shaped as if drafts 0..i-1 had been emitted. Which
features exist is `core.shapers`; the ops are `ops.shaping`, called by `core.row_shaping`. Where a shape is the same in
every row (allowed ids, logit bias), nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.step_buffers import Int32Array

Float32Array = NDArray[np.float32]
RowFn = Callable[[Float32Array], Float32Array]
"""Takes one row's logits, [vocab] float32, and gives back others; it may change them in place."""

NO_IDS: Final[Int32Array] = np.empty(0, np.int32)
NO_VALUES: Final[Float32Array] = np.empty(0, np.float32)


@dataclass(frozen=True)
class Penalties:
    """Tokens seen by one row, and how they count.

    Attributes:
        ids: [n] int32, each once.
        counts: [n] int32, how often the output holds each; 0 where only the prompt does.
        repetition: as in `SamplingParams`.
        frequency: as there.
        presence: as there.
    """

    ids: Int32Array
    counts: Int32Array
    repetition: float
    frequency: float
    presence: float


@dataclass(frozen=True)
class RowShape:
    """What changes one row of logits. The fields stand in the order in which they are applied.

    Attributes:
        mask: [ceil(vocab / 32)] int32, a set bit allows; None allows all. Rows that share one array share one copy.
        forbidden: ids that are not allowed either, each once.
        bias_ids: ids whose logits get something added, each once.
        bias: as many numbers.
        penalties: of seen tokens.
        functions: a user's own, last; they see logits on the host, so the step waits for them.
        forced: the only id that may be drawn, whatever stands above; -1 for none. It changes no logprob.
        mask_row: the row of the step's grammar masks (`core.grammar.masks`) that `mask` is; -1 where it is none.
    """

    mask: Int32Array | None = None
    forbidden: Int32Array = field(default_factory=lambda: NO_IDS)
    bias_ids: Int32Array = field(default_factory=lambda: NO_IDS)
    bias: Float32Array = field(default_factory=lambda: NO_VALUES)
    penalties: Penalties | None = None
    functions: tuple[RowFn, ...] = ()
    forced: int = -1
    mask_row: int = -1

    @property
    def is_plain(self) -> bool:
        """Nothing changes."""
        few = self.mask is None and self.penalties is None and self.forced < 0 and not self.functions
        return few and not self.forbidden.size and not self.bias_ids.size

    def allows_nothing(self, vocab_size: int) -> bool:
        """Whether masks leave no id at all, so that nothing can be drawn from any logits."""
        if self.forced >= 0:
            return False
        allowed = np.ones(vocab_size, bool)
        if self.mask is not None:
            allowed &= unpack_mask(self.mask, vocab_size)
        allowed[self.forbidden] = False
        return not bool(allowed.any())

    @property
    def forbids_what_it_forces(self) -> bool:
        """Whether the forced id is one that the masks leave out, so that nothing can be drawn from any logits."""
        if self.forced < 0:
            return False
        is_masked = self.mask is not None and not self.mask[self.forced >> 5] >> (self.forced & 31) & 1
        return is_masked or bool((self.forbidden == self.forced).any())


PLAIN = RowShape()


@runtime_checkable
class RowShaper(Protocol):
    """Shapes the rows of one answer. Its state is what `accept` told it, and survives preemption."""

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """One shape per verify row: row i stands behind everything accepted and `drafts[:i]`; len(drafts) + 1 in all.

        A draft may be any id, also one that an earlier row forbids: rows behind it are not used then, so any shape
        will do for them. It changes nothing. What it raises ends the request with an error that names it.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Tokens that were emitted."""
        ...


class Shapers:
    """Several shapers as one: masks must agree, biases add up, functions run in order, the first forced id wins."""

    def __init__(self, parts: Sequence[RowShaper]) -> None:
        self.parts = tuple(parts)

    def shape(self, drafts: Sequence[int]) -> list[RowShape]:
        """See `RowShaper`."""
        rows = [part.shape(drafts) for part in self.parts]
        return [merge(shapes) for shapes in zip(*rows, strict=True)]

    def accept(self, tokens: Sequence[int]) -> None:
        """See `RowShaper`."""
        for part in self.parts:
            part.accept(tokens)


def merge(shapes: Sequence[RowShape]) -> RowShape:
    """All of them at once.

    Raises:
        ValueError: two of them hold penalties, for which there is no one meaning.
    """
    merged, *others = shapes
    for other in others:
        if other.is_plain:
            continue
        if merged.is_plain:
            merged = other
            continue
        if merged.penalties is not None and other.penalties is not None:
            raise ValueError("two shapers of one request have penalties")
        mask, mask_row = merged.mask, merged.mask_row
        if other.mask is not None:
            mask, mask_row = (other.mask, other.mask_row) if mask is None else (mask & other.mask, -1)
        bias_ids, bias = _sum(merged, other)
        merged = RowShape(
            mask,
            np.union1d(merged.forbidden, other.forbidden).astype(np.int32),
            bias_ids,
            bias,
            merged.penalties or other.penalties,
            merged.functions + other.functions,
            merged.forced if merged.forced >= 0 else other.forced,
            mask_row,
        )
    return merged


def pack_mask(ids: Sequence[int] | Int32Array, vocab_size: int) -> Int32Array:
    """The mask that allows these ids alone: [ceil(vocab_size / 32)] int32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def unpack_mask(mask: Int32Array, vocab_size: int) -> NDArray[np.bool_]:
    """[vocab_size] bool."""
    words = np.ascontiguousarray(mask).astype("<i4").view(np.uint8)
    return np.unpackbits(words, bitorder="little")[:vocab_size].astype(bool)


def _sum(one: RowShape, other: RowShape) -> tuple[Int32Array, Float32Array]:
    if not other.bias_ids.size:
        return one.bias_ids, one.bias
    if not one.bias_ids.size:
        return other.bias_ids, other.bias
    ids, places = np.unique(np.concatenate((one.bias_ids, other.bias_ids)), return_inverse=True)
    total = np.zeros(len(ids), np.float32)
    np.add.at(total, places, np.concatenate((one.bias, other.bias)))
    return ids.astype(np.int32), total
