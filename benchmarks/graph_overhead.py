"""Host time of a decode step with captured graphs and without, on any backend.

    python benchmarks/graph_overhead.py --backend cuda_sm90 [--requests 64] [--steps 300] [--rounds 5] [--vocab 384]

The model is one op, so what is left is the host's own work: planning, writing the step into pinned memory, one copy,
replays, one copy back, collecting. Time in which the host waits for the device is taken off. The figure that the
project holds itself to is under 150 microseconds a step at 64 requests on a GPU. Each figure is a median over the steps
of a round; the round with the least is shown, and the medians of all rounds behind it, since whoever else uses the
machine makes steps slower and never faster. On a device of software the host runs
the ops itself, in its waits and sometimes between them, so its figure says little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer import SamplingParams
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.models.interface import Caches, CacheSpec, Draft, ModelInfo, RecordSpec, StepBatch, Tap
from deepinfer.ops.backend import BindContext
from deepinfer.ops.formats import CacheFormat
from deepinfer.ops.heads import embedding
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.step import gather_ids

_WARM_UP = 20
_OWN = "host's own"


class OneOpModel:
    """A model whose logits are rows of a table: metadata as V4.1 has it, and nothing to compute.

    Args:
        ops: of the device.
        vocab_size: ids run from 0 to `vocab_size` - 1.
    """

    def __init__(self, ops: OpTable, vocab_size: int) -> None:
        tiny = CacheFormat("f32", 1)
        self.info = ModelInfo("one op", vocab_size, 8192)
        self.cache_spec = CacheSpec(
            block_records=(RecordSpec("r2", tiny, 2), RecordSpec("r1", tiny, 1)),
            window_records=(RecordSpec("w", tiny),),
            window=128,
            ngram=4,
        )
        self.draft: Draft | None = None
        self._pick, self._look_up = ops.bind(gather_ids), ops.bind(embedding, hidden=vocab_size)
        self._table = ops.context.runtime.zeros((vocab_size, vocab_size), torch.float32)

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """The table's rows of the wanted tokens."""
        return self._look_up(self._table, self._pick(batch.input_ids, batch.logits_rows), torch.float32)


class Clock:
    """Seconds by label and step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Add the time of every call of `owner.name` to a label."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._step[label] += time.perf_counter() - start

        setattr(owner, name, timed)

    def wrap_collecting(self, engine: Engine) -> None:
        """Time `Engine._collect`, and how long it waited."""
        self.wrap(engine, "_collect", "collecting")
        collect = engine._collect

        def noted(launched: Any) -> Any:
            outputs = collect(launched)
            self._step["waiting"] += launched.waited
            return outputs

        setattr(engine, "_collect", noted)  # noqa: B010

    def finish_step(self) -> None:
        """What is timed from here on belongs to the next step."""
        self.steps.append(self._step)
        self._step = defaultdict(float)

    def finish_round(self) -> dict[str, float]:
        """Medians of the steps since the round before."""
        rows = {
            "planning": self.median("planning"),
            "launching, the rest": self.median("launching", less=("planning",)),
            "collecting": self.median("collecting", less=("waiting",)),
            _OWN: self.median("step", less=("waiting",)),
            "whole step": self.median("step"),
        }
        self.steps = []
        return rows

    def median(self, *labels: str, less: tuple[str, ...] = ()) -> float:
        """Median over steps, in microseconds, of the sum of labels without those of `less`."""
        return 1e6 * statistics.median(sum(s[x] for x in labels) - sum(s[x] for x in less) for s in self.steps)


def measure(args: argparse.Namespace, *, graphs: bool) -> None:
    """Run one engine and print the medians of its best round."""
    backend = find_backend(args.backend)
    assert backend.runtime is not None, "a backend that is found has a runtime"
    runtime = backend.runtime()
    ops = OpTable(backend, BindContext(runtime.device, runtime, True, max(2048, args.requests)))
    max_tokens = args.rounds * args.steps + _WARM_UP + 8
    settings = EngineConfig(
        max_num_seqs=args.requests,
        max_num_batched_tokens=max(2048, args.requests),
        num_kv_blocks=args.requests * (2 + (32 + max_tokens) // 128),
        graphs=graphs,
    )
    engine = Engine(OneOpModel(ops, args.vocab), settings, ops)
    for i in range(args.requests):
        params = SamplingParams(max_tokens=max_tokens, temperature=args.temperature, seed=i)
        engine.add_request(str(i), list(range(3, 35)), params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(_WARM_UP):
        engine.step()
    before = engine.stats().num_graph_steps
    clock = Clock()
    clock.wrap(engine.scheduler, "plan", "planning")
    clock.wrap(engine, "_launch", "launching")
    clock.wrap_collecting(engine)
    clock.wrap(engine, "step", "step")
    rounds = []
    for _ in range(args.rounds):
        for _ in range(args.steps):
            engine.step()
            clock.finish_step()
        rounds.append(clock.finish_round())
    stats = engine.stats()
    done = stats.num_graph_steps - before
    how = f"graphs: {done} of {args.rounds * args.steps} steps" if graphs else "without graphs"
    print(f"{how}{f' ({stats.graph_reason})' if graphs and stats.graph_reason else ''}")
    for label, value in min(rounds, key=lambda found: found[_OWN]).items():
        print(f"  {label:<20} {value:8.0f} us")
    print(f"  {_OWN}, by round: {', '.join(f'{found[_OWN]:.0f}' for found in rounds)} us")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.requests} requests on {args.backend}, medians")
    for graphs in (True, False):
        measure(args, graphs=graphs)


if __name__ == "__main__":
    main()
