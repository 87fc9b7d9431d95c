"""Batches: documents packed into rows, and for each token how much its successor counts.

Tasks come from the training split of `deepinfer.entrypoints.eval_tasks`, rendered by the project's own chat format.
A batch follows from (seed, step) and the text of `corpus`, so nothing about data needs to be saved for a resume in the
same tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.eval_tasks import Item, make_item
from deepinfer.entrypoints.eval_tasks.lookups import Haystack
from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from tools.train_tiny.corpus import natural_text
from tools.train_tiny.settings import ALIGNMENT, Plan

PROMPT_WEIGHT = 0.05
"""What a token of a prompt counts: random content cannot be foretold, but its form can."""
_TEXT_WEIGHT = 0.3
_MIN_PASS_KEY, _CHAT_ROOM = 128, 24

_SHORT = {
    "copy": 2.0,
    "reverse": 2.0,
    "sort": 2.0,
    "add": 3.0,
    "compare": 1.0,
    "think": 1.5,
    "lookup": 2.0,
    "extract": 2.0,
    "pass_key": 0.5,
    "text": 0.7,
}
_LONG = {"tool_call": 1.0, "pass_key": 1.0}
_LONG_ROOM = 672
"""Tokens that a tool call with its schemas fits in."""


@dataclass(frozen=True)
class Batch:
    """Packed rows, B of length S.

    Attributes:
        ids: [B, S] int64.
        positions: [B, S] int64, of each token in its document. A document begins at a multiple of `ALIGNMENT`.
        documents: [B, S] int64, number of the document in the row.
        weights: [B, S] float32, what the prediction of the token's successor counts; 0 at a document's end.
        anchors: [B, A] int64 places in the row behind which the draft is trained: tokens of answers.
        anchor_counts: [B, A] float32, 0 where a row has fewer.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    weights: Tensor
    anchors: Tensor
    anchor_counts: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop)."""
        return Batch(*(getattr(self, f.name)[start:stop] for f in fields(self)))


@dataclass(frozen=True)
class Document:
    """Token ids, and what the prediction of each counts."""

    ids: list[int]
    weights: list[float]


class BatchMaker:
    """Makes the batch of any step.

    Args:
        encoder: the run's tokenizer.
        plan: lengths and seed.
    """

    def __init__(self, encoder: Tokenizer, plan: Plan) -> None:
        self._encoder = encoder
        self._plan = plan
        self._text = [paragraph for source in natural_text() for paragraph in source.paragraphs]

    def __call__(self, step: int) -> Batch:
        """The batch of step `step`."""
        length = self._plan.row_length(step)
        rows = [self._row(step, row, length) for row in range(max(self._plan.tokens // length, 1))]
        return Batch(*(torch.stack(tensors) for tensors in zip(*rows, strict=True)))

    def document(self, item: Item) -> Document:
        """An item with its answer."""
        prompt = encode_chat(item.request).to_ids(self._encoder)
        ids = encode_chat(item.answered_request, add_generation_prompt=False).to_ids(self._encoder)
        assert ids[: len(prompt)] == prompt, "an answer follows its prompt"
        return Document(ids, [PROMPT_WEIGHT] * len(prompt) + [1.0] * (len(ids) - len(prompt)))

    def _row(self, step: int, row: int, length: int) -> tuple[Tensor, ...]:
        rng = random.Random(f"{self._plan.seed} {step} {row}")
        pad = self._encoder.pad_token_id
        ids: list[int] = []
        positions: list[int] = []
        documents: list[int] = []
        weights: list[float] = []
        for number, document in enumerate(self._documents(rng, step, row, length)):
            count = len(document.ids)
            room = -(-count // ALIGNMENT) * ALIGNMENT
            ids += document.ids + [pad] * (room - count)
            positions += range(room)
            documents += [number] * room
            weights += document.weights[1:] + [0.0] * (room - count + 1)
        anchors, counts = self._anchors(rng, weights, length)
        return (
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(documents, dtype=torch.int64),
            torch.tensor(weights, dtype=torch.float32),
            torch.tensor(anchors, dtype=torch.int64),
            torch.tensor(counts, dtype=torch.float32),
        )

    def _documents(self, rng: random.Random, step: int, row: int, length: int) -> Iterator[Document]:
        """Documents that fill a row, the last one cut where the row ends."""
        left, number = length, 0
        while left > 0:
            # Long rows hold long documents first, and others where those no longer fit.
            mixture = _LONG if left > _LONG_ROOM and (number == 0 or rng.random() < 0.7) else _SHORT
            task = rng.choices([*mixture], [*mixture.values()])[0]
            document = self._draw(rng, task, (step * 4096 + row) * 256 + number, left)
            number += 1
            if len(document.ids) > left:
                document = Document(document.ids[:left], document.weights[:left])
            yield document
            left -= -(-len(document.ids) // ALIGNMENT) * ALIGNMENT

    def _draw(self, rng: random.Random, task: str, number: int, left: int) -> Document:
        if task == "text":
            ids = [self._encoder.bos_token_id, *self._encoder.encode(rng.choice(self._text))]
            return Document(ids, [0.0] + [_TEXT_WEIGHT] * (len(ids) - 1))
        where = None
        if task == "pass_key":
            longest = left - _CHAT_ROOM if left > self._plan.row else min(left - _CHAT_ROOM, self._plan.row // 2)
            if longest < _MIN_PASS_KEY:
                task = "add"
            else:
                where = Haystack(rng.randint(max(_MIN_PASS_KEY, longest // 2), longest))
        item = make_item(task, "train", self._plan.seed, number, count_tokens=self._count, where=where)
        return self.document(item)

    def _count(self, text: str) -> int:
        return len(self._encoder.encode(text))

    def _anchors(self, rng: random.Random, weights: list[float], length: int) -> tuple[list[int], list[float]]:
        count = max(self._plan.anchors * length // 512, 1)
        # The newest token was sampled, so what predicts it is part of an answer.
        answers = [place for place in range(1, length) if weights[place - 1] == 1.0 and weights[place] == 1.0]
        chosen = rng.sample(answers, min(count, len(answers)))
        return chosen + [0] * (count - len(chosen)), [1.0] * len(chosen) + [0.0] * (count - len(chosen))
