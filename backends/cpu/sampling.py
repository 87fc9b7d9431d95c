"""Sampling ops on the CPU: the native row kernels, called on NumPy views of the tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.backends.cpu import BACKEND, _kernels
from deepinfer.backends.cpu.tensors import num_threads
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.sampling import apply_bitmask, process_logits, sample, token_logprobs
from deepinfer.ops.shaping import adjust_logits, apply_penalties, logprobs_of, put_rows
from deepinfer.ops.verification import VerifyMode, verify

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int32]

_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty((0, 1), np.float32)


@BACKEND.implements(apply_bitmask)
def apply_bitmask_cpu(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """A word at a time; words that allow all their ids are skipped."""
    view = _array(logits, torch.float32)
    _kernels.apply_bitmask(view, _array(mask, torch.int32), _array(rows, torch.int32), num_threads())
    if not logits.is_contiguous():
        logits.copy_(torch.from_numpy(view))


@BACKEND.implements(process_logits)
def process_logits_cpu(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Block maxima bound top-k, and radix selection over masses finds the edge of top-p: no row is sorted."""
    out = torch.empty(logits.shape, dtype=torch.float32)
    filters = _filters(temperature, top_k, top_p, min_p)
    _kernels.process_logits(_array(logits, torch.float32), *filters, out.numpy(), num_threads())
    return out


@BACKEND.implements(sample)
def sample_cpu(
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
) -> Tensor:
    """Words are made for every chunk that could win, logarithms only where the least word could."""
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    _kernels.sample(
        _array(logits, torch.float32),
        *_filters(temperature, top_k, top_p, min_p),
        *_keys(seeds, output_index, choice),
        int(purpose),
        _NO_INTS if anchor is None else _array(anchor, torch.int32),
        out.numpy(),
        num_threads(),
    )
    return out


@BACKEND.implements(token_logprobs)
def token_logprobs_cpu(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass for the maximum, one for the sum, one for the rank."""
    num_rows = logits.shape[0]
    logprob = torch.empty(num_rows, dtype=torch.float32)
    rank = torch.empty(num_rows, dtype=torch.int32)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int32)
    top_logprobs = torch.empty(num_rows, num_top, dtype=torch.float32)
    _kernels.token_logprobs(
        _array(logits, torch.float32),
        _array(tokens, torch.int32),
        num_top,
        logprob.numpy(),
        rank.numpy(),
        top_ids.numpy(),
        top_logprobs.numpy(),
        num_threads(),
    )
    return logprob, rank, top_ids, top_logprobs


@BACKEND.implements(adjust_logits)
def adjust_logits_cpu(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Few single numbers: torch does it in one gather and one scatter."""
    adjust_logits.reference(logits, rows, ids, values)


@BACKEND.implements(apply_penalties)
def apply_penalties_cpu(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In NumPy, on flat indices: prompts are long, and torch checks and widens every index array it is given."""
    entries = [_array(x, torch.int32) for x in (rows, ids, counts)]
    used = entries[0] >= 0
    row, token, count = entries if used.all() else (x[used] for x in entries)
    view = _array(logits, torch.float32)
    flat = view.reshape(-1)
    place = row.astype(np.int64) * logits.shape[1] + token
    x = flat[place]
    factor = _array(repetition, torch.float32)[row]
    with np.errstate(all="ignore"):  # Inf and NaN pass through
        x = np.where(x > 0, x / factor, x * factor)
        x -= _array(frequency, torch.float32)[row] * count.astype(np.float32)
        x -= np.where(count > 0, _array(presence, torch.float32)[row], np.float32(0))
    flat[place] = x
    if not logits.is_contiguous():
        logits.copy_(torch.from_numpy(view))


@BACKEND.implements(put_rows)
def put_rows_cpu(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Torch's own."""
    put_rows.reference(x, rows, values)


@BACKEND.implements(logprobs_of)
def logprobs_of_cpu(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A pass of `token_logprobs` per id; ids are few."""
    logprob = torch.empty(ids.shape, dtype=torch.float32)
    rank = torch.empty(ids.shape, dtype=torch.int32)
    for place in range(ids.shape[1]):
        logprob[:, place], rank[:, place], _, _ = token_logprobs_cpu(logits, ids[:, place], 0)
    return logprob, rank


@BACKEND.implements(verify)
def verify_cpu(
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
) -> tuple[Tensor, Tensor]:
    """Rows of a request in order, and none past the last that is emitted; requests over threads."""
    if mode not in ("coupled", "rejection"):
        raise OpArgumentError(f"verify: mode is {mode!r}; it is 'coupled' or 'rejection'")
    if mode == "rejection" and draft_logits is None:
        raise OpArgumentError("verify: mode 'rejection' needs draft_logits")
    num_emitted = torch.empty(cu_seqlens.shape[0] - 1, dtype=torch.int32)
    tokens = torch.empty(logits.shape[0], dtype=torch.int32)
    drafted = draft_logits if mode == "rejection" else None
    _kernels.verify(
        _array(logits, torch.float32),
        _array(cu_seqlens, torch.int32),
        _array(draft_ids, torch.int32),
        *_filters(temperature, top_k, top_p, min_p),
        *_keys(seeds, output_index, choice),
        _NO_FLOATS if drafted is None else _array(drafted, torch.float32),
        num_emitted.numpy(),
        tokens.numpy(),
        num_threads(),
    )
    return num_emitted, tokens


def _array(x: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """A view where dtype and layout fit (the contract's own do), else a copy."""
    view: NDArray[Any] = x.to(dtype).contiguous().numpy()
    return view


def _filters(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[_Floats, _Ints, _Floats, _Floats]:
    return (
        _array(temperature, torch.float32),
        _array(top_k, torch.int32),
        _array(top_p, torch.float32),
        _array(min_p, torch.float32),
    )


def _keys(seeds: Tensor, output_index: Tensor, choice: Tensor) -> tuple[NDArray[np.int64], _Ints, _Ints]:
    return _array(seeds, torch.int64), _array(output_index, torch.int32), _array(choice, torch.int32)
