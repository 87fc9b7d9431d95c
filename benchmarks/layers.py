"""Prefill and decode of a model of real dimensions with a few layers: tokens a second, by batch, context and settings.

    python benchmarks/layers.py --backend cuda_sm90 [--layers 6] [--batches 1,16,64,256] [--contexts 4096,32768]
        [--speculation off,on] [--graphs on,off] [--quick] [--json FILE]

The engine runs as it is served: asynchronous, mixed steps, its own caches and block tables. Weights are random
(`random_model.py`). To decode at a long context the prompt is not computed: its records are random bytes, and steps are
planned and kept as if the model had run. Decode steps are timed together, with the device idle before and after.

Random weights keep no draft, so with speculation a step draws one token of each sequence all the same; how many of its
drafts must be kept on average for it to pay is printed beside it. A row with `graphs` off is what the host costs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from random_model import RELEASED, build, cut_config, read_config
from torch import Tensor

from deepinfer import SamplingParams
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.interface import Model, StepBatch, Tap
from deepinfer.ops.backend import BindContext
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import Runtime

_SETTLE: Final = 6
"""Steps of a shape before it is timed: what it needs is compiled, captured and replayed by then."""
_QUICK: Final = {"batches": [1, 64], "contexts": [4096, 32768], "layers": 5, "prefill": [8192]}


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        kind: "prefill" or "decode".
        batch: sequences.
        context: tokens of each: of the prompt, or stored when decoding begins.
        speculation: with drafts.
        graphs: decode steps as graphs.
        step_us: of a decode step; of a prompt's whole prefill.
        tokens_per_s: prompt tokens, or drawn tokens, of all sequences.
        captured: share of the timed steps that were replays.
        eager: why the others were not, in words.
    """

    kind: str
    batch: int
    context: int
    speculation: bool
    graphs: bool
    step_us: float
    tokens_per_s: float
    captured: float
    eager: str = ""

    def __str__(self) -> str:
        why = f" ({self.eager})" if self.eager else ""
        return (
            f"{self.kind:8} batch {self.batch:4} context {self.context:7} "
            f"{'drafts' if self.speculation else '      '} {'graphs' if self.graphs else 'eager '} "
            f"{self.step_us:11.0f} us {self.tokens_per_s:11.0f} tokens/s {self.captured:5.0%} replayed{why}"
        )


@dataclass(frozen=True)
class Settings:
    """What all measurements share.

    Attributes:
        steps: decode steps that are timed.
        max_rows: rows of a step.
        temperature: of all requests.
        seconds: after so many nothing new is begun.
    """

    steps: int
    max_rows: int
    temperature: float
    seconds: float


