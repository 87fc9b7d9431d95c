"""Host time of one decode step's bookkeeping: append, reserve, write the metadata and commit.

    python benchmarks/native_step.py [--steps 300] [--context 4096]

Prints the median microseconds per step of the native module at 256 and 1024 decode sequences, by part, and of the same
bookkeeping in Python with NumPy tables, measured in the same run. No accelerator is used.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import Int32Array, StepBuffers

BLOCK, PAGE, WINDOW = 128, 32, 128
RATIOS = (1, 2)
NGRAM = 4


class NativeSteps:
    """Decode steps by the native module; `parts` collects microseconds by name."""

    def __init__(self, num_seqs: int, context: int, steps: int) -> None:
        blocks_per_seq = -(-(context + steps + 1) // BLOCK)
        self.kv = KVBlockManager(num_seqs * blocks_per_seq, BLOCK, window_page=PAGE, window=WINDOW, num_slots=num_seqs)
        tokens = np.arange(context, dtype=np.int32)
        self.seqs = np.array([self.kv.open(tokens) for _ in range(num_seqs)], dtype=np.int32)
        self.lens = np.full(num_seqs, context, dtype=np.int32)
        self.kv.reserve_many(self.seqs, self.lens)
        self.kv.commit(self.seqs, self.lens)
        self.buffers = StepBuffers(
            max_rows=num_seqs,
            max_seqs=num_seqs,
            max_blocks=blocks_per_seq,
            max_window_pages=self.kv.max_window_pages(1),
            ratios=RATIOS,
            ngram=NGRAM,
        )
        self.ones = np.ones(num_seqs, dtype=np.int32)
        self.parts: dict[str, list[float]] = {}

    def step(self, tokens: Int32Array) -> None:
        """Append one token to each sequence and do the bookkeeping of the step that computes it."""
        self.lens += 1
        self._timed("append", lambda: self.kv.pool.append(self.seqs, self.ones, tokens))
        self._timed("reserve", lambda: self.kv.reserve_many(self.seqs, self.lens))
        self._timed("write", lambda: self.buffers.write(self.kv.pool, self.seqs, self.ones))
        self._timed("commit", lambda: self.kv.commit(self.seqs, self.lens))

    def _timed(self, part: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter_ns()
        call()
        self.parts.setdefault(part, []).append((time.perf_counter_ns() - begin) / 1e3)


class PythonSteps:
    """The same steps in Python: lists for the books, NumPy for the tables."""

    def __init__(self, num_seqs: int, context: int, steps: int) -> None:
        blocks_per_seq = -(-(context + steps + 1) // BLOCK)
        self.free_blocks = list(range(num_seqs * blocks_per_seq, 0, -1))
        self.free_pages = list(range(num_seqs * (WINDOW // PAGE + 3), 0, -1))
        self.first_page = [(context - WINDOW + 1) // PAGE] * num_seqs
        self.tokens = [list(range(context)) for _ in range(num_seqs)]
        self.blocks = [[self.free_blocks.pop() for _ in range(-(-context // BLOCK))] for _ in range(num_seqs)]
        held = -(-context // PAGE) - self.first_page[0]
        self.pages = [[self.free_pages.pop() for _ in range(held)] for _ in range(num_seqs)]
        row_arrays = "input_ids", "positions", "row_to_seq", "window_slots", "seq_lens", "query_lens", "state_slots"
        self.rows = {name: np.zeros(num_seqs, np.int32) for name in (*row_arrays, "first_page")}
        self.slots = {ratio: np.zeros(num_seqs, np.int32) for ratio in RATIOS}
        self.history = np.zeros((num_seqs, NGRAM - 1), np.int32)
        self.block_tables = np.zeros((num_seqs, blocks_per_seq), np.int32)
        self.window_tables = np.zeros((num_seqs, WINDOW // PAGE + 3), np.int32)
        self.cu_seqlens_q = np.zeros(num_seqs + 1, np.int32)

    def step(self, tokens: Int32Array) -> None:
        """Append one token to each sequence and do the bookkeeping of the step that computes it."""
        columns: dict[str, list[int]] = {name: [] for name in self.rows}
        slots: dict[int, list[int]] = {ratio: [] for ratio in RATIOS}
        for i, token in enumerate(tokens.tolist()):
            ids, blocks, pages = self.tokens[i], self.blocks[i], self.pages[i]
            position = len(ids)
            ids.append(token)
            if position // BLOCK == len(blocks):
                blocks.append(self.free_blocks.pop())
            if position // PAGE - self.first_page[i] == len(pages):
                pages.append(self.free_pages.pop())
            page = pages[position // PAGE - self.first_page[i]]
            row = token, position, i, page * PAGE + position % PAGE, position + 1, 1, i + 1, self.first_page[i]
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            for ratio, column in slots.items():
                records, entry = BLOCK // ratio, position // ratio
                closes = (position + 1) % ratio == 0
                column.append(blocks[entry // records] * records + entry % records if closes else -1)
            self.history[i] = ids[position - 1 : position - NGRAM : -1]
            self.block_tables[i, : len(blocks)] = blocks
            self.block_tables[i, len(blocks) :] = 0
            self.window_tables[i, : len(pages)] = pages
            self.window_tables[i, len(pages) :] = 0
            first_page = max(0, position + 1 - WINDOW + 1) // PAGE
            if first_page > self.first_page[i]:
                self.free_pages += pages[: first_page - self.first_page[i]]
                del pages[: first_page - self.first_page[i]]
                self.first_page[i] = first_page
        for name, values in columns.items():
            self.rows[name][:] = values
        for ratio, values in slots.items():
            self.slots[ratio][:] = values
        self.cu_seqlens_q[1:] = np.cumsum(self.rows["query_lens"])


def time_steps(step: Callable[[Int32Array], None], num_seqs: int, steps: int) -> float:
    """Median microseconds of a step."""
    times = []
    for i in range(steps):
        tokens = np.full(num_seqs, i, dtype=np.int32)
        begin = time.perf_counter_ns()
        step(tokens)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each sequence before the first step")
    args = parser.parse_args()
    print(f"context {args.context}, block {BLOCK}, window page {PAGE}, ratios {RATIOS}, median of {args.steps} steps")
    for num_seqs in (256, 1024):
        native = NativeSteps(num_seqs, args.context, args.steps)
        python = PythonSteps(num_seqs, args.context, args.steps)
        native_us = time_steps(native.step, num_seqs, args.steps)
        python_us = time_steps(python.step, num_seqs, args.steps)
        assert (native.buffers.write(native.kv.pool, native.seqs, native.ones * 0).block_table_lens > 0).all()
        parts = ", ".join(f"{name} {statistics.median(times):.1f}" for name, times in native.parts.items())
        print(
            f"{num_seqs:5d} sequences: native {native_us:7.1f} us ({parts}), "
            f"python {python_us:9.1f} us, ratio {python_us / native_us:.0f}"
        )


if __name__ == "__main__":
    main()
