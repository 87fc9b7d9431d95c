"""The ends of the model: embedding, row selection, and the draft's rows and sequential head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import ends, trunk
from deepinfer.ops.numeric import accumulate, rounded, row_products
from deepinfer.ops.results import New, float32_like, int32_like, rows_like
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_rows


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=ends.embedding_cases,
    dims={"hidden": "weight:1"},
    touches={"weight": at_rows("input_ids")},
    results=lambda new, a: new((a.input_ids.shape[0], a.weight.shape[1]), a.out_dtype),
)
def embedding(weight: Tensor, input_ids: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Rows of the embedding table.

    Args:
        weight: [V, H] bfloat16 or float32.
        input_ids: [T] int32.
        out_dtype: dtype of the result.

    Returns:
        [T, H] of `out_dtype`.
    """
    return weight[input_ids.long()].to(out_dtype)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=ends.gather_rows_cases,
    touches={"x": at_rows("rows")},
    results=lambda new, a: rows_like(new, a.x, a.rows.shape[0]),
)
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Selected rows.

    Args:
        x: [T, ...] of any dtype.
        rows: [n] int32.

    Returns:
        [n, ...] like `x`.
    """
    return x[rows.long()]


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=ends.concat_columns_cases,
    results=lambda new, a: new((a.parts[0].shape[0], sum(p.shape[1] for p in a.parts)), a.parts[0].dtype),
)
def concat_columns(parts: tuple[Tensor, ...]) -> Tensor:
    """Columns of several [T, Ni] tensors of one dtype, at least one, side by side: [T, sum Ni]."""
    return torch.cat(parts, dim=1)


def _block_rows(new: New, a: Any) -> tuple[Tensor, ...]:
    count = a.anchor_ids.shape[0] * a.num_tokens
    return *(new((count,), torch.int32) for _ in range(5)), new((count, a.num_tokens), torch.int32)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=ends.draft_rows_cases,
    dims={"num_tokens": "num_tokens"},
    results=_block_rows,
)
def draft_rows(
    anchor_ids: Tensor, anchor_positions: Tensor, seqs: Tensor, num_tokens: int, noise_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of a draft block: each sequence's newest token, and noise at the positions behind it.

    Args:
        anchor_ids: [S] int32; -1 is replaced by noise.
        anchor_positions: [S] int32.
        seqs: [S] int32, the sequence of each anchor.
        num_tokens: D, rows of a block.
        noise_id: token id of the other rows.

    Returns:
        Six int32 tensors, D rows per anchor: input ids [S * D]; positions [S * D], from the anchor's on; the position
        before the anchor [S * D], where the block's context ends; the sequence [S * D]; the row's own number [S * D],
        its slot in a scratch cache; and the numbers of all rows of its block [S * D, D].
    """
    num_seqs = anchor_ids.shape[0]
    place = torch.arange(num_tokens, device=anchor_ids.device, dtype=torch.int32).repeat(num_seqs)
    row = torch.arange(num_seqs * num_tokens, device=anchor_ids.device, dtype=torch.int32)
    anchor, position, seq = (t.repeat_interleave(num_tokens) for t in (anchor_ids, anchor_positions, seqs))
    ids = torch.where((place == 0) & (anchor >= 0), anchor, noise_id).int()
    block = (row - place)[:, None] + torch.arange(num_tokens, device=anchor_ids.device, dtype=torch.int32)
    return ids, position + place, position - 1, seq, row, block


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=ends.known_ids_cases,
    results=int32_like("token_ids"),
)
def known_ids(token_ids: Tensor, fallback: int) -> Tensor:
    """Token ids, with one that exists in place of every -1.

    Args:
        token_ids: [T] int32, -1 for a token that could not be chosen.
        fallback: what takes its place.

    Returns:
        [T] int32.
    """
    return torch.where(token_ids >= 0, token_ids, fallback).int()


@define_op(
    tolerance=Tolerance(1e-4, 1e-4, why="fp32 dot products over the Markov rank"),
    determinism="D2",
    cases=ends.markov_logits_cases,
    dims={"rank": "head:1"},
    touches={"embed": at_rows("token_ids")},
    results=float32_like("base"),
)
def markov_logits(base: Tensor, token_ids: Tensor, embed: Tensor, head: Tensor) -> Tensor:
    """Draft logits of one place in the chain: base logits plus a rank-limited bias of the token before it.

    Args:
        base: [T, V] float32.
        token_ids: [T] int32.
        embed: [V, R].
        head: [V, R].

    Returns:
        [T, V] float32.
    """
    wide = accumulate(base)
    return wide + row_products(embed[token_ids.long()].to(wide.dtype), head.to(wide.dtype))


@define_op(
    tolerance=Tolerance(1e-5, 1e-5, why="fp32 dot product and sigmoid"),
    determinism="D2",
    cases=ends.draft_confidence_cases,
    dims={"hidden": "hidden:1"},
    touches={"embed": at_rows("token_ids")},
    results=lambda new, a: new((a.hidden.shape[0],), torch.float32),
)
def draft_confidence(hidden: Tensor, token_ids: Tensor, embed: Tensor, proj: Tensor, temperature: float) -> Tensor:
    """Confidence that a drafted token will be accepted.

    Args:
        hidden: [T, H] collapsed state of the draft, not normed.
        token_ids: [T] int32, the token before the drafted one.
        embed: [V, R] of the Markov head.
        proj: [1, H + R].
        temperature: divides the logit.

    Returns:
        [T] float32 in (0, 1).
    """
    features = torch.cat((accumulate(hidden), embed[token_ids.long()].to(accumulate(hidden).dtype)), 1)
    return rounded(torch.sigmoid, row_products(features, proj.to(features.dtype))[:, 0] / temperature)


@define_op(
    tolerance=Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="fp32 mean of the streams, one rounding"),
    determinism="D2",
    cases=trunk.stream_mean_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
    results=lambda new, a: new((a.h.shape[0], a.h.shape[2]), a.h.dtype),
)
def stream_mean(h: Tensor) -> Tensor:
    """Mean over the residual streams, the draft's feature.

    Args:
        h: [T, M, H] bfloat16 or float32.

    Returns:
        [T, H] like `h`.
    """
    return accumulate(h).mean(1).to(h.dtype)
