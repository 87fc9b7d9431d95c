"""Cases of what surrounds attention and experts: streams, compressor, Engram, heads, step correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator

from deepinfer.ops.cases.common import (
    FLOATS,
    bound,
    cases_of,
    far_stride,
    integers,
    mixed,
    normal,
    packed,
    quantised,
    row_counts,
    short,
)
from deepinfer.ops.spec import Case


def _streams(gen: Generator, rows: int, dtype: torch.dtype, m: int = 4, h: int = 48) -> dict[str, Any]:
    mix = m + m + m * m
    return {
        "h": normal(gen, rows, m, h, dtype=dtype),
        "y": normal(gen, rows, h, dtype=dtype),
        "pre": torch.rand(rows, m, generator=gen),
        "post": torch.rand(rows, m, generator=gen) * 2,
        "comb": torch.rand(rows, m, m, generator=gen),
        "fn": normal(gen, mix, m * h, scale=(m * h) ** -0.5),
        "scale": torch.tensor([0.5, 0.7, 1.3]),
        "base": normal(gen, mix, scale=0.5),
        "mix": normal(gen, rows, mix, scale=3.0),
    }


def _stream_cases(
    names: tuple[str, ...], rows_of: tuple[str, ...], extra: dict[str, Any], broken: str
) -> Iterable[Case]:
    def make(gen: Generator, awkward_rows: bool = False, **keywords: Any) -> dict[str, Any]:
        args = _streams(gen, **keywords)
        if awkward_rows:
            args[broken] = mixed(gen, *args[broken].shape, dtype=args[broken].dtype)
        return {**{name: args[name] for name in names}, **extra}

    for dtype in FLOATS:
        yield from cases_of(
            make, rows_of, ((f"{n}, {short(dtype)}", {"rows": r, "dtype": dtype}) for n, r in row_counts())
        )
        keywords = {"rows": 18, "dtype": dtype, "awkward_rows": True}
        yield Case(f"awkward rows, {short(dtype)}", bound(make, **keywords), "small", rows_of)
        yield Case(f"two streams, {short(dtype)}", bound(make, rows=9, dtype=dtype, m=2, h=33), "small", rows_of)
    yield Case("model width", bound(make, rows=64, dtype=torch.bfloat16, h=5120), "real", rows_of)


def mhc_prenorm_mix_cases() -> Iterable[Case]:
    """Awkward rows, two streams, zero rows of streams, and so many rows that a device needs several waves for them."""

    def make(gen: Generator, rows: int) -> dict[str, Any]:
        args = _streams(gen, rows, torch.bfloat16, h=5120)
        return {"h": args["h"], "fn": args["fn"], "eps": 1e-20}

    yield from _stream_cases(("h", "fn"), ("h",), {"eps": 1e-20}, "h")
    yield Case("model width, many rows", bound(make, rows=2500), "real", ("h",))


def mhc_split_sinkhorn_cases() -> Iterable[Case]:
    """One iteration and twenty, steep logits."""
    for iters in (1, 2, 20):
        for case in _stream_cases(("mix", "scale", "base"), ("mix",), {"iters": iters, "eps": 1e-6}, "mix"):
            if case.tag == "small" or iters == 20:
                yield Case(f"{case.name}, {iters} iterations", case.make, case.tag, case.rows)


def mhc_apply_cases() -> Iterable[Case]:
    """Awkward rows, two streams."""
    return _stream_cases(("h", "pre"), ("h", "pre"), {}, "h")


def mhc_post_cases() -> Iterable[Case]:
    """A matrix that is far from symmetric, awkward rows."""
    return _stream_cases(("y", "h", "post", "comb"), ("y", "h", "post", "comb"), {}, "h")


def mhc_expand_cases() -> Iterable[Case]:
    """One stream and several."""

    def make(gen: Generator, rows: int, dtype: torch.dtype, streams: int) -> dict[str, Any]:
        return {"x": normal(gen, rows, 24, dtype=dtype), "streams": streams}

    for dtype in FLOATS:
        for streams in (1, 4):
            tail = f"{streams} streams, {short(dtype)}"
            yield from cases_of(
                make,
                ("x",),
                ((f"{n}, {tail}", {"rows": r, "dtype": dtype, "streams": streams}) for n, r in row_counts()),
            )


def mhc_step_cases() -> Iterable[Case]:
    """The fusion of write, mix, read and norm."""

    def make(gen: Generator, **keywords: Any) -> dict[str, Any]:
        args = _streams(gen, **keywords)
        names = ("y", "h", "post", "comb", "fn", "scale", "base")
        extra = {
            "iters": 20,
            "hc_eps": 1e-6,
            "norm_eps": 1e-20,
            "norm_weight": normal(gen, args["h"].shape[-1]) * 0.2 + 1,
        }
        return {**{name: args[name] for name in names}, "read": args["pre"], **extra}

    rows_of = ("y", "h", "post", "comb", "read")
    for dtype in FLOATS:
        yield from cases_of(
            make, rows_of, ((f"{n}, {short(dtype)}", {"rows": r, "dtype": dtype}) for n, r in row_counts())
        )
    yield Case("model width", bound(make, rows=64, dtype=torch.bfloat16, h=5120), "real", rows_of)
    yield Case("model width, many rows", bound(make, rows=523, dtype=torch.bfloat16, h=5120), "real", rows_of)


def stream_mean_cases() -> Iterable[Case]:
    """Awkward rows, two streams."""
    return _stream_cases(("h",), ("h",), {}, "h")


def kv_compress_cases() -> Iterable[Case]:
    """Every residue of the ratio as start and as length, rings that wrap, padding rows, states beyond 2^31 bytes."""

    def make(
        gen: Generator,
        lengths: tuple[int, ...],
        ends: tuple[int, ...],
        ratio: int,
        ring: int,
        dtype: torch.dtype = torch.float32,
        width: int = 24,
        padding: int = 0,
        far: bool = False,
    ) -> dict[str, Any]:
        meta = packed(lengths, ends)
        total = sum(lengths) + padding
        slots = len(lengths) + 3
        state = normal(gen, slots, ring, 2, width)
        if far:
            import numpy as np

            stride = far_stride(slots) // 4
            buffer = torch.from_numpy(np.zeros((slots - 1) * stride + ring * 2 * width, dtype=np.float32))
            view = buffer.as_strided(state.shape, (stride, 2 * width, width, 1))
            view.copy_(state)
            state = view
        state_slots = (torch.randperm(slots - 1, generator=gen)[: len(lengths)] + 1).int()
        row_to_seq = torch.cat((meta["row_to_seq"], torch.full((padding,), len(lengths), dtype=torch.int32)))
        if padding:
            state_slots = torch.cat((state_slots, torch.zeros(1, dtype=torch.int32)))
            meta["cu_seqlens_q"] = torch.cat((meta["cu_seqlens_q"], meta["cu_seqlens_q"][-1:]))
        return {
            "gate": normal(gen, total, width, scale=4.0),
            "value": normal(gen, total, width),
            "state": state,
            "state_slots": state_slots,
            "positions": torch.cat((meta["positions"], torch.zeros(padding, dtype=torch.int32))),
            "row_to_seq": row_to_seq,
            "cu_seqlens_q": meta["cu_seqlens_q"],
            "ratio": ratio,
            "out_dtype": dtype,
        }

    for ratio in (1, 2, 3, 4):
        for residue in range(ratio):
            ends = (20 + residue, 9 + residue, 41 + residue)
            keywords = {"lengths": (7, 1, 12), "ends": ends, "ratio": ratio, "ring": 8}
            yield Case(f"MN-4 residue {residue} of ratio {ratio}", bound(make, **keywords))
    yield Case("MN-5 no rows", bound(make, lengths=(0, 0), ends=(5, 0), ratio=2, ring=8))
    yield Case("MN-5 no sequences", bound(make, lengths=(), ends=(), ratio=2, ring=8))
    yield Case("LD-3 lengths 12 and 11", bound(make, lengths=(12, 11), ends=(12, 11), ratio=2, ring=8))
    yield Case("MN-1 forty tokens", bound(make, lengths=(40,), ends=(40,), ratio=2, ring=8, dtype=torch.bfloat16))
    for ring in (4, 5, 16):
        keywords = {"lengths": (11, 3, 1), "ends": (30, 17, 2), "ratio": 2, "ring": ring}
        yield Case(f"ring of {ring}", bound(make, **keywords))
    yield Case("decode rows", bound(make, lengths=(1,) * 6, ends=(1, 2, 3, 8, 9, 100), ratio=2, ring=8))
    yield Case("verify rows", bound(make, lengths=(6,) * 4, ends=(6, 13, 20, 99), ratio=2, ring=8))
    yield Case("padding rows", bound(make, lengths=(4, 3), ends=(9, 3), ratio=2, ring=8, padding=3))
    far = bound(make, lengths=(7, 2, 4), ends=(20, 9, 5), ratio=2, ring=8, far=True)
    yield Case("MN-3 state offsets past 2^31", far)
    real = {"lengths": (301, 1, 6), "ends": (301, 77, 900), "dtype": torch.bfloat16}
    yield Case("model channels", bound(make, ratio=2, ring=8, width=512, **real), "real")


def engram_ngrams_cases() -> Iterable[Case]:
    """Sequence starts, decode rows with history, missing history, blocked rows in the rows and in the history."""

    def make(
        gen: Generator,
        lengths: tuple[int, ...],
        ends: tuple[int, ...],
        depth: int = 4,
        images: bool = False,
        earlier: bool = True,
    ) -> dict[str, Any]:
        meta = packed(lengths, ends)
        total, sequences = sum(lengths), len(lengths)
        history = integers(gen, 50, sequences, depth - 1)
        before = torch.tensor([e - n for n, e in zip(lengths, ends, strict=True)], dtype=torch.long).reshape(-1, 1)
        history = torch.where(torch.arange(depth - 1) < before, history, -1).int()
        return {
            "input_ids": integers(gen, 50, total),
            "row_to_seq": meta["row_to_seq"],
            "cu_seqlens_q": meta["cu_seqlens_q"],
            "history": history,
            "token_map": torch.randperm(50, generator=gen).int(),
            "pad_token_id": 2,
            "blocked": torch.rand(total, generator=gen) < 0.2 if images else None,
            "history_blocked": torch.rand(sequences, depth - 1, generator=gen) < 0.2 if images and earlier else None,
        }

    for images in (False, True):
        tail = ", images" if images else ""
        yield Case(f"MN-5 no rows{tail}", bound(make, lengths=(0,), ends=(0,), images=images))
        yield Case(f"prompt{tail}", bound(make, lengths=(9, 1, 3), ends=(9, 1, 3), images=images))
        yield Case(f"chunks{tail}", bound(make, lengths=(5, 2, 1), ends=(30, 3, 2), images=images))
        yield Case(f"decode rows{tail}", bound(make, lengths=(1,) * 5, ends=(1, 2, 3, 4, 90), images=images))
        yield Case(f"verify rows{tail}", bound(make, lengths=(6, 6, 6), ends=(6, 7, 50), images=images))
    yield Case("images in these rows only", bound(make, lengths=(4,) * 8, ends=(30,) * 8, images=True, earlier=False))
    yield Case("no n-grams", bound(make, lengths=(4, 2), ends=(4, 9), depth=1))


def engram_hash_cases() -> Iterable[Case]:
    """Products that wrap in 64 bits, primes near the real size."""

    def make(gen: Generator, rows: int, high: int, layers: int = 2, heads: int = 2) -> dict[str, Any]:
        primes = torch.tensor([[61, 67, 71, 73, 79, 83], [16000057, 16000067, 16000087, 97, 101, 103]])[:layers]
        return {
            "ngrams": integers(gen, 99092, rows, 4),
            "multipliers": torch.randint(-high, high, (layers, 4), generator=gen) * 2 + 1,
            "primes": primes,
            "offsets": primes.cumsum(1) - primes,
        }

    for name, rows in row_counts():
        yield Case(name, bound(make, rows=rows, high=2**45), "small", ("ngrams",))
    yield Case("products wrap in 64 bits", bound(make, rows=40, high=2**61), "small", ("ngrams",))


def engram_fetch_cases() -> Iterable[Case]:
    """Plain and quantised tables, duplicate rows, tables beyond 2^31 bytes."""

    def make(gen: Generator, rows: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
        table = quantised(gen, 90, 64, fmt="mxfp8") if kind == "mxfp8" else normal(gen, 90, 64, dtype=torch.bfloat16)
        return {"table": table, "rows": integers(gen, 90, rows, 5), "out_dtype": dtype}

    for kind in ("plain", "mxfp8"):
        for dtype in FLOATS:
            names = (
                (f"{n}, {kind} to {short(dtype)}", {"rows": r, "kind": kind, "dtype": dtype}) for n, r in row_counts()
            )
            yield from cases_of(make, ("rows",), names)

    def far(gen: Generator) -> dict[str, Any]:
        import numpy as np

        stride = far_stride(12)
        buffer = torch.from_numpy(np.zeros(11 * stride // 2 + 64, dtype=np.int16)).view(torch.bfloat16)
        table = buffer.as_strided((12, 64), (stride // 2, 1))
        table.copy_(normal(gen, 12, 64))
        return {"table": table, "rows": integers(gen, 12, 9, 5), "out_dtype": torch.float32}

    yield Case("MN-3 row offsets past 2^31", far, "small", ("rows",))


def engram_gate_cases() -> Iterable[Case]:
    """Products of zero with either sign bit, blocked rows, zero rows, awkward rows."""

    def make(gen: Generator, rows: int, dtype: torch.dtype, m: int = 4, h: int = 32, dress: str = "") -> dict[str, Any]:
        streams = mixed(gen, rows, m, h, dtype=dtype) if dress == "awkward" else normal(gen, rows, m, h, dtype=dtype)
        kv = normal(gen, rows, (m + 1) * h, dtype=dtype)
        if dress == "zero":
            streams[::2] = 0.0
            streams[1::4] = -0.0
            kv[::3, : m * h] = 0.0  # a dot product of zero: its sign decides, and the stream cancels the rest
            streams[::3] = -0.5 * kv[::3, None, m * h :]
        return {
            "h": streams,
            "kv": kv,
            "q_weight": normal(gen, m, h),
            "k_weight": normal(gen, m, h),
            "eps": 1e-20,
            "blocked": torch.rand(rows, generator=gen) < 0.4 if dress == "blocked" else None,
        }

    rows_of = ("h", "kv", "blocked")
    for dtype in FLOATS:
        yield from cases_of(
            make, rows_of, ((f"{n}, {short(dtype)}", {"rows": r, "dtype": dtype}) for n, r in row_counts())
        )
        for dress in ("blocked", "awkward"):
            yield Case(
                f"{dress} rows, {short(dtype)}", bound(make, rows=18, dtype=dtype, dress=dress), "small", rows_of
            )
        yield Case(
            f"zero rows of streams, {short(dtype)}", bound(make, rows=12, dtype=dtype, dress="zero"), "small", rows_of
        )
    yield Case("model width", bound(make, rows=32, dtype=torch.bfloat16, h=5120), "real", rows_of)
    yield Case("model width, many rows", bound(make, rows=1100, dtype=torch.bfloat16, h=5120), "real", rows_of)
