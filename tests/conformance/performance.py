"""Level 6: the performance sheet. Time, rate, and the share of a roof that is measured in the same run.

Roofs are what torch itself reaches on the device: a large copy for bytes, a large matrix product for arithmetic. Where
torch does not compute on the device there is no roof, and ops have a rate and no share. Bytes are those an ideal
implementation would move: arguments once, results once, of a cache only the records that slots name. Operands that stay
in a processor's cache can pass 100 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.results import CaseResult
from deepinfer.conformance.runner import Made, make_case
from deepinfer.conformance.subject import Subject
from deepinfer.conformance.suite import Session
from deepinfer.conformance.values import HUGE_BYTES, extent, walk
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.formats import PagedCache, QTensor
from deepinfer.ops.runtime import Runtime

SECONDS_PER_CASE = 0.3
MAX_REPEATS = 50


@dataclass(frozen=True)
class Roof:
    """What the device reached: bytes per second of a copy, bf16 operations per second of a product; 0 if unknown."""

    bytes_per_second: float
    flops_per_second: float


def run_performance(session: Session) -> None:
    """Time every case with the model's own shapes, of ops that the backend implements."""
    roof = measure_roof(session.runtime)
    for name, op in defined_ops().items():
        for case in op.cases():
            if case.tag != "real" or not session.wants(name, case.name):
                continue
            made = make_case(op, case)
            subject = session.subject(made)
            if not subject.native:
                continue  # the speed of a reference is nobody's claim
            session.add(time_case(subject, made, roof))


def measure_roof(runtime: Runtime) -> Roof:
    """Copy and product as torch runs them on the device."""
    if not runtime.capabilities.torch_compute:
        return Roof(0.0, 0.0)
    host = runtime.device.type == "cpu"
    source = runtime.zeros(((64 if host else 1024) << 20,), torch.uint8)
    target = torch.empty_like(source)
    copy = seconds(runtime, lambda: target.copy_(source))
    size = 1024 if host else 8192
    a = runtime.to_device(torch.randn(size, size).to(torch.float32 if host else torch.bfloat16))
    product = seconds(runtime, lambda: a @ a)
    return Roof(2 * source.numel() / copy, 2 * size**3 / product)


def seconds(runtime: Runtime, call: Callable[[], Any]) -> float:
    """Median time of a call, warm, with the device idle before and after."""
    call()
    runtime.synchronize()
    times: list[float] = []
    spent = 0.0
    while len(times) < 3 or (spent < SECONDS_PER_CASE and len(times) < MAX_REPEATS):
        began = time.perf_counter()
        call()
        runtime.synchronize()
        times.append(time.perf_counter() - began)
        spent += times[-1]
    return sorted(times)[len(times) // 2]


def time_case(subject: Subject, made: Made, roof: Roof) -> CaseResult:
    """One line of the sheet."""
    result = CaseResult(6, made.op.name, made.case.name, subject.implementation, subject.native)
    if any(extent(t) * t.element_size() > HUGE_BYTES * 64 for _, t in walk(made.args)):
        result.status, result.detail = "unsupported", "too large to copy for timing"
        return result
    there = subject.prepared({name: subject.moved(value) for name, value in made.args.items()})
    options, positional = subject.options(made.args), subject.positional(there)
    returned = subject.plan.run(*positional, **options)
    outcome = options.get("out", returned)  # the engine does not look at what is returned either
    taken = seconds(subject.runtime, lambda: subject.plan.run(*positional, **options))
    moved, flops = ideal_bytes(made.args, outcome), ideal_flops(made.op.name, made.args)
    by_bytes = moved / roof.bytes_per_second if roof.bytes_per_second else 0.0
    by_flops = flops / roof.flops_per_second if roof.flops_per_second else 0.0
    bound = "arithmetic" if by_flops > by_bytes else "memory"
    rate = f"{flops / taken / 1e12:.2f} TFLOP/s" if bound == "arithmetic" else f"{moved / taken / 1e9:.1f} GB/s"
    result.seconds = taken
    result.facts = {"us": taken * 1e6, "rate": rate, "bound": bound}
    result.detail = f"{taken * 1e6:.1f} us, {rate}"
    if roof.bytes_per_second:
        share = max(by_bytes, by_flops) / taken
        result.facts["share"] = share
        result.detail += f", {share:.0%} of the measured roof"
    return result


def ideal_bytes(args: Mapping[str, Any], outcome: Any) -> int:
    """Bytes that must move: every plain argument and result once, every named record once."""
    total = sum(t.numel() * t.element_size() for _, t in walk(outcome))
    for name, value in args.items():
        if isinstance(value, PagedCache):
            slots = args.get(name.replace("cache", "slots"), args.get("slots"))
            named = int((slots >= 0).sum()) if isinstance(slots, Tensor) else value.num_slots
            total += min(named, value.num_slots) * value.format.record_bytes
        else:
            total += sum(t.numel() * t.element_size() for _, t in walk(value))
    return total


def ideal_flops(op: str, args: Mapping[str, Any]) -> int:
    """Multiply-adds times two of the products in an op; 0 where there are none to speak of."""
    if op in ("linear_mx", "linear_bf16"):
        return 2 * _rows(args["x"]) * _size(args["weight"])
    if op == "linear_grouped_o":
        return 2 * _rows(args["x"]) * _size(args["weight"])
    if op == "moe_grouped_gemm":
        return 2 * int(args["psum"][-1]) * _size(args["weight"], 1)
    if op == "sparse_attn":
        keys = sum(int((args[name] >= 0).sum()) for name in ("window_slots", "kv_slots") if args[name] is not None)
        return 4 * keys * _size(args["q"], 1)
    if op == "index_logits_paged":
        return 2 * int(args["visible"].sum()) * _size(args["q"], 1)
    if op == "vision_attn":
        lengths = args["cu_seqlens"].diff().long()
        return 4 * int((lengths * lengths).sum()) * _size(args["q"], 1)
    if op == "mhc_prenorm_mix":
        return 2 * _rows(args["h"]) * _size(args["fn"])
    return 0


def _size(x: Tensor | QTensor, first: int = 0) -> int:
    return math.prod(tuple(x.shape)[first:])


def _rows(x: Tensor | QTensor) -> int:
    return int(x.shape[0])
