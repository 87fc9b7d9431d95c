"""Mixture of experts around its products: router, rows to experts and back, experts laid out anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from deepinfer.ops import moe
from op_work.work import CHOSEN, CODE_BYTES, HIDDEN, INTERMEDIATE, Families, Maker, Work


def gate(make: Maker) -> Iterator[Work]:
    """The choice of experts."""
    experts = make.sizes.experts
    for rows in (make.sizes.few, make.sizes.many):
        args = {
            "logits": make.single(rows, experts),
            "bias": make.single(experts),
            "image_bias": None,
            "image_mask": None,
            "k": CHOSEN,
            "scale": 1.5,
        }
        yield Work(
            moe.moe_gate, f"{CHOSEN} of {experts}, {rows} rows", [args], 0.0, rows * (4.0 * experts + 12 * CHOSEN)
        )


def exchange(make: Maker) -> Iterator[Work]:
    """Rows to their experts and back, on one rank."""
    for rows in (make.sizes.few, make.sizes.many):
        chosen = _chosen(make, rows)
        args = {
            "x": make.codes(rows, HIDDEN, fmt="mxfp8"),
            "expert_ids": chosen,
            "weights": make.single(rows, CHOSEN),
            "num_experts": make.sizes.experts,
        }
        shape, choices = f"{rows} x {CHOSEN} rows of {HIDDEN}", rows * CHOSEN
        num_bytes = (rows + choices) * CODE_BYTES * HIDDEN + 20.0 * choices
        yield Work(moe.ep_dispatch, f"{shape}, mxfp8", [args], 0.0, num_bytes)
        order = chosen.flatten().argsort(stable=True)
        slot_to_row = order.argsort().int().reshape(rows, CHOSEN)
        args = {
            "y": make.plain(choices, HIDDEN),
            "handle": moe.DispatchHandle(slot_to_row),
            "bias": make.plain(rows, HIDDEN),
            "out_dtype": torch.bfloat16,
        }
        num_bytes = (choices + 2 * rows) * HIDDEN * 2.0 + 4.0 * choices
        yield Work(moe.ep_combine, f"{shape} and a shared one", [args], 0.0, num_bytes)


def shuffle(make: Maker) -> Iterator[Work]:
    """Every expert's second matrix somewhere else."""
    experts = make.sizes.experts
    weight = make.codes(experts, HIDDEN, INTERMEDIATE, fmt="mxfp4")
    args = {"weight": weight, "source": make.shuffled(experts).long()}
    shape = f"{experts} of {HIDDEN} x {INTERMEDIATE}, mxfp4"
    yield Work(moe.expert_shuffle, shape, [args], 0.0, 2.0 * weight.num_bytes)


def _chosen(make: Maker, rows: int) -> Tensor:
    """[rows, CHOSEN] int64 of different experts."""
    affinity = torch.rand(rows, make.sizes.experts, generator=make.gen, device=make.device)
    return affinity.topk(CHOSEN, 1).indices


FAMILIES: Final[Families] = {
    gate: ("moe_gate",),
    exchange: ("ep_dispatch", "ep_combine"),
    shuffle: ("expert_shuffle",),
}
