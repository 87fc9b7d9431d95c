"""The compressor: pooled key/value entries from consecutive tokens, with the open group kept between steps.

Source: CSA2 compressor of DeepSeek-V4.1-Flash (model specification, section 6.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cases import trunk
from deepinfer.ops.numeric import rounded
from deepinfer.ops.spec import Tolerance, define_op
from deepinfer.ops.touches import at_rows


@define_op(
    mutates=("state",),
    tolerance=Tolerance(2**-7, 1e-6, single=(1e-5, 1e-6), why="softmax over a group in fp32, one rounding"),
    determinism="D2",
    cases=trunk.kv_compress_cases,
    dims={"ratio": "ratio", "dim": "value:1"},
    touches={"state": at_rows("state_slots")},
    results=lambda new, a: new(tuple(a.value.shape), a.out_dtype),
)
def kv_compress(
    gate: Tensor,
    value: Tensor,
    state: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    row_to_seq: Tensor,
    cu_seqlens_q: Tensor,
    ratio: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Pool each complete group of `ratio` tokens: per channel, a softmax over the group weighs the values.

    A group is complete at its last token. Members in this step are read from the rows, earlier ones from `state`, which
    keeps (gate, value) of the newest tokens at `position % ring`: a rollback is a shorter length and no copy.

    Args:
        gate: [T, D] float32.
        value: [T, D] float32.
        state: [num_slots, ring, 2, D] float32; ring >= ratio, plus the tokens a rollback may take back.
        state_slots: [S] int32, state of each sequence; slot 0 belongs to padding.
        positions: [T] int32, consecutive within a sequence.
        row_to_seq: [T] int32.
        cu_seqlens_q: [S + 1] int32; rows behind its end are padding and write slot 0.
        ratio: tokens per group.
        out_dtype: dtype of the result.

    Returns:
        [T, D]: the pooled value in rows that complete a group, zeros elsewhere.
    """
    num_rows, ring = gate.shape[0], state.shape[1]
    out = torch.zeros_like(value)
    seq = row_to_seq.long()
    slot = state_slots.long()[seq]
    first = cu_seqlens_q.long()[seq]
    position = positions.long()
    row = torch.arange(num_rows, device=gate.device)
    closes = (position + 1) % ratio == 0
    members = []
    for back in range(ratio - 1, -1, -1):
        here = row - back >= first
        old = state[slot, (position - back).clamp(min=0) % ring].to(gate.dtype)
        now = torch.stack((gate, value), 1)[(row - back).clamp(min=0)]
        members.append(torch.where(here[:, None, None], now, old))
    group = torch.stack(members, 1)
    weights = rounded(lambda x: x.softmax(1), group[:, :, 0])
    out = torch.where(closes[:, None], (weights * group[:, :, 1]).sum(1), out)
    last = cu_seqlens_q.long()[seq + 1]
    newest = (row >= last - ring) & (row < last)
    state[slot[newest], position[newest] % ring] = torch.stack((gate, value), 1)[newest].to(state.dtype)
    return out.to(out_dtype)
