"""Host time per step with a model that costs nothing, at many running requests.

    python benchmarks/host_overhead.py [--requests 256] [--steps 200] [--drafts 5] [--constrained 0.1 --rule penalty]

Wraps the engine's own parts, so what is printed is what runs: planning (the scheduler), metadata (the native writer),
sending, launching (all that is behind these and before the step is under way), collecting. What a device would do is
done by the CPU here and printed as the device's share: the empty model, and the ops that sample, verify and correct.
The host's own time is the step without it. The figures that the project holds itself to, on one core: planning plus
metadata under 1 ms per step at 256 requests, and the host's own time under 3 ms at 1,024 requests with 5 drafts each.
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
from deepinfer.ops.registry import BoundOp
from deepinfer.testing import NullModel

RULES: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 16, "stop_token_ids": (5, 6)},
    "penalty": {"frequency_penalty": 0.5},
}
"""Rules that look at the tokens before, so that their requests wait for them, and for their drafts, in every step."""


def v41_like() -> CacheSpec:
    """Ratios and n-gram depth of V4.1, with records too small to matter."""
    tiny = CacheFormat("f32", 1)
    return CacheSpec(
        block_records=(RecordSpec("r2", tiny, 2), RecordSpec("r1", tiny, 1)),
        window_records=(RecordSpec("w", tiny),),
        window=128,
        ngram=4,
    )


class Clock:
    """Seconds of this thread, by step and label: what else the machine does meanwhile is not counted."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Add the time of every call of `owner.name` to a label."""
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._step[label] += time.thread_time() - start

        setattr(owner, name, wrapper)

    def finish_step(self) -> None:
        """What is timed from here on belongs to the next step."""
        self.steps.append(self._step)
        self._step = defaultdict(float)

    def median(self, *labels: str, less: tuple[str, ...] = ()) -> float:
        """Median over steps, in microseconds, of the sum of labels without those of `less`."""
        return 1e6 * statistics.median(sum(s[x] for x in labels) - sum(s[x] for x in less) for s in self.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=384)
    parser.add_argument("--drafts", type=int, default=0, help="speculate with a draft that costs nothing, all accepted")
    parser.add_argument("--constrained", type=float, default=0.0, help="share of requests whose logits follow a rule")
    parser.add_argument("--rule", choices=RULES, default="min_tokens", help="which rule that is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = NullModel(args.vocab, cache_spec=v41_like(), max_position=8192, num_drafts=args.drafts)
    rows = args.requests * (1 + args.drafts)
    speculation: dict[str, Any] = {"speculation": "coupled", "draft_schedule": "fixed"} if args.drafts else {}
    max_tokens = (args.steps + 8) * (1 + args.drafts)
    llm = LLM(
        model,
        backend="cpu",
        max_num_seqs=args.requests,
        max_num_batched_tokens=max(2048, rows),
        num_kv_blocks=args.requests * (2 + (32 + max_tokens) // 128),
        **speculation,
    )
    engine = llm.engine
    plain = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    constrained = SamplingParams(max_tokens=max_tokens, temperature=0.0, **RULES[args.rule])
    num_constrained = int(args.requests * args.constrained)
    for i in range(args.requests):
        engine.add_request(str(i), list(range(3, 35)), constrained if i < num_constrained else plain)
    while engine.scheduler.waiting:
        engine.step()
    clock = Clock()
    clock.wrap(engine.scheduler, "plan", "planning")
    clock.wrap(engine.executor, "plan", "metadata")
    clock.wrap(engine.executor, "batch", "sending")
    clock.wrap(model, "forward", "empty model")
    clock.wrap(BoundOp, "__call__", "ops")
    clock.wrap(engine, "_launch", "launching")
    clock.wrap(engine, "_collect", "collecting")
    clock.wrap(engine, "step", "whole step")
    for _ in range(args.steps):
        engine.step()
        clock.finish_step()
    device = ("empty model", "ops")
    shares = {
        "planning": clock.median("planning"),
        "metadata": clock.median("metadata"),
        "sending": clock.median("sending"),
        "launching, the rest": clock.median("launching", less=("planning", "metadata", "sending", *device)),
        "collecting": clock.median("collecting"),
        "host's own": clock.median("whole step", less=device),
        "device's share": clock.median(*device),
        "whole step": clock.median("whole step"),
    }
    print(f"{args.requests} running requests, {args.drafts} drafts, {args.steps} decode steps, one thread, medians")
    for label, value in shares.items():
        print(f"  {label:<20} {value:8.0f} us  {value / shares['whole step']:6.1%} of the step")
    print(f"  planning + metadata  {clock.median('planning', 'metadata'):8.0f} us")


if __name__ == "__main__":
    main()