class Bench:
    """Engines over one model.

    Args:
        backend: its name.
        config: of the model.
        settings: of all measurements.
        max_len: tokens of the longest sequence.
        speculation: with draft blocks.
    """

    def __init__(
        self, backend: str, config: ModelConfig, settings: Settings, max_len: int, *, speculation: bool
    ) -> None:
        found = find_backend(backend)
        if found.runtime is None:
            raise SystemExit(f"backend {backend!r} has no device to run on")
        self.runtime: Runtime = found.runtime()
        self._settings, self._max_len, self._speculation = settings, max_len, speculation
        context = BindContext(self.runtime.device, self.runtime, True, settings.max_rows)
        self._ops = OpTable(found, context)
        self._model: Model = build(config, self._ops, draft=speculation, max_model_len=max_len)
        self._vocab = config.text.vocab_size

    def prefill(self, context: int) -> Line:
        """Prompts of so many tokens, two budgets of rows at least, after one that is not timed."""
        count = max(1, -(-2 * self._settings.max_rows // context))
        with self._engine(count, context + 2, graphs=True) as engine:
            times = []
            for _ in range(2):
                began = time.perf_counter()
                self._submit(engine, count, context, max_tokens=1)
                while engine.has_unfinished():
                    _check(engine.step())
                self.runtime.synchronize()
                times.append(time.perf_counter() - began)
        taken = times[-1]
        return Line(
            "prefill", count, context, self._speculation, True, taken * 1e6 / count, count * context / taken, 0.0
        )

    def decode(self, batch: int, context: int, *, graphs: bool) -> Line:
        """Decode steps of so many sequences behind contexts that nobody computed."""
        steps = self._settings.steps
        # while the last prompts are taken in, the first sequences draw already: one token in each of those steps
        early = -(-batch * context // max(self._settings.max_rows - batch, 1)) + batch
        room = early + _SETTLE + steps + 8
        with self._engine(batch, context + room, graphs=graphs) as engine:
            with self._nothing_computed(engine):
                self._submit(engine, batch, context, max_tokens=room)
                while engine.scheduler.waiting or any(r.num_computed < context for r in engine.scheduler.running):
                    engine.step()
            for _ in range(_SETTLE):
                _check(engine.step())
            self.runtime.synchronize()
            before, drawn = engine.stats().num_graph_steps, engine.stats().num_generated_tokens
            reasons = dict(engine.stats().num_eager_steps)
            began = time.perf_counter()
            for _ in range(steps):
                _check(engine.step())
            self.runtime.synchronize()
            taken = time.perf_counter() - began
            stats = engine.stats()
            tokens, replayed = stats.num_generated_tokens - drawn, stats.num_graph_steps - before
            why = stats.graph_reason or "; ".join(
                reason for reason, count in stats.num_eager_steps.items() if count > reasons.get(reason, 0)
            )
        return Line(
            "decode",
            batch,
            context,
            self._speculation,
            graphs,
            taken * 1e6 / steps,
            tokens / taken,
            replayed / steps,
            why if graphs else "",
        )

    @contextmanager
    def _engine(self, batch: int, length: int, *, graphs: bool) -> Iterator[Engine]:
        block = 128
        settings = EngineConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=self._settings.max_rows,
            max_model_len=min(length, self._max_len),
            num_kv_blocks=batch * (-(-length // block) + 1),
            prefix_caching=False,
            speculation="coupled" if self._speculation else "off",
            draft_schedule="fixed",
            graphs=graphs,
        )
        engine = Engine(self._model, settings, self._ops)
        caches = engine.executor.caches
        if self.runtime.capabilities.torch_compute:
            for pool in (caches.blocks, caches.pages):
                pool.random_(0, 100)  # codes and scales of any format, none of them NaN
        try:
            yield engine
        finally:
            engine.close()
            gc.collect()

    def _submit(self, engine: Engine, count: int, context: int, *, max_tokens: int) -> None:
        gen = torch.Generator().manual_seed(context)
        for index in range(count):
            ids = torch.randint(3, self._vocab * 9 // 10, (context,), generator=gen).tolist()
            params = SamplingParams(
                max_tokens=max_tokens, temperature=self._settings.temperature, seed=index, ignore_eos=True
            )
            engine.add_request(f"{index}", ids, params)

    @contextmanager
    def _nothing_computed(self, engine: Engine) -> Iterator[None]:
        """Let steps pass without the model: every row's logits are zeros."""
        forward = engine.executor.forward

        def zeros(batch: StepBatch, tap: Tap | None = None) -> Tensor:
            return self.runtime.zeros((batch.logits_rows.shape[0], self._vocab), torch.float32)

        engine.executor.forward = zeros  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine.executor.forward = forward  # type: ignore[method-assign]


def _check(outputs: Sequence[Any]) -> None:
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")


def measure(asked: argparse.Namespace) -> Iterator[Line]:
    """Everything that was asked for, as it comes."""
    config = cut_config(read_config(asked.config), asked.layers)
    settings = Settings(asked.steps, asked.max_rows, asked.temperature, asked.seconds)
    longest = max([*asked.contexts, *asked.prefill, 0]) + max(asked.contexts, default=0) // 4 + 4096
    began = time.monotonic()

    def is_over() -> bool:
        return time.monotonic() - began > settings.seconds

    for speculation in asked.speculation:
        bench = Bench(
            asked.backend, config, settings, min(longest, config.text.max_position_embeddings), speculation=speculation
        )
        for context in asked.prefill if not speculation else []:
            if not is_over():
                yield bench.prefill(context)
        for context, batch, graphs in itertools.product(asked.contexts, asked.batches, asked.graphs):
            if not is_over():
                yield bench.decode(batch, context, graphs=graphs)
        del bench
        gc.collect()


def break_even(lines: Sequence[Line]) -> list[str]:
    """For each decode measured with and without drafts: how many drafts must be kept for speculation to pay."""
    plain = {(x.batch, x.context, x.graphs): x for x in lines if x.kind == "decode" and not x.speculation}
    said = []
    for line in lines:
        other = plain.get((line.batch, line.context, line.graphs))
        if line.kind == "decode" and line.speculation and other is not None:
            kept = line.step_us / other.step_us - 1
            how = "graphs" if line.graphs else "eager"
            said.append(
                f"batch {line.batch}, context {line.context}, {how}: drafts pay from {kept:.2f} kept of a block on"
            )
    return said


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _switches(text: str) -> list[bool]:
    words = {"on": True, "off": False}
    try:
        return [words[part] for part in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error.args[0]!r} is neither on nor off") from None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--config", type=Path, default=RELEASED, help="config.json of the dimensions")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batches", type=_numbers, default=[1, 16, 64, 256, 512])
    parser.add_argument("--contexts", type=_numbers, default=[4096, 32768, 131072])
    parser.add_argument("--prefill", type=_numbers, default=[8192, 32768], help="lengths of prompts that are computed")
    parser.add_argument("--speculation", type=_switches, default=[False, True])
    parser.add_argument("--graphs", type=_switches, default=[True])
    parser.add_argument("--steps", type=int, default=30, help="decode steps that are timed")
    parser.add_argument("--max-rows", type=int, default=8192, help="rows of one step")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this")
    parser.add_argument("--quick", action="store_true", help="few batches and contexts, 5 layers, done in a minute")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    asked = parser.parse_args(argv)
    if asked.quick:
        for name, value in _QUICK.items():
            setattr(asked, name, value)
    return asked


def main() -> None:
    asked = parse()
    lines: list[Line] = []
    began = time.monotonic()
    for line in measure(asked):
        lines.append(line)
        print(line, flush=True)
    print(*break_even(lines), sep="\n")
    print(f"{len(lines)} measurements, {asked.layers} layers, {time.monotonic() - began:.0f} s")
    if asked.json:
        facts = {
            "command": " ".join(sys.argv),
            "layers": asked.layers,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "lines": [asdict(line) for line in lines],
        }
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
