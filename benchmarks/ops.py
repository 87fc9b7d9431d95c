"""Ops at DeepSeek-V4.1-Flash's real shapes: time, rate, share of roofs measured in the same run, and torch beside it.

    python benchmarks/ops.py --backend cuda_sm90 [--op GLOB[,GLOB]] [--shape GLOB] [--invariance on,off] [--json FILE]

A time is the median over replays of a captured graph of several calls (where the device captures; else over plain
calls), so launch overhead of the host is not in it, but for an op that waits for the host, which its shape says.
Operands and peers are described in `op_work/`. With `--invariance on,off` an op is timed as it runs by default and
with `batch_invariant=False`, where another implementation is chosen for that; `--peers off` leaves torch out.

Before it is timed an op runs a few times on the same operands and must give the same bits (D2): rows by the thousand
show races that the cases of a contract are too small for. What differs is named, not timed, and the exit status is 1.
What an op writes in place is as it was before each of these runs and before the timed ones.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from op_lines import Line, Roofs, markdown
from op_work import FAMILIES, Calls, Maker, Work
from torch import Tensor

from deepinfer.conformance.performance import measure_roof
from deepinfer.conformance.subject import context
from deepinfer.ops.backend import Backend
from deepinfer.ops.contract import static_dims
from deepinfer.ops.errors import OpError
from deepinfer.ops.registry import BoundOp, OpTable, find_backend
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.trees import tensors_of

_CALLS: Final = 10
_REPLAYS: Final = 7
_REPEATS: Final = 4
"""Runs of an op whose results must have the same bits."""


def time_calls(runtime: Runtime, calls: Calls, run: Callable[..., Any], *, capturable: bool = True) -> float:
    """Microseconds a call, over argument lists in turn."""
    chosen = [calls[i % len(calls)] for i in range(max(_CALLS, len(calls)))]

    def all_calls() -> None:
        for args in chosen:
            run(**args)

    all_calls()
    runtime.synchronize()
    replay = runtime.capture(all_calls) if runtime.capabilities.graphs and capturable else all_calls
    replay()
    times = []
    for _ in range(_REPLAYS):
        first, last = runtime.event(), runtime.event()
        began = time.perf_counter()
        first.record()
        replay()
        last.record()
        runtime.synchronize()
        timed = last.elapsed_ms(first) if runtime.capabilities.asynchronous else (time.perf_counter() - began) * 1e3
        times.append(timed * 1e3 / len(chosen))
    return statistics.median(times)


def repeats(bound: BoundOp[..., Any], args: dict[str, Any]) -> bool:
    """Whether runs on the same operands give the same bits, in results and in what they write in place.

    What they write is put back behind each of them.
    """
    written = tensors_of([args[name] for name in bound.op.mutates])
    before = [tensor.clone() for tensor in written]

    def outcome() -> list[Tensor]:
        found = [*tensors_of(bound(**args)), *(tensor.clone() for tensor in written)]
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        return found

    first = outcome()
    return all(
        torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))
        for _ in range(_REPEATS - 1)
        for old, new in zip(first, outcome(), strict=True)
    )


class OpBench:
    """Times work on one device.

    Args:
        backend: loaded.
        invariance: which tables to time: with batch invariance, without, or both.
        peers: time what torch offers as well.

    Attributes:
        unequal: implementations and operands on which runs differed.
    """

    def __init__(self, backend: Backend, invariance: Sequence[bool], *, peers: bool) -> None:
        if backend.runtime is None:
            raise SystemExit(f"backend {backend.name!r} has no device to time")
        self.runtime = backend.runtime()
        self.tables = {
            kind: OpTable(backend, replace(context(self.runtime), batch_invariant=kind), overrides={})
            for kind in invariance
        }
        self._peers = peers
        self.unequal: list[str] = []
        roof = measure_roof(self.runtime)
        name = getattr(self.runtime, "device_name", self.runtime.device.type)
        self.roofs = Roofs.of(name, roof.bytes_per_second / 1e9, roof.flops_per_second / 1e12)
        self.make = Maker(next(iter(self.tables.values())))

    def lines(self, globs: Sequence[str], shape: str = "*") -> Iterator[Line]:
        """All work of ops that fit one of the globs, on operands that fit `shape`."""

        def wants(name: str) -> bool:
            return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

        for family, names in FAMILIES.items():
            if any(map(wants, names)):  # its operands alone take gigabytes
                for work in family(self.make):
                    if wants(work.op.name) and fnmatch.fnmatchcase(work.shape, shape):
                        yield from self.measure(work)

    def measure(self, work: Work) -> Iterator[Line]:
        """An op, in both ways where they differ, and its peers."""
        known: set[str] = set()
        for invariant, table in self.tables.items():
            bound = table.bind(work.op, **static_dims(work.op.dims, work.calls[0]))
            if bound.implementation in known:
                continue
            known.add(bound.implementation)
            calls = [{name: bound.prepare(name, value) for name, value in call.items()} for call in work.calls]
            if not repeats(bound, calls[0]):
                self.unequal.append(f"{bound.implementation} {work.shape}")
                print(f"{bound.implementation:40} {work.shape:40} not timed: runs differ", flush=True)
                continue
            yield from self._line(work, bound.implementation, calls, bound, invariant, capturable=bound.capturable)
        for peer in work.peers if self._peers else ():
            yield from self._line(work, peer.name, peer.calls(), peer.run, None)

    def _line(
        self,
        work: Work,
        who: str,
        calls: Calls,
        run: Callable[..., Any],
        invariant: bool | None,
        *,
        capturable: bool = True,
    ) -> Iterator[Line]:
        try:
            us = time_calls(self.runtime, calls, run, capturable=capturable)
        except RuntimeError as error:  # a peer that this torch lacks for the device, or memory that is not there
            print(f"{who:40} {work.shape:40} not run: {str(error).splitlines()[0][:80]}", flush=True)
            return
        key = f"{work.op.name} {work.shape}"
        yield Line.of(
            key,
            who,
            work.shape,
            us,
            invariant=invariant,
            flops=work.flops,
            num_bytes=work.num_bytes,
            roofs=self.roofs,
        )


def _kinds(text: str) -> list[bool]:
    words = {"on": True, "off": False}
    if not text or any(part not in words for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not on, off, or both with a comma between")
    return [words[part] for part in text.split(",")]


def _globs(text: str) -> list[str]:
    """Globs, each of which fits an op that is timed."""
    names = [name for family in FAMILIES.values() for name in family]
    globs = [glob.strip() for glob in text.split(",")]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise argparse.ArgumentTypeError(f"no op fits {glob!r}; there are {', '.join(sorted(names))}")
    return globs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu", help="whose kernels are timed")
    parser.add_argument("--op", type=_globs, default=["*"], help="globs over names of ops, with commas between")
    parser.add_argument("--shape", default="*", help="glob over what the table says of operands")
    parser.add_argument(
        "--invariance", type=_kinds, default=[True, False], help="batch invariance: on, off, or on,off (default)"
    )
    parser.add_argument("--peers", choices=("on", "off"), default="on", help="also time what torch offers")
    parser.add_argument("--json", type=Path, help="write the lines and the roofs here")
    parser.add_argument("--markdown", type=Path, help="write a table for people here")
    asked = parser.parse_args()
    try:
        backend = find_backend(asked.backend)
    except OpError as error:
        raise SystemExit(f"error: {error}") from None
    bench = OpBench(backend, asked.invariance, peers=asked.peers == "on")
    roofs = bench.roofs
    print(f"measured roofs: copy {roofs.copy_gbs:.0f} GB/s, bf16 product {roofs.product_tflops:.0f} TFLOP/s")
    lines = []
    for line in bench.lines(asked.op, asked.shape):
        lines.append(line)
        print(line, flush=True)
    if not lines and not bench.unequal:
        raise SystemExit(f"no operands of {', '.join(asked.op)} fit --shape {asked.shape!r}")
    if asked.json is not None:
        facts = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **asdict(roofs),
            "lines": [asdict(line) for line in lines],
        }
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if asked.markdown is not None:
        asked.markdown.write_text(markdown(lines) + "\n", encoding="utf-8")
    if bench.unequal:
        raise SystemExit(f"runs of the same operands differ: {'; '.join(bench.unequal)}")


if __name__ == "__main__":
    main()
