"""From logits to tokens: filters, draws, judged drafts; and logprobs. A vector core per row."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import VECTOR_CORES, program
from deepinfer.backends.ascend950.registry import implements
from deepinfer.backends.ascend950.tensors import new_like, packed, rows_of
from deepinfer.ops import sampling as sampling_ops
from deepinfer.ops import shaping as shaping_ops
from deepinfer.ops import verification as verification_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose
from deepinfer.ops.verification import VerifyMode

_SOURCES: Final = ("sampling.py", "kernels/sampling.asc")
_PROGRAM: Final = program("sampling.asc")
_FILTER: Final = _PROGRAM.kernel(
    "filter_rows", "logits, temperature, top_k, top_p, min_p, out!, rows: i64, pitch: i64, ids: i32"
)
_DRAW: Final = _PROGRAM.kernel(
    "draw_rows",
    "logits, draft_logits, draft_ids, temperature, top_k, top_p, min_p, seeds, output_index, choice, anchor, "
    "cu_seqlens, tokens!, rows: i64, pitch: i64, draft_pitch: i64, ids: i32, requests: i32, purpose: i32",
)
_EMIT: Final = _PROGRAM.kernel("emit_tokens", "tokens!, num_emitted!, draft_ids, cu_seqlens, requests: i32")
_RANK: Final = _PROGRAM.kernel(
    "rank_rows",
    "logits, asked, logprobs!, ranks!, top_ids!, top_logprobs!, rows: i64, pitch: i64, ids: i32, num_asked: i32, "
    "num_top: i32",
)
_EMIT_THREADS: Final = 256
"""Requests that a core settles at a time: threads of `emit_requests`."""

_Filters = tuple[Tensor, Tensor, Tensor, Tensor]
_Keys = tuple[Tensor, Tensor, Tensor, Tensor | None]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _score_rows(logits: Tensor, name: str = "logits") -> Tensor:
    """[N, V] float32 with neighbouring ids in a row.

    Raises:
        OpArgumentError: another dtype; the contract has none.
    """
    if logits.dtype != torch.float32:
        raise OpArgumentError(f"{name} is {logits.dtype}; the sampling kernels take float32")
    return rows_of(logits)


def _packed_filters(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> _Filters:
    return packed(temperature), packed(top_k), packed(top_p), packed(min_p)


@implements(sampling_ops.process_logits, sources=_SOURCES)
def process_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """A cut of the row is searched for, then every id is held against it."""
    flat = _score_rows(logits)
    rows, ids = flat.shape
    out = new_like(out, (rows, ids), torch.float32, logits.device)
    filters = _packed_filters(temperature, top_k, top_p, min_p)
    _FILTER(min(rows, VECTOR_CORES), flat, *filters, out, rows, flat.stride(0), ids)
    return out


def _draw(
    tokens: Tensor,
    logits: Tensor,
    filters: _Filters,
    keys: _Keys,
    purpose: int,
    cu_seqlens: Tensor | None = None,
    draft_ids: Tensor | None = None,
    draft_logits: Tensor | None = None,
) -> None:
    flat = _score_rows(logits)
    theirs = None if draft_logits is None else _score_rows(draft_logits, "draft_logits")
    rows, ids = flat.shape
    _DRAW(
        min(rows, VECTOR_CORES),
        flat,
        theirs,
        draft_ids,
        *filters,
        *keys,
        cu_seqlens,
        tokens,
        rows,
        flat.stride(0),
        0 if theirs is None else theirs.stride(0),
        ids,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        purpose,
    )


@implements(sampling_ops.sample, sources=_SOURCES)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    purpose: int = 0,
    anchor: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The cut of a row, then one pass that draws and compares."""
    out = new_like(out, (logits.shape[0],), torch.int32, logits.device)
    keys = (packed(seeds), packed(output_index), packed(choice), None if anchor is None else packed(anchor))
    _draw(out, logits, _packed_filters(temperature, top_k, top_p, min_p), keys, int(purpose))
    return out


@implements(verification_ops.verify, sources=_SOURCES)
def verify(
    logits: Tensor,
    cu_seqlens: Tensor,
    draft_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    choice: Tensor,
    mode: VerifyMode = "coupled",
    draft_logits: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """All rows at once, each as if alone; then a thread per request reads its rows up to the first that differs.

    Raises:
        OpArgumentError: an unknown mode, or "rejection" without draft logits.
    """
    if mode not in ("coupled", "rejection"):
        raise OpArgumentError(f"verify: mode is {mode!r}; it is 'coupled' or 'rejection'")
    if mode == "rejection" and draft_logits is None:
        raise OpArgumentError("verify: mode 'rejection' needs draft_logits")
    requests, device = cu_seqlens.shape[0] - 1, logits.device
    num_emitted = new_like(None if out is None else out[0], (requests,), torch.int32, device)
    tokens = new_like(None if out is None else out[1], (logits.shape[0],), torch.int32, device)
    bounds, drafts = packed(cu_seqlens), packed(draft_ids)
    _draw(
        tokens,
        logits,
        _packed_filters(temperature, top_k, top_p, min_p),
        (packed(seeds), packed(output_index), packed(choice), None),
        int(Purpose.TARGET),
        bounds,
        drafts,
        draft_logits if mode == "rejection" else None,
    )
    _EMIT(min(-(-requests // _EMIT_THREADS), VECTOR_CORES), tokens, num_emitted, drafts, bounds, requests)
    return num_emitted, tokens


def _rank(
    logits: Tensor,
    asked: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor | None,
    top_logprobs: Tensor | None,
) -> None:
    flat = _score_rows(logits)
    rows, ids = flat.shape
    num_asked = asked.numel() // max(rows, 1)
    num_top = 0 if top_ids is None else top_ids.shape[1]
    _RANK(
        min(rows, VECTOR_CORES),
        flat,
        packed(asked),
        logprobs,
        ranks,
        top_ids,
        top_logprobs,
        rows,
        flat.stride(0),
        ids,
        num_asked,
        num_top,
    )


@implements(sampling_ops.token_logprobs, sources=_SOURCES)
def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, *, out: _Four | None = None) -> _Four:
    """The sum of the row, a pass that counts better ids, and a pass for each of the best."""
    rows, device = logits.shape[0], logits.device
    given = out if out is not None else (None,) * 4
    logprob = new_like(given[0], (rows,), torch.float32, device)
    rank = new_like(given[1], (rows,), torch.int32, device)
    top_ids = new_like(given[2], (rows, num_top), torch.int32, device)
    top_logprobs = new_like(given[3], (rows, num_top), torch.float32, device)
    _rank(logits, tokens, logprob, rank, top_ids, top_logprobs)
    return logprob, rank, top_ids, top_logprobs


@implements(shaping_ops.logprobs_of, sources=_SOURCES)
def logprobs_of(logits: Tensor, ids: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The sum of the row, and a pass for each id that counts better ones."""
    given = out if out is not None else (None, None)
    logprob = new_like(given[0], tuple(ids.shape), torch.float32, logits.device)
    rank = new_like(given[1], tuple(ids.shape), torch.int32, logits.device)
    _rank(logits, ids, logprob, rank, None, None)
    return logprob, rank
