"""From logits to tokens: masks, biases, penalties, the draw, verified drafts, and logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops import sampling, shaping, verification
from op_work.work import DRAFTS, Families, Maker, Peer, Work


def draws(make: Maker) -> Iterator[Work]:
    """Tokens of a decode step: drawn from all ids or from few, or the best ones."""
    rows, ids = make.sizes.few, make.sizes.vocabulary
    logits = _logits(make, rows)
    keys = _keys(make, rows)
    size = 4.0 * rows * ids
    for what, filters in (
        ("no filter", _filters(make, rows)),
        ("top-k 50, top-p 0.95", _filters(make, rows, top_k=50, top_p=0.95)),
        ("top-p 0.95", _filters(make, rows, top_p=0.95)),
        ("greedy", _filters(make, rows, temperature=0.0)),
    ):
        args, shape = {"logits": logits, **filters}, f"{rows} x {ids}, {what}"
        peer = Peer("torch softmax, exponential race", _race, lambda: [{"logits": logits}])
        yield Work(sampling.sample, shape, [{**args, **keys}], 0.0, size, [peer] if what == "no filter" else [])
        if what.startswith("top"):
            yield Work(sampling.process_logits, shape, [args], 0.0, 2 * size)


def verified(make: Maker) -> Iterator[Work]:
    """Drafts that are all kept, so that every row counts."""
    requests, ids = make.sizes.requests, make.sizes.vocabulary
    rows = requests * (DRAFTS + 1)
    logits, drafts = _logits(make, rows), make.integers(0, ids, rows)
    logits.scatter_(1, drafts.long()[:, None], 100.0)  # the draw cannot miss them
    last = make.numbers(0, rows) % (DRAFTS + 1) == DRAFTS
    args = {
        "logits": logits,
        "cu_seqlens": make.numbers(0, requests + 1) * (DRAFTS + 1),
        "draft_ids": torch.where(last, -1, drafts),
        **_filters(make, requests, top_p=0.95),
        **_keys(make, requests),
    }
    shape, size = f"{requests} x {DRAFTS + 1} x {ids}", 4.0 * rows * ids
    yield Work(verification.verify, f"{shape}, coupled", [{**args, "mode": "coupled"}], 0.0, size)
    args = {**args, "mode": "rejection", "draft_logits": logits.clone()}
    num_bytes = size * (1 + DRAFTS / (DRAFTS + 1))
    yield Work(verification.verify, f"{shape}, rejection", [args], 0.0, num_bytes)


def masks(make: Maker) -> Iterator[Work]:
    """Grammars that forbid nearly every id."""
    rows, ids = make.sizes.few, make.sizes.vocabulary
    words = make.integers(0, 1 << 30, rows, -(-ids // 32))
    mask = torch.where(make.integers(0, 64, *words.shape) == 0, words, 0)
    args = {"logits": make.single(rows, ids), "mask": mask, "rows": make.shuffled(rows)}
    yield Work(sampling.apply_bitmask, f"{rows} x {ids}", [args], 0.0, rows * (4.0 * ids + ids / 8 + 4))


def changes(make: Maker) -> Iterator[Work]:
    """Biases of some ids of each row, and penalties of those that its request holds already."""
    rows, ids = make.sizes.few, make.sizes.vocabulary
    for count in (16, 1024):
        each = min(count, ids)
        entry = make.numbers(0, rows * each)
        logits = make.single(rows, ids)
        # an id of every stretch of the vocabulary, another one in each row
        places = {"rows": entry // each, "ids": (entry % each * (ids // each) + entry // each) % ids}
        if count == 16:
            args = {"logits": logits, **places, "values": make.single(len(entry)) * 1e-3}
            yield Work(shaping.adjust_logits, f"{rows} x {each} ids", [args], 0.0, 20.0 * len(entry))
            continue
        args = {
            "logits": logits,
            **places,
            "counts": make.integers(0, 5, len(entry)),
            "repetition": 1 + make.single(rows) * 1e-3,  # calls multiply
            "frequency": make.single(rows),
            "presence": make.single(rows),
        }
        yield Work(shaping.apply_penalties, f"{rows} x {each} ids", [args], 0.0, 20.0 * len(entry) + 12.0 * rows)


def logprobs(make: Maker) -> Iterator[Work]:
    """Logprobs and ranks of what was drawn, of the best, and of ids that were asked for."""
    rows, ids = make.sizes.few, make.sizes.vocabulary
    logits = _logits(make, rows)
    size, tokens = 4.0 * rows * ids, make.integers(0, ids, rows)
    peer = Peer("torch.log_softmax alone", torch.log_softmax, lambda: [{"input": logits, "dim": 1}])
    for best in (0, 5):
        args = {"logits": logits, "tokens": tokens, "num_top": best}
        peers = [peer] if best == 0 else []
        yield Work(sampling.token_logprobs, f"{rows} x {ids}, best {best}", [args], 0.0, size, peers)
    args = {"logits": logits, "ids": make.integers(0, ids, rows, 4)}
    yield Work(shaping.logprobs_of, f"{rows} x {ids}, 4 ids", [args], 0.0, size)


def _logits(make: Maker, rows: int) -> Tensor:
    """Of float32, as the head gives them: in fewer bits many ids would be equally good."""
    return 3 * torch.randn(rows, make.sizes.vocabulary, generator=make.gen, device=make.device)


def _filters(make: Maker, rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> dict[str, Any]:
    return {
        "temperature": make.same(temperature, rows, dtype=torch.float32),
        "top_k": make.same(top_k, rows),
        "top_p": make.same(top_p, rows, dtype=torch.float32),
        "min_p": make.same(0.0, rows, dtype=torch.float32),
    }


def _keys(make: Maker, rows: int) -> dict[str, Any]:
    return {
        "seeds": make.numbers(0, rows).long() * 0x9E3779B97F4A,
        "output_index": make.integers(0, 4096, rows),
        "choice": make.same(0, rows),
    }


def _race(logits: Tensor) -> Tensor:
    """A draw in proportion to probabilities: the first of exponential arrivals."""
    chances = torch.softmax(logits, 1)
    return chances.div_(torch.empty_like(chances).exponential_()).argmax(1)


FAMILIES: Final[Families] = {
    draws: ("process_logits", "sample"),
    verified: ("verify",),
    masks: ("apply_bitmask",),
    changes: ("adjust_logits", "apply_penalties"),
    logprobs: ("token_logprobs", "logprobs_of"),
}
