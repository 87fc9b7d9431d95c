"""Rows of a draft, and its head: a step of the Markov chain, and the confidence in what it gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepinfer.ops import heads
from op_work.work import DRAFTS, HIDDEN, Families, Maker, Work

_MARKOV_RANK = 256


def rows(make: Maker) -> Iterator[Work]:
    """Ids and positions of the rows of a draft, and tokens that are sure to exist."""
    requests, vocabulary = make.sizes.requests, make.sizes.vocabulary
    ids = make.integers(-1, vocabulary, requests)
    args = {
        "anchor_ids": ids,
        "anchor_positions": make.integers(0, 1 << 17, requests),
        "seqs": make.shuffled(requests),
        "num_tokens": DRAFTS,
        "noise_id": vocabulary - 1,
    }
    num_bytes = requests * 4.0 * (3 + DRAFTS * (5 + DRAFTS))
    yield Work(heads.draft_rows, f"{requests} x {DRAFTS} rows", [args], 0.0, num_bytes)
    args = {"token_ids": ids, "fallback": vocabulary - 1}
    yield Work(heads.known_ids, f"{requests} ids", [args], 0.0, 8.0 * requests)


def chain(make: Maker) -> Iterator[Work]:
    """One place of all drafts."""
    requests, vocabulary = make.sizes.requests, make.sizes.vocabulary
    embed = make.plain(vocabulary, _MARKOV_RANK)
    tokens = {"token_ids": make.integers(0, vocabulary, requests), "embed": embed}
    args = {"base": make.single(requests, vocabulary), **tokens, "head": make.plain(vocabulary, _MARKOV_RANK)}
    yield Work(
        heads.markov_logits,
        f"{requests} x {vocabulary}, rank {_MARKOV_RANK}",
        [args],
        2.0 * requests * vocabulary * _MARKOV_RANK,
        2.0 * _MARKOV_RANK * (vocabulary + requests) + 8.0 * requests * vocabulary,
    )
    width = HIDDEN + _MARKOV_RANK
    args = {"hidden": make.plain(requests, HIDDEN), **tokens, "proj": make.single(1, width) * 0.01, "temperature": 1.0}
    num_bytes = 2.0 * requests * width + 4.0 * (width + 2 * requests)
    yield Work(heads.draft_confidence, f"{requests} x {width}", [args], 0.0, num_bytes)


FAMILIES: Final[Families] = {
    rows: ("draft_rows", "known_ids"),
    chain: ("markov_logits", "draft_confidence"),
}
