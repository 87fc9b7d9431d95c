"""Changes to logits that only the host knows to make: biases, penalties, rows that a user's own code computed.

Like `apply_bitmask` they name the rows they change and touch no other, so a request without such features is the same
in any company. Each is one fp32 operation per step of its contract, in the order written here, so every backend gives
the same bits. `ops.sampling` says where they stand among the steps from logits to a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.ops.cases import shaping as shaping_cases
from deepinfer.ops.numeric import accumulate
from deepinfer.ops.results import nothing
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_rows

_ONE_ROUNDING_EACH = Tolerance(why="fp32 operations in the order of the contract, each rounded once")


@define_op(
    mutates=("logits",),
    tolerance=_ONE_ROUNDING_EACH,
    determinism="D2",
    cases=shaping_cases.adjust_logits_cases,
    touches={"logits": at_rows("rows")},
    results=nothing,
)
def adjust_logits(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add a number to single logits, in place: `logits[rows[i], ids[i]] += values[i]`.

    Args:
        logits: [N, V] float32.
        rows: [E] int32; -1 is an entry that changes nothing.
        ids: [E] int32; no (row, id) stands twice.
        values: [E] float32; -inf forbids the id.
    """
    used = rows >= 0
    row, token = rows[used].long(), ids[used].long()
    logits[row, token] = logits[row, token] + values[used].to(logits.dtype)


@define_op(
    mutates=("logits",),
    tolerance=_ONE_ROUNDING_EACH,
    determinism="D2",
    cases=shaping_cases.apply_penalties_cases,
    touches={"logits": at_rows("rows")},
    results=nothing,
)
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Make tokens that were seen less (or more) likely, in place.

    For each entry x = `logits[rows[i], ids[i]]` becomes, in this order and each step rounded to fp32:
    `x / repetition` where x > 0, else `x * repetition`; minus `frequency * counts[i]`; minus `presence` where
    `counts[i]` > 0.

    Args:
        logits: [N, V] float32.
        rows: [E] int32; -1 is an entry that changes nothing.
        ids: [E] int32, tokens seen in the prompt or the output; no (row, id) stands twice.
        counts: [E] int32, how often the output holds the id; 0 where only the prompt does.
        repetition: [N] float32, above 0; 1 is off.
        frequency: [N] float32; 0 is off.
        presence: [N] float32; 0 is off.

    Source: repetition penalty, arXiv:1909.05858 (section 4.1); the others are those of OpenAI's API. vLLM's meaning:
    repetition looks at prompt and output, the other two at the output.
    """
    used = rows >= 0
    row, token, count = rows[used].long(), ids[used].long(), counts[used]
    x = logits[row, token]
    factor = repetition[row].to(x.dtype)
    x = torch.where(x > 0, x / factor, x * factor)
    x = x - frequency[row].to(x.dtype) * count
    x = x - torch.where(count > 0, presence[row].to(x.dtype), 0.0)
    logits[row, token] = x


@define_op(
    mutates=("x",),
    tolerance=EXACT,
    determinism="D2",
    cases=shaping_cases.put_rows_cases,
    touches={"x": at_rows("rows")},
    results=nothing,
)
def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Replace rows, in place: the inverse of `gather_rows`.

    Args:
        x: [T, V] of any dtype.
        rows: [n] int32, all different.
        values: [n, V] like `x`.
    """
    x[rows.long()] = values


@define_op(
    tolerance=Tolerance(1e-5, 1e-5, why="fp32 exp, log and a sum over the vocabulary; ranks must be equal"),
    determinism="D2",
    cases=shaping_cases.logprobs_of_cases,
    results=lambda new, a: (new(tuple(a.ids.shape), torch.float32), new(tuple(a.ids.shape), torch.int32)),
)
def logprobs_of(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and ranks of several given ids per row, as `token_logprobs` has them for one.

    Args:
        logits: [N, V] float32.
        ids: [N, K] int32; one outside [0, V), such as -1, has none.

    Returns:
        logprob [N, K] float32, NaN where there is none; rank [N, K] int32, 0 there. A row with NaN or +inf, or without
        any finite entry, has none at all.
    """
    num_ids = logits.shape[1]
    wide = accumulate(logits)
    broken = (wide.isnan() | (wide == math.inf)).any(1) | ~wide.isfinite().any(1)
    logprobs = wide.double().log_softmax(1).float()
    known = ~broken[:, None] & (ids >= 0) & (ids < num_ids)
    index = ids.long().clamp(0, num_ids - 1)
    own = wide.gather(1, index)
    place = torch.arange(num_ids, device=logits.device)
    ranks = [
        ((wide > own[:, k : k + 1]) | ((wide == own[:, k : k + 1]) & (place < index[:, k : k + 1]))).sum(1) + 1
        for k in range(ids.shape[1])
    ]
    rank = torch.stack(ranks, 1) if ranks else index
    return torch.where(known, logprobs.gather(1, index), math.nan), torch.where(known, rank, 0).int()
