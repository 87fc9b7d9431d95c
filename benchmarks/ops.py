"""Ops at DeepSeek-V4.1-Flash's real shapes: time, rate, share of a roof measured in the same run, and torch beside it.

    python benchmarks/ops.py --backend cuda_sm90 [--op GLOB] [--json FILE]

A time is the median over replays of a captured graph of several calls (where the device captures; else over plain
calls), so launch overhead of the host is not in it. Operands are made on the device; those of a product that a cache
could hold are rotated over 400 MB. Peers are what torch offers for the same product: its own bf16 matrix product on
operands decoded beforehand, its scaled and grouped products where this torch has them for the device.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.performance import measure_roof
from deepinfer.conformance.subject import context
from deepinfer.ops import attention, index, linear, moe, norm, quant
from deepinfer.ops.contract import static_dims
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import OpSpec

HIDDEN, HEADS, DIM, EXPERTS, CHOSEN = 5120, 64, 512, 384, 6
ROTATED_BYTES = 400 << 20
CALLS = 10


@dataclass
class Line:
    """One measurement.

    Attributes:
        op: the op, or the peer's name.
        shape: what was run.
        us: microseconds a call.
        tflops: arithmetic rate, 0 where the op has none to speak of.
        gbs: bytes an ideal implementation moves, over the time.
        share: of the roof that bounds it.
        bound: "arithmetic" or "memory".
    """

    op: str
    shape: str
    us: float
    tflops: float
    gbs: float
    share: float
    bound: str


@dataclass(frozen=True)
class Work:
    """Something to time.

    Attributes:
        op: its contract; None for a peer.
        name: in the table.
        shape: in the table.
        calls: argument lists to rotate over.
        flops: a call's.
        num_bytes: that a call must move.
        run: instead of the op.
    """

    op: OpSpec[..., Any] | None
    name: str
    shape: str
    calls: list[dict[str, Any]]
    flops: float
    num_bytes: float
    run: Callable[..., Any] | None = None


class Maker:
    """Random operands on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gen = torch.Generator(device).manual_seed(0)

    def plain(self, *shape: int) -> Tensor:
        """Standard normal bfloat16."""
        return torch.randn(*shape, generator=self.gen, device=self.device).to(torch.bfloat16)

    def codes(self, *shape: int, fmt: str) -> QTensor:
        """Any code but NaN, scales near 1."""
        width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
        data = torch.randint(0, 256, (*shape[:-1], width), generator=self.gen, device=self.device, dtype=torch.uint8)
        if fmt == "mxfp8":
            data.masked_fill_((data & 0x7F) == 0x7F, 0)
        scale_shape = (*shape[:-1], shape[-1] // 32)
        scale = torch.randint(110, 118, scale_shape, generator=self.gen, device=self.device, dtype=torch.uint8)
        return QTensor(data, scale, fmt)  # type: ignore[arg-type]

    def cache(self, kind: str, pages: int, records: int, dim: int) -> PagedCache:
        """Records of random bytes that are no NaN."""
        fmt = CacheFormat(kind, dim)  # type: ignore[arg-type]
        data = torch.randint(
            0, 100, (pages, records * fmt.record_bytes), generator=self.gen, device=self.device, dtype=torch.uint8
        )
        return PagedCache(data, fmt, records)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.gen, device=self.device, dtype=torch.int32)


def rotated(make: Callable[[], dict[str, Any]], num_bytes: float) -> list[dict[str, Any]]:
    """As many operand sets as leave a cache no chance, 16 at most."""
    return [make() for _ in range(max(1, min(16, math.ceil(ROTATED_BYTES / max(num_bytes, 1)))))]


