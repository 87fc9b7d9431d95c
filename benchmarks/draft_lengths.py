"""Host time of scheduling drafts, at many running requests.

    python benchmarks/draft_lengths.py [--requests 1024] [--drafts 5]

What a step adds with `draft_schedule="adaptive"`: choosing lengths before it is planned, deciding whether to draft when
it is launched, and learning from it when it is collected. The figure that the project holds itself to is the choice:
under 300 us at 1,024 requests of 5 drafts on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from deepinfer.core.confidence import Forecaster
from deepinfer.core.draft_lengths import DraftLengths
from deepinfer.core.step_cost import CycleCost


def microseconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and least time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=500)
    args = parser.parse_args()
    count, drafts = args.requests, args.drafts
    rng = np.random.default_rng(0)
    rows = count * (1 + drafts)
    cost = CycleCost(rows, count)
    for size in rng.integers(1, rows, 200).tolist():
        cost.step.observe(size, size * 3000.0, 1e-3 + 2e-6 * size + 3e-13 * size * 3000)
        cost.draft.observe(count, 0, 1e-3)
    seqs = np.arange(1, count + 1, dtype=np.int32)
    contexts = rng.integers(100, 10_000, count).astype(np.int32)
    verified = np.full(count, drafts, np.int32)
    accepted = rng.integers(0, drafts + 1, count).astype(np.int32)
    for rule in ("coupled", "rejection"):
        forecaster = Forecaster(count, drafts, rejection=rule == "rejection")
        forecaster.book.claim(seqs, np.ones(count, np.int64))
        for _ in range(3):
            forecaster.book.drafted(seqs)
            forecaster.book.arrived(seqs, rng.random((count, drafts)).astype(np.float32))
        lengths = DraftLengths(drafts, rows, cost)
        parts: dict[str, Callable[[], object]] = {
            "choose lengths": lambda f=forecaster, n=lengths: n.choose(f.of_drafted(seqs), verified, contexts, 0),
            "whether to draft": lambda f=forecaster, n=lengths: n.pays(f.of_next(seqs), contexts, 0),
            "learn confidences": lambda f=forecaster: f.observe(seqs, verified, accepted),
            "learn costs": lambda: cost.step.observe(1000, 3e6, 3e-3),
        }
        print(f"{rule}: {count} requests, {drafts} drafts each, one thread; median and least")
        for name, call in parts.items():
            median, least = microseconds(call, args.repeats)
            print(f"  {name:<20} {median:7.0f} us {least:7.0f} us")


if __name__ == "__main__":
    main()
