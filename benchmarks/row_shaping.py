"""Host time of shaping rows at the model's vocabulary: `python benchmarks/row_shaping.py`.

Prints, per feature, milliseconds per step for 102 shaped rows (a tenth of 1,024), made and applied on the CPU.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from deepinfer import SamplingParams
from deepinfer.core.row_shaping import RowShaping
from deepinfer.core.shapers import ShapingContext, make_shaper
from deepinfer.testing.workloads import cpu_ops

VOCAB, ROWS, OUTPUTS, REPEATS = 129280, 102, 500, 20

CASES = {
    "penalties, 500 outputs, 4,000 prompt tokens": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "frequency penalty, 500 outputs": {"frequency_penalty": 0.5},
    "logit bias of 100 ids": {"logit_bias": {i: 1.0 for i in range(100)}},
    "allowed ids": {"allowed_token_ids": range(0, VOCAB, 7)},
    "min_tokens": {"min_tokens": 1000, "max_tokens": 2000, "stop_token_ids": [5, 6]},
    "golden tokens": {"golden_token_ids": list(range(1000))},
}


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    context = ShapingContext(VOCAB, (1,))
    shaping = RowShaping(cpu_ops(), VOCAB)
    logits = torch.zeros(ROWS, VOCAB)
    for name, options in CASES.items():
        shapers = []
        for _ in range(ROWS):
            shaper = make_shaper(SamplingParams(**options), rng.integers(0, VOCAB, 4000).tolist(), context)
            assert shaper is not None, "every case shapes rows"
            shaper.accept(rng.integers(0, VOCAB, OUTPUTS).tolist())
            shapers.append(shaper)
        made = applied = 0.0
        for _ in range(REPEATS):
            start = time.perf_counter()
            rows = [(row, shaper.shape(())[0]) for row, shaper in enumerate(shapers)]
            middle = time.perf_counter()
            shaping.apply(logits, rows)
            shaping.force(logits, rows)
            made, applied = made + middle - start, applied + time.perf_counter() - middle
        print(f"{name:45} made {made / REPEATS * 1e3:7.2f} ms, applied {applied / REPEATS * 1e3:7.2f} ms")


if __name__ == "__main__":
    main()
