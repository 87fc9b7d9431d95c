"""The ends of the model: embedding, row selection, and the draft's sequential head."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import ends, trunk
from deepinfer.ops.numeric import accumulate, rounded, row_products
from deepinfer.ops.spec import EXACT, Tolerance, define_op


@define_op(tolerance=EXACT, determinism="D2", cases=ends.embedding_cases, dims={"hidden": "weight:1"})
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


@define_op(tolerance=EXACT, determinism="D2", cases=ends.gather_rows_cases)
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
    tolerance=Tolerance(1e-4, 1e-4, why="fp32 dot products over the Markov rank"),
    determinism="D2",
    cases=ends.markov_logits_cases,
    dims={"rank": "head:1"},
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
    tolerance=Tolerance(2**-8, 1e-6, why="fp32 mean of the streams, one rounding"),
    determinism="D2",
    cases=trunk.stream_mean_cases,
    dims={"streams": "h:1", "hidden": "h:2"},
)
def stream_mean(h: Tensor) -> Tensor:
    """Mean over the residual streams, the draft's feature.

    Args:
        h: [T, M, H] bfloat16 or float32.

    Returns:
        [T, H] like `h`.
    """
    return accumulate(h).mean(1).to(h.dtype)
