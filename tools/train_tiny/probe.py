"""How a model does on held-out items while it trains.

An answer whose every token is the best one given those before it is the answer that greedy decoding gives, so one pass
over items with their answers tells what an engine would say.
"""

from __future__ import annotations

import torch

from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.eval_tasks import TASKS, make_item
from deepinfer.entrypoints.eval_tasks.lookups import Haystack
from tools.train_tiny.data import Batch, BatchMaker, Document
from tools.train_tiny.model import Backbone
from tools.train_tiny.settings import Phase

_SEED = 7
_ROWS_AT_ONCE = 32


class Probe:
    """Held-out items of every task, a row each.

    Args:
        maker: renders items.
        encoder: the run's tokenizer.
        items: of each task.
        length: of a row, a multiple of the window; longer items are left out.
        pass_key_tokens: length of pass key questions.
    """

    def __init__(
        self, maker: BatchMaker, encoder: Tokenizer, items: int, length: int = 768, pass_key_tokens: int = 640
    ) -> None:
        self._batches: dict[str, Batch] = {}
        where = Haystack(pass_key_tokens)
        for task in TASKS:
            documents = []
            for number in range(items):
                item = make_item(
                    task, "held_out", _SEED, number, count_tokens=lambda text: len(encoder.encode(text)), where=where
                )
                document = maker.document(item)
                if len(document.ids) <= length:
                    documents.append(document)
            if documents:
                self._batches[task] = _rows(documents, length, encoder.pad_token_id)

    @torch.no_grad()
    def __call__(self, backbone: Backbone, phase: Phase, device: torch.device) -> dict[str, float]:
        """Share of items answered right, by task."""
        shares = {}
        for task, batch in self._batches.items():
            right = 0
            for start in range(0, batch.ids.shape[0], _ROWS_AT_ONCE):
                part = batch.rows(start, start + _ROWS_AT_ONCE).to(device)
                best = backbone.logits(backbone(part, phase)).argmax(-1).view(part.ids.shape)
                wrong = (best != part.ids.roll(-1, 1)) & (part.weights == 1)
                right += int((~wrong.any(1)).sum())
            shares[task] = right / batch.ids.shape[0]
        return shares


def _rows(documents: list[Document], length: int, pad: int) -> Batch:
    ids = torch.full((len(documents), length), pad)
    weights = torch.zeros(len(documents), length)
    for row, document in enumerate(documents):
        ids[row, : len(document.ids)] = torch.tensor(document.ids)
        weights[row, : len(document.ids) - 1] = torch.tensor(document.weights[1:])
    positions = torch.arange(length).repeat(len(documents), 1)
    none = torch.zeros(len(documents), 1)
    return Batch(ids, positions, torch.zeros_like(positions), weights, none.long(), none)
