"""Residual streams: mixed, read and written by every sublayer, and the fusion of all that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from deepinfer.ops import heads, mhc
from op_work.work import EPS, HIDDEN, STREAMS, Families, Maker, Peer, Work

_MIX = STREAMS * (STREAMS + 2)


def sublayer(make: Maker) -> Iterator[Work]:
    """What the model runs around each sublayer."""
    for rows in (make.sizes.few, make.sizes.many):
        h, weights, vector = make.plain(rows, STREAMS, HIDDEN), make.single(rows, STREAMS), rows * HIDDEN * 2.0
        shape = f"{rows} x {STREAMS} x {HIDDEN}"
        mixing = _mixing(make)
        yield Work(
            mhc.mhc_prenorm_mix,
            shape,
            [{"h": h, "fn": mixing["fn"], "eps": EPS}],
            _mix_flops(rows),
            STREAMS * vector + _MIX * 4.0 * (STREAMS * HIDDEN + rows),
        )
        args = {
            "mix": make.single(rows, _MIX),
            "scale": mixing["scale"],
            "base": mixing["base"],
            "iters": 20,
            "eps": 1e-6,
        }
        yield Work(mhc.mhc_split_sinkhorn, f"{rows} x {_MIX}, 20 iterations", [args], 0.0, 8.0 * rows * _MIX)
        num_bytes = (STREAMS + 1) * vector + 4.0 * rows * STREAMS
        yield Work(mhc.mhc_apply, shape, [{"h": h, "pre": weights}], 0.0, num_bytes)
        args = {"y": make.plain(rows, HIDDEN), "h": h, "post": weights, "comb": make.single(rows, STREAMS, STREAMS)}
        num_bytes = (2 * STREAMS + 1) * vector + 4.0 * rows * STREAMS * (STREAMS + 1)
        yield Work(mhc.mhc_post, shape, [args], 0.0, num_bytes)


def fused_step(make: Maker) -> Iterator[Work]:
    """From one sublayer's output to the next one's input in one op."""
    for rows in (make.sizes.few, make.sizes.many):
        args = {
            "y": make.plain(rows, HIDDEN),
            "h": make.plain(rows, STREAMS, HIDDEN),
            "post": make.single(rows, STREAMS),
            "comb": make.single(rows, STREAMS, STREAMS),
            "read": make.single(rows, STREAMS),
            **_mixing(make),
            "iters": 20,
            "hc_eps": 1e-6,
            "norm_weight": torch.ones(HIDDEN, device=make.device),
            "norm_eps": EPS,
        }
        num_bytes = rows * HIDDEN * 2.0 * (2 * STREAMS + 2) + 4.0 * _MIX * STREAMS * HIDDEN
        yield Work(mhc.mhc_step, f"{rows} x {STREAMS} x {HIDDEN}", [args], _mix_flops(rows), num_bytes)


def ends(make: Maker) -> Iterator[Work]:
    """Where streams begin, and their mean, which the draft reads."""
    for rows in (make.sizes.few, make.sizes.many):
        num_bytes, shape = (STREAMS + 1) * rows * HIDDEN * 2.0, f"{rows} x {STREAMS} x {HIDDEN}"
        args = {"x": make.plain(rows, HIDDEN), "streams": STREAMS}
        yield Work(mhc.mhc_expand, shape, [args], 0.0, num_bytes + 4.0 * rows * STREAMS)
        h = make.plain(rows, STREAMS, HIDDEN)
        peer = Peer("torch.mean", torch.mean, lambda h=h: [{"input": h, "dim": 1}])
        yield Work(heads.stream_mean, shape, [{"h": h}], 0.0, num_bytes, [peer])


def _mixing(make: Maker) -> dict[str, Any]:
    return {
        "fn": make.single(_MIX, STREAMS * HIDDEN) * 0.01,
        "scale": torch.ones(3, device=make.device),
        "base": torch.zeros(_MIX, device=make.device),
    }


def _mix_flops(rows: int) -> float:
    return 2.0 * rows * _MIX * STREAMS * HIDDEN


FAMILIES: Final[Families] = {
    sublayer: ("mhc_prenorm_mix", "mhc_split_sinkhorn", "mhc_apply", "mhc_post"),
    fused_step: ("mhc_step",),
    ends: ("mhc_expand", "stream_mean"),
}
