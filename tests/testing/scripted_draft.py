"""A draft whose tokens and confidences come from a function, so that a test decides what is accepted.

It speculates for any model. Since a draft is asked about sequences by their place in the step before, `bind` wraps the
model: the wrapped one keeps each token's id as a record of its own and reads whole sequences back through the block
tables, so that shared prefixes, rollbacks and preemption are seen as the engine sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deepinfer.models.interface import (
    Caches,
    CacheSpec,
    Choose,
    Draft,
    DraftBatch,
    DraftOutput,
    Model,
    ModelInfo,
    StepBatch,
    Tap,
)
from deepinfer.ops.formats import CacheFormat, PagedCache
from deepinfer.testing.puppet import TokenRecords

DraftFn = Callable[[list[int]], Sequence[Any]]
"""Called with a sequence's token ids, the newest included; gives (tokens, confidences), or also logits behind these.

Tokens and confidences are [n] and logits [n, vocab], n of any size: what is missing counts as token 0 with confidence
0, what is too much is left out. With logits, the tokens are what would be chosen without noise."""


class ScriptedDraft:
    """A draft that says what `draft_fn` says; implements `models.interface.Draft`.

    Tokens of a function that gives logits are chosen from them, one place after the other, by the engine's `choose`.
    Where the choice is another token than the function's own, the function is asked again with the tokens chosen so
    far, and what it then says holds for the places behind. Without logits its tokens are taken as they are, and where
    logits are asked for they are 0 at the token and minus infinity elsewhere.

    Args:
        draft_fn: see `DraftFn`.
        num_tokens: tokens of a draft, D.
    """

    def __init__(self, draft_fn: DraftFn, num_tokens: int = 5) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self._draft_fn = draft_fn
        self._num_tokens = num_tokens
        self._model: _TokenKeeper | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of a draft, D."""
        return self._num_tokens

    def bind(self, model: Model) -> Model:
        """The same model with this draft, to be given to the engine in its place.

        Raises:
            ValueError: this draft speculates for a model already; its sequences are known by their place in one step.
        """
        if self._model is not None:
            raise ValueError("this ScriptedDraft is bound to a model already; make a second one")
        self._model = _TokenKeeper(model, self)
        return self._model

    def new_scratch(self, num_seqs: int) -> PagedCache:
        """A record per sequence that nobody uses: a function keeps nothing on the device."""
        return PagedCache(torch.zeros((num_seqs, 4), dtype=torch.uint8), CacheFormat("f32", 1), 1)

    def draft(
        self,
        batch: DraftBatch,
        caches: Caches,
        choose: Choose | None = None,
        *,
        temperatures: Sequence[float] = (),
        with_logits: bool = False,
        tap: Tap | None = None,
    ) -> DraftOutput:
        """Ask the function about every sequence.

        Args:
            batch: the sequences; `seqs` names rows of the step that the bound model ran last.
            caches: not read.
            choose: takes a token from logits; used for functions that give some.
            temperatures: [D], divide the logits of the confidences; empty for 1.
            with_logits: return the logits as well.
            tap: not called.

        Raises:
            ValueError: `temperatures` has another length, or the function gave what is no draft.
            RuntimeError: no model is bound.
        """
        if self._model is None:
            raise RuntimeError("bind this ScriptedDraft to a model first: engine_model = draft.bind(model)")
        if len(temperatures) not in (0, self._num_tokens):
            raise ValueError(f"temperatures has {len(temperatures)} entries for {self._num_tokens} drafted tokens")
        vocab = self._model.info.vocab_size
        guesses = [self._begin(batch, i) for i in range(len(batch.anchor_ids))]
        shape = len(guesses), self._num_tokens
        tokens, confidences = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        logits = np.full((*shape, vocab), -np.inf, np.float32)
        for place in range(self._num_tokens):
            for i, guess in enumerate(guesses):
                tokens[i, place], confidences[i, place] = guess.token(place), guess.confidence(place)
                logits[i, place] = guess.row(place, vocab)
            if choose is not None and any(guess.has_logits for guess in guesses):
                chosen = choose(place, torch.from_numpy(logits[:, place].copy())).numpy()
                for i, guess in enumerate(guesses):
                    if guess.has_logits and chosen[i] >= 0:
                        tokens[i, place] = chosen[i]
            for i, guess in enumerate(guesses):
                if guess.has_logits and place + 1 < self._num_tokens and tokens[i, place] != guess.token(place):
                    guess.ask(tokens[i, : place + 1].tolist())
        if temperatures:
            with np.errstate(divide="ignore", over="ignore"):  # 0 and 1 stay what they are
                odds = np.log(confidences) - np.log1p(-confidences)
                confidences = (1 / (1 + np.exp(-odds / np.asarray(temperatures, np.float32)))).astype(np.float32)
        return DraftOutput(
            torch.from_numpy(tokens),
            torch.from_numpy(confidences),
            torch.from_numpy(logits) if with_logits else None,
        )

    def _begin(self, batch: DraftBatch, i: int) -> _Guess:
        assert self._model is not None, "draft checks it"
        anchor = int(batch.anchor_ids[i])
        guess = _Guess(self._draft_fn, self._model.info.vocab_size)
        if anchor >= 0:
            known = self._model.tokens(int(batch.seqs[i]), int(batch.anchor_positions[i]))
            guess.prefix = [*known, anchor]
            guess.ask([])
        return guess


