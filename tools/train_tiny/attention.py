"""Attention over packed rows: the window in bands, compressed entries with masks, and the indexer's scores.

Compressed entries of a packed row are numbered through the whole row; documents begin at multiples of every ratio, so
a document's entries are consecutive and masks by document keep them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepinfer.ops.index import block_max, topk_select

_QUERIES_AT_ONCE = 512
"""Rows longer than this are taken in pieces, and scores made again for the gradient."""


@dataclass(frozen=True)
class Entries:
    """Compressed entries that queries may see.

    Attributes:
        values: [B, C, D].
        ratio: tokens of an entry.
        selected: [B, S, k] int64 chosen entries, C standing for none; None to see all visible ones.
    """

    values: Tensor
    ratio: int
    selected: Tensor | None = None


@dataclass(frozen=True)
class View:
    """What is common to all queries of a layer.

    Attributes:
        documents: [B, S].
        sink: [heads].
        window: positions a query sees, itself included.
        shares: whether the probabilities of entries are wanted.
    """

    documents: Tensor
    sink: Tensor
    window: int
    shares: bool


Softmax = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""The form of `functions.probabilities`."""


def attend(
    q: Tensor, keys: Tensor, view: View, entries: Entries | None, softmax: Softmax
) -> tuple[Tensor, Tensor | None]:
    """Causal attention inside documents; key equals value.

    Args:
        q: [B, S, heads, D]; S is a multiple of the window.
        keys: [B, S, D] window KV of this layer.
        view: what queries see.
        entries: compressed ones, or None for a window-only layer.
        softmax: `functions.probabilities`.

    Returns:
        [B, S, heads, D], and the probabilities of entries summed over heads, [B, S, C] float32 without gradient; None
        where they are not wanted.
    """
    length = q.shape[1]
    step = max(_QUERIES_AT_ONCE // view.window, 1) * view.window
    if length <= step:
        return _attend_rows(q, keys, view, entries, softmax, 0)
    outputs, shares = [], []
    for start in range(0, length, step):
        o, p = _again(_attend_rows, q[:, start : start + step], keys, view, entries, softmax, start)
        outputs.append(o)
        shares.append(p)
    return torch.cat(outputs, 1), torch.cat(shares, 1) if shares[0] is not None else None


def _again(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's results, made again for their gradients; it draws nothing."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(
    q: Tensor, keys: Tensor, view: View, entries: Entries | None, softmax: Softmax, start: int
) -> tuple[Tensor, Tensor | None]:
    rows, length, heads, dim = q.shape
    bands = q.unflatten(1, (-1, view.window))
    band_keys, seen = _bands(keys, view.documents, view.window, start, length)
    scores, mask = torch.einsum("bnwhd,bnkd->bnhwk", bands, band_keys), seen[:, :, None]
    if entries is not None:
        mine = torch.einsum("bnwhd,bcd->bnhwc", bands, entries.values)
        visible = _visible(view.documents, entries, start, length).unflatten(1, (-1, view.window))[:, :, None]
        scores, mask = torch.cat((scores, mine), -1), torch.cat((mask, visible), -1)
    p = softmax(scores, mask, view.sink, dim**-0.5)
    width = band_keys.shape[2]
    o = torch.einsum("bnhwk,bnkd->bnwhd", p[..., :width], band_keys)
    if entries is not None:
        o = o + torch.einsum("bnhwc,bcd->bnwhd", p[..., width:], entries.values)
    shares = None
    if entries is not None and view.shares:
        shares = p[..., width:].detach().float().sum(2).flatten(1, 2)
    return o.reshape(rows, length, heads, dim), shares


def _bands(keys: Tensor, documents: Tensor, window: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys [B, n, 2W, D] of each stretch of W queries and the stretch before it, and what queries see [B, n, W, 2W]."""
    stop = start + length
    stretches = F.pad(keys, (0, 0, window, 0))[:, start : stop + window].unflatten(1, (-1, window))
    places = torch.arange(2 * window, device=keys.device)
    behind = places[None, :] - places[:window, None]  # the query at w stands at place w + W
    in_window = (behind > 0) & (behind <= window)
    theirs = F.pad(documents, (window, 0), value=-1)[:, start : stop + window].unfold(1, 2 * window, window)
    ours = documents[:, start:stop].unflatten(1, (-1, window))
    both = torch.cat((stretches[:, :-1], stretches[:, 1:]), 2)
    return both, in_window & (theirs[:, :, None] == ours[..., None])


def visible_entries(documents: Tensor, ratio: int, start: int, length: int) -> Tensor:
    """[B, length, C] bool: complete entries of the query's own document, of queries from `start` on."""
    place = torch.arange(start, start + length, device=documents.device)
    last = torch.arange(documents.shape[1] // ratio, device=documents.device) * ratio + ratio - 1
    same = documents[:, start : start + length, None] == documents[:, None, ::ratio]
    return same & (last <= place[:, None])


def _visible(documents: Tensor, entries: Entries, start: int, length: int) -> Tensor:
    if entries.selected is None:
        return visible_entries(documents, entries.ratio, start, length)
    chosen = entries.selected[:, start : start + length]
    count = entries.values.shape[1]
    seen = torch.zeros((*chosen.shape[:2], count + 1), dtype=torch.bool, device=chosen.device)
    return seen.scatter(2, chosen, True)[..., :count]


def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor, documents: Tensor, ratio: int) -> Tensor:
    """Scores `sum_h w_h relu(q_h . k_j)`: [B, S, C] float32, -inf where an entry is not visible.

    Args:
        q: [B, S, heads, D], rounded.
        keys: [B, C, D], rounded.
        head_weights: [B, S, heads], scaled.
        documents: [B, S].
        ratio: tokens of an entry.
    """
    length = q.shape[1]
    if length <= _QUERIES_AT_ONCE:
        return _score_rows(q, keys, head_weights, documents, ratio, 0)
    pieces = []
    for start in range(0, length, _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        piece = _again(_score_rows, q[:, part], keys, head_weights[:, part], documents, ratio, start)
        pieces.append(piece)
    return torch.cat(pieces, 1)


def _score_rows(q: Tensor, keys: Tensor, head_weights: Tensor, documents: Tensor, ratio: int, start: int) -> Tensor:
    dots = torch.einsum("bshd,bcd->bshc", q, keys).float().relu()
    scores = torch.einsum("bshc,bsh->bsc", dots, head_weights.float())
    return scores.masked_fill(~visible_entries(documents, ratio, start, q.shape[1]), -torch.inf)


@torch.no_grad()
def select(scores: Tensor, topk: int, ratio: int, *, exact: bool) -> Tensor:
    """[B, S, topk] int64 entries with the best scores, C for none.

    Args:
        scores: of `index_scores`; -inf is never chosen.
        topk: how many.
        ratio: tokens of an entry.
        exact: of equal scores take the earlier entry, as the engine does; otherwise any, in a fraction of the time.
    """
    rows, length, count = scores.shape
    if exact:
        chosen = topk_select(scores.flatten(0, 1), topk, _visible_lens(rows, length, ratio, scores.device)).long()
        return torch.where(chosen < 0, count, chosen).view(rows, length, topk)
    best = scores.topk(min(topk, count), dim=-1, sorted=False)
    return torch.where(best.values > -torch.inf, best.indices, count)


@torch.no_grad()
def candidates(scores: Tensor, num_blocks: int, block: int, ratio: int) -> Tensor:
    """[B, S, C] bool: entries of the best candidate blocks, the newest block among them."""
    rows, length, count = scores.shape
    best, valid = block_max(scores.flatten(0, 1), _visible_lens(rows, length, ratio, scores.device), block)
    width = best.shape[1]
    chosen = topk_select(best, min(num_blocks, width), valid).long()
    seen = torch.zeros((rows * length, width + 1), dtype=torch.bool, device=scores.device)
    seen.scatter_(1, torch.where(chosen < 0, width, chosen), True)
    return seen[:, :-1].repeat_interleave(block, 1)[:, :count].reshape(rows, length, count)


def _visible_lens(rows: int, length: int, ratio: int, device: torch.device) -> Tensor:
    """[B * S] int32: one past the newest entry of each query, counted from the start of the packed row."""
    place = torch.arange(length, device=device)
    return ((place + 1) // ratio).int().repeat(rows)


def distillation(scores: Tensor, shares: Tensor, seen: Tensor | None) -> Tensor:
    """Mean over queries of KL(attention || indexer), both over the entries that the attention saw.

    Args:
        scores: of `index_scores`, with gradient.
        shares: [B, S, C] probabilities of entries, summed over heads and layers that share the choice.
        seen: [B, S, C] bool, the selection; None where everything visible was seen.
    """
    masked = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    total = shares.sum(-1)
    # A query without entries has nothing to teach; elsewhere softmax is over at least one finite score.
    counts = (masked > -torch.inf).any(-1) & (total > 0)
    target = shares / total.clamp(min=1e-20)[..., None]
    log_q = masked.masked_fill(~counts[..., None], 0.0).log_softmax(-1)
    terms = target * (target.clamp(min=1e-20).log() - log_q.clamp(min=-1e4))
    return (terms.sum(-1) * counts).sum() / counts.sum().clamp(min=1)
