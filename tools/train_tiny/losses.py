"""What is minimised: the text's next tokens, even use of experts, the indexer's distance to attention, the draft.

A batch is taken in parts that fit in memory, so a loss is a sum over a part divided by the count of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.train_tiny.data import Batch
from tools.train_tiny.draft import Anchors, Drafted, draft
from tools.train_tiny.model import Backbone
from tools.train_tiny.settings import Phase

BALANCE_SHARE = 0.003
CONFIDENCE_SHARE = 0.2
_LARGEST_AREA = 1 << 26
"""Queries times keys of the rows that are taken at once."""


@dataclass(frozen=True)
class Losses:
    """Losses of a part of a batch.

    Attributes:
        total: what gradients are taken of.
        values: [5] without gradient: text, balance, index, draft, confidence.
        counts: [4] answer tokens, right ones; drafts that could be accepted, accepted ones.
        loads: by layer, [E] share of the part's choices, weighed by the part's share of the batch.
    """

    total: Tensor
    values: Tensor
    counts: Tensor
    loads: dict[str, Tensor]


def parts(batch: Batch) -> list[Batch]:
    """A batch in parts of rows that fit in memory."""
    rows, length = batch.ids.shape
    at_once = max(_LARGEST_AREA // length**2, 1)
    return [batch.rows(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]


def losses(backbone: Backbone, part: Batch, whole: Batch, phase: Phase) -> Losses:
    """Run the model on a part of a batch."""
    share = part.ids.shape[0] / whole.ids.shape[0]
    passed = backbone(part, phase)
    logits = backbone.logits(passed)
    targets, weights = part.ids.roll(-1, 1).flatten(), part.weights.flatten()
    each = F.cross_entropy(logits, targets, reduction="none")
    text = (each * weights).sum() / whole.weights.sum().clamp(min=1)
    balance = passed.balance.loss / backbone.config.num_layers * share
    index = passed.index_loss * share
    best = logits.detach().argmax(-1)
    answers = weights == 1
    counts = [answers.sum(), ((best == targets) & answers).sum()]
    total = text + BALANCE_SHARE * balance + index
    loads = {name: load * share for name, load in passed.balance.loads.items()}
    drafting = [text.new_zeros(()), text.new_zeros(())]
    if phase.draft:
        anchors = draft_anchors(part, backbone.config.dspark_block_size)
        drafted = draft(backbone, passed, part.positions, part.documents, anchors, phase)
        drafting, kept = draft_losses(drafted, part, whole, best.view(part.ids.shape), anchors)
        uneven = drafted.balance.loss / backbone.config.num_nextn_predict_layers * share
        total = total + drafting[0] + CONFIDENCE_SHARE * drafting[1] + BALANCE_SHARE * uneven
        counts += kept
        loads |= {name: load * share for name, load in drafted.balance.loads.items()}
    else:
        counts += [counts[0].new_zeros(())] * 2
    values = torch.stack([text, balance, index, *drafting]).detach()
    return Losses(total, values, torch.stack(counts), loads)


def draft_anchors(batch: Batch, count: int) -> Anchors:
    """The anchors of a batch with the tokens behind them; what lies beyond the row is its last token."""
    rows = torch.arange(batch.ids.shape[0], device=batch.ids.device).repeat_interleave(batch.anchors.shape[1])
    places = batch.anchors.flatten()
    span = places[:, None] + torch.arange(count + 1, device=places.device)
    return Anchors(rows, places, batch.ids[rows[:, None], span.clamp(max=batch.ids.shape[1] - 1)])


def draft_losses(
    drafted: Drafted, part: Batch, whole: Batch, best: Tensor, anchors: Anchors
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and counts of drafts against what the backbone would say.

    The draft learns the backbone's own best tokens, as those are what verification compares with. A place counts as
    reached when all drafts before it were accepted; there alone its confidence means anything.

    Args:
        drafted: behind the anchors of `part`.
        part: of the batch.
        whole: the batch.
        best: [B, S] the backbone's best next tokens.
        anchors: of `part`.

    Returns:
        Token loss and confidence loss; reached places and accepted ones.
    """
    count = drafted.logits.shape[1]
    length = part.ids.shape[1]
    span = anchors.places[:, None] + torch.arange(count, device=best.device)
    inside = span.clamp(max=length - 1)
    rows = anchors.rows[:, None]
    own = part.documents[anchors.rows, anchors.places][:, None]
    taught = (span < length) & (part.documents[rows, inside] == own) & (part.weights[rows, inside] == 1)
    taught = taught & (part.anchor_counts.flatten()[:, None] > 0)
    targets = best[rows, inside]
    weights = taught.float() / (whole.anchor_counts.sum().clamp(min=1) * count)
    each = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        for logits in (drafted.logits, drafted.base)
    ]
    tokens = ((each[0] + each[1]) * weights.flatten()).sum()
    accepted = (drafted.logits.detach().argmax(-1) == targets) & taught
    follows = accepted & (targets == anchors.tokens[:, 1:])  # behind another token the text teaches nothing
    reached = F.pad(follows.int().cumprod(1)[:, :-1], (1, 0), value=1).bool() & taught
    doubt = F.binary_cross_entropy_with_logits(drafted.confidence, accepted.float(), reduction="none")
    confidence = (doubt * reached).sum() / (whole.anchor_counts.sum().clamp(min=1) * count)
    return [tokens, confidence], [reached.sum(), (accepted & reached).sum()]
