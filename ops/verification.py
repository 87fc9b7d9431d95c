"""Which drafted tokens the target model keeps, and the token that follows them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from deepinfer.ops.cases import sampling as sampling_cases
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose, gumbel, random_words, uniform
from deepinfer.ops.sampling import process_logits, sample, usable_rows
from deepinfer.ops.spec import Tolerance, define_op

VerifyMode = Literal["coupled", "rejection"]
_Filters = tuple[Tensor, Tensor, Tensor, Tensor]
_Key = tuple[Tensor, Tensor, Tensor]


@define_op(
    tolerance=Tolerance(
        why="tokens are equal where best sums and accept tests are not within 1e-4; cases hold none that close"
    ),
    determinism="D2",
    cases=sampling_cases.verify_cases,
    results=lambda new, a: (new((a.cu_seqlens.shape[0] - 1,), torch.int32), new((a.logits.shape[0],), torch.int32)),
)
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
) -> tuple[Tensor, Tensor]:
    """Emit the longest prefix of each request's drafts that the target keeps, and one token more.

    Rows of a request are packed; row i holds the target's logits after drafts 0..i-1, and judges draft i. Row i of
    request r draws for output index `output_index[r] + i`. What a row emits never depends on rows or drafts after it.

    *coupled*: x_i is what `sample` draws from row i alone (TARGET). Emitted are x_0..x_n, n the first row with
    x_n != draft n; the last row has no draft. Drafts only save time, so the draft's logits are not needed.

    *rejection*: draft i is kept if u(ACCEPT) * q < p, with p and q its fp32 probabilities under the target's and the
    draft's logits, both filtered with the request's parameters (so drafts are drawn by `sample` with purpose DRAFT, the
    same parameters, and the index of the first draft as anchor). The first draft that is not kept is replaced by the
    argmax of ln(p - q) + g(RESIDUAL) over ids with p > q; if rounding leaves none, by a draw from p with RESIDUAL.
    Where no draft is left, the row draws as in coupled mode. Greedy requests are as in coupled mode.

    Args:
        logits: [T, V] float32, the target's, after masks.
        cu_seqlens: [R + 1] int32, rows of each request; a request may have none.
        draft_ids: [T] int32, the draft that each row judges; -1 for none, which ends the verification at that row: the
            last row of a request always has none.
        temperature: [R] float32; filters and seeds as in `sample`, one per request.
        top_k: [R] int32.
        top_p: [R] float32.
        min_p: [R] float32.
        seeds: [R] int64.
        output_index: [R] int32, of the request's first row.
        choice: [R] int32.
        mode: "coupled" or "rejection".
        draft_logits: [T, V] float32, what draft i was drawn from, in row i; rows without a draft are not read. A row
            with NaN or +inf, or without any finite entry, counts as having no draft. Only for "rejection".

    Returns:
        num_emitted [R] int32, at least 1 for a request with rows; tokens [T] int32, a request's emitted tokens from its
        first row on, then -1. A row that `sample` would mark emits -1 as the request's last token, and is counted.

    Raises:
        OpArgumentError: an unknown mode, or "rejection" without draft logits.
    """
    if mode not in ("coupled", "rejection"):
        raise OpArgumentError(f"verify: mode is {mode!r}; it is 'coupled' or 'rejection'")
    if mode == "rejection" and draft_logits is None:
        raise OpArgumentError("verify: mode 'rejection' needs draft_logits")
    num_requests = cu_seqlens.shape[0] - 1
    num_emitted = torch.zeros(num_requests, dtype=torch.int32, device=logits.device)
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int32, device=logits.device)
    bounds = cu_seqlens.tolist()
    for r in range(num_requests):
        request = slice(r, r + 1)
        filters = (temperature[request], top_k[request], top_p[request], min_p[request])
        for i, row in enumerate(range(bounds[r], bounds[r + 1])):
            key = (seeds[request], output_index[request] + i, choice[request])
            draft = -1 if row + 1 == bounds[r + 1] else int(draft_ids[row])
            target_row = logits[row : row + 1]
            if mode == "coupled" or draft < 0 or temperature[r] <= 0:
                token = int(sample(target_row, *filters, *key))
            else:
                assert draft_logits is not None
                token = _accept_or_replace(target_row, draft_logits[row : row + 1], draft, filters, key)
            tokens[row] = token
            num_emitted[r] += 1
            if token != draft or token < 0:
                break
    return num_emitted, tokens


def _accept_or_replace(target_row: Tensor, draft_row: Tensor, draft: int, filters: _Filters, key: _Key) -> int:
    """One row of rejection sampling: the draft if it is kept, else its replacement; -1 for an unusable target row."""
    temperature, top_k, top_p, min_p = filters
    num_ids = target_row.shape[1]
    if not (usable_rows(target_row, temperature) & usable_rows(draft_row, temperature)):
        return int(sample(target_row, temperature, top_k, top_p, min_p, *key))
    scores = process_logits(target_row, temperature, top_k, top_p, min_p)
    p = scores.double().softmax(1).float()
    q = process_logits(draft_row, temperature, top_k, top_p, min_p).double().softmax(1).float()
    if draft < num_ids:
        u = uniform(random_words(*key, Purpose.ACCEPT, 1))[0, 0]
        if u * q[0, draft] < p[0, draft]:
            return draft
    residual = p - q
    weights = torch.where(residual > 0, residual.log(), -math.inf)
    if not (residual > 0).any():
        weights = scores
    return int((weights + gumbel(random_words(*key, Purpose.RESIDUAL, num_ids))).argmax(1))
