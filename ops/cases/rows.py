"""Cases of norms, quantisers and rotations: rows in, rows out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from deepinfer.ops.cases.common import FLOATS, bound, cases_of, integers, mixed, normal, rotary, row_counts, short
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat
from deepinfer.ops.spec import Case

FORMATS: tuple[QuantFormat, ...] = ("mxfp8", "mxfp4", "nvfp4")


def _norm(gen: Generator, rows: int, width: int, dtype: torch.dtype, weighted: bool = True) -> dict[str, Any]:
    weight = normal(gen, width) * 0.2 + 1 if weighted else None
    return {"x": mixed(gen, rows, width, dtype=dtype), "weight": weight, "eps": 1e-20}


def rms_norm_cases() -> Iterable[Case]:
    """Row counts, widths that are no multiple of any vector, zero and subnormal rows, NaN next to healthy rows."""
    for dtype in FLOATS:
        name = short(dtype)
        yield from cases_of(
            _norm, ("x",), ((f"{n}, {name}", {"rows": r, "width": 96, "dtype": dtype}) for n, r in row_counts())
        )
        for width in (1, 31, 33, 257):
            yield Case(f"width {width}, {name}", bound(_norm, rows=19, width=width, dtype=dtype), "small", ("x",))
        yield Case(f"no weight, {name}", bound(_norm, rows=19, width=64, dtype=dtype, weighted=False), "small", ("x",))
        yield Case(f"hidden, {name}", bound(_norm, rows=128, width=5120, dtype=dtype), "real", ("x",))

    def heads(gen: Generator) -> dict[str, Any]:
        return {**_norm(gen, 7 * 3, 32, torch.bfloat16), "x": mixed(gen, 7, 3, 32, dtype=torch.bfloat16)}

    yield Case("heads, bf16", heads, "small", ("x",))


def rms_norm_quant_cases() -> Iterable[Case]:
    """As `rms_norm`, for every format."""
    for fmt in FORMATS:
        for dtype in FLOATS:
            name = f"{fmt}, {short(dtype)}"

            def make(
                gen: Generator, rows: int, width: int, dtype: torch.dtype = dtype, fmt: str = fmt
            ) -> dict[str, Any]:
                return {**_norm(gen, rows, width, dtype), "fmt": fmt}

            yield from cases_of(make, ("x",), ((f"{n}, {name}", {"rows": r, "width": 96}) for n, r in row_counts()))
    yield Case(
        "hidden, mxfp8, bf16", bound(make, rows=128, width=5120, dtype=torch.bfloat16, fmt="mxfp8"), "real", ("x",)
    )


def _edge_rows(gen: Generator, fmt: QuantFormat, rows: Callable[[QuantFormat], Tensor]) -> dict[str, Any]:
    return {"x": rows(fmt), "fmt": fmt}


def _scales_at_powers(fmt: QuantFormat) -> Tensor:
    """Groups whose largest value is just below, at and just above what one power of two can hold."""
    top = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}[fmt]
    peaks = torch.tensor([top * 2.0**e for e in (-12, -3, 0, 1, 9)])
    around = torch.stack(
        (torch.nextafter(peaks, torch.zeros(())), peaks, torch.nextafter(peaks, torch.tensor(1e30))), 1
    )
    x = around.reshape(-1, 1) * torch.linspace(-1, 1, GROUP[fmt])
    x[:, -1] = around.flatten()
    return x


def _midpoints(fmt: QuantFormat) -> Tensor:
    """Every midpoint between two codes at scale 1, and its neighbours on both sides, both signs."""
    codes = _values(fmt)
    middle = (codes[1:] + codes[:-1]) / 2
    middle = torch.cat((middle, torch.nextafter(middle, torch.zeros(())), torch.nextafter(middle, torch.tensor(1e3))))
    middle = torch.cat((middle, -middle))
    group = GROUP[fmt]
    width = group - 1
    rows = torch.nn.functional.pad(middle, (0, -len(middle) % width)).reshape(-1, width)
    return torch.cat((rows, torch.full((len(rows), 1), float(codes[-1]))), 1)


def _values(fmt: QuantFormat) -> Tensor:
    from deepinfer.ops.quant import E2M1, e4m3_value

    if fmt == "mxfp8":
        return e4m3_value(torch.arange(0x7F, dtype=torch.uint8))
    return torch.tensor(E2M1)


def quantize_cases() -> Iterable[Case]:
    """Ties, saturation, scales at powers of two, ragged last groups, subnormals, NaN and Inf groups."""

    def make(gen: Generator, rows: int, width: int, dtype: torch.dtype, fmt: QuantFormat) -> dict[str, Any]:
        return {"x": mixed(gen, rows, width, dtype=dtype), "fmt": fmt}

    for fmt in FORMATS:
        for dtype in FLOATS:
            for name, rows in row_counts():
                keywords = {"rows": rows, "width": 96, "dtype": dtype, "fmt": fmt}
                yield Case(f"{name}, {fmt}, {short(dtype)}", bound(make, **keywords), "small", ("x",))
        for width in (2, 30, 34, 50):
            keywords = {"rows": 18, "width": width, "dtype": torch.float32, "fmt": fmt}
            yield Case(f"width {width}, {fmt}", bound(make, **keywords), "small", ("x",))
        yield Case(f"midpoints, {fmt}", bound(_edge_rows, fmt=fmt, rows=_midpoints), "small", ("x",))
        yield Case(f"scale edges, {fmt}", bound(_edge_rows, fmt=fmt, rows=_scales_at_powers), "small", ("x",))
        yield Case(f"tiny values, {fmt}", bound(_tiny, fmt=fmt), "small", ("x",))
        keywords = {"rows": 256, "width": 5120, "dtype": torch.bfloat16, "fmt": fmt}
        yield Case(f"hidden, {fmt}", bound(make, **keywords), "real", ("x",))


def _tiny(gen: Generator, fmt: QuantFormat) -> dict[str, Any]:
    exponents = torch.arange(-149, -90).float()
    return {"x": (normal(gen, len(exponents), 64).double() * 2.0 ** exponents.double()[:, None]).float(), "fmt": fmt}


def dequantize_cases() -> Iterable[Case]:
    """Every code under every scale, NaN scales and subnormal results included."""

    def every(gen: Generator, fmt: QuantFormat, dtype: torch.dtype) -> dict[str, Any]:
        group = GROUP[fmt]
        codes = torch.arange(256, dtype=torch.uint8)
        data = codes.repeat(256, 1)
        groups = 256 * (1 if fmt == "mxfp8" else 2) // group
        scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, groups)
        return {"x": QTensor(data, scale, fmt), "dtype": dtype}

    def random(gen: Generator, rows: int, fmt: QuantFormat, dtype: torch.dtype) -> dict[str, Any]:
        from deepinfer.ops.quant import quantize

        return {"x": quantize.reference(mixed(gen, rows, 96, dtype=torch.float32), fmt), "dtype": dtype}

    for fmt in FORMATS:
        for dtype in FLOATS:
            yield Case(
                f"every code and scale, {fmt}, {short(dtype)}", bound(every, fmt=fmt, dtype=dtype), "small", ("x",)
            )
            for name, rows in row_counts():
                yield Case(
                    f"{name}, {fmt}, {short(dtype)}", bound(random, rows=rows, fmt=fmt, dtype=dtype), "small", ("x",)
                )


def _turn(
    gen: Generator, rows: int, dtype: torch.dtype, heads: int = 3, dim: int = 40, width: int = 16
) -> dict[str, Any]:
    shape = (rows, heads, dim) if heads else (rows, dim)
    return {
        "x": mixed(gen, *shape, dtype=dtype),
        "positions": integers(gen, 200, rows),
        "cos_sin": rotary(200, width),
    }


def rope_cases() -> Iterable[Case]:
    """Both directions, with and without heads, all channels and a few of them, position 0."""
    rows_of = ("x", "positions")
    for dtype in FLOATS:
        for name, rows in row_counts():
            for back in (False, True):

                def make(gen: Generator, back: bool = back, **keywords: Any) -> dict[str, Any]:
                    return {**_turn(gen, **keywords), "conjugate": back}

                label = f"{name}, {short(dtype)}{', back' if back else ''}"
                yield Case(label, bound(make, rows=rows, dtype=dtype), "small", rows_of)
        yield Case(f"no head axis, {short(dtype)}", bound(_turn, rows=17, dtype=dtype, heads=0), "small", rows_of)
        yield Case(f"all channels, {short(dtype)}", bound(_turn, rows=17, dtype=dtype, dim=16), "small", rows_of)
    keywords = {"rows": 64, "dtype": torch.bfloat16, "heads": 64, "dim": 512, "width": 64}
    yield Case("model heads", bound(_turn, **keywords), "real", rows_of)


def q_norm_rope_cases() -> Iterable[Case]:
    """MN-6: with the configuration's flag off and on, the fused op equals norm and rotation one after the other."""

    def make(gen: Generator, normalise: bool, **keywords: Any) -> dict[str, Any]:
        args = _turn(gen, **keywords)
        return {"q": args.pop("x"), **args, "normalise": normalise, "eps": 1e-20}

    for normalise in (False, True):
        flag = "MN-6 normalise on" if normalise else "MN-6 normalise off"
        for dtype in FLOATS:
            for name, rows in row_counts():
                keywords = {"rows": rows, "dtype": dtype, "normalise": normalise}
                yield Case(f"{flag}, {name}, {short(dtype)}", bound(make, **keywords), "small", ("q", "positions"))
    keywords = {"rows": 64, "dtype": torch.bfloat16, "heads": 64, "dim": 512, "width": 64, "normalise": False}
    yield Case("model heads", bound(make, **keywords), "real", ("q", "positions"))


def o_rope_cases() -> Iterable[Case]:
    """One group, a group per head, and the model's eight."""

    def make(gen: Generator, groups: int, **keywords: Any) -> dict[str, Any]:
        args = _turn(gen, **keywords)
        return {"o": args.pop("x"), **args, "num_groups": groups}

    for groups in (1, 2, 4):
        for dtype in FLOATS:
            for name, rows in row_counts():
                keywords = {"rows": rows, "dtype": dtype, "heads": 4, "groups": groups}
                yield Case(
                    f"{groups} groups, {name}, {short(dtype)}", bound(make, **keywords), "small", ("o", "positions")
                )
    keywords = {"rows": 64, "dtype": torch.bfloat16, "heads": 64, "dim": 512, "width": 64, "groups": 8}
    yield Case("model heads", bound(make, **keywords), "real", ("o", "positions"))
