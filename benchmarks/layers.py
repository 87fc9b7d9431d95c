"""Prefill and decode of a model of real dimensions with a few layers: tokens a second, by batch, context and settings.

    python benchmarks/layers.py --backend cuda_sm90 [--layers 5] [--batches 1,16,64,256] [--contexts 4096,32768]
        [--speculation off,on] [--graphs on,off] [--quick] [--json FILE]

The engine runs as it is served: asynchronous, mixed steps, its own caches and block tables. Weights are random
(`random_model.py`). To decode at a long context the prompt is not computed: its records are random bytes. One engine
serves all batches of a context, the largest first; requests are taken back in between. Decode steps are timed together,
with the device idle before and after. What does not fit into memory is left out, and said.

Beside each figure stands what `layer_roofs.py` says the same work takes at best, at rates measured in the same run.

With speculation a step judges all drafts of a block. How many are kept says nothing about a trained model (requests
with a temperature draw with the noise that their drafts were drawn with, so random weights keep some); how many must be
kept on average for it to pay is printed beside it. A row with `graphs` off is what the host costs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from layer_lines import Line, Skipped, break_even
from layer_roofs import LayerRoofs
from random_model import RELEASED, build, cut_config, read_config

from deepinfer import SamplingParams
from deepinfer.conformance.performance import Roof, measure_roof
from deepinfer.core.cache_sizes import CacheSizes
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.kv_blocks import PrefixMatch
from deepinfer.core.request import Request
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.interface import Model
from deepinfer.ops.backend import Backend, BindContext
from deepinfer.ops.errors import OutOfDeviceMemoryError
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import Runtime

_SETTLE: Final = 6
"""Steps of a shape before it is timed: what it needs is compiled, captured and replayed by then."""
_SPARE: Final = 1 / 10
"""Share of device memory that caches leave to scratch, results and graphs."""
_BLOCK: Final = 128
_QUICK: Final = {"batches": [1, 64], "contexts": [4096, 32768], "layers": 5, "prefill": [8192]}


@dataclass(frozen=True)
class Settings:
    """What all measurements share.

    Attributes:
        steps: decode steps that are timed.
        max_rows: rows of a step.
        temperature: of all requests.
        seconds: after so many nothing new is begun; with and without drafts have half of them each.
    """

    steps: int
    max_rows: int
    temperature: float
    seconds: float


class Bench:
    """Engines over one model.

    Args:
        runtime: the device.
        found: its backend.
        config: of the model.
        settings: of all measurements.
        max_len: tokens of the longest sequence.
        roof: what the device reaches.
        speculation: with draft blocks.
    """

    def __init__(
        self,
        runtime: Runtime,
        found: Backend,
        config: ModelConfig,
        settings: Settings,
        max_len: int,
        roof: Roof,
        *,
        speculation: bool,
    ) -> None:
        self.runtime = runtime
        self._settings, self._max_len, self._speculation = settings, max_len, speculation
        context = BindContext(runtime.device, runtime, True, settings.max_rows)
        self._ops = OpTable(found, context)
        self._model: Model = build(config, self._ops, draft=speculation, max_model_len=max_len)
        self._vocab = config.text.vocab_size
        self._num_drafts = self._model.draft.num_tokens if self._model.draft is not None else 0
        self._roofs = LayerRoofs(config, draft=speculation)
        self._rates = roof.bytes_per_second / 1e9, roof.flops_per_second / 1e12

    def prefill(self, context: int) -> Line:
        """Prompts of so many tokens, two budgets of rows at least, after one that is not timed."""
        count = max(1, -(-2 * self._settings.max_rows // context))
        with self._engine(self._config(count, context + 2, graphs=True)) as engine:
            times = []
            for _ in range(2):
                began = time.perf_counter()
                self._submit(engine, count, context)
                while engine.has_unfinished():
                    _check(engine.step())
                self.runtime.synchronize()
                times.append(time.perf_counter() - began)
        taken = times[-1]
        best = self._roofs.prefill(count, context, self._settings.max_rows)
        return Line(
            "prefill",
            count,
            context,
            self._speculation,
            True,
            taken * 1e6 / count,
            count * context / taken,
            0.0,
            best_us=best.us(*self._rates) / count,
            bound=best.bound(*self._rates),
        )

    def decode(
        self, batches: Sequence[int], context: int, is_over: Callable[[], bool], *, graphs: bool
    ) -> Iterator[Line | Skipped]:
        """Decode steps behind contexts that nobody computed, of the largest batch that fits and of all smaller ones.

        Args:
            batches: sequences of each measurement.
            context: tokens of each sequence.
            is_over: says when to begin nothing new.
            graphs: decode steps as graphs.
        """
        steps = self._settings.steps
        length = context + (_SETTLE + steps + 2) * len(batches) * (1 + self._num_drafts) + 8
        left = sorted(batches, reverse=True)
        while left and not is_over():
            config = self._config(left[0], length, graphs=graphs)
            why = self._lacks_memory(config)
            if not why:
                try:
                    yield from self._decode_each(config, left, context, is_over)
                    break
                except (OutOfDeviceMemoryError, torch.OutOfMemoryError) as error:
                    why = str(error).partition("\n")[0]
            yield Skipped(self._what(left.pop(0), context), why)
            gc.collect()
        for batch in left:
            yield Skipped(self._what(batch, context), "time was over")

    def _decode_each(
        self, config: EngineConfig, left: list[int], context: int, is_over: Callable[[], bool]
    ) -> Iterator[Line]:
        """Measure in one engine, and take from `left` what is done."""
        with self._engine(config) as engine:
            self._begin_behind(engine, left[0], context)
            while left and not is_over():
                for index in range(left[0], config.max_num_seqs):
                    engine.abort(f"{index}")
                yield self._decode(engine, left[0], context)
                left.pop(0)

    def _decode(self, engine: Engine, batch: int, context: int) -> Line:
        """Steps of the requests that run."""
        steps = self._settings.steps
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
        assert stats.num_running == batch, "requests have room for all steps"
        tokens, replayed = stats.num_generated_tokens - drawn, stats.num_graph_steps - before
        why = stats.graph_reason or "; ".join(
            reason for reason, count in stats.num_eager_steps.items() if count > reasons.get(reason, 0)
        )
        best = self._roofs.decode(batch, context, self._num_drafts)
        return Line(
            "decode",
            batch,
            context,
            self._speculation,
            engine.config.graphs,
            taken * 1e6 / steps,
            tokens / taken,
            replayed / steps,
            why if engine.config.graphs else "",
            tokens / steps / batch,
            best.us(*self._rates),
            best.bound(*self._rates),
            stats.graph_bytes / 1e6,
        )

    def _what(self, batch: int, context: int) -> str:
        return f"decode, batch {batch}, context {context}{', drafts' if self._speculation else ''}"

    def _config(self, batch: int, length: int, *, graphs: bool) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=self._settings.max_rows,
            max_model_len=min(length, self._max_len),
            num_kv_blocks=batch * (-(-length // _BLOCK) + 1),
            block_size=_BLOCK,
            prefix_caching=False,
            speculation="coupled" if self._speculation else "off",
            draft_schedule="fixed",
            graphs=graphs,
            max_graph_rows=max(512, batch * (1 + self._num_drafts)),
        )

    def _lacks_memory(self, config: EngineConfig) -> str:
        """How much an engine's caches miss; empty when they fit."""
        sizes = CacheSizes.of(
            self._model.cache_spec,
            config,
            self.runtime,
            max_len=self._max_len,
            num_drafts=self._num_drafts,
            most_replayed=0,
            scratch_bytes=0,
        )
        need = sizes.fixed_bytes + (sizes.num_blocks + 1) * sizes.block_bytes
        memory = self.runtime.memory_info()
        free = memory.free_bytes - _SPARE * memory.total_bytes
        return f"its caches take {need / 1e9:.1f} GB and {free / 1e9:.1f} are free for them" if need > free else ""

    @contextmanager
    def _engine(self, config: EngineConfig) -> Iterator[Engine]:
        engine = Engine(self._model, config, self._ops)
        caches = engine.executor.caches
        if self.runtime.capabilities.torch_compute:
            for pool in (caches.blocks, caches.pages):
                pool.random_(0, 100)  # codes and scales of any format, none of them NaN
        try:
            yield engine
        finally:
            engine.close()
            gc.collect()

    def _submit(self, engine: Engine, count: int, context: int) -> None:
        """Queue prompts that are computed."""
        gen = torch.Generator().manual_seed(context)
        for index in range(count):
            ids = torch.randint(3, self._vocab * 9 // 10, (context,), generator=gen).tolist()
            engine.add_request(f"{index}", ids, self._params(1, index))

    def _begin_behind(self, engine: Engine, count: int, context: int) -> None:
        """Let requests begin behind `context - 1` tokens that are stored already, as after a prefix that is there.

        Their blocks are their own. Memory is held as in steps of the usual size, since pages behind the window go back.
        Nobody reads their prompts, so all of them have the same list of ids: millions of tokens are queued at once.
        """
        ids, stored = [3] * context, context - 1
        tokens = np.array(ids, np.int32)
        blocks, opens = engine.blocks, engine.blocks.open

        def open_stored(*args: Any, **kwargs: Any) -> int:
            seq = opens(tokens)
            for end in [*range(self._settings.max_rows, stored, self._settings.max_rows), stored]:
                blocks.reserve(seq, end)
                blocks.commit(np.array([seq], np.int32), np.array([end], np.int32))
            return seq

        for index in range(count):
            params = self._params(engine.max_len - context, index)
            request = Request.new(f"{index}", ids, params, index, engine.max_len, None)
            request.use_prefix = True
            engine._intake.queue(request)
        found: dict[str, Any] = {"open": open_stored, "match": lambda *_, **__: PrefixMatch(stored, 0)}
        with patch.multiple(blocks, **found), patch.object(Request, "token_ids", tokens):
            _check(engine.step())

    def _params(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=self._settings.temperature, seed=seed, ignore_eos=True)


def _check(outputs: Sequence[Any]) -> None:
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")


def measure(asked: argparse.Namespace, roof: Roof | None = None) -> Iterator[Line | Skipped]:
    """Everything that was asked for, as it comes.

    Args:
        asked: the command line.
        roof: of the device, where it was measured already.
    """
    found = find_backend(asked.backend)
    if found.runtime is None:
        raise SystemExit(f"backend {asked.backend!r} has no device to run on")
    runtime = found.runtime()
    roof = measure_roof(runtime) if roof is None else roof
    config = cut_config(read_config(asked.config), asked.layers)
    settings = Settings(asked.steps, asked.max_rows, asked.temperature, asked.seconds)
    longest = max([*asked.contexts, *asked.prefill, 0]) + 4096 + 16 * asked.steps * max(len(asked.batches), 1)
    max_len = min(longest, config.text.max_position_embeddings)
    began = time.monotonic()

    for place, speculation in enumerate(asked.speculation, 1):
        ends = began + settings.seconds * place / len(asked.speculation)

        def is_over(ends: float = ends) -> bool:
            return time.monotonic() > ends

        bench = Bench(runtime, found, config, settings, max_len, roof, speculation=speculation)
        made = f"a model of {asked.layers} layers{' and drafts' if speculation else ''} is made"
        print(f"{time.monotonic() - began:5.0f} s  {made}", flush=True)
        for context in asked.prefill if not speculation else []:
            yield Skipped(f"prefill, context {context}", "time was over") if is_over() else bench.prefill(context)
        for context, graphs in itertools.product(asked.contexts, asked.graphs):
            yield from bench.decode(asked.batches, context, is_over, graphs=graphs)
        del bench
        gc.collect()


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
    parser.add_argument("--layers", type=int, default=5)
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
    runtime = find_backend(asked.backend).runtime
    roof = measure_roof(runtime()) if runtime is not None else None
    if roof is not None:
        rates = roof.bytes_per_second / 1e9, roof.flops_per_second / 1e12
        print(f"measured roofs: copy {rates[0]:.0f} GB/s, bf16 product {rates[1]:.0f} TFLOP/s", flush=True)
    lines: list[Line] = []
    skipped: list[Skipped] = []
    began = time.monotonic()
    for found in measure(asked, roof):
        if isinstance(found, Line):
            lines.append(found)
        else:
            skipped.append(found)
        print(f"{time.monotonic() - began:5.0f} s  {found}", flush=True)
        if asked.json:
            write(asked.json, asked.layers, roof, lines, skipped)  # each time, since whoever waits may lose patience
    print(*break_even(lines), sep="\n")
    print(f"{len(lines)} measurements, {asked.layers} layers, {time.monotonic() - began:.0f} s")


def write(path: Path, layers: int, roof: Roof | None, lines: Sequence[Line], skipped: Sequence[Skipped]) -> None:
    """What was measured so far, as JSON."""
    facts = {
        "command": " ".join(sys.argv),
        "layers": layers,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "roof": asdict(roof) if roof is not None else None,
        "lines": [asdict(line) | {"share": line.share} for line in lines],
        "skipped": [asdict(one) for one in skipped],
    }
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
