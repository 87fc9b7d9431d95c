"""Conformance cases of the sampling ops.

Every backend must give equal tokens, but its fp32 exponentials and logarithms may differ in the last bits. So a case
is "settled" before use: arguments are drawn anew until no two best sums are close, and until scaling all logits by a
little changes no result. Scaling keeps ties equal, so tie rules are tested all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.ops.spec import Case, OpSpec

REAL_VOCABULARY = 129280
SETTLED_GAP = 1e-3
SETTLED_SCALE = 2e-6

_ROWS = ("logits", "temperature", "top_k", "top_p", "min_p")
_SAMPLE_ROWS = (*_ROWS, "seeds", "output_index", "choice", "anchor")

# temperature, top_k, top_p, min_p: greedy, nothing, each filter alone, all of them, all off by their other values
_PROFILES = (
    (0.0, 0, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.1),
    (0.9, 40, 0.95, 0.02),
    (2.0, 10**6, 1.5, -1.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (0.0, 3, 0.5, 0.5),
)


def apply_bitmask_cases() -> Iterable[Case]:
    """Zero rows, one row, ragged last words, unconstrained rows, an empty mask, repeated mask rows."""

    def make(gen: Generator, num_rows: int, num_ids: int, num_masks: int) -> dict[str, Any]:
        words = torch.randint(-(2**31), 2**31, (num_masks, (num_ids + 31) // 32), generator=gen)
        words[0] = 0  # forbids everything
        rows = torch.randint(-1, num_masks, (num_rows,), generator=gen)
        logits = torch.randn(num_rows, num_ids, generator=gen)
        logits.view(-1)[::7] = math.nan
        return {"logits": logits, "mask": words.int(), "rows": rows.int()}

    for name, shape, tag in _shapes():
        yield Case(name, partial(make, num_rows=shape[0], num_ids=shape[1], num_masks=3), tag, ("logits", "rows"))


def process_logits_cases() -> Iterable[Case]:
    """Every filter alone and together, ties, holes, broken rows."""
    for name, shape, tag in _shapes():
        yield Case(name, partial(_settled_filters, shape=shape, dress=_plain), tag, _ROWS)
    for name, dress in _DRESSES.items():
        yield Case(name, partial(_settled_filters, shape=(len(_PROFILES) * 2, 37), dress=dress), "small", _ROWS)


def sample_cases() -> Iterable[Case]:
    """As `process_logits`, with seeds above 2^63, every purpose and far output indices."""

    def make(gen: Generator, shape: tuple[int, int], dress: Callable[[Tensor], None], purpose: int) -> dict[str, Any]:
        from deepinfer.ops.sampling import best_gap, sample

        def draw() -> dict[str, Any]:
            args = {**_filters(gen, shape, dress), **_keys(gen, shape[0])}
            return {**args, "purpose": purpose, "anchor": _integers(gen, shape[0], 1000)}

        return _settled(draw, sample, lambda args: bool((best_gap(**args) > SETTLED_GAP).all()))

    for name, shape, tag in _shapes():
        yield Case(name, partial(make, shape=shape, dress=_plain, purpose=0), tag, _SAMPLE_ROWS)
    for name, dress in _DRESSES.items():
        shape = (len(_PROFILES) * 2, 37)
        yield Case(name, partial(make, shape=shape, dress=dress, purpose=0), "small", _SAMPLE_ROWS)
    for purpose in (1, 2, 3):
        yield Case(
            f"purpose {purpose}", partial(make, shape=(11, 64), dress=_plain, purpose=purpose), "small", _SAMPLE_ROWS
        )


def token_logprobs_cases() -> Iterable[Case]:
    """num_top of 0, 1 and V; ties across the edge of the best; tokens outside the vocabulary; broken rows."""

    def make(gen: Generator, shape: tuple[int, int], num_top: int, dress: Callable[[Tensor], None]) -> dict[str, Any]:
        logits = torch.randn(*shape, generator=gen) * 4
        dress(logits)
        tokens = torch.randint(0, shape[1], (shape[0],), generator=gen).int()
        tokens[3::7] = -1
        tokens[5::7] = shape[1]
        return {"logits": logits, "tokens": tokens, "num_top": num_top}

    rows = ("logits", "tokens")
    for name, shape, tag in _shapes():
        for num_top in (0, 5) if shape[1] > 5 else (0, 1):
            yield Case(f"{name}, top {num_top}", partial(make, shape=shape, num_top=num_top, dress=_plain), tag, rows)
    for name, dress in _DRESSES.items():
        for num_top in (1, 37):
            yield Case(
                f"{name}, top {num_top}", partial(make, shape=(22, 37), num_top=num_top, dress=dress), "small", rows
            )


def verify_cases() -> Iterable[Case]:
    """Both modes; requests of 0, 1 and several rows; right, wrong, missing and impossible drafts; broken rows."""
    lengths: dict[str, tuple[int, ...]] = {
        "no requests": (),
        "one row": (1,),
        "ragged": (3, 0, 1, 6, 2, 4, 1, 8, 3, 5, 6),
    }
    for mode in ("coupled", "rejection"):
        for name, rows in lengths.items():
            for num_ids in (5, 61):
                make = partial(_settled_verify, lengths=rows, num_ids=num_ids, mode=mode, dress=_plain)
                yield Case(f"{mode}, {name}, {num_ids} ids", make)
        for name, dress in _DRESSES.items():
            yield Case(
                f"{mode}, {name}", partial(_settled_verify, lengths=(4,) * 11, num_ids=37, mode=mode, dress=dress)
            )
        make = partial(_settled_verify, lengths=(6, 6), num_ids=REAL_VOCABULARY, mode=mode, dress=_plain)
        yield Case(f"{mode}, model vocabulary", make, "real")


def _settled_verify(
    gen: Generator, lengths: tuple[int, ...], num_ids: int, mode: str, dress: Callable[[Tensor], None]
) -> dict[str, Any]:
    from deepinfer.ops.sampling import best_gap, sample
    from deepinfer.ops.verification import verify

    num_rows, num_requests = sum(lengths), len(lengths)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).int()

    def per_row(args: dict[str, Any]) -> dict[str, Any]:
        row_to_seq = torch.repeat_interleave(torch.arange(num_requests), torch.tensor(lengths, dtype=torch.int64))
        row_args = {key: value[row_to_seq] for key, value in args.items() if key in _SAMPLE_ROWS and key != "logits"}
        place = torch.arange(num_rows) - cu_seqlens.long()[row_to_seq]
        return {**row_args, "output_index": (row_args["output_index"] + place).int(), "logits": args["logits"]}

    def draw() -> dict[str, Any]:
        filters = _filters(gen, (num_requests, num_ids), _plain)
        logits = torch.randn(num_rows, num_ids, generator=gen) * 4
        dress(logits)
        args = {**filters, **_keys(gen, num_requests), "logits": logits, "cu_seqlens": cu_seqlens, "mode": mode}
        draft_ids = sample(**per_row(args))  # what coupled mode will accept
        wrong = torch.rand(num_rows, generator=gen) < 0.2
        draft_ids[wrong] = torch.randint(-1, num_ids, (int(wrong.sum()),), generator=gen).int()
        if mode == "rejection":
            draft_logits = logits + torch.randn(num_rows, num_ids, generator=gen)
            draft_logits[5::9] = math.nan
            args["draft_logits"] = draft_logits
        return {**args, "draft_ids": draft_ids}

    return _settled(draw, verify, lambda args: bool((best_gap(**per_row(args)) > SETTLED_GAP).all()))


def _settled_filters(gen: Generator, shape: tuple[int, int], dress: Callable[[Tensor], None]) -> dict[str, Any]:
    from deepinfer.ops.sampling import process_logits

    def kept(**args: Any) -> Tensor:
        return process_logits(**args).isfinite()

    return _settled(lambda: _filters(gen, shape, dress), kept, lambda args: True)


def _settled(
    draw: Callable[[], dict[str, Any]],
    op: Callable[..., Any] | OpSpec[..., Any],
    accept: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Arguments whose result does not hang on the last bits of anything."""
    for _ in range(100):
        args = draw()
        if not accept(args):
            continue
        want = op(**args)
        variants = [
            {**args, name: args[name] * (1 + sign * SETTLED_SCALE)}
            for name in ("logits", "draft_logits")
            for sign in (-1, 1)
            if name in args
        ]
        if all(_equal(op(**variant), want) for variant in variants):
            return args
    raise AssertionError("no settled arguments in 100 draws: the case is made of close calls")


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, tuple):
        return all(_equal(g, w) for g, w in zip(got, want, strict=True))
    return torch.equal(got, want)


