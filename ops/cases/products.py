"""Cases of dense, grouped and expert products, the router, activation, dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.ops.cases.common import activation_of, bound, cases_of, integers, mixed, normal, row_counts, weight_of
from deepinfer.ops.formats import QTensor
from deepinfer.ops.spec import Case

OUT = {"bf16": torch.bfloat16, "f32": torch.float32}


def _broken_rows(x: Tensor | QTensor) -> Tensor | QTensor:
    """A NaN row and an Inf row among healthy ones."""
    if isinstance(x, QTensor):
        if len(x.scale) > 4:
            x.scale[1] = 255
        return x
    if len(x) > 4:
        x.view(len(x), -1)[1, 0] = torch.nan
        x.view(len(x), -1)[3, -1] = torch.inf
        x.view(len(x), -1)[2] = 0
    return x


def linear_mx_cases() -> Iterable[Case]:
    """Plain and quantised activations, both weight formats, an accumulator, sizes that are ragged in every tile."""

    def make(
        gen: Generator, rows: int, n: int, k: int, x: str, weight: str, out: str, acc: bool = False
    ) -> dict[str, Any]:
        args: dict[str, Any] = {
            "x": _broken_rows(activation_of(gen, rows, k, kind=x)),
            "weight": weight_of(gen, n, k, kind=weight),
            "out_dtype": OUT[out],
        }
        return {**args, "acc": normal(gen, rows, n)} if acc else args

    for weight in ("mxfp8", "mxfp4"):
        for x, out in (("mxfp8", "bf16"), ("mxfp8", "f32"), ("bf16", "bf16"), ("f32", "f32")):
            keywords = {"n": 50, "k": 96, "x": x, "weight": weight, "out": out}
            names = ((f"{n}, {x} x {weight} to {out}", {"rows": r, **keywords}) for n, r in row_counts())
            yield from cases_of(make, ("x",), names)
        keywords = {"n": 33, "k": 256, "x": "mxfp8", "weight": weight, "out": "f32", "acc": True}
        yield Case(f"accumulator, {weight}", bound(make, rows=17, **keywords), "small", ("x", "acc"))
        keywords = {"n": 1, "k": 32, "x": "mxfp8", "weight": weight, "out": "f32"}
        yield Case(f"one output, {weight}", bound(make, rows=9, **keywords), "small", ("x",))
        for x, out, rows in (("mxfp8", "bf16", 1), ("mxfp8", "f32", 70), ("bf16", "bf16", 200), ("f32", "f32", 9)):
            keywords = {"n": 256, "k": 384, "x": x, "weight": weight, "out": out}
            label = f"whole blocks, {rows} rows, {x} x {weight} to {out}"
            yield Case(label, bound(make, rows=rows, **keywords), "small", ("x",))
        keywords = {"n": 128, "k": 128, "x": "mxfp8", "weight": weight, "out": "bf16", "acc": True}
        yield Case(f"whole blocks, accumulator, {weight}", bound(make, rows=21, **keywords), "small", ("x", "acc"))
    yield Case("every weight code", _every_weight_code, "small", ("x",))
    for name, n, k in (
        ("q_a and kv", 1792, 5120),
        ("q_b", 32768, 1280),
        ("o_b", 5120, 8192),
        ("shared up", 4608, 5120),
        ("q_a and kv, one of 4 ranks", 448, 5120),
    ):
        keywords = {"rows": 64, "n": n, "k": k, "x": "mxfp8", "weight": "mxfp8", "out": "bf16"}
        yield Case(f"model {name}", bound(make, **keywords), "real", ("x",))


def _every_weight_code(gen: Generator) -> dict[str, Any]:
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # a weight holds no NaN
    scale = torch.arange(120, 136, dtype=torch.uint8)[:, None]
    return {
        "x": activation_of(gen, 5, 32, kind="mxfp8"),
        "weight": QTensor(codes.repeat(2, 1), scale, "mxfp8"),
        "out_dtype": torch.float32,
    }


def linear_bf16_cases() -> Iterable[Case]:
    """Both storage types, all casts, a scale, ragged sizes, NaN and Inf rows."""

    def make(
        gen: Generator, rows: int, n: int, k: int, x: str, weight: str, out: str, scale: float = 1.0
    ) -> dict[str, Any]:
        return {
            "x": _broken_rows(activation_of(gen, rows, k, kind=x)),
            "weight": weight_of(gen, n, k, kind=weight),
            "out_dtype": OUT[out],
            "out_scale": scale,
        }

    for x, weight, out in (
        ("bf16", "bf16", "bf16"),
        ("bf16", "bf16", "f32"),
        ("bf16", "f32", "f32"),
        ("f32", "f32", "f32"),
    ):
        keywords = {"n": 50, "k": 96, "x": x, "weight": weight, "out": out}
        yield from cases_of(
            make, ("x",), ((f"{n}, {x} x {weight} to {out}", {"rows": r, **keywords}) for n, r in row_counts())
        )
    keywords = {"x": "f32", "weight": "bf16", "out": "f32", "scale": 0.0137}
    for n, k in ((1, 1), (3, 7), (32, 129)):
        yield Case(f"{n} x {k}, scaled", bound(make, rows=18, n=n, k=k, **keywords), "small", ("x",))
    for name, n, k, out in (
        ("router", 384, 5120, "f32"),
        ("compressor", 512, 5120, "f32"),
        ("head weights", 32, 5120, "bf16"),
    ):
        keywords = {"rows": 64, "n": n, "k": k, "x": "bf16", "weight": "bf16", "out": out}
        yield Case(f"model {name}", bound(make, **keywords), "real", ("x",))


def linear_grouped_o_cases() -> Iterable[Case]:
    """One group and several, plain and quantised weights."""

    def make(gen: Generator, rows: int, groups: int, n: int, k: int, x: str, weight: str) -> dict[str, Any]:
        plain = activation_of(gen, rows, groups, k, kind=x)
        return {"x": _broken_rows(plain), "weight": weight_of(gen, groups, n, k, kind=weight)}

    for x, weight in (("bf16", "bf16"), ("bf16", "mxfp8"), ("f32", "mxfp8")):
        for groups in (1, 3):
            keywords = {"groups": groups, "n": 20, "k": 64, "x": x, "weight": weight}
            names = ((f"{groups} groups, {n}, {x} x {weight}", {"rows": r, **keywords}) for n, r in row_counts())
            yield from cases_of(make, ("x",), names)
    for x in ("bf16", "f32"):
        keywords = {"rows": 37, "groups": 2, "n": 128, "k": 256, "x": x, "weight": "mxfp8"}
        yield Case(f"whole blocks, {x} x mxfp8", bound(make, **keywords), "small", ("x",))
    for name, n in (("o groups", 1024), ("o groups, one of 16 ranks", 64)):
        keywords = {"rows": 32, "groups": 8, "n": n, "k": 4096, "x": "bf16", "weight": "mxfp8"}
        yield Case(f"model {name}", bound(make, **keywords), "real", ("x",))


def moe_gate_cases() -> Iterable[Case]:
    """Ties, a bias that decides alone, images, very negative and very large logits, k of 1 and of all experts."""
    rows_of = ("logits", "image_mask")

    def make(
        gen: Generator, rows: int, experts: int, k: int, scale: float = 1.0, images: bool = False
    ) -> dict[str, Any]:
        logits = normal(gen, rows, experts, scale=scale)
        return {
            "logits": logits,
            "bias": normal(gen, experts, scale=0.3),
            "image_bias": normal(gen, experts, scale=3.0) if images else None,
            "image_mask": torch.rand(rows, generator=gen) < 0.5 if images else None,
            "k": k,
            "scale": 1.5,
        }

    for name, rows in row_counts():
        for images in (False, True):
            label = f"{name}{', images' if images else ''}"
            yield Case(label, bound(make, rows=rows, experts=16, k=3, images=images), "small", rows_of)
    for k in (1, 8):
        yield Case(f"{k} of 8 experts", bound(make, rows=20, experts=8, k=k), "small", rows_of)
    yield Case("large logits", bound(make, rows=20, experts=24, k=6, scale=60.0), "small", rows_of)

    def ties(gen: Generator) -> dict[str, Any]:
        logits = integers(gen, 2, 24, 16).float()
        return {**make(gen, 24, 16, 5), "logits": logits, "bias": torch.zeros(16)}

    def all_tied(gen: Generator) -> dict[str, Any]:
        return {**make(gen, 4, 16, 5), "logits": torch.full((4, 16), 0.25), "bias": torch.zeros(16)}

    yield Case("ties go to the smaller id", ties, "small", rows_of)
    yield Case("all equal", all_tied, "small", rows_of)
    yield Case("model router", bound(make, rows=512, experts=384, k=6), "real", rows_of)
    yield Case("draft router", bound(make, rows=64, experts=128, k=3), "real", rows_of)


def routing(gen: Generator, rows: int, experts: int, k: int, *, holes: bool = True) -> tuple[Tensor, Tensor]:
    """Different expert ids per row (some -1, expert 0 never chosen) and weights."""
    ids = (
        torch.stack([torch.randperm(experts - 1, generator=gen)[:k] + 1 for _ in range(rows)])
        if rows
        else torch.zeros(0, k)
    )
    ids = ids.long()
    if holes and rows > 2:
        ids[1] = -1
        ids[2, 0] = -1
    return ids, torch.rand(rows, k, generator=gen) + 0.1


def ep_dispatch_cases() -> Iterable[Case]:
    """Experts without rows, all rows to one expert, choices of -1, plain and quantised rows."""

    def make(
        gen: Generator, rows: int, experts: int, k: int, kind: str, one: bool = False, h: int = 64
    ) -> dict[str, Any]:
        ids, weights = routing(gen, rows, experts, k)
        if one:
            ids = torch.full_like(ids, experts - 1)
        return {
            "x": activation_of(gen, rows, h, kind=kind),
            "expert_ids": ids,
            "weights": weights,
            "num_experts": experts,
        }

    rows_of = ("x", "expert_ids", "weights")
    for kind in ("bf16", "mxfp8", "f32"):
        names = ((f"{n}, {kind}", {"rows": r, "experts": 9, "k": 3, "kind": kind}) for n, r in row_counts())
        yield from cases_of(make, rows_of, names)
        yield Case(
            f"one expert takes all, {kind}",
            bound(make, rows=13, experts=5, k=1, kind=kind, one=True),
            "small",
            rows_of,
        )
    yield Case("model experts", bound(make, rows=128, experts=384, k=6, kind="mxfp8", h=5120), "real", rows_of)
    yield Case("model experts, many rows", bound(make, rows=1500, experts=384, k=6, kind="mxfp8"), "real", rows_of)


def ep_combine_cases() -> Iterable[Case]:
    """Choices of -1, rows without any choice, NaN in rows nobody reads, with and without the shared expert."""

    def make(gen: Generator, rows: int, k: int, kind: str, bias: bool, h: int = 64) -> dict[str, Any]:
        from deepinfer.ops.moe import DispatchHandle

        spare = 3
        order = torch.randperm(rows * k + spare, generator=gen)
        slot_to_row = order[: rows * k].reshape(rows, k).int()
        if rows > 2:
            slot_to_row[1] = -1
            slot_to_row[2, 0] = -1
        y = normal(gen, rows * k + spare, h, dtype=OUT[kind])
        unread = torch.ones(len(y), dtype=torch.bool)
        unread[slot_to_row[slot_to_row >= 0].long()] = False
        y[unread] = torch.nan
        return {
            "y": y,
            "handle": DispatchHandle(slot_to_row),
            "bias": normal(gen, rows, h, dtype=OUT[kind]) if bias else None,
            "out_dtype": OUT[kind],
        }

    for kind in ("bf16", "f32"):
        for bias in (False, True):
            for name, rows in row_counts():
                label = f"{name}, {kind}{', shared expert' if bias else ''}"
                yield Case(label, bound(make, rows=rows, k=3, kind=kind, bias=bias), "small", ("handle", "bias"))
    yield Case("model rows", bound(make, rows=128, k=6, kind="bf16", bias=True, h=5120), "real", ("handle", "bias"))


def moe_grouped_gemm_cases() -> Iterable[Case]:
    """Experts without rows at the start, middle and end; undefined rows behind the last end hold NaN."""

    def make(
        gen: Generator, counts: tuple[int, ...], n: int, k: int, x: str, weight: str, out: str, spare: int = 2
    ) -> dict[str, Any]:
        total = sum(counts)
        rows = activation_of(gen, total + spare, k, kind=x)
        if isinstance(rows, QTensor):
            rows.scale[total:] = 255
        else:
            rows[total:] = torch.nan
        return {
            "x": rows,
            "weight": weight_of(gen, len(counts), n, k, kind=weight),
            "psum": torch.tensor(counts).cumsum(0).int(),
            "out_dtype": OUT[out],
        }

    counts = {
        "MN-5 no rows": (0, 0, 0),
        "one row": (0, 1, 0),
        "ragged": (5, 0, 1, 7, 0),
        "first and last": (4, 0, 0, 9),
    }
    kinds = (("mxfp8", "mxfp4", "bf16"), ("mxfp8", "mxfp8", "f32"), ("bf16", "bf16", "bf16"), ("f32", "mxfp4", "f32"))
    for x, weight, out in kinds:
        for name, count in counts.items():
            keywords = {"counts": count, "n": 40, "k": 96, "x": x, "weight": weight, "out": out}
            yield Case(f"{name}, {x} x {weight} to {out}", bound(make, **keywords), "small", ("x",))
    for x, weight, out in (("mxfp8", "mxfp4", "bf16"), ("bf16", "mxfp8", "f32"), ("f32", "mxfp4", "f32")):
        keywords = {"counts": (0, 3, 70, 0, 9), "n": 256, "k": 256, "x": x, "weight": weight, "out": out}
        yield Case(f"whole blocks, {x} x {weight} to {out}", bound(make, **keywords), "small", ("x",))
    few, some = (0, 3, 1, 0, 2), (5, 7, 9, 0, 8)
    for name, count, out in (("few rows", few, "bf16"), ("few rows", few, "f32"), ("some rows", some, "bf16")):
        keywords = {"counts": count, "n": 256, "k": 384, "x": "mxfp8", "weight": "mxfp4", "out": out}
        yield Case(f"whole blocks, {name}, mxfp8 x mxfp4 to {out}", bound(make, **keywords), "small", ("x",))
    keywords = {"counts": (0, 0), "spare": 0, "n": 40, "k": 96, "x": "bf16", "weight": "bf16", "out": "bf16"}
    yield Case("MN-5 no rows at all", bound(make, **keywords), "small", ("x",))
    for name, n, k in (("up and gate", 4608, 5120), ("down", 5120, 2304), ("down, one of 8 ranks", 5120, 288)):
        keywords = {
            "counts": (0, 3, 17, 1, 40, 0, 2, 64),
            "n": n,
            "k": k,
            "x": "mxfp8",
            "weight": "mxfp4",
            "out": "bf16",
        }
        yield Case(f"model {name}", bound(make, **keywords), "real", ("x",))


def swiglu_quant_cases() -> Iterable[Case]:
    """Values on both sides of the clamp, gate very negative, views into one wide buffer, with and without weights."""

    def make(gen: Generator, rows: int, width: int, kind: str, fmt: str | None, weighted: bool) -> dict[str, Any]:
        both = mixed(gen, rows, 2 * width, dtype=OUT[kind]) * 6
        gate, up = both.split(width, dim=1)
        return {
            "gate": gate,
            "up": up,
            "limit": 10.0,
            "row_weight": torch.rand(rows, generator=gen) * 2 if weighted else None,
            "fmt": fmt,
        }

    rows_of = ("gate", "up", "row_weight")
    for kind in ("bf16", "f32"):
        for fmt in (None, "mxfp8"):
            for weighted in (False, True):
                for name, rows in row_counts():
                    label = f"{name}, {kind} to {fmt or kind}{', weighted' if weighted else ''}"
                    keywords = {"rows": rows, "width": 64, "kind": kind, "fmt": fmt, "weighted": weighted}
                    yield Case(label, bound(make, **keywords), "small", rows_of)
    keywords = {"rows": 256, "width": 2304, "kind": "bf16", "fmt": "mxfp8", "weighted": True}
    yield Case("model experts", bound(make, **keywords), "real", rows_of)


def expert_shuffle_cases() -> Iterable[Case]:
    """Permutations, replicas, fewer experts, codes together with scales."""

    def make(gen: Generator, source: tuple[int, ...], kind: str) -> dict[str, Any]:
        return {"weight": weight_of(gen, 5, 6, 64, kind=kind), "source": torch.tensor(source, dtype=torch.long)}

    for kind in ("bf16", "mxfp4", "mxfp8"):
        for name, source in (("permuted", (4, 2, 0, 1, 3)), ("replicas", (1, 1, 4, 1, 0, 3, 2)), ("MN-5 none", ())):
            yield Case(f"{name}, {kind}", bound(make, source=source, kind=kind))
