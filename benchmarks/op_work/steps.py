"""Correction of a planned step on the device.

Drafts of the step before were all accepted, so that a call changes nothing that the next one reads: any number of
replays finds positions where the model would have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepinfer.ops import step
from op_work.work import BLOCK, DRAFTS, WINDOW, WINDOW_PAGE, Families, Maker, Work

_ROWS = DRAFTS + 1
"""Of a request: its newest token and its drafts."""
_CONTEXT = 8192
_NGRAM = 4


def correction(make: Maker) -> Iterator[Work]:
    """Ids, positions and slots of requests with drafts."""
    requests, vocabulary = make.sizes.requests, make.sizes.vocabulary
    rows, ratios, pages = requests * _ROWS, (1, 2), (WINDOW + _ROWS) // WINDOW_PAGE + 2
    blocks = _CONTEXT // BLOCK
    args = {
        "input_ids": make.integers(0, vocabulary, rows),
        "positions": _CONTEXT - _ROWS + make.numbers(0, rows) % _ROWS,
        "seq_lens": make.same(_CONTEXT, requests),
        "window_slots": make.same(0, rows),
        "ratio_slots": make.same(0, len(ratios), rows),
        "cu_seqlens_q": make.numbers(0, requests + 1) * _ROWS,
        "row_to_seq": make.numbers(0, rows) // _ROWS,
        "previous": make.shuffled(requests),
        "planned": make.same(_ROWS, requests),
        "accepted": make.same(_ROWS, requests),
        "sampled_ids": make.integers(0, vocabulary, requests),
        "draft_ids": make.integers(0, vocabulary, requests, DRAFTS),
        "block_tables": make.numbers(1, 1 + requests * blocks).reshape(requests, blocks),
        "block_size": BLOCK,
        "window_tables": make.numbers(1, 1 + requests * pages).reshape(requests, pages),
        "window_first_page": make.same(_CONTEXT // WINDOW_PAGE - pages, requests),
        "window_page": WINDOW_PAGE,
        "ratios": ratios,
    }
    of_a_row = 4.0 * (2 + 3 + 1 + len(ratios) + 2)  # token, position, slot, slots of entries; their pages and blocks
    num_bytes = rows * (of_a_row + 4) + requests * 4.0 * 7
    yield Work(step.advance_step, f"{requests} x {_ROWS} rows", [args], 0.0, num_bytes)


def histories(make: Maker) -> Iterator[Work]:
    """Tokens before the first row of each request."""
    requests, vocabulary = make.sizes.requests, make.sizes.vocabulary
    rows = requests * _ROWS
    args = {
        "history": make.same(-1, requests, _NGRAM - 1),
        "previous": make.shuffled(requests),
        "tokens": make.integers(0, vocabulary, rows),
        "starts": make.numbers(0, requests) * _ROWS,
        "num_emitted": make.integers(1, _ROWS + 1, requests),
        "last_rows": make.numbers(0, requests) * _ROWS,
        "last_seqs": make.numbers(0, requests),
        "last_input_ids": make.integers(0, vocabulary, rows),
        "last_cu_seqlens_q": make.numbers(0, requests + 1) * _ROWS,
        "last_history": make.integers(0, vocabulary, requests, _NGRAM - 1),
    }
    num_bytes = requests * 4.0 * (2 * (_NGRAM - 1) + 6)
    yield Work(step.advance_history, f"{requests} requests, {_NGRAM - 1} tokens", [args], 0.0, num_bytes)


def numbers(make: Maker) -> Iterator[Work]:
    """Positions, newest tokens and indices, one of each request or row."""
    requests, rows = make.sizes.requests, make.sizes.requests * _ROWS
    same = make.same(_ROWS, requests)
    args = {"values": make.integers(0, _CONTEXT, rows), "previous": make.numbers(0, rows) // _ROWS}
    yield Work(step.rewind, f"{rows} values", [{**args, "planned": same, "accepted": same}], 0.0, 20.0 * rows)
    args = {
        "tokens": make.integers(0, make.sizes.vocabulary, rows),
        "starts": make.numbers(0, requests) * _ROWS,
        "num_emitted": make.integers(1, _ROWS + 1, requests),
    }
    yield Work(step.last_emitted, f"{requests} of {rows} tokens", [args], 0.0, 16.0 * requests)
    args = {"ids": args["tokens"], "rows": make.integers(-1, rows, rows)}
    yield Work(step.gather_ids, f"{rows} of {rows} ids", [args], 0.0, 12.0 * rows)
    yield Work(step.shift, f"{rows} values", [{"values": args["ids"], "amount": 2}], 0.0, 8.0 * rows)


FAMILIES: Final[Families] = {
    correction: ("advance_step",),
    histories: ("advance_history",),
    numbers: ("rewind", "last_emitted", "gather_ids", "shift"),
}
