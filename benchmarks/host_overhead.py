"""Host time per step with a model that costs nothing, at many running requests.

    python benchmarks/host_overhead.py [--requests 256] [--steps 200]

Wraps the engine's own parts, so what is printed is what runs: planning (the scheduler), metadata (the native writer),
sending, the model's empty forward, sampling, recording. The figure that the project holds itself to is planning plus
metadata: under 1 ms per step at 256 requests on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.models.interface import CacheSpec, RecordSpec
from deepinfer.ops.formats import CacheFormat
from deepinfer.testing import NullModel


def v41_like() -> CacheSpec:
    """Ratios and n-gram depth of V4.1, with records too small to matter."""
    tiny = CacheFormat("f32", 1)
    return CacheSpec(
        block_records=(RecordSpec("r2", tiny, 2), RecordSpec("r1", tiny, 1)),
        window_records=(RecordSpec("w", tiny),),
        window=128,
        ngram=4,
    )


def timed(owner: Any, name: str, label: str, times: dict[str, list[float]]) -> None:
    function = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times[label].append(time.perf_counter() - start)

    setattr(owner, name, wrapper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=384)
    parser.add_argument("--drafts", type=int, default=0, help="speculate with a draft that costs nothing, all accepted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = defaultdict(list)
    model = NullModel(args.vocab, cache_spec=v41_like(), max_position=8192, num_drafts=args.drafts)
    rows = args.requests * (1 + args.drafts)
    speculation: dict[str, Any] = {"speculation": "coupled", "draft_schedule": "fixed"} if args.drafts else {}
    llm = LLM(model, backend="cpu", max_num_seqs=args.requests, max_num_batched_tokens=max(2048, rows), **speculation)
    engine = llm.engine
    params = SamplingParams(max_tokens=(args.steps + 8) * (1 + args.drafts), temperature=0.0)
    for i in range(args.requests):
        engine.add_request(str(i), list(range(3, 35)), params)
    while engine.scheduler.waiting:
        engine.step()
    timed(engine.scheduler, "plan", "planning", times)
    timed(engine.executor, "plan", "metadata", times)
    timed(engine.executor, "batch", "sending", times)
    timed(engine.executor, "forward", "empty model", times)
    timed(engine.sampler, "draw" if not args.drafts else "verify", "sampling", times)
    timed(engine, "_collect", "collecting", times)
    timed(engine, "step", "whole step", times)
    for _ in range(args.steps):
        engine.step()
    whole = statistics.median(times["whole step"])
    print(f"{args.requests} running requests, {args.steps} decode steps, one thread, median per step")
    for label in ("planning", "metadata", "sending", "empty model", "sampling", "collecting", "whole step"):
        value = statistics.median(times[label])
        print(f"  {label:<20} {value * 1e6:8.0f} us  {value / whole:6.1%} of the step")
    both = statistics.median(a + b for a, b in zip(times["planning"], times["metadata"], strict=True))
    print(f"  planning + metadata  {both * 1e6:8.0f} us  (aim: under 1000 us at 256)")


if __name__ == "__main__":
    main()