@dataclass
class _Guess:
    """What the function said about one sequence; `first` is the place that its newest answer begins at."""

    draft_fn: DraftFn
    vocab_size: int
    prefix: list[int] | None = None
    first: int = 0
    tokens: Sequence[int] = ()
    confidences: Sequence[float] = ()
    logits: NDArray[np.float32] | None = None

    @property
    def has_logits(self) -> bool:
        return self.logits is not None

    def ask(self, chosen: list[int]) -> None:
        """Ask what follows the prefix and the tokens chosen behind it."""
        assert self.prefix is not None, "sequences without an anchor are not asked about"
        answer = self.draft_fn(self.prefix + chosen)
        if len(answer) not in (2, 3):
            raise ValueError(f"draft_fn gives (tokens, confidences) or (tokens, confidences, logits), got {answer!r}")
        self.first = len(chosen)
        self.tokens = [int(t) for t in answer[0]]
        self.confidences = [float(c) for c in answer[1]]
        self.logits = _logits(answer[2], len(self.tokens), self.vocab_size) if len(answer) == 3 else None
        if len(self.tokens) != len(self.confidences):
            raise ValueError(f"draft_fn gave {len(self.tokens)} tokens and {len(self.confidences)} confidences")
        if not all(0 <= t < self.vocab_size for t in self.tokens):
            raise ValueError(f"draft_fn gave tokens {self.tokens}; ids run from 0 to {self.vocab_size - 1}")

    def token(self, place: int) -> int:
        at = place - self.first
        return self.tokens[at] if at < len(self.tokens) else 0

    def confidence(self, place: int) -> float:
        at = place - self.first
        return self.confidences[at] if at < len(self.confidences) else 0.0

    def row(self, place: int, vocab: int) -> NDArray[np.float32]:
        at = place - self.first
        if self.logits is not None and at < len(self.logits):
            return cast(NDArray[np.float32], self.logits[at])
        row = np.full(vocab, -np.inf, np.float32)
        row[self.token(place)] = 0
        return row


class _TokenKeeper:
    """A model that also keeps token ids as records, and knows the sequences of its last step."""

    def __init__(self, model: Model, draft: Draft) -> None:
        self._records = TokenRecords("scripted_draft.token")
        spec = model.cache_spec
        self.info: ModelInfo = model.info
        self.cache_spec: CacheSpec = replace(spec, block_records=(*spec.block_records, self._records.spec))
        self.draft: Draft | None = draft
        self._model = model
        self._step: tuple[StepBatch, Caches] | None = None

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Store the ids of all rows, then run the model."""
        self._records.store(batch, caches)
        self._step = batch, caches
        return self._model.forward(batch, caches, tap)

    def tokens(self, seq: int, length: int) -> list[int]:
        """The first `length` token ids of a sequence of the last step."""
        if self._step is None:
            raise RuntimeError("no step has run yet, so no sequence is known")
        return self._records.read(*self._step, seq, length)


def _logits(values: ArrayLike, rows: int, vocab: int) -> NDArray[np.float32]:
    logits = np.asarray(values, np.float32)
    if logits.shape != (rows, vocab):
        raise ValueError(f"draft_fn gave logits of shape {logits.shape} for {rows} tokens of {vocab} ids")
    return logits