def _filters(gen: Generator, shape: tuple[int, int], dress: Callable[[Tensor], None]) -> dict[str, Any]:
    num_rows, _ = shape
    logits = torch.randn(*shape, generator=gen) * 4
    dress(logits)
    profiles = [_PROFILES[(row + 1) % len(_PROFILES)] for row in range(num_rows)]
    temperature, top_k, top_p, min_p = zip(*profiles, strict=True) if profiles else ((), (), (), ())
    return {
        "logits": logits,
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p, dtype=torch.float32),
        "min_p": torch.tensor(min_p, dtype=torch.float32),
    }


def _keys(gen: Generator, num_rows: int) -> dict[str, Any]:
    return {
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=gen),
        "output_index": _integers(gen, num_rows, 2**20),
        "choice": _integers(gen, num_rows, 4),
    }


def _integers(gen: Generator, num_rows: int, high: int) -> Tensor:
    return torch.randint(0, high, (num_rows,), generator=gen).int()


def _shapes() -> Iterable[tuple[str, tuple[int, int], Any]]:
    yield "no rows", (0, 37), "small"
    yield "one row", (1, 37), "small"
    yield "one id", (11, 1), "small"
    for num_ids in (2, 16, 31, 32, 33, 257, 1000):
        yield f"{num_ids} ids", (22, num_ids), "small"
    yield "model vocabulary", (11, REAL_VOCABULARY), "real"


def _plain(logits: Tensor) -> None:
    pass


def _ties(logits: Tensor) -> None:
    logits.copy_((logits / 2).round() * 2)  # equal runs, also at the top and on both zeros


def _flat(logits: Tensor) -> None:
    logits.fill_(0.5)


def _holes(logits: Tensor) -> None:
    logits[:, 1::2] = -math.inf
    logits[::3, 3:] = -math.inf
    logits[1::5, :] = -math.inf
    logits[1::5, -1] = -3.0  # a single candidate, the last id


def _broken(logits: Tensor) -> None:
    logits[0] = math.nan
    logits[2::6, -1] = math.nan
    logits[3::6, 4] = math.inf
    logits[4::6] = -math.inf


def _steep(logits: Tensor) -> None:
    logits.mul_(300.0)  # probabilities that underflow


_DRESSES: dict[str, Callable[[Tensor], None]] = {
    "ties": _ties,
    "all equal": _flat,
    "holes": _holes,
    "broken rows": _broken,
    "steep": _steep,
}
