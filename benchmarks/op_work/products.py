"""Products with FP8, plain and FP4 weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops import linear, moe, quant
from deepinfer.ops.formats import QTensor
from op_work.work import (
    CHOSEN,
    DIM,
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    RANK,
    Calls,
    Families,
    Maker,
    Peer,
    Work,
    rotated,
)


def dense(make: Maker) -> Iterator[Work]:
    """Products with FP8 weights."""
    for label, n, k in (("q_b", 32768, 1280), ("shared up", 4608, HIDDEN), ("o_b", HIDDEN, 8192)):
        for rows in (16, 64, 128, 2048, 8192):

            def operands(rows: int = rows, n: int = n, k: int = k) -> dict[str, Any]:
                x, weight = make.codes(rows, k, fmt="mxfp8"), make.codes(n, k, fmt="mxfp8")
                return {"x": x, "weight": weight, "out_dtype": torch.bfloat16}

            yield Work(
                linear.linear_mx,
                f"{label} {rows} x {n} x {k}, mxfp8",
                rotated(operands, n * k),
                2.0 * rows * n * k,
                n * k * 33 / 32 + rows * k * 33 / 32 + rows * n * 2,
                _dense_peers(make, rows, n, k),
            )


def _dense_peers(make: Maker, rows: int, n: int, k: int) -> list[Peer]:
    decode = make.ops.bind(quant.dequantize, k=k, fmt="mxfp8")

    def decoded() -> dict[str, Any]:
        return {"input": make.plain(rows, k), "mat2": make.plain(n, k).t()}

    def coded() -> dict[str, Any]:
        return {"x": make.plain(rows, k), "weight": make.codes(n, k, fmt="mxfp8")}

    def decode_and_multiply(x: Tensor, weight: QTensor) -> Tensor:
        return torch.mm(x, decode(weight, torch.bfloat16).t())

    peers = [
        Peer("torch.mm, bf16 copy", torch.mm, lambda: rotated(decoded, 2 * n * k)),
        Peer("dequantise, then torch.mm", decode_and_multiply, lambda: rotated(coded, n * k)),
    ]
    if rows >= 64 and make.device.type != "cpu" and hasattr(torch, "_scaled_mm"):
        one = torch.ones((), device=make.device)

        def scaled() -> dict[str, Any]:
            eight = torch.float8_e4m3fn
            a, b = make.plain(rows, k).to(eight), make.plain(n, k).to(eight).t()
            return {"input": a, "mat2": b, "scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}

        peers.append(Peer("torch._scaled_mm, one scale", torch._scaled_mm, lambda: rotated(scaled, n * k)))
    return peers


def grouped_output(make: Maker) -> Iterator[Work]:
    """The grouped half of the output projection."""
    width = HEADS * DIM // GROUPS
    for rows in (64, 8192):

        def operands(rows: int = rows) -> dict[str, Any]:
            return {"x": make.plain(rows, GROUPS, width), "weight": make.codes(GROUPS, RANK, width, fmt="mxfp8")}

        size = GROUPS * RANK * width
        yield Work(
            linear.linear_grouped_o,
            f"{rows} x {GROUPS} groups of {RANK} x {width}, mxfp8",
            rotated(operands, size),
            2.0 * rows * size,
            size * 33 / 32 + rows * GROUPS * (width + RANK) * 2,
        )


def plain_dense(make: Maker) -> Iterator[Work]:
    """Products with plain weights."""
    for label, n, k, counts in (("router", EXPERTS, HIDDEN, (64, 8192)), ("head", 129280, HIDDEN, (16, 64))):
        for rows in counts:
            args = {"x": make.plain(rows, k), "weight": make.plain(n, k), "out_dtype": torch.float32}
            num_bytes = 2.0 * n * k + 2.0 * rows * k + 4.0 * rows * n
            peer = {"input": args["x"], "mat2": args["weight"].t()}
            yield Work(
                linear.linear_bf16,
                f"{label} {rows} x {n} x {k}, bf16",
                [args],
                2.0 * rows * n * k,
                num_bytes,
                [Peer("torch.mm, bf16 result", torch.mm, lambda peer=peer: [peer])],
            )


def experts(make: Maker) -> Iterator[Work]:
    """Products with the weights of chosen experts."""
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    for n, k in shapes:
        weight = make.codes(EXPERTS, n, k, fmt="mxfp4")
        for tokens in (16, 128, 1024, 16384):
            choice = torch.rand(tokens, EXPERTS, generator=make.gen, device=make.device).topk(CHOSEN, 1).indices
            counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
            hit, rows = int((counts > 0).sum()), tokens * CHOSEN
            args = {
                "x": make.codes(rows, k, fmt="mxfp8"),
                "weight": weight,
                "psum": counts.cumsum(0).int(),
                "out_dtype": torch.bfloat16,
            }
            yield Work(
                moe.moe_grouped_gemm,
                f"{tokens} tokens, {hit} experts, {n} x {k}",
                [args],
                2.0 * rows * n * k,
                hit * n * k * 17 / 32 + rows * k * 33 / 32 + rows * n * 2,
                _expert_peers(make, rows, n, k, args["psum"]),
            )


def _expert_peers(make: Maker, rows: int, n: int, k: int, ends: Tensor) -> list[Peer]:
    if make.device.type == "cpu" or not hasattr(torch, "_grouped_mm"):
        return []

    def decoded() -> Calls:
        matrices = make.plain(EXPERTS, n, k).transpose(1, 2)
        return [{"input": make.plain(rows, k), "mat2": matrices, "offs": ends}]

    return [Peer("torch._grouped_mm, bf16 copy", torch._grouped_mm, decoded)]


FAMILIES: Final[Families] = {
    dense: ("linear_mx",),
    grouped_output: ("linear_grouped_o",),
    plain_dense: ("linear_bf16",),
    experts: ("moe_grouped_gemm",),
}