def dense(make: Maker) -> Iterator[Work]:
    for label, n, k in (("q_b", 32768, 1280), ("shared up", 4608, HIDDEN), ("o_b", HIDDEN, 8192)):
        for rows in (16, 64, 128, 2048, 8192):
            num_bytes = n * k * 33 / 32 + rows * k * 33 / 32 + rows * n * 2
            flops = 2.0 * rows * n * k

            def operands(rows: int = rows, n: int = n, k: int = k) -> dict[str, Any]:
                return {
                    "x": make.codes(rows, k, fmt="mxfp8"),
                    "weight": make.codes(n, k, fmt="mxfp8"),
                    "out_dtype": torch.bfloat16,
                }

            shape = f"{label} {rows} x {n} x {k}, mxfp8"
            yield Work(linear.linear_mx, "linear_mx", shape, rotated(operands, n * k), flops, num_bytes)

            def decoded(rows: int = rows, n: int = n, k: int = k) -> dict[str, Any]:
                return {"input": make.plain(rows, k), "mat2": make.plain(n, k).t()}

            yield Work(
                None, "  torch.mm, bf16 copy", shape, rotated(decoded, 2 * n * k), flops, num_bytes, run=torch.mm
            )
            if rows >= 64 and hasattr(torch, "_scaled_mm") and make.device.type != "cpu":
                one = torch.ones((), device=make.device)

                def scaled(rows: int = rows, n: int = n, k: int = k, one: Tensor = one) -> dict[str, Any]:
                    eight = torch.float8_e4m3fn
                    a, b = make.plain(rows, k).to(eight), make.plain(n, k).to(eight).t()
                    return {"input": a, "mat2": b, "scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}

                yield Work(
                    None,
                    "  torch._scaled_mm, one scale",
                    shape,
                    rotated(scaled, n * k),
                    flops,
                    num_bytes,
                    run=torch._scaled_mm,
                )


def plain_dense(make: Maker) -> Iterator[Work]:
    for label, n, k, counts in (("router", EXPERTS, HIDDEN, (64, 8192)), ("head", 129280, HIDDEN, (16, 64))):
        for rows in counts:
            args = {"x": make.plain(rows, k), "weight": make.plain(n, k), "out_dtype": torch.float32}
            flops, num_bytes = 2.0 * rows * n * k, 2.0 * n * k + 2.0 * rows * k + 4.0 * rows * n
            shape = f"{label} {rows} x {n} x {k}, bf16"
            yield Work(linear.linear_bf16, "linear_bf16", shape, [args], flops, num_bytes)


def experts(make: Maker) -> Iterator[Work]:
    weight = {(n, k): make.codes(EXPERTS, n, k, fmt="mxfp4") for n, k in ((4608, HIDDEN), (HIDDEN, 2304))}
    for tokens in (16, 128, 1024, 16384):
        choice = torch.rand(tokens, EXPERTS, generator=make.gen, device=make.device).topk(CHOSEN, 1).indices
        counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
        hit = int((counts > 0).sum())
        psum = counts.cumsum(0).int()
        rows = tokens * CHOSEN
        for (n, k), w in weight.items():
            x = make.codes(rows, k, fmt="mxfp8")
            args = {"x": x, "weight": w, "psum": psum, "out_dtype": torch.bfloat16}
            num_bytes = hit * n * k * 17 / 32 + rows * k * 33 / 32 + rows * n * 2
            shape = f"{tokens} tokens, {hit} experts, {n} x {k}"
            yield Work(moe.moe_grouped_gemm, "moe_grouped_gemm", shape, [args], 2.0 * rows * n * k, num_bytes)


def attend(make: Maker) -> Iterator[Work]:
    window, kv = make.cache("fp8", 2048, 32, DIM), make.cache("fp4", 2048, 64, DIM)
    for rows in (16, 64, 128, 512, 8192):
        args = {
            "q": make.plain(rows, HEADS, DIM) * 0.1,
            "window_cache": window,
            "window_slots": make.integers(32, window.num_slots, rows, 128),
            "kv_cache": kv,
            "kv_slots": make.integers(64, kv.num_slots, rows, 512),
            "softmax_scale": DIM**-0.5,
            "attn_sink": torch.zeros(HEADS, device=make.device),
        }
        num_bytes = rows * (128 * 528 + 512 * 288 + 4.0 * HEADS * DIM)
        flops = 4.0 * rows * HEADS * 640 * DIM
        yield Work(attention.sparse_attn, "sparse_attn", f"{rows} rows x 640 keys", [args], flops, num_bytes)
        if rows <= 512:
            q, keys = make.plain(rows, HEADS, 1, DIM), make.plain(rows, 1, 640, DIM).expand(rows, HEADS, 640, DIM)
            run = torch.nn.functional.scaled_dot_product_attention
            peer = {"query": q, "key": keys, "value": keys}
            yield Work(None, "  torch SDPA, gathered bf16", f"{rows} rows x 640 keys", [peer], flops, num_bytes, run)


def choose(make: Maker) -> Iterator[Work]:
    heads, dim, records = 32, 128, 64
    for rows, columns in ((64, 32768), (1024, 8192)):
        blocks = columns // records
        args = {
            "q": make.codes(rows, heads, dim, fmt="mxfp4"),
            "cache": make.cache("index", blocks + 1, records, dim),
            "weights": make.plain(rows, heads),
            "visible": torch.full((rows,), columns, dtype=torch.int32, device=make.device),
            "block_table": torch.arange(1, blocks + 1, dtype=torch.int32, device=make.device)[None],
            "row_to_seq": torch.zeros(rows, dtype=torch.int32, device=make.device),
            "num_columns": columns,
        }
        flops, num_bytes = 2.0 * rows * columns * heads * dim, columns * 68.0 + rows * columns * 4
        yield Work(index.index_logits_paged, "index_logits_paged", f"{rows} x {columns}", [args], flops, num_bytes)
    for columns in (16384, 65536):
        for dtype in (torch.float32, torch.bfloat16):
            x = make.plain(256, columns).to(dtype)
            args = {"x": x, "k": 512, "lens": torch.full((256,), columns, dtype=torch.int32, device=make.device)}
            num_bytes = float(x.numel() * x.element_size())
            shape = f"512 of {columns}, 256 rows, {str(dtype)[6:]}"
            yield Work(index.topk_select, "topk_select", shape, [args], 0.0, num_bytes)
            peer = {"input": x, "k": 512, "sorted": False}
            yield Work(None, "  torch.topk, ties anyhow", shape, [peer], 0.0, num_bytes, torch.topk)


def rows(make: Maker) -> Iterator[Work]:
    for count in (128, 8192):
        x, weight = make.plain(count, HIDDEN), torch.ones(HIDDEN, device=make.device)
        out = count * HIDDEN
        args = {"x": x, "weight": weight, "eps": 1e-6}
        yield Work(norm.rms_norm, "rms_norm", f"{count} x {HIDDEN}", [args], 0.0, 4.0 * out)
        args = {"x": x, "fmt": "mxfp8"}
        yield Work(quant.quantize, "quantize", f"{count} x {HIDDEN}, mxfp8", [args], 0.0, out * (3 + 1 / 32))


FAMILIES: dict[Callable[[Maker], Iterator[Work]], tuple[str, ...]] = {
    dense: ("linear_mx",),
    plain_dense: ("linear_bf16",),
    experts: ("moe_grouped_gemm",),
    attend: ("sparse_attn",),
    choose: ("index_logits_paged", "topk_select"),
    rows: ("rms_norm", "quantize"),
}
"""The ops of each family, known before its operands are made."""


def time_work(runtime: Runtime, work: Work, run: Callable[..., Any]) -> float:
    """Microseconds a call."""
    calls = [work.calls[i % len(work.calls)] for i in range(max(CALLS, len(work.calls)))]

    def all_calls() -> None:
        for args in calls:
            run(**args)

    all_calls()
    runtime.synchronize()
    replay = runtime.capture(all_calls) if runtime.capabilities.graphs else all_calls
    replay()
    times = []
    for _ in range(7):
        first, last = runtime.event(), runtime.event()
        began = time.perf_counter()
        first.record()
        replay()
        last.record()
        runtime.synchronize()
        timed = last.elapsed_ms(first) if runtime.capabilities.asynchronous else (time.perf_counter() - began) * 1e3
        times.append(timed * 1e3 / len(calls))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--op", default="*", help="glob over names in the table; peers follow their op")
    parser.add_argument("--json", help="write the lines and the roofs here")
    asked = parser.parse_args()
    backend = find_backend(asked.backend)
    if backend.runtime is None:
        raise SystemExit(f"backend {backend.name!r} has no device to time")
    runtime = backend.runtime()
    backend.load()
    table = OpTable(backend, context(runtime), overrides={})
    roof = measure_roof(runtime)
    copy, product = roof.bytes_per_second / 1e9, roof.flops_per_second / 1e12
    print(f"measured roofs: copy {copy:.0f} GB/s, bf16 product {product:.0f} TFLOP/s")
    make = Maker(runtime.device)
    lines, skip = [], False
    for family, names in FAMILIES.items():
        if not any(fnmatch.fnmatchcase(name, asked.op) for name in names):
            continue  # its operands alone take gigabytes
        for work in family(make):
            skip = not fnmatch.fnmatchcase(work.name, asked.op) if work.op is not None else skip
            if skip:
                continue
            if work.op is None:
                run, who = work.run, work.name
            else:
                bound = table.bind(work.op, **static_dims(work.op.dims, work.calls[0]))
                run, who = bound, bound.implementation
                work = replace(
                    work, calls=[{name: bound.prepare(name, v) for name, v in call.items()} for call in work.calls]
                )
            assert run is not None, "an op, or a peer to run"
            try:
                us = time_work(runtime, work, run)
            except RuntimeError as error:
                print(f"{who:32} {work.shape:40} not run: {str(error).splitlines()[0][:80]}", flush=True)
                continue
            by_bytes, by_flops = work.num_bytes / 1e9 / copy, work.flops / 1e12 / product
            bound = "arithmetic" if by_flops > by_bytes else "memory"
            rates = work.flops / us / 1e6, work.num_bytes / us / 1e3
            line = Line(who, work.shape, us, *rates, max(by_bytes, by_flops) * 1e6 / us, bound)
            lines.append(line)
            print(
                f"{who:32} {work.shape:40} {us:9.1f} us {line.tflops:7.1f} TFLOP/s {line.gbs:7.0f} GB/s "
                f"{line.share:5.0%} of {bound}",
                flush=True,
            )
    if asked.json:
        with open(asked.json, "w") as out:
            json.dump({"copy_gbs": copy, "product_tflops": product, "lines": [asdict(x) for x in lines]}, out, indent=1)


if __name__ == "__main__":
    main()
